"""Checkpoints: a directory with the weights as safetensors, a readable `config.json`, and `state.pt` to resume.

    about = checkpoint.read("runs/sasrec/best")
    checkpoint.load_weights(model, "runs/sasrec/best")     # registry.load builds the model too

Nothing in it is pickled code: `state.pt` holds tensors and numbers and is read with `weights_only=True`.
`config.json` is written last and lists the files with their sizes and SHA-256, so a half-written checkpoint is none;
sizes are checked wherever a checkpoint is looked at, hashes when a file of it is loaded.

A run's folder, local or a URI, has the checkpoints `step-N-aATTEMPT` that `keep` makes, the last one and the best one:
none is written over, so whenever the process is killed `last` finds a whole one. An attempt at the training
(`models/storage/attempts.py`) writes only folders of its own number and removes none of a newer one. `publish` ends the run
with `best`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from pyarrow import fs
from torch import nn

from models.storage.attempts import UNNUMBERED, Attempt, require_current
from models.storage.tables import (
    TableVersion,
    UserError,
    check_inside,
    join,
    open_uri,
    sealed,
    unsealed,
)
from models.storage.uri import file_info, write_file

WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "state.pt"

BEST = "best"
"""In a run's folder: its best checkpoint, when it is finished."""

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
    """Hashes of the tables that it belongs to: `sequences`, `items`, `sids`, `trie`, `queries`, `text_*`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics at this point."""
    epoch: int = 0
    """Epochs done."""
    step: int = 0
    """Optimizer steps done."""
    best: dict[str, Any] = field(default_factory=dict)
    """The best validation so far: `value`, `epoch` and `step`, and the `folder` of its checkpoint."""
    attempt: str = str(UNNUMBERED)
    """Number of the attempt that wrote it (`models/storage/attempts.py`)."""
    tracking: dict[str, str] = field(default_factory=dict)
    """MLflow `run_id`, `uri` and `experiment` of the training run, where there is one."""
    code: str = ""
    """Version of the code that wrote it (`code_version`)."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds and examples per second so far."""
    learned: dict[str, Any] = field(default_factory=dict)
    """What it knows of its tables beside weights (`models/warm_start.py`)."""
    files: dict[str, int] = field(default_factory=dict)
    """The other files and their sizes in bytes."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Their SHA-256."""

    @property
    def name(self) -> str:
        return str(self.model.get("name"))

    @property
    def folder(self) -> str:
        """Folder of this checkpoint in its run's folder."""
        return folder_name(self.step, Attempt.parse(self.attempt))

    @property
    def best_folder(self) -> str:
        """Folder of the run's best checkpoint so far."""
        return str(self.best.get("folder") or folder_name(self.best["step"]))

    def follow(self, before: Checkpoint | None) -> None:
        """Note the folder of the best checkpoint, given the run's checkpoint before this one."""
        if before is None or self.best["step"] in (0, self.step):  # 0: no validation
            self.best["folder"] = self.folder
        else:
            self.best["folder"] = before.best_folder

    def to_json(self) -> str:
        return sealed(asdict(self))


class Uploads:
    """A thread that takes a run's checkpoints to a storage elsewhere, one after the other, while the training goes on
    from the files that were written here."""

    def __init__(self) -> None:
        self._thread, self._last = ThreadPoolExecutor(1), Future[None]()
        self._last.set_result(None)

    def __call__(self, upload: Callable[[], None]) -> None:
        """Begins it, once the one before has ended."""
        self.wait()
        self._last = self._thread.submit(upload)

    def wait(self) -> None:
        """Returns when all is there, or raises what went wrong."""
        self._last.result()


def save(
    uri: str | Path,
    model: nn.Module,
    about: Checkpoint,
    state: dict[str, Any] | None = None,
    after: Callable[[], None] = lambda: None,
    uploads: Uploads | None = None,
    shares: Sequence[Written] = (),
    extra: Mapping[str, bytes] | None = None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Make or replace the checkpoint at a path or URI.

    Args:
        uri: Folder of the checkpoint.
        model: Model whose weights are saved.
        about: Content of `config.json`, which is written last.
        state: State to resume from. That of a model with a shard of its weights holds all of them as `weights`.
        after: Called when the checkpoint is complete.
        uploads: Thread that sends a checkpoint to a URI, so that this returns at once.
        shares: Files that `write_shares` has written there.
        extra: Further files, by name.
        before: Called right before `config.json` is written.
    """
    filesystem, path = open_uri(str(uri))
    is_local = isinstance(filesystem, fs.LocalFileSystem)
    if is_local and not shares:
        _make_anew(filesystem, path)
    made = None if is_local else TemporaryDirectory()
    folder = Path(made.name if made else path)
    if state is not None and "weights" in state:
        state = dict(state)
        safetensors.torch.save_file(state.pop("weights"), str(folder / WEIGHTS))
    else:
        safetensors.torch.save_model(
            model, str(folder / WEIGHTS)
        )  # keeps tied weights once
    if state is not None:
        torch.save(state, folder / STATE)
    for name, content in (extra or {}).items():
        (folder / name).write_bytes(content)
    names = (WEIGHTS, STATE, *(extra or {}))
    there = [name for name in names if (folder / name).exists()]
    about.files = {name: (folder / name).stat().st_size for name in there}
    about.sha256 = {name: _hash(folder / name) for name in there}
    about.files |= {name: size for name, size, _ in shares}
    about.sha256 |= {name: sha256 for name, _, sha256 in shares}
    config = about.to_json().encode()

    def upload() -> None:
        if made:
            with made:
                if not shares:
                    _make_anew(filesystem, path)
                fs.copy_files(
                    str(folder),
                    path,
                    source_filesystem=fs.LocalFileSystem(),
                    destination_filesystem=filesystem,
                )
        before()
        write_file(join(str(uri), CONFIG), config)
        after()

    if made and uploads:
        uploads(upload)
    else:
        upload()


SHARE = re.compile(r"state-\d+\.pt")
"""File of a checkpoint with one rank's share of the optimizer's state."""

Written = tuple[str, int, str]
"""A file's name, size and SHA-256."""


def write_shares(
    folder: str, about: Checkpoint, state: dict[str, Any], rank: int
) -> list[Written]:
    """Every rank but 0, whose own is in its state, writes its share of the optimizer's state into a checkpoint that
    `save` then ends. All ranks call this at once, and get what was written."""
    filesystem, path = open_uri(join(folder, about.folder))
    if rank == 0:
        _make_anew(filesystem, path)
    dist.barrier()
    mine: Written | None = None
    if rank:
        with TemporaryDirectory() as made:
            file = Path(made) / f"state-{rank}.pt"
            torch.save(state["optimizer"]["state"], file)
            fs.copy_files(
                str(file),
                f"{path}/{file.name}",
                source_filesystem=fs.LocalFileSystem(),
                destination_filesystem=filesystem,
            )
            mine = (file.name, file.stat().st_size, _hash(file))
    every: list[Written | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [written for written in every if written]


def _make_anew(filesystem: fs.FileSystem, path: str) -> None:
    if filesystem.get_file_info(path).type != fs.FileType.NotFound:
        filesystem.delete_dir(path)
    filesystem.create_dir(path, recursive=True)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep(
    folder: str,
    model: nn.Module,
    about: Checkpoint,
    state: dict[str, Any] | None,
    uploads: Uploads | None = None,
    shares: Sequence[Written] = (),
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Save a checkpoint of the run in `folder` and remove the run's older ones, except the best.

    `uploads`, `shares` and `extra` are arguments of `save`. Raises SupersededError, and removes nothing, where a newer
    attempt trains the run.
    """
    attempt = Attempt.parse(about.attempt)
    check_attempt = partial(require_current, folder, attempt)
    staying = (about.folder, about.best_folder)

    def remove() -> None:
        check_attempt()
        filesystem, path = open_uri(folder)
        for name in _steps(folder):
            if name not in staying and _attempt_and_step(name)[0] <= attempt:
                filesystem.delete_dir(f"{path}/{name}")

    save(
        join(folder, about.folder),
        model,
        about,
        state,
        remove,
        uploads,
        shares,
        extra,
        check_attempt,
    )


STEP = re.compile(r"step-(\d+)(?:-a(\d+\.\d+))?")
"""Folder of a checkpoint: the step and the attempt, which Trieline 0.1 did not name at first."""


def folder_name(step: int, attempt: Attempt = UNNUMBERED) -> str:
    """Return the folder of a run's checkpoint at an optimizer step."""
    return f"step-{step:08d}" + (f"-a{attempt}" if attempt > UNNUMBERED else "")


def _attempt_and_step(name: str) -> tuple[Attempt, int]:
    """Return what the folder name of a checkpoint says; it sorts checkpoints by age."""
    found = STEP.fullmatch(name)
    assert found
    return Attempt.parse(found[2] or str(UNNUMBERED)), int(found[1])


def _steps(folder: str) -> list[str]:
    """Return the names of a run's checkpoints, complete or not, the newest attempt and its newest first."""
    filesystem, path = open_uri(folder)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in found if STEP.fullmatch(info.base_name)]
    return sorted(names, key=_attempt_and_step, reverse=True)


def last(folder: str) -> Checkpoint | None:
    """Return the newest complete checkpoint of the newest attempt that has one.

    An older attempt may complete a checkpoint of a later step when a newer attempt has already removed the best one
    that it refers to.
    """
    for name in _steps(folder):
        with suppress(
            UserError
        ):  # it was being written when the run was killed: the one before it counts
            return read(join(folder, name))
    return None


def publish(folder: str, about: Checkpoint) -> str:
    """Copies the best checkpoint of a run that ended with `about` to `best`, without the state to resume from; where
    that is."""
    source, target = join(folder, about.best_folder), join(folder, BEST)
    best = read(source)
    best.files, best.sha256 = (
        {WEIGHTS: best.files[WEIGHTS]},
        {WEIGHTS: best.sha256[WEIGHTS]},
    )
    (filesystem, origin), (_, path) = open_uri(source), open_uri(target)
    filesystem.create_dir(path, recursive=True)
    filesystem.copy_file(f"{origin}/{WEIGHTS}", f"{path}/{WEIGHTS}")
    write_file(join(target, CONFIG), best.to_json().encode())
    return target


@contextmanager
def local(uri: str | Path) -> Iterator[Path]:
    """The checkpoint at a path or URI as a local folder; one that is elsewhere is copied for the time."""
    filesystem, path = open_uri(str(uri))
    if isinstance(filesystem, fs.LocalFileSystem):
        yield Path(path)
        return
    with TemporaryDirectory() as made:
        folder = Path(made)
        if filesystem.get_file_info(path).type == fs.FileType.Directory:
            fs.copy_files(
                path,
                str(folder),
                source_filesystem=filesystem,
                destination_filesystem=fs.LocalFileSystem(),
            )
        yield folder


def exists(uri: str | Path) -> bool:
    """Whether there is a checkpoint, its files whole or not."""
    return bool(file_info(join(str(uri), CONFIG)).type == fs.FileType.File)


class OtherTablesError(UserError):
    """A checkpoint cannot go on with these tables: a model has to be trained anew."""


def read(uri: str | Path) -> Checkpoint:
    """The checkpoint's `config.json`, its files checked to be whole. Raises UserError where there is none."""
    filesystem, path = open_uri(str(uri))
    where = f"{path}/{CONFIG}"
    if not exists(uri):
        raise UserError(
            f"{uri} is not a checkpoint: it holds no {CONFIG}; give the folder that jobs.train printed"
        )
    try:
        with filesystem.open_input_stream(where) as stream:
            content = unsealed(stream.read())
        content.pop("shards", None)  # checkpoints before commit 61e80fa have it
        about = Checkpoint(**content)
        about.model, about.files = dict(about.model), dict(about.files)
        check_inside(about.files)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{where} is damaged ({error}); use another checkpoint or train again"
        ) from error
    for name, size in about.files.items():
        info = filesystem.get_file_info(f"{path}/{name}")
        if info.type != fs.FileType.File:
            raise UserError(
                f"{uri}/{name} is missing; use another checkpoint or train again"
            )
        if info.size != size:
            raise UserError(
                f"{uri}/{name} has {info.size} bytes, {CONFIG} says {size}: truncated or replaced; use another "
                f"checkpoint or train again"
            )
    return about


def whole(folder: Path, name: str, uri: str | Path) -> Path:
    """The file `name` of the checkpoint at `uri`, whose local copy is `folder`; UserError where it is damaged."""
    expected, found = read(uri).sha256.get(name, "nothing"), _hash(folder / name)
    if found != expected:
        raise UserError(
            f"{uri}/{name} is damaged: its SHA-256 is {found[:12]}, {CONFIG} says {expected[:12]}; use another "
            f"checkpoint or train again"
        )
    return folder / name


def weights_hash(uri: str) -> str:
    """SHA-256 of the weights file of the checkpoint at `uri`."""
    with local(uri) as folder:
        return _hash(whole(folder, WEIGHTS, uri))


def _remedy(table: str) -> str:
    option = (
        "text"
        if table.startswith("text_")
        else "sids"
        if table in ("sids", "trie")
        else ""
    )
    what = (
        f"give the --{option} that it was trained with"
        if option
        else "evaluate on the tables that it was trained on"
    )
    return f"{what}, or train again"


def extended(
    about: Checkpoint, table: str, versions: Mapping[str, TableVersion]
) -> bool:
    """Return whether a table extends the table that the checkpoint was trained on.

    Queries and their texts, which models know by their words alone, count as extended
    if the sequences and the items' texts are.
    """
    table = {
        "queries": "sequences",
        "text_queries": "text_items",
        "text_pairs": "text_items",
    }.get(table, table)
    given = versions.get(table)
    return given is not None and about.hashes.get(table) in given.extends


def check(
    about: Checkpoint,
    uri: str | Path,
    versions: Mapping[str, TableVersion],
    name: str | None = None,
    extending: bool = False,
) -> None:
    """Raise UserError if the checkpoint is of another model or of other tables.

    Args:
        about: What the checkpoint says of its training.
        uri: Where the checkpoint is, for messages.
        versions: The tables, by name.
        name: The model that is expected; None: any.
        extending: Whether tables that extend the checkpoint's own tables are accepted.
    """
    if name is not None and about.name != name:
        raise UserError(
            f"{uri} is a checkpoint of the model '{about.name}', not of '{name}'; give one of '{name}'"
        )
    for table, trained in about.hashes.items():
        version = versions.get(table)
        if trained and not version:
            raise UserError(
                f"{uri} was trained with a table '{table}' that is not given; {_remedy(table)}"
            )
        if (
            trained
            and version
            and version.hash != trained
            and not (extending and extended(about, table, versions))
        ):
            raise OtherTablesError(
                f"{uri} belongs to another table '{table}': {trained[:12]} was trained on, {version.hash[:12]} is given; "
                f"{_remedy(table)}"
            )
    if about.hashes and OPTIONAL in versions and OPTIONAL not in about.hashes:
        raise UserError(
            f"{uri} was trained without text, and a table '{OPTIONAL}' is given; leave out --text"
        )


def load_weights(model: nn.Module, uri: str | Path) -> None:
    """Fills `model` with the checkpoint's weights; every one must be there and fit."""
    with local(uri) as folder:
        try:
            safetensors.torch.load_model(model, str(whole(folder, WEIGHTS, uri)))
            check_finite(model, uri)
        except RuntimeError as error:
            first = " ".join(str(error).split())[:300]
            raise UserError(
                f"{uri} does not fit the model: {first}; give a checkpoint of this model"
            ) from error


def check_finite(model: nn.Module, uri: str | Path) -> None:
    """UserError where a weight is no number."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"the weights of {uri} are not all finite ({name}): its training diverged; train with a lower fit.lr, "
                f"or use another checkpoint"
            )


def load_state(uri: str | Path) -> dict[str, Any]:
    """What `fit` needs to resume. Raises UserError where the checkpoint has none, as that of a served model."""
    with local(uri) as folder:
        if not (folder / STATE).exists():
            raise UserError(
                f"{uri} holds no {STATE}, so training cannot resume from it; use the run's last checkpoint"
            )
        state, *shares = [
            torch.load(whole(folder, name, uri), map_location="cpu", weights_only=True)
            for name in [STATE, *sorted(filter(SHARE.fullmatch, read(uri).files))]
        ]
    for share in shares:
        state["optimizer"]["state"] |= share
    found: dict[str, Any] = state
    return found
