"""Checkpoints: folders with weights, a `config.json`, and a state to resume from.

    metadata = checkpoint.read("runs/sasrec/best")
    checkpoint.load_weights(model, "runs/sasrec/best")

Weights are stored as safetensors. No file contains pickled code: the state is stored in
`state.pt`, which has tensors and numbers and is read with `weights_only=True`.
`config.json` is written last and lists the other files with sizes and SHA-256, so a
folder without it is an incomplete checkpoint. Sizes are verified when a checkpoint is
read, and hashes when a file is loaded.

The folder of a run, local or at a URI, contains the last and the best checkpoint of the
run, written by `keep` to folders `step-N-aATTEMPT`. Checkpoints are not overwritten, so
`last` finds a complete checkpoint after a kill at any time. An attempt at the training
(`models/training/attempts.py`) writes only folders with its own number, and does not
remove folders of a newer attempt. `publish` adds the folder `best` at the end of the
run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from pyarrow import fs
from pydantic import TypeAdapter
from torch import nn

from core.errors import UserError, one_line
from core.files import absolute, file_info, join, open_uri, write_file
from core.schemas import RunRef
from core.tables import CHECKED, Table, check_file_names
from models.training.attempts import UNNUMBERED, Attempt, require_current

WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "state.pt"

BEST = "best"
"""Name of the folder with the best checkpoint of a finished run."""

OPTIONAL = "text_items"
"""Table that is optional in training, but required later if training used it."""


@dataclass
class Checkpoint:
    """Content of `config.json`."""

    __pydantic_config__ = CHECKED

    model: dict[str, Any]
    """Registry name of the model, under `name`, and the fields of its config."""
    fit: dict[str, Any] = field(default_factory=dict)
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
    best: dict[str, Any] = field(default_factory=dict)
    """Best validation so far: `value`, `epoch`, `step`, and the `folder` of its
    checkpoint."""
    attempt: str = str(UNNUMBERED)
    """Number of the attempt that wrote the checkpoint (`Attempt`)."""
    tracking: dict[str, str] = field(default_factory=dict)
    """MLflow `run_id`, `uri` and `experiment` of the run; empty without MLflow."""
    timing: dict[str, float] = field(default_factory=dict)
    """Duration and throughput of the training so far."""
    learned: dict[str, Any] = field(default_factory=dict)
    """Values other than weights that were learned from the tables
    (`models/warm_start.py`)."""
    files: dict[str, int] = field(default_factory=dict)
    """Sizes of the other files in bytes, by name."""
    sha256: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the other files, by name."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return str(self.model.get("name"))

    @property
    def folder(self) -> str:
        """Name of this checkpoint's folder in the run's folder."""
        return folder_name(self.step, Attempt.parse(self.attempt))

    @property
    def best_folder(self) -> str:
        """Name of the folder of the run's best checkpoint so far."""
        return str(self.best.get("folder") or folder_name(self.best["step"]))

    def set_best_folder(self, previous: Checkpoint | None) -> None:
        """Set the folder of the best checkpoint so far.

        Args:
            previous: The previous checkpoint of the run, if any.
        """
        is_best = self.best["step"] in (0, self.step)  # 0: no validation yet
        if previous is None or is_best:
            self.best["folder"] = self.folder
        else:
            self.best["folder"] = previous.best_folder

    def to_json(self) -> str:
        """Return the content of `config.json`."""
        return json.dumps(asdict(self), indent=2, sort_keys=True, default=str)


class Uploads:
    """A thread that uploads the checkpoints of a run in order during training."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._last = Future[None]()
        self._last.set_result(None)

    def __call__(self, upload: Callable[[], None]) -> None:
        """Start an upload after the previous upload has ended."""
        self.wait()
        self._last = self._thread.submit(upload)

    def wait(self) -> None:
        """Wait for the last upload, and raise its exception if it failed."""
        self._last.result()


@dataclass(frozen=True)
class Completion:
    """How `save` completes a checkpoint after its files are written locally."""

    before: Callable[[], None] = lambda: None
    """Called right before `config.json` is written."""
    after: Callable[[], None] = lambda: None
    """Called when the checkpoint is complete."""
    uploads: Uploads | None = None
    """Thread that uploads a checkpoint to a URI, so that `save` returns at once."""


def save(
    uri: str | Path,
    model: nn.Module,
    metadata: Checkpoint,
    state: dict[str, Any] | None = None,
    extra: Mapping[str, bytes] | None = None,
    completion: Completion | None = None,
) -> None:
    """Create or replace the checkpoint at a path or URI.

    Args:
        uri: Folder of the checkpoint.
        model: Model whose weights are saved.
        metadata: Content of `config.json`, which is written last.
        state: State to resume from. The state of a sharded model contains the full
            weights under `weights`.
        extra: Content of further files, by name.
        completion: Callbacks and upload thread; None completes the checkpoint at once.
    """
    completion = completion or Completion()
    filesystem, path = open_uri(str(uri))
    is_local = isinstance(filesystem, fs.LocalFileSystem)
    if is_local:
        _make_empty_folder(filesystem, path)
    staging = None if is_local else TemporaryDirectory()
    folder = Path(staging.name if staging else path)
    _write_files(folder, model, metadata, state, extra or {})
    config = metadata.to_json().encode()

    def upload() -> None:
        if staging:
            with staging:
                _make_empty_folder(filesystem, path)
                _copy(str(folder), path, fs.LocalFileSystem(), filesystem)
        completion.before()
        write_file(join(str(uri), CONFIG), config)
        completion.after()

    if staging and completion.uploads:
        completion.uploads(upload)
    else:
        upload()


def _write_files(
    folder: Path,
    model: nn.Module,
    metadata: Checkpoint,
    state: dict[str, Any] | None,
    extra: Mapping[str, bytes],
) -> None:
    """Write the files of a checkpoint, except `config.json`, into a local folder."""
    if state is not None and "weights" in state:
        state = dict(state)
        safetensors.torch.save_file(state.pop("weights"), str(folder / WEIGHTS))
    else:
        # save_model stores tied weights once
        safetensors.torch.save_model(model, str(folder / WEIGHTS))
    if state is not None:
        torch.save(state, folder / STATE)
    for name, content in extra.items():
        (folder / name).write_bytes(content)
    names = [WEIGHTS, *([STATE] if state is not None else []), *extra]
    metadata.files = {name: (folder / name).stat().st_size for name in names}
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


def _make_empty_folder(filesystem: fs.FileSystem, path: str) -> None:
    """Create an empty folder, and delete a folder with its name first."""
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        filesystem.delete_dir(path)
    filesystem.create_dir(path, recursive=True)


def _hash(path: Path) -> str:
    """Return the SHA-256 of a local file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep(
    folder: str,
    model: nn.Module,
    metadata: Checkpoint,
    state: dict[str, Any] | None,
    uploads: Uploads | None = None,
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Save a checkpoint of a run and remove older ones, except the best checkpoint.

    Args:
        folder: Folder of the run.
        model: Model whose weights are saved.
        metadata: Content of `config.json`.
        state: State to resume from.
        uploads: Thread that uploads checkpoints to a URI.
        extra: Content of further files, by name.

    Raises:
        SupersededError: If a newer attempt trains the run; no checkpoint is removed
            then.
    """
    attempt = Attempt.parse(metadata.attempt)
    check_attempt = partial(require_current, folder, attempt)
    current_folders = (metadata.folder, metadata.best_folder)

    def remove_older() -> None:
        check_attempt()
        filesystem, path = open_uri(folder)
        for name in _steps(folder):
            other_attempt, _ = _attempt_and_step(name)
            if name not in current_folders and other_attempt <= attempt:
                filesystem.delete_dir(f"{path}/{name}")

    completion = Completion(check_attempt, remove_older, uploads)
    uri = join(folder, metadata.folder)
    save(uri, model, metadata, state, extra, completion)


STEP = re.compile(r"step-(\d+)(?:-a(\d+\.\d+))?")
"""Pattern of the name of a checkpoint's folder: the step, and the attempt, which is
missing in early versions of Trieline 0.1."""

FOLDER = re.compile(rf"{BEST}|{STEP.pattern}")
"""Pattern of the names of all folders of a run."""


def folder_name(step: int, attempt: Attempt = UNNUMBERED) -> str:
    """Return the name of the folder of a checkpoint.

    Args:
        step: Number of completed optimizer steps.
        attempt: Attempt that writes the checkpoint.
    """
    return f"step-{step:08d}" + (f"-a{attempt}" if attempt > UNNUMBERED else "")


def _attempt_and_step(name: str) -> tuple[Attempt, int]:
    """Parse the name of a checkpoint's folder into a key that sorts by age."""
    match = STEP.fullmatch(name)
    assert match
    return Attempt.parse(match[2] or str(UNNUMBERED)), int(match[1])


def _steps(folder: str) -> list[str]:
    """Return the folder names of a run's checkpoints, newest first."""
    filesystem, path = open_uri(folder)
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in infos if STEP.fullmatch(info.base_name)]
    return sorted(names, key=_attempt_and_step, reverse=True)


def last(folder: str) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run, or None.

    Checkpoints are ordered by attempt, then by step. An older attempt may still
    complete a checkpoint of a later step, although a newer attempt has removed the best
    checkpoint that it refers to.
    """
    for name in _steps(folder):
        with suppress(UserError):  # incomplete: the job was killed while writing
            return read(join(folder, name))
    return None


def publish(folder: str, metadata: Checkpoint) -> str:
    """Copy the best checkpoint of a run to `best`, without the state to resume from.

    Args:
        folder: Folder of the run.
        metadata: Last checkpoint of the run.

    Returns:
        The URI of the copy.
    """
    source = join(folder, metadata.best_folder)
    target = join(folder, BEST)
    best = read(source)
    best.files = {WEIGHTS: best.files[WEIGHTS]}
    best.sha256 = {WEIGHTS: best.sha256[WEIGHTS]}
    filesystem, source_path = open_uri(source)
    _, target_path = open_uri(target)
    filesystem.create_dir(target_path, recursive=True)
    filesystem.copy_file(f"{source_path}/{WEIGHTS}", f"{target_path}/{WEIGHTS}")
    write_file(join(target, CONFIG), best.to_json().encode())
    return target


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
        for name in (CONFIG, *read(uri).files):
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
    """Read `config.json`, and verify the sizes of the other files."""
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
        check_file_names(metadata.files)
    except ValueError as error:
        raise UserError(f"{config_path} is damaged ({one_line(error)})") from error
    for name, size in metadata.files.items():
        info = filesystem.get_file_info(f"{path}/{name}")
        if info.type != fs.FileType.File:
            raise UserError(f"{uri}/{name} is missing")
        if info.size != size:
            raise UserError(f"{uri}/{name} has {info.size} bytes, {CONFIG} says {size}")
    return metadata


def verify_file(folder: Path, name: str, uri: str | Path) -> Path:
    """Verify the hash of a file of a checkpoint, and return the path of the file.

    Args:
        folder: Local copy of the checkpoint.
        name: Name of the file.
        uri: Path or URI of the checkpoint.
    """
    expected = read(uri).sha256.get(name, "nothing")
    actual = _hash(folder / name)
    if actual != expected:
        raise UserError(
            f"{uri}/{name} is damaged: its SHA-256 is {actual[:12]}, {CONFIG} says "
            f"{expected[:12]}"
        )
    return folder / name


def weights_hash(uri: str) -> str:
    """Verify and return the SHA-256 of the weights of a checkpoint."""
    with local(uri) as folder:
        return _hash(verify_file(folder, WEIGHTS, uri))


def is_extended(
    metadata: Checkpoint, table: str, versions: Mapping[str, Table[Any]]
) -> bool:
    """Return whether a table extends the table that the checkpoint was trained on.

    Models read queries and pairs only as text. So `queries` counts as extended if
    `sequences` is extended, and their texts if the texts of items are.

    Args:
        metadata: Content of the checkpoint's `config.json`.
        table: Name of the table.
        versions: Versions of all tables by name.
    """
    table = {
        "queries": "sequences",
        "text_queries": "text_items",
        "text_pairs": "text_items",
    }.get(table, table)
    version = versions.get(table)
    return version is not None and metadata.hashes.get(table) in version.extends


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
    with local(uri) as folder:
        try:
            safetensors.torch.load_model(model, str(verify_file(folder, WEIGHTS, uri)))
            check_finite(model, uri)
        except RuntimeError as error:
            raise UserError(
                f"{uri} does not fit the model: {one_line(error)}"
            ) from error


def check_finite(model: nn.Module, uri: str | Path) -> None:
    """Raise UserError if a parameter is infinite or NaN.

    Args:
        model: Model with the loaded weights.
        uri: Path or URI of the checkpoint, for the message.
    """
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"the weights of {uri} are not all finite ({name}): its training "
                "diverged"
            )


def load_state(uri: str | Path) -> dict[str, Any]:
    """Load the state from which `fit` resumes."""
    with local(uri) as folder:
        if not (folder / STATE).exists():
            raise UserError(
                f"{uri} holds no {STATE}, so training cannot resume from it"
            )
        path = verify_file(folder, STATE, uri)
        return torch.load(path, map_location="cpu", weights_only=True)
