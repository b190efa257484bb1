"""Checkpoints: folders with weights, a `config.json`, and a state to resume from.

    metadata = checkpoint.read("runs/sasrec/best")
    checkpoint.load_weights(model, "runs/sasrec/best")

Weights are stored as safetensors. No file contains pickled code: the state is stored in
`state.pt`, which has tensors and numbers and is read with `weights_only=True`.
`config.json` is written last and lists the other files with their SHA-256, which are
verified when a file is loaded. So a folder without it is an incomplete checkpoint.

The folder of a run, local or at a URI, contains the last and the best checkpoint in
folders `step-N`, and at the end of the run the best weights in `best`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import safetensors.torch
import torch
from pyarrow import fs
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import nn
from typing_extensions import TypedDict

from core.errors import UserError, one_line
from core.files import (
    absolute,
    file_info,
    join,
    open_uri,
    storage_errors,
    write_file,
)
from core.schemas import RunRef
from core.tables import CHECKED, Table, check_file_names
from models.training.fit_config import FitConfig

WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "state.pt"

BEST = "best"
"""Name of the folder with the best checkpoint of a finished run."""

OPTIONAL = "text_items"
"""Table that is optional in training, but required later if training used it."""


class Best(TypedDict, total=False):
    """The best validation of a run so far."""

    value: float | None
    epoch: int
    """Number of the epoch, from 1."""
    step: int
    """Number of completed optimizer steps; 0 before the first validation."""


class Learned(TypedDict, total=False):
    """Values other than weights that were learned from the tables."""

    scales: dict[str, Any]
    """Scales of features, as the model's catalogue has them."""
    names: dict[str, Sequence[Sequence[Any] | None]]
    """Values of the rows of embedding tables, by module (`models/warm_start.py`)."""
    until: int | None
    """Time in ms at which the training examples end; None without a temporal split."""
    since: int
    """Time in ms from which all training examples are used."""
    choice: str
    """Options that the model has chosen on validation."""
    popularity: str
    """Training behaviours by item, encoded (`models/retrieval/popular.py`)."""


class State(TypedDict, total=False):
    """State of the training loop beside the weights."""

    position: dict[str, Any]
    """Fields of the loop's `Position`."""
    optimizer: dict[str, Any]
    weights: dict[str, torch.Tensor]
    """Full weights of a sharded model."""


@dataclass
class Checkpoint:
    """Content of `config.json`."""

    __pydantic_config__ = CHECKED

    model: dict[str, Any]
    """Registry name of the model, under `name`, and the fields of its config."""
    fit: FitConfig = field(default_factory=FitConfig)
    """Options of the training loop."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the training tables: `sequences`, `items`, `sids`, `trie`, `queries`,
    `text_*`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics at this step."""
    epoch: int = 0
    """Number of completed epochs."""
    step: int = 0
    """Number of completed optimizer steps."""
    best: Best = field(default_factory=Best)
    tracking: dict[str, str] = field(default_factory=dict)
    """MLflow `run_id`, `uri` and `experiment` of the run; empty without MLflow."""
    timing: dict[str, float] = field(default_factory=dict)
    """Duration and throughput of the training so far."""
    unsent: list[tuple[str, float, int, int]] = field(default_factory=list)
    """Points that MLflow has not taken yet: metric, value, time in ms and step."""
    learned: Learned = field(default_factory=Learned)
    code: dict[str, str] = field(default_factory=dict)
    """Sources of the user's own files that trained the model (`models/registry.py`)."""
    sha256: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the other files, by name."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return str(self.model.get("name"))

    @property
    def folder(self) -> str:
        """Name of this checkpoint's folder in the run's folder."""
        return STEP.format(self.step)

    @property
    def best_folder(self) -> str:
        """Name of the folder of the run's best checkpoint so far."""
        return STEP.format(self.best["step"] or self.step)

    def to_json(self) -> str:
        """Return the content of `config.json`."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, default=str)


def save(
    uri: str | Path,
    model: nn.Module,
    metadata: Checkpoint,
    state: State | None = None,
) -> None:
    """Create or replace the checkpoint at a path or URI.

    Args:
        uri: Folder of the checkpoint.
        model: Model whose weights are saved.
        metadata: Content of `config.json`, which is written last.
        state: State to resume from. The state of a sharded model contains the full
            weights under `weights`.
    """
    filesystem, path = open_uri(str(uri))
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        filesystem.delete_dir(path)
    filesystem.create_dir(path, recursive=True)
    if isinstance(filesystem, fs.LocalFileSystem):
        _write_files(Path(path), model, metadata, state)
    else:
        with TemporaryDirectory() as folder:
            _write_files(Path(folder), model, metadata, state)
            _copy(folder, path, fs.LocalFileSystem(), filesystem)
    write_file(join(str(uri), CONFIG), metadata.to_json().encode())


def _write_files(
    folder: Path,
    model: nn.Module,
    metadata: Checkpoint,
    state: State | None,
) -> None:
    """Write the files of a checkpoint, except `config.json`, into a local folder."""
    try:
        if state is not None and "weights" in state:
            state = state.copy()
            safetensors.torch.save_file(state.pop("weights"), str(folder / WEIGHTS))
        else:
            # save_model stores tied weights once
            safetensors.torch.save_model(model, str(folder / WEIGHTS))
        if state is not None:
            torch.save(state, folder / STATE)
    except (SafetensorError, RuntimeError) as error:  # such as a full disk
        raise OSError(f"{folder}: {one_line(error)}") from None
    names = [WEIGHTS, *([STATE] if state is not None else [])]
    metadata.sha256 = {name: _hash(folder / name) for name in names}


def _copy(
    source: str, target: str, source_system: fs.FileSystem, target_system: fs.FileSystem
) -> None:
    """Copy a file or a folder between file systems."""
    fs.copy_files(
        source,
        target,
        source_filesystem=source_system,
        destination_filesystem=target_system,
    )


def _hash(path: Path) -> str:
    """Return the SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


STEP = "step-{:08d}"
"""Name of the folder of a checkpoint, by its number of completed optimizer steps."""

FOLDER = re.compile(rf"{BEST}|step-\d+")
"""Pattern of the names of all folders of a run."""


def list_steps(folder: str) -> list[str]:
    """Return the folder names of a run's checkpoints, newest first."""
    filesystem, path = open_uri(folder)
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in infos if FOLDER.fullmatch(info.base_name)]
    return sorted((name for name in names if name != BEST), reverse=True)


def last(folder: str) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None."""
    for name in list_steps(folder):
        with suppress(UserError):  # incomplete: the job was killed while writing
            return read(join(folder, name))
    return None


def remove_steps(folder: str, last: Checkpoint) -> None:
    """Remove the checkpoints of a run but the last one and the best one."""
    filesystem, path = open_uri(folder)
    for name in list_steps(folder):
        if name not in (last.folder, last.best_folder):
            filesystem.delete_dir(f"{path}/{name}")


@contextmanager
def local(uri: str | Path) -> Iterator[Path]:
    """Provide a checkpoint as a local folder while the block runs.

    A checkpoint at a remote URI is downloaded to a temporary folder.
    """
    filesystem, path = open_uri(str(uri))
    if isinstance(filesystem, fs.LocalFileSystem):
        yield Path(path)
        return
    with TemporaryDirectory() as folder:
        # by the names of its record: the store may list other names
        for name in (CONFIG, *read(uri).sha256):
            target = f"{folder}/{name}"
            _copy(f"{path}/{name}", target, filesystem, fs.LocalFileSystem())
        yield Path(folder)


def exists(uri: str | Path) -> bool:
    """Return whether `uri` contains a checkpoint, even if it is damaged."""
    return bool(file_info(join(str(uri), CONFIG)).type == fs.FileType.File)


class OtherTablesError(UserError):
    """Raised if a checkpoint does not fit the tables; a new model must be trained."""


def locate(uri: str, what: str = "checkpoint") -> str:
    """Return the absolute URI of a checkpoint, or of the best checkpoint of a run.

    Args:
        uri: A checkpoint, or the folder of a finished run.
        what: Word for the checkpoint in the error message, such as `teacher`.
    """
    uri = absolute(uri)
    for candidate in (uri, join(uri, BEST)):
        if exists(candidate):
            return candidate
    raise UserError(
        f"the {what} {uri} is neither a checkpoint nor a finished run: it holds no "
        f"{CONFIG} and no best/",
        "run",
    )


def read(uri: str | Path) -> Checkpoint:
    """Read `config.json`."""
    filesystem, path = open_uri(str(uri))
    config_path = f"{path}/{CONFIG}"
    if not exists(uri):
        raise UserError(f"{uri} is not a checkpoint: it holds no {CONFIG}")
    try:
        with filesystem.open_input_stream(config_path) as stream:
            content = json.loads(stream.read())
        metadata: Checkpoint = TypeAdapter(Checkpoint).validate_python(content)
        if metadata.tracking:
            RunRef(**metadata.tracking)  # raises if a field is missing
        check_file_names(metadata.sha256)
    except ValueError as error:
        raise UserError(f"{config_path} is damaged ({one_line(error)})") from error
    return metadata


@contextmanager
def verified(uri: str | Path, name: str) -> Iterator[Path]:
    """Provide a file of a checkpoint as a local path, after its hash is verified."""
    expected = read(uri).sha256.get(name)
    if not expected:
        raise UserError(f"{uri} holds no {name}")
    with local(uri) as folder:
        with storage_errors(f"{uri}/{name}"):
            actual = _hash(folder / name)
        if actual != expected:
            raise UserError(
                f"{uri}/{name} is damaged: its SHA-256 is {actual[:12]}, {CONFIG} says "
                f"{expected[:12]}"
            )
        yield folder / name


def weights_hash(uri: str) -> str:
    """Verify and return the SHA-256 of the weights of a checkpoint."""
    with verified(uri, WEIGHTS):
        return read(uri).sha256[WEIGHTS]


def is_extended(
    metadata: Checkpoint, table: str, versions: Mapping[str, Table[Any]]
) -> bool:
    """Return whether a table extends the table that the checkpoint was trained on.

    An appended log numbers its queries and pairs anew, so their tables never extend
    earlier versions. Models read them only as text, so `sequences`, or the texts of
    items, decide instead.

    Args:
        metadata: Content of the checkpoint's `config.json`.
        table: Name of the table.
        versions: Versions of all tables by name.
    """
    decisive = {
        "queries": "sequences",
        "text_queries": "text_items",
        "text_pairs": "text_items",
    }.get(table, table)
    version = versions.get(decisive)
    return version is not None and metadata.hashes.get(decisive) in version.extends


def check(
    metadata: Checkpoint,
    uri: str | Path,
    versions: Mapping[str, Table[Any]],
    name: str | None = None,
    extending: bool = False,
) -> None:
    """Check that a checkpoint is of the expected model and tables.

    Args:
        metadata: Content of the checkpoint's `config.json`.
        uri: Path or URI of the checkpoint, for messages.
        versions: Versions of the tables by name.
        name: Name of the expected model; None for any.
        extending: Whether tables may extend the tables of the training.

    Raises:
        OtherTablesError: If a table differs from the table of the training.
    """
    if name is not None and metadata.name != name:
        raise UserError(
            f"{uri} is a checkpoint of the model '{metadata.name}', not of '{name}'"
        )
    for table, trained in metadata.hashes.items():
        version = versions.get(table)
        if not trained:
            continue
        if version is None:
            raise UserError(
                f"{uri} was trained with a table '{table}' that is not given"
            )
        is_accepted = extending and is_extended(metadata, table, versions)
        if version.hash != trained and not is_accepted:
            raise OtherTablesError(
                f"{uri} belongs to another table '{table}': {trained[:12]} was trained "
                f"on, {version.hash[:12]} is given"
            )
    if metadata.hashes and OPTIONAL in versions and OPTIONAL not in metadata.hashes:
        raise UserError(
            f"{uri} was trained without text, and a table '{OPTIONAL}' is given"
        )


def load_weights(model: nn.Module, uri: str | Path) -> None:
    """Load the weights of a checkpoint into a model with the same shapes."""
    with verified(uri, WEIGHTS) as path:
        try:
            safetensors.torch.load_model(model, str(path))
        except RuntimeError as error:
            raise UserError(
                f"{uri} does not fit the model: {one_line(error)}"
            ) from error


def load_state(uri: str | Path) -> State:
    """Load the state from which `fit` resumes."""
    with verified(uri, STATE) as path:
        return cast(State, torch.load(path, map_location="cpu", weights_only=True))
