"""Checkpoints: a folder with the weights as safetensors, a readable `config.json`, and `state.pt` to resume from.

    about = checkpoint.read("runs/sasrec/best")
    checkpoint.load_weights(model, "runs/sasrec/best")     # load_model builds the model too

No file holds pickled code: `state.pt` has tensors and numbers and is read with
`weights_only=True`. `config.json` is written last and lists the other files with sizes
and SHA-256, so a half-written checkpoint is not one. Sizes are checked when a
checkpoint is read, hashes when one of its files is loaded.

The folder of a run, local or at a URI, has checkpoints `step-N-aATTEMPT` from `keep`:
the last one and the best one. No checkpoint is overwritten, so `last` finds a complete
one after a kill at any moment. An attempt at the training
(`models/storage/attempts.py`) writes only folders of its own number, and removes no
folder of a newer attempt. `publish` adds the folder `best` at the end of the run.
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
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from pyarrow import fs
from torch import nn

from models.storage.attempts import UNNUMBERED, Attempt, require_current
from models.storage.tables import (
    TableVersion,
    UserError,
    add_seal,
    check_file_names,
    check_seal,
    join,
    open_uri,
)
from models.storage.uri import absolute, file_info, write_file

WEIGHTS, CONFIG, STATE = "model.safetensors", "config.json", "state.pt"

BEST = "best"
"""Folder of a finished run with its best checkpoint."""

OPTIONAL = "text_items"
"""Table that some models are trained with and some without."""


@dataclass
class Checkpoint:
    """Content of `config.json`."""

    model: dict[str, Any]
    """Name in the registry under `name`, and the fields of the model's config."""
    fit: dict[str, Any] = field(default_factory=dict)
    """The training config."""
    hashes: dict[str, str] = field(default_factory=dict)
    """Hashes of the tables that it was trained on: `sequences`, `items`, `sids`,
    `trie`, `queries`, `text_*`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Validation metrics at this step."""
    epoch: int = 0
    """Completed epochs."""
    step: int = 0
    """Completed optimizer steps."""
    best: dict[str, Any] = field(default_factory=dict)
    """Best validation so far: `value`, `epoch`, `step`, and the `folder` of its
    checkpoint."""
    attempt: str = str(UNNUMBERED)
    """Number of the attempt that wrote it (`models/storage/attempts.py`)."""
    tracking: dict[str, str] = field(default_factory=dict)
    """MLflow `run_id`, `uri` and `experiment` of the training run, if there is one."""
    code: str = ""
    """Version of the code that wrote it (`code_version`)."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds and examples per second so far."""
    learned: dict[str, Any] = field(default_factory=dict)
    """State of the model about its tables beside the weights
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

    def follow(self, before: Checkpoint | None) -> None:
        """Note the folder of the best checkpoint, given the run's checkpoint before this one."""
        if before is None or self.best["step"] in (0, self.step):  # 0: no validation
            self.best["folder"] = self.folder
        else:
            self.best["folder"] = before.best_folder

    def to_json(self) -> str:
        """Return the content of `config.json`, with a hash of itself."""
        return add_seal(asdict(self))


class Uploads:
    """A thread that uploads the checkpoints of a run one after the other, while the training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._last = Future[None]()
        self._last.set_result(None)

    def __call__(self, upload: Callable[[], None]) -> None:
        """Start an upload when the one before has ended."""
        self.wait()
        self._last = self._thread.submit(upload)

    def wait(self) -> None:
        """Wait for the last upload, and raise its error if it failed."""
        self._last.result()


def save(
    uri: str | Path,
    model: nn.Module,
    about: Checkpoint,
    state: dict[str, Any] | None = None,
    after: Callable[[], None] = lambda: None,
    uploads: Uploads | None = None,
    shards: Sequence[WrittenFile] = (),
    extra: Mapping[str, bytes] | None = None,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Make or replace the checkpoint at a path or URI.

    Args:
        uri: Folder of the checkpoint.
        model: Model whose weights are saved.
        about: Content of `config.json`, which is written last.
        state: State to resume from. The state of a sharded model has all its weights
            under `weights`.
        after: Called when the checkpoint is complete.
        uploads: Thread that uploads a checkpoint to a URI, so that this returns at
            once.
        shards: Files that `write_shards` has written into the folder.
        extra: Further files, by name.
        before: Called right before `config.json` is written.
    """
    filesystem, path = open_uri(str(uri))
    is_local = isinstance(filesystem, fs.LocalFileSystem)
    if is_local and not shards:
        _make_empty_folder(filesystem, path)
    staging = None if is_local else TemporaryDirectory()
    folder = Path(staging.name if staging else path)
    _write_files(folder, model, about, state, extra or {})
    about.files |= {shard.name: shard.size for shard in shards}
    about.sha256 |= {shard.name: shard.sha256 for shard in shards}
    config = about.to_json().encode()

    def upload() -> None:
        if staging:
            with staging:
                if not shards:
                    _make_empty_folder(filesystem, path)
                _copy(str(folder), path, fs.LocalFileSystem(), filesystem)
        before()
        write_file(join(str(uri), CONFIG), config)
        after()

    if staging and uploads:
        uploads(upload)
    else:
        upload()


def _write_files(
    folder: Path,
    model: nn.Module,
    about: Checkpoint,
    state: dict[str, Any] | None,
    extra: Mapping[str, bytes],
) -> None:
    """Write weights, state and further files into a local folder, and note their sizes and hashes in `about`."""
    if state is not None and "weights" in state:
        state = dict(state)
        safetensors.torch.save_file(state.pop("weights"), str(folder / WEIGHTS))
    else:
        # keeps tied weights once
        safetensors.torch.save_model(model, str(folder / WEIGHTS))
    if state is not None:
        torch.save(state, folder / STATE)
    for name, content in extra.items():
        (folder / name).write_bytes(content)
    names = [WEIGHTS, *([STATE] if state is not None else []), *extra]
    about.files = {name: (folder / name).stat().st_size for name in names}
    about.sha256 = {name: _hash(folder / name) for name in names}


SHARD = re.compile(r"state-\d+\.pt")
"""File of a checkpoint with one rank's shard of the optimizer's state."""


class WrittenFile(NamedTuple):
    """A file of a checkpoint that another rank has written."""

    name: str
    size: int
    """Size in bytes."""
    sha256: str


def write_shards(
    folder: str, about: Checkpoint, state: dict[str, Any], rank: int
) -> list[WrittenFile]:
    """Write the shards of the optimizer's state of all ranks but 0 into a checkpoint that `save` completes.

    Rank 0 has its own shard in the state that it saves. All ranks call this at once,
    and all get the list of files.
    """
    filesystem, path = open_uri(join(folder, about.folder))
    if rank == 0:
        _make_empty_folder(filesystem, path)
    dist.barrier()
    mine: WrittenFile | None = None
    if rank:
        with TemporaryDirectory() as staging:
            file = Path(staging) / f"state-{rank}.pt"
            torch.save(state["optimizer"]["state"], file)
            _copy(str(file), f"{path}/{file.name}", fs.LocalFileSystem(), filesystem)
            mine = WrittenFile(file.name, file.stat().st_size, _hash(file))
    gathered: list[WrittenFile | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return [written for written in gathered if written]


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
    shards: Sequence[WrittenFile] = (),
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Save a checkpoint of the run in `folder` and remove the run's older ones, except the best.

    `uploads`, `shards` and `extra` are arguments of `save`.

    Raises:
        SupersededError: if a newer attempt trains the run. Then no checkpoint is
            removed.
    """
    attempt = Attempt.parse(about.attempt)
    check_attempt = partial(require_current, folder, attempt)
    staying = (about.folder, about.best_folder)

    def remove_older() -> None:
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
        remove_older,
        uploads,
        shards,
        extra,
        check_attempt,
    )


STEP = re.compile(r"step-(\d+)(?:-a(\d+\.\d+))?")
"""Name of a checkpoint's folder: the step and the attempt, which early versions of
Trieline 0.1 left out."""


def folder_name(step: int, attempt: Attempt = UNNUMBERED) -> str:
    """Return the name of the folder of a run's checkpoint at an optimizer step."""
    return f"step-{step:08d}" + (f"-a{attempt}" if attempt > UNNUMBERED else "")


def _attempt_and_step(name: str) -> tuple[Attempt, int]:
    """Return the attempt and the step of a checkpoint by its folder name, a key that sorts checkpoints by age."""
    found = STEP.fullmatch(name)
    assert found
    return Attempt.parse(found[2] or str(UNNUMBERED)), int(found[1])


def _steps(folder: str) -> list[str]:
    """Return the folder names of a run's checkpoints, complete or not, from the newest to the oldest."""
    filesystem, path = open_uri(folder)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in found if STEP.fullmatch(info.base_name)]
    return sorted(names, key=_attempt_and_step, reverse=True)


def last(folder: str) -> Checkpoint | None:
    """Return the newest complete checkpoint of the newest attempt that has one.

    An older attempt may complete a checkpoint of a later step when a newer attempt has
    already removed the best one that it refers to.
    """
    for name in _steps(folder):
        with suppress(UserError):  # incomplete: a kill came while it was written
            return read(join(folder, name))
    return None


def publish(folder: str, about: Checkpoint) -> str:
    """Copy the best checkpoint of a run that ended with the checkpoint `about` to `best`, without state to resume from.

    Return the URI of the copy.
    """
    source = join(folder, about.best_folder)
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
    """Provide the checkpoint at a path or URI as a local folder; a remote one is downloaded while the block runs."""
    filesystem, path = open_uri(str(uri))
    if isinstance(filesystem, fs.LocalFileSystem):
        yield Path(path)
        return
    with TemporaryDirectory() as folder:
        if filesystem.get_file_info(path).type == fs.FileType.Directory:
            _copy(path, folder, filesystem, fs.LocalFileSystem())
        yield Path(folder)


def exists(uri: str | Path) -> bool:
    """Return whether `uri` has a checkpoint, damaged or not."""
    return bool(file_info(join(str(uri), CONFIG)).type == fs.FileType.File)


class OtherTablesError(UserError):
    """A checkpoint does not belong to the given tables, so a model has to be trained anew."""


def locate(uri: str, what: str = "checkpoint") -> str:
    """Return the absolute URI of the checkpoint at `uri`, or of the best one of a
    finished run.

    Args:
        what: Word for the checkpoint in the UserError about a missing one.
    """
    uri = absolute(uri)
    for candidate in (uri, join(uri, BEST)):
        if exists(candidate):
            return candidate
    raise UserError(
        f"the {what} {uri} is neither a checkpoint nor a finished run: it holds no {CONFIG} and no best/; "
        f"give the folder of a run of jobs.train, which is its STORAGE/NAME"
    )


def read(uri: str | Path) -> Checkpoint:
    """Return the content of `config.json`, and check that the other files are complete.

    Raises:
        UserError: if there is no checkpoint, or it is damaged.
    """
    filesystem, path = open_uri(str(uri))
    where = f"{path}/{CONFIG}"
    if not exists(uri):
        raise UserError(
            f"{uri} is not a checkpoint: it holds no {CONFIG}; give the folder that jobs.train printed"
        )
    try:
        with filesystem.open_input_stream(where) as stream:
            content = check_seal(stream.read())
        content.pop("shards", None)  # checkpoints before commit 61e80fa have it
        about = Checkpoint(**content)
        about.model, about.files = dict(about.model), dict(about.files)
        check_file_names(about.files)
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


def verify_file(folder: Path, name: str, uri: str | Path) -> Path:
    """Return the path of a file of the checkpoint at `uri`, whose local copy is `folder`.

    Raises:
        UserError: if the hash of the file is not the one in `config.json`.
    """
    expected = read(uri).sha256.get(name, "nothing")
    actual = _hash(folder / name)
    if actual != expected:
        raise UserError(
            f"{uri}/{name} is damaged: its SHA-256 is {actual[:12]}, {CONFIG} says {expected[:12]}; use another "
            f"checkpoint or train again"
        )
    return folder / name


def weights_hash(uri: str) -> str:
    """Return the SHA-256 of the weights of the checkpoint at `uri`."""
    with local(uri) as folder:
        return _hash(verify_file(folder, WEIGHTS, uri))


def _remedy(table: str) -> str:
    """Return the remedy for a table that a checkpoint does not belong to."""
    if table.startswith("text_"):
        what = "give the --text that it was trained with"
    elif table in ("sids", "trie"):
        what = "give the --sids that it was trained with"
    else:
        what = "evaluate on the tables that it was trained on"
    return f"{what}, or train again"


def is_extended(
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
            and not (extending and is_extended(about, table, versions))
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
    """Load the weights of a checkpoint into a model of the same shapes.

    Raises:
        UserError: if weights are missing, do not fit, or are not finite.
    """
    with local(uri) as folder:
        try:
            safetensors.torch.load_model(model, str(verify_file(folder, WEIGHTS, uri)))
            check_finite(model, uri)
        except RuntimeError as error:
            first = " ".join(str(error).split())[:300]
            raise UserError(
                f"{uri} does not fit the model: {first}; give a checkpoint of this model"
            ) from error


def check_finite(model: nn.Module, uri: str | Path) -> None:
    """Raise UserError if a weight is infinite or not a number."""
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"the weights of {uri} are not all finite ({name}): its training diverged; train with a lower fit.lr, "
                f"or use another checkpoint"
            )


def load_state(uri: str | Path) -> dict[str, Any]:
    """Return the state that `fit` resumes from.

    Raises:
        UserError: if the checkpoint has no state, like the checkpoint of a served
            model.
    """
    with local(uri) as folder:
        if not (folder / STATE).exists():
            raise UserError(
                f"{uri} holds no {STATE}, so training cannot resume from it; use the run's last checkpoint"
            )
        names = [STATE, *sorted(filter(SHARD.fullmatch, read(uri).files))]
        parts: list[dict[str, Any]] = [
            torch.load(
                verify_file(folder, name, uri), map_location="cpu", weights_only=True
            )
            for name in names
        ]
    state, *shards = parts
    for shard in shards:
        state["optimizer"]["state"] |= shard
    return state
