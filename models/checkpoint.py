"""Checkpoints: a directory with the weights as safetensors, a readable `config.json`, and `state.pt` to resume.

    about = checkpoint.read("runs/sasrec/best")
    checkpoint.load_weights(model, "runs/sasrec/best")     # registry.load builds the model too

Nothing in it is pickled code: `state.pt` holds tensors and numbers and is read with `weights_only=True`.
`config.json` is written last and lists the files with their sizes and SHA-256, so a half-written checkpoint is none;
sizes are checked wherever a checkpoint is looked at, hashes when a file of it is loaded.

A local checkpoint that `save` replaces is there at every moment, whenever the process is killed: what is half done is
put back or swept up by whoever comes next.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from pyarrow import fs
from torch import nn

from models.tables import UserError, check_inside, join, open_uri, sealed, unsealed

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

OPTIONAL = "text_items"
"""A table that some models are trained with and some without."""


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
    stream: list[int] = field(default_factory=list)
    """Shards and buffers in which the training table is streamed, which its order depends on; empty: held whole."""
    files: dict[str, int] = field(default_factory=dict)
    """The other files and their sizes in bytes."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Their SHA-256."""

    @property
    def name(self) -> str:
        return str(self.model.get("name"))

    def to_json(self) -> str:
        return sealed(asdict(self))


def write(directory: str | Path, model: nn.Module, about: Checkpoint, state: dict[str, Any] | None = None) -> None:
    """Writes the checkpoint's files into an existing directory, `config.json` last. The state of a model that has but a
    shard of its weights holds them all as `weights`."""
    folder = Path(directory)
    if state is not None and "weights" in state:
        state = dict(state)
        safetensors.torch.save_file(state.pop("weights"), str(folder / WEIGHTS))
    else:
        safetensors.torch.save_model(model, str(folder / WEIGHTS))  # keeps tied weights once
    if state is not None:
        torch.save(state, folder / STATE)
    there = [name for name in (WEIGHTS, STATE) if (folder / name).exists()]
    about.files = {name: (folder / name).stat().st_size for name in there}
    about.sha256 = {name: _hash(folder / name) for name in there}
    (folder / CONFIG).write_text(about.to_json())


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save(directory: str | Path, model: nn.Module, about: Checkpoint, state: dict[str, Any] | None = None) -> None:
    """Makes or replaces the local checkpoint `directory`: written beside it and moved into its place.

    What is there is moved aside for that moment, and comes back with the next `save` or `read` if the process is
    killed in it. One process at a time saves in a folder.
    """
    target = Path(directory).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        put_back(target)
        made, aside = _made(target), _aside(target)
        shutil.rmtree(made, ignore_errors=True)  # of a killed process: a living one would hold the folder
        made.mkdir()
        try:
            write(made, model, about, state)
            if target.exists():
                target.replace(aside)
            made.replace(target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
            put_back(target)


def put_back(target: Path) -> None:
    """Undoes or ends what a killed `save` has left half done: the checkpoint that it moved aside is put back where the
    new one is not in its place, else removed. For whoever is alone in the folder."""
    aside = _aside(target)
    if aside.exists() and not target.exists():
        aside.replace(target)
    shutil.rmtree(aside, ignore_errors=True)


def _made(target: Path) -> Path:
    """Where a checkpoint is written before it is moved to `target`."""
    return target.parent / f".{target.name}-new"


def _aside(target: Path) -> Path:
    """Where the one before it is for the moment."""
    return target.parent / f".{target.name}-old"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process of this machine is in here; let go however a process ends. The lock is on the
    folder itself, so that no file is left; where a file system has no locks, nothing is waited for."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder for a checkpoint on its way; those of processes that were killed are removed first.

    Each is locked while its process lives, from before it has the name by which others find it.
    """
    root, prefix = Path(tempfile.gettempdir()), f"trieline-checkpoint-{os.getuid()}-"
    for left in root.glob(f"{prefix}*"):
        with suppress(OSError):
            handle = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(handle)
    new = Path(tempfile.mkdtemp(prefix="trieline-"))
    folder = root / f"{prefix}{new.name.removeprefix('trieline-')}"
    handle = os.open(new, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        new.rename(folder)
        yield folder
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def local(uri: str | Path) -> Iterator[Path]:
    """The checkpoint at a path or URI as a local folder; one that is elsewhere is copied for the time."""
    filesystem, path = open_uri(str(uri))
    if isinstance(filesystem, fs.LocalFileSystem):
        yield Path(path)
        return
    with scratch() as folder:
        if filesystem.get_file_info(path).type == fs.FileType.Directory:
            fs.copy_files(path, str(folder), source_filesystem=filesystem, destination_filesystem=fs.LocalFileSystem())
        yield folder


def exists(uri: str | Path) -> bool:
    """Whether there is a checkpoint, whole or not; one that a killed `save` moved aside is put back first."""
    filesystem, path = open_uri(str(uri))
    place = Path(path)
    if isinstance(filesystem, fs.LocalFileSystem) and not place.exists() and _aside(place).exists():
        with suppress(OSError), _alone(place.parent):  # one that is just being saved is waited for
            put_back(place)
    return bool(filesystem.get_file_info(f"{path}/{CONFIG}").type == fs.FileType.File)


def steps(folder: Path) -> list[Path]:
    """The checkpoints `step-*` of a local folder, the newest last."""
    for aside in folder.glob(".step-*-old"):
        exists(folder / aside.name.removeprefix(".").removesuffix("-old"))
    return sorted(folder.glob("step-*"))


def read(uri: str | Path) -> Checkpoint:
    """The checkpoint's `config.json`, its files checked to be whole. Raises UserError where there is none."""
    filesystem, path = open_uri(str(uri))
    where = f"{path}/{CONFIG}"
    if not exists(uri):
        raise UserError(f"{uri} is not a checkpoint: it holds no {CONFIG}; give the folder that jobs.train printed")
    try:
        with filesystem.open_input_stream(where) as stream:
            about = Checkpoint(**unsealed(stream.read()))
        about.model, about.files = dict(about.model), dict(about.files)
        check_inside(about.files)
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


def whole(folder: Path, name: str, uri: str | Path) -> Path:
    """The file `name` of the checkpoint at `uri`, whose local copy is `folder`; UserError where it is damaged."""
    about = read(uri)  # which puts back what a killed `save` moved aside
    _compare(_hash(folder / name), about, name, uri)
    return folder / name


def _compare(found: str, about: Checkpoint, name: str, uri: str | Path) -> None:
    if found != (expected := about.sha256.get(name, "nothing")):
        raise UserError(
            f"{uri}/{name} is damaged: its SHA-256 is {found[:12]}, {CONFIG} says {expected[:12]}; use another "
            f"checkpoint or train again"
        )


def weights_hash(uri: str) -> str:
    """SHA-256 of the weights file of the checkpoint at `uri`."""
    about = read(uri)
    filesystem, path = open_uri(join(uri, WEIGHTS))
    with filesystem.open_input_stream(path) as stream:
        found = hashlib.sha256(stream.read()).hexdigest()
    _compare(found, about, WEIGHTS, uri)
    return found


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
    if about.hashes and OPTIONAL in hashes and OPTIONAL not in about.hashes:
        raise UserError(f"{uri} was trained without text, and a table '{OPTIONAL}' is given; leave out --text")


def load_weights(model: nn.Module, uri: str | Path) -> None:
    """Fills `model` with the checkpoint's weights; every one must be there and fit."""
    with local(uri) as folder:
        try:
            safetensors.torch.load_model(model, str(whole(folder, WEIGHTS, uri)))
            for name, weight in model.named_parameters():
                if not bool(weight.isfinite().all()):
                    raise UserError(
                        f"the weights of {uri} are not all finite ({name}): its training diverged; train with a lower "
                        f"fit.lr, or use another checkpoint"
                    )
        except (RuntimeError, FileNotFoundError) as error:
            first = " ".join(str(error).split())[:300]
            raise UserError(f"{uri} does not fit the model: {first}; give a checkpoint of this model") from error


def load_state(uri: str | Path, map_location: str = "cpu") -> dict[str, Any]:
    """What `fit` needs to resume. Raises UserError where the checkpoint has none, as that of a served model."""
    with local(uri) as folder:
        if not (folder / STATE).exists():
            raise UserError(f"{uri} holds no {STATE}, so training cannot resume from it; use the run's last checkpoint")
        state: dict[str, Any] = torch.load(whole(folder, STATE, uri), map_location=map_location, weights_only=True)
    return state
