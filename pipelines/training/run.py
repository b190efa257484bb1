"""Run a training under a fixed storage folder and name, so that it can be continued.

Ray Train's `TorchTrainer` starts the workers. A single worker without a cluster trains
in this process, as starting Ray and a trainer takes 30 s of processor time. Ray and
MLflow are imported when a training starts; a finished run needs neither.

`STORAGE/NAME/` holds `run.json` (settings and status), the checkpoints to resume from
(`step-*`, the last one and the best one) and, once the run is finished, the best
weights in `best/`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from pyarrow import fs

from core.errors import UserError, pluralize
from core.files import hold_lock, join, open_uri, write_file
from core.options import CheckpointPath
from core.schemas import EventsInfo, Inputs, JobRef, RunRecord, RunRef, SidsInfo
from core.tables import find_table, open_table, table_hashes
from models import own_code, registry
from models.loaded_model import load_catalogue
from models.metrics.ranking_metrics import describe_chance_level, format_metric
from models.model import LabelOptions, resolve_weights
from models.training import checkpoint
from models.training.checkpoint import BEST, CONFIG, WEIGHTS, Checkpoint
from models.training_run import check_fit, check_init
from pipelines import tracking
from pipelines.start import start_ray
from pipelines.training.backends import LocalBackend, wants_gpu
from pipelines.training.config import TrainConfig
from pipelines.training.record import (
    MAY_CHANGE,
    RUN,
    check_equal,
    is_longer,
    read_record,
    write_record,
)
from pipelines.training.stop import STOP_REQUEST
from pipelines.training.worker import train_worker
from pipelines.version import code_version, submission_id

if TYPE_CHECKING:
    from ray.train import UserCallback

RAY_TRAIN_FILES = (".validate_storage_marker", "checkpoint_manager_snapshot.json")
"""Files that Ray Train writes into the folder of a run."""


@dataclass
class TrainingResult:
    """The result of a training: its best checkpoint and its MLflow run."""

    name: str
    """Name of the run."""
    checkpoint: str
    """Folder with the best weights."""
    best: Checkpoint
    """The best checkpoint's config, metrics and timing."""
    run: RunRef
    """The MLflow run."""
    was_finished: bool = False
    """Whether an earlier call finished the run, so that this one did nothing."""


@dataclass(frozen=True)
class TrialContext:
    """Settings that a sweep adds to the training of a trial.

    The defaults are for a training outside of a sweep.
    """

    tags: dict[str, str] = field(default_factory=dict)
    """Further tags of the MLflow run, such as the id of its parent."""
    on_checkpoint: Callable[[Checkpoint], Any] | None = None
    """Called with every checkpoint. A single worker then trains in this process even
    on a cluster. If the function raises SystemExit, the training ends and the run
    stays open, so that it can be continued or finished later."""
    callbacks: Sequence[UserCallback] = ()
    """Callbacks for Ray Train, used if the training has several workers."""
    lock_timeout_s: float = 0
    """Seconds to wait for another process that holds the run's lock."""


def run_training(
    config: TrainConfig,
    *,
    say: Callable[[str], None] = print,
    trial: TrialContext = TrialContext(),
) -> TrainingResult:
    """Train a model, or continue the run of this name, or return its result.

    A single worker trains in this process unless the job was submitted to a cluster.

    Args:
        config: Configuration as the user gave it.
        say: Called with lines of progress.
        trial: Settings that a sweep adds.
    """
    began = time.monotonic()
    given = config
    config, hashes = resolve_training(given)
    for option in given.inputs.folders().keys() - config.inputs.folders().keys():
        say(f"note: the model {config.model.name} does not read {option}")
    folder = config.folder
    with lock_run(config.storage, config.name, trial.lock_timeout_s):
        record = None
        if not config.overwrite:
            record = read_record(folder, str(config.tracking_uri))
        if record:
            check_continues(config, hashes, record)
            if is_complete(record, config.fit.max_epochs):
                say(f"The run '{config.name}' is finished; nothing to do.")
                return report_result(config, record, say, was_finished=True)
        is_submitted = bool(os.environ.get("RAY_ADDRESS"))
        in_process = config.ray.num_workers == 1 and bool(
            trial.on_checkpoint or not is_submitted
        )
        if not in_process:
            start_ray()
        trains_by_gradient = registry.find(config.model.name).trains_by_gradient
        use_gpu = trains_by_gradient and wants_gpu(config.ray)
        is_trial = tracking.PARENT_TAG in trial.tags
        if not (in_process or is_trial):  # a sweep has checked the cluster
            from pipelines.training.ray_train import check_cluster

            uri = str(config.tracking_uri)
            check_cluster(config.ray, config.ray.num_workers, use_gpu, uri)
        if config.overwrite:
            delete_run(config, say)
        if record:
            record = reopen_run(config, record, say)
        else:
            record = open_run(config, given.model, hashes, trial)
        with end_failed_run(record.run):
            if in_process:
                device = torch.device("cuda" if use_gpu else "cpu")
                backend = LocalBackend(folder, device, say, trial.on_checkpoint)
                train_worker(config, record.run, backend)
                if STOP_REQUEST.requested:
                    raise KeyboardInterrupt
            else:
                from pipelines.training.ray_train import run_workers

                run_workers(config, record.run, use_gpu, say, trial.callbacks)
            last = checkpoint.last(folder)
            if last is None:
                raise RuntimeError(f"the run in {folder} ended without a checkpoint")
            finish_run(folder, record, last, config.log_model, say=say)
    seconds = time.monotonic() - began
    epochs = pluralize(last.epoch, "epoch")
    say(f"Trained {config.model.name} for {epochs} in {seconds:.0f} s.")
    return report_result(config, record, say)


def is_complete(record: RunRecord, max_epochs: int) -> bool:
    """Return whether a run is finished and `max_epochs` asks for no further epochs."""
    return record.status == "finished" and not is_longer(record, max_epochs)


def identify(config: TrainConfig) -> dict[str, Any]:
    """Return the settings of a resolved training that a continued run must share."""
    identity: dict[str, Any] = {
        "model": asdict(config.model),
        "fit": asdict(config.fit),
        "ray": {"num_workers": config.ray.num_workers},
    }
    if config.init:
        identity["init"] = checkpoint.read(config.init).sha256[WEIGHTS]
    return identity


def check_continues(
    config: TrainConfig, hashes: dict[str, str], record: RunRecord
) -> None:
    """Raise UserError if a run was begun with other settings, tables or experiment."""
    may_change = MAY_CHANGE
    if is_longer(record, config.fit.max_epochs):
        may_change = MAY_CHANGE | {"fit.max_epochs"}
    check_equal(record.config, identify(config), may_change)
    for table, value in hashes.items():
        if record.hashes.get(table) != value:
            raise UserError(f"the run was started with another table '{table}'", "name")
    experiment = record.run.experiment
    if config.experiment not in (None, "", experiment):
        raise UserError(
            f"the run '{config.name}' is in the experiment {experiment}, not "
            f"{config.experiment}",
            "name",
        )


def report_result(
    config: TrainConfig,
    record: RunRecord,
    say: Callable[[str], None],
    was_finished: bool = False,
) -> TrainingResult:
    """Print the result of a finished run, and return it."""
    uri = join(config.folder, BEST)
    best, run = checkpoint.read(uri), record.run
    model_class = registry.find(best.name)
    if not (model_class.is_baseline or model_class.is_diagnostic):
        if chance := describe_chance_level(best.metrics):
            say(f"warning: no better than without training ({chance})")
        if config.fit.eval_every_epochs < config.fit.max_epochs == best.epoch:
            say("note: the best epoch is the last (fit.max_epochs)")
    metrics = [
        f"{name} {format_metric(best.metrics.get(name))}"
        for name in model_class.shown_metrics()
    ]
    say(
        f"  best epoch  {best.epoch}: {'  '.join(metrics)} on val\n"
        f"  checkpoint  {uri}\n"
        f"  MLflow run  {run.run_id} in {run.experiment}\n"
        f"  look at it  {tracking.view_command(run.uri)}"
    )
    return TrainingResult(config.name, uri, best, run, was_finished)


def open_run(
    config: TrainConfig, given: Any, hashes: dict[str, str], trial: TrialContext
) -> RunRecord:
    """Open the MLflow run of a new training, and write `run.json`.

    Args:
        config: Options of the training, resolved.
        given: Config of the model as the user gave it.
        hashes: Hashes of the tables.
        trial: Settings that a sweep adds.

    Returns:
        The content of `run.json`.
    """
    inputs, identity = config.inputs, identify(config)
    kind = registry.find(config.model.name).kind.name
    dataset = f"{kind}/{dataset_name(inputs.tables)}"
    tags = {**trial.tags, tracking.FOLDER_TAG: config.folder}
    if is_simulated(inputs.tables):
        tags[tracking.SIMULATED_TAG] = "true"
    run = tracking.open_run(
        str(config.tracking_uri),
        config.experiment or dataset,
        config.name,
        config.storage,
        config={**identity, **inputs.folders(), "ray": asdict(config.ray)},
        hashes=hashes,
        tags=tags,
    )
    if inputs.sids:  # log the tokenizer's metrics beside the model's
        info = open_table(join(inputs.sids, "sids"), SidsInfo).info
        content = {**asdict(info), **asdict(info.measures), "measures": {}}
        tracking.Logger(run).update(collect_numbers(content, "sids"), 0)
    record = RunRecord(
        status="running",
        run=run,
        config=identity,
        given=asdict(given),
        hashes=hashes,
        inputs=inputs.folders(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        jobs=[JobRef(code_version(), submission_id())],
    )
    write_record(config.folder, record)
    return record


def reopen_run(
    config: TrainConfig, record: RunRecord, say: Callable[[str], None]
) -> RunRecord:
    """Continue the MLflow run of a training, and update `run.json`.

    If the code has changed since, a note reports it. `run.json` and MLflow's tags keep
    all versions and jobs, as the results come from all of them.

    Returns:
        The content of `run.json`.
    """
    run, tags = record.run, {}
    tracking.reopen(run)
    if is_longer(record, config.fit.max_epochs):
        epochs = config.fit.max_epochs
        say(
            f"note: {config.name} continues to epoch {epochs}, from here with the "
            "learning rates of the longer schedule"
        )
        record = replace(record, config=identify(config))
        # MLflow's params cannot change, so a tag has the new value. Without its tags
        # the model is logged and measured again.
        tags = {"fit.max_epochs": str(epochs), "model": "", tracking.WEIGHTS_TAG: ""}
    job, latest = JobRef(code_version(), submission_id()), record.jobs[-1]
    if job.code != latest.code:
        say(
            f"note: this run was trained by the code {latest.code}, and continues with "
            f"{job.code}"
        )
    jobs = [*record.jobs, job] if job != latest else record.jobs
    record = replace(
        record,
        status="running",
        inputs=config.inputs.folders(),  # tables may have moved
        jobs=jobs,
    )
    write_record(config.folder, record)
    tags[tracking.CODE_TAG] = ", ".join(dict.fromkeys(job.code for job in jobs))
    submissions = dict.fromkeys(job.submission_id for job in jobs if job.submission_id)
    if submissions:
        tags[tracking.SUBMISSION_TAG] = ", ".join(submissions)
    tracking.Logger(run).tag(**tags)
    return record


@contextmanager
def end_failed_run(run: RunRef) -> Iterator[None]:
    """End the MLflow run as KILLED or FAILED if the block is stopped or raises.

    The run stays open on SystemExit, by which a sweep stops a trial.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        from mlflow.exceptions import MlflowException

        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        with suppress(UserError, MlflowException):  # `error` says more
            tracking.end_run(run, status)
        raise


def finish_run(
    folder: str,
    record: RunRecord,
    last: Checkpoint,
    log_model: bool = False,
    stopped: bool = False,
    say: Callable[[str], None] = print,
) -> None:
    """Copy the best checkpoint of a run to `best`, and log its results to MLflow.

    The status in `run.json` becomes `finished` last.

    Args:
        folder: The run's folder.
        record: The content of `run.json`.
        last: The run's last checkpoint.
        log_model: Whether to store the best model in MLflow.
        stopped: Whether the scheduler of a sweep stopped the run early.
        say: Called with a line about the model.
    """
    run, best_folder = record.run, join(folder, BEST)
    checkpoint.remove_steps(folder, last)  # an interrupted upload may be left
    best = copy_weights(join(folder, last.best_folder), best_folder)
    logger = tracking.Logger(run, last.unsent)
    eval_seconds = last.timing.get("eval_seconds", 0.0)
    values = {
        "best/epoch": last.best["epoch"],
        **{f"best/{name}": value for name, value in best.metrics.items()},
        "train/steps": last.step,
        "train/total_seconds": last.timing["train_seconds"] + eval_seconds,
    }
    logger.update(values, last.step)
    logger.tag(checkpoint=best_folder)
    is_served = registry.find(best.name).ranks == "catalogue"
    if log_model and is_served and not logger.tags.get("model"):
        from pipelines.serving import package

        say("logging the model to MLflow")
        inputs = Inputs(**record.inputs)
        logger.tag(model=package.log_model(run, best_folder, inputs))
    logger.end()
    finished = replace(
        record,
        status="finished",
        epochs=last.epoch,
        stopped=stopped,
        values=best.metrics,
    )
    write_record(folder, finished)


def copy_weights(source: str, target: str) -> Checkpoint:
    """Copy a checkpoint without the state to resume from, and return its content."""
    copied = checkpoint.read(source)
    copied.sha256 = {WEIGHTS: copied.sha256[WEIGHTS]}
    filesystem, source_path = open_uri(source)
    _, target_path = open_uri(target)
    filesystem.create_dir(target_path, recursive=True)
    filesystem.copy_file(f"{source_path}/{WEIGHTS}", f"{target_path}/{WEIGHTS}")
    write_file(join(target, CONFIG), copied.to_json().encode())
    return copied


def resolve_training(
    config: TrainConfig,
    load: Callable[[str, Inputs], Any] = load_catalogue,
) -> tuple[TrainConfig, dict[str, str]]:
    """Check a training against its tables and checkpoints, without writing anything.

    Args:
        config: Configuration as the user gave it.
        load: Load the catalogue of a model, by model name and inputs.

    Returns:
        The resolved configuration: with sizes taken from the teacher, paths of
        checkpoints, the tracking URI, the number of workers, and only those input
        folders that the model reads. And the hashes of the tables, by name.
    """
    model_class = registry.find(config.model.name)
    name = model_class.name
    tracking_uri = tracking.resolve_uri(config.tracking_uri, config.storage)
    model, hints = config.model, get_type_hints(type(config.model), include_extras=True)
    used = [getattr(model, key) for key in hints if hints[key] == CheckpointPath]
    for uri in filter(None, [*used, config.init]):
        with suppress(UserError):  # a finished run needs no teacher
            uri = checkpoint.locate(uri)
        if checkpoint.exists(uri):
            code = checkpoint.read(uri).code
            own_code.accept_code(code, uri, config.trust_code)
    inputs = config.inputs.select(name, model_class.inputs_of(config.model))
    catalogue = load(name, inputs)
    record = None if config.overwrite else read_record(config.folder)
    try:
        model = model_class.resolve_config(model, catalogue)
    except UserError:  # a finished run needs no teacher
        if not record or record.status != "finished" or record.given != asdict(model):
            raise
        model = registry.build_model_config(record.config["model"])
    ray = config.ray
    if model_class.trains_by_gradient:
        wants_gpu(ray)
    else:
        ray = replace(ray, num_workers=1, min_workers=0)
    check_fit(config.fit, model_class, catalogue)
    if isinstance(model, LabelOptions):
        resolve_weights(catalogue.labels, model.label_weights)
    init = config.init
    if init:
        init = checkpoint.locate(init)
        content = checkpoint.read(init)
        check_init(content, init, catalogue.versions, model_class, config.fit)
    resolved_config = replace(
        config,
        model=model,
        ray=ray,
        **vars(inputs),
        init=init,
        tracking_uri=tracking_uri,
    )
    return resolved_config, table_hashes(catalogue.versions)


def lock_run(
    storage: str, name: str, timeout_s: float = 0
) -> AbstractContextManager[None]:
    """Hold the lock of a run.

    Args:
        storage: Folder of all runs.
        name: Name of the run.
        timeout_s: Seconds to wait for another process that holds the lock.
    """
    busy = f"the run '{name}' in {storage} is being trained by another process"
    return hold_lock(tracking.lock_path(join(storage, name)), busy, timeout_s)


def is_simulated(tables: str) -> bool:
    """Return whether the log's mapping file declares it as simulated."""
    uri = join(tables, "events")
    events = find_table(uri, EventsInfo)
    return bool(events and events.config.get("source", {}).get("simulated"))


def dataset_name(tables: str) -> str:
    """Return the name of the folder, or of its parent if it is called `tables`."""
    parts = [part for part in tables.rstrip("/").split("/") if part]
    return parts[-2] if parts[-1] == "tables" and len(parts) > 1 else parts[-1]


def collect_numbers(content: Any, name: str) -> dict[str, float]:
    """Return the numbers in nested content by their path, like `sids/loss/0`.

    Args:
        content: Dictionaries and lists of any depth; other values are skipped.
        name: First part of each path.
    """
    if isinstance(content, int | float):
        return {name: float(content)}
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content)
    numbers: dict[str, float] = {}
    for key, value in pairs:
        numbers |= collect_numbers(value, f"{name}/{key}")
    return numbers


def delete_run(config: TrainConfig, say: Callable[[str], None]) -> None:
    """Delete the files of a run that trainings write, and its MLflow run."""
    filesystem, path = open_uri(config.folder)
    entries = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    record = read_record(config.folder, str(config.tracking_uri))
    if record is None:
        if entries:
            raise UserError(f"{config.folder} is not the folder of a run", "name")
        return
    try:
        tracking.delete(record.run)
    except UserError as error:
        say(f"note: {error}")
    for entry in entries:
        if entry.type == fs.FileType.Directory:
            if checkpoint.FOLDER.fullmatch(entry.base_name):
                filesystem.delete_dir(entry.path)
        elif entry.base_name in RAY_TRAIN_FILES:
            filesystem.delete_file(entry.path)
    # deleted last: a killed deletion leaves the folder of a run, not an unknown folder
    filesystem.delete_file(f"{path}/{RUN}")
