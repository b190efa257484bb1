"""Checkpoints: a directory with the weights as safetensors, a readable `config.json`, and `state.pt` to resume.

    model, config = checkpoint.load("runs/sasrec/best", catalogue)

Nothing in it is pickled code: `state.pt` holds tensors and numbers and is read with `weights_only=True`.
`config.json` is written last and lists the files with their sizes, so a half-written checkpoint is none.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pyarrow import fs
from torch import nn

from models.tables import UserError, join, open_uri

WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "state.pt"

REMEDY = {
    "sequences": "evaluate on the tables that it was trained on, or train again",
    "items": "evaluate on the tables that it was trained on, or train again",
    "sids": "give the --sids that it was trained with, or train again",
    "trie": "give the --sids that it was trained with, or train again",
    "queries": "evaluate on the tables that it was trained on, or train again",
    **dict.fromkeys(
        ("text_items", "text_queries", "text_pairs"), "give the --text that it was trained with, or train again"
    ),
}


@dataclass
class Checkpoint:
    """What `config.json` holds."""

    model: dict[str, Any]
    """Name in the registry under `name`, and the fields of the model's config."""
    fit: dict[str, Any] = field(default_factory=dict)
    """The training config."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the tables that it belongs to: `sequences`, `items`, `sids`, `trie`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics at this point."""
    epoch: int = 0
    """Epochs done."""
    step: int = 0
    """Optimizer steps done."""
    best: dict[str, Any] = field(default_factory=dict)
    """The best validation so far: `value`, `epoch` and `step`."""
    tracking: dict[str, str] = field(default_factory=dict)
    """MLflow `run_id`, `uri` and `experiment` of the training run, where there is one."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds and examples per second so far."""
    files: dict[str, int] = field(default_factory=dict)
    """The other files and their sizes in bytes."""

    @property
    def name(self) -> str:
        return str(self.model.get("name"))


def write(directory: str | Path, model: nn.Module, about: Checkpoint, state: dict[str, Any] | None = None) -> None:
    """Writes the checkpoint's files into an existing directory, `config.json` last."""
    folder = Path(directory)
    safetensors.torch.save_model(model, str(folder / WEIGHTS))  # keeps tied weights once
    if state is not None:
        torch.save(state, folder / STATE)
    about.files = {name: (folder / name).stat().st_size for name in (WEIGHTS, STATE) if (folder / name).exists()}
    (folder / CONFIG).write_text(json.dumps(asdict(about), indent=2, sort_keys=True, default=str))


def save(directory: str | Path, model: nn.Module, about: Checkpoint, state: dict[str, Any] | None = None) -> None:
    """Makes or replaces the local checkpoint `directory`: written beside it and moved into its place."""
    target = Path(directory).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    os.chmod(made, 0o755)
    try:
        write(made, model, about, state)
        replace(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def replace(made: Path, target: Path) -> None:
    """Moves the directory `made` to `target`; what was there is moved aside first and then removed."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    try:
        if target.exists():
            target.replace(aside / "old")
        made.replace(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def local(uri: str | Path) -> Iterator[Path]:
    """The checkpoint at a path or URI as a local folder; one that is elsewhere is copied for the time."""
    filesystem, path = open_uri(str(uri))
    if isinstance(filesystem, fs.LocalFileSystem):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        if filesystem.get_file_info(path).type == fs.FileType.Directory:
            fs.copy_files(path, folder, source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
        yield Path(folder)


def read(uri: str | Path) -> Checkpoint:
    """The checkpoint's `config.json`, its files checked to be whole. Raises UserError where there is none."""
    filesystem, path = open_uri(str(uri))
    where = f"{path}/{CONFIG}"
    if filesystem.get_file_info(where).type != fs.FileType.File:
        raise UserError(f"{uri} is not a checkpoint: it holds no {CONFIG}; give the folder that jobs.train printed")
    try:
        with filesystem.open_input_stream(where) as stream:
            about = Checkpoint(**json.loads(stream.read()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} is damaged ({error}); use another checkpoint or train again") from error
    for name, size in about.files.items():
        info = filesystem.get_file_info(f"{path}/{name}")
        if info.type != fs.FileType.File:
            raise UserError(f"{uri}/{name} is missing; use another checkpoint or train again")
        if info.size != size:
            raise UserError(
                f"{uri}/{name} has {info.size} bytes, {CONFIG} says {size}: truncated or replaced; use another "
                f"checkpoint or train again"
            )
    return about


def weights_hash(uri: str) -> str:
    """SHA-256 of the weights file of the checkpoint at `uri`."""
    filesystem, path = open_uri(join(uri, WEIGHTS))
    with filesystem.open_input_stream(path) as stream:
        return hashlib.sha256(stream.read()).hexdigest()


def check(about: Checkpoint, uri: str | Path, hashes: dict[str, str | None], name: str | None = None) -> None:
    """Raises UserError where the checkpoint is of another model than `name` or of other tables than `hashes`."""
    if name is not None and about.name != name:
        raise UserError(f"{uri} is a checkpoint of the model '{about.name}', not of '{name}'; give one of '{name}'")
    for table, trained in about.hashes.items():
        given = hashes.get(table)
        if trained and not given:
            raise UserError(f"{uri} was trained with a table '{table}' that is not given; {REMEDY.get(table, '')}")
        if trained and given != trained:
            raise UserError(
                f"{uri} belongs to another table '{table}': {trained[:12]} was trained on, {str(given)[:12]} is given; "
                f"{REMEDY.get(table, '')}"
            )


def load_weights(model: nn.Module, uri: str | Path) -> None:
    """Fills `model` with the checkpoint's weights; every one must be there and fit."""
    with local(uri) as folder:
        try:
            safetensors.torch.load_model(model, str(folder / WEIGHTS))
        except safetensors.SafetensorError as error:
            raise UserError(
                f"{uri}/{WEIGHTS} is not a whole safetensors file ({error}); use another checkpoint or train again"
            ) from error
        except (RuntimeError, FileNotFoundError) as error:
            first = " ".join(str(error).split())[:300]
            raise UserError(f"{uri} does not fit the model: {first}; give a checkpoint of this model") from error


def load_state(uri: str | Path, map_location: str = "cpu") -> dict[str, Any]:
    """What `fit` needs to resume. Raises UserError where the checkpoint has none, as that of a served model."""
    with local(uri) as folder:
        if not (folder / STATE).exists():
            raise UserError(f"{uri} holds no {STATE}, so training cannot resume from it; use the run's last checkpoint")
        content = io.BytesIO((folder / STATE).read_bytes())
    return torch.load(content, map_location=map_location, weights_only=True)


def load(uri: str | Path, catalogue: Any, name: str | None = None) -> tuple[nn.Module, Checkpoint]:
    """The model in evaluation mode, and the checkpoint's config.

    `catalogue` must be of the tables that it was trained on (see `check`); `name`, where given, is the model
    that is expected.
    """
    from models import registry

    about = read(uri)
    check(about, uri, catalogue.hashes, name)
    model = registry.build(registry.config_from_dict(about.model), catalogue)
    load_weights(model, uri)
    return model.eval(), about
