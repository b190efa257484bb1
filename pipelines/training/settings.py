"""Check a training as far as possible before Ray starts, and resolve what its model takes from checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from models import registry
from models.build import parse_options
from models.config import path_fields
from models.dataset.folds import describe_windows, find_train_end, resolve_fold
from models.loaded_model import check_trained_before, load_catalogue
from models.model import Model
from models.storage import checkpoint
from models.storage.input_folders import CHECKPOINT
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest
from models.text.text_encoder import resolve_encoder_path
from models.training_run import check_fit, check_init
from pipelines.tracking import resolve_uri
from pipelines.training.config import TrainConfig
from pipelines.training.record import read_record


@dataclass(frozen=True)
class CheckedTraining:
    """A training that may begin."""

    config: TrainConfig
    """Its configuration, with everything resolved: sizes of a teacher, checkpoints, the
    tracking URI, the number of workers, and the folders that the model reads."""
    given_model: Any
    """Config of the model before it was resolved."""
    hashes: dict[str, str]
    """Hashes of the tables that the model reads."""
    remedy: str
    """What the user can do if the run of this name has other settings."""
    init_weights: str | None = None
    """SHA-256 of the weights that it begins with."""
    windows: dict[str, int] = field(default_factory=dict)
    """Number of folds and starts of the windows of its fold, of tables with folds."""
    notes: list[str] = field(default_factory=list)
    """Messages to show before the training."""

    @property
    def model_class(self) -> type[Model]:
        """The model's class."""
        return registry.find_by_config(self.config.model)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that a continued run must have in common, as `run.json` holds them."""
        fit = asdict(self.config.fit)
        if fit["fold"] is None:  # of tables without folds
            del fit["fold"]
        identity: dict[str, Any] = {
            "model": self.model_class.config_to_dict(self.config.model),
            "fit": fit,
            "ray": {"num_workers": self.config.ray.num_workers},
        }
        if self.windows:
            identity["split"] = self.windows
        return identity | {"init": self.init_weights} if self.init_weights else identity


def check_training(
    config: TrainConfig,
    remedy: str = "",
    load: Callable[[str, Inputs], Any] = load_catalogue,
) -> CheckedTraining:
    """Check a training against its tables and checkpoints. Nothing is written.

    Args:
        config: The training.
        remedy: What the user can do if the run of this name has other settings.
        load: Load the catalogue of a model.

    Raises:
        UserError: for what the user can correct and is known without Ray.
    """
    remedy = remedy or (
        f"choose another --name, or --overwrite the run '{config.name}' in {config.storage}"
    )
    model_class = registry.find_by_config(config.model)
    name = model_class.name
    tracking_uri = resolve_uri(config.tracking.tracking_uri, config.storage)
    check_checkpoint_names(config)
    model = locate_encoders(config.model)
    catalogue = load(name, config.inputs)
    record = None if config.overwrite else read_record(config.folder)
    resolved = resolve_model(model, catalogue, record)
    if config.ray.fsdp and not model_class.supports_fsdp:
        sharded = [
            other for other in registry.MODELS if registry.find(other).supports_fsdp
        ]
        raise UserError(
            f"ray.fsdp is true, but '{name}' is not trained in shards; {', '.join(sharded)} are; leave it out"
        )
    ray = config.ray
    if not model_class.trains_by_gradient:
        ray = replace(ray, num_workers=1, min_workers=0)
    check_fit(config.fit, model_class, catalogue)
    for workers in range(ray.fewest_workers, ray.num_workers + 1):
        check_batch(config.fit.batch_size, workers)
    init, init_weights = config.init, None
    if init:
        init = checkpoint.locate(init)
        about = checkpoint.read(init)
        check_init(about, init, catalogue.versions, model_class, config.fit)
        init_weights = about.sha256[checkpoint.WEIGHTS]
    sequences = config.inputs.sequences
    info = read_manifest(sequences, "sequences").info
    fold = resolve_fold(info, config.fit.fold, sequences)
    if fold is not None and not record:
        check_origins(resolved, init, find_train_end(info, fold))
    return CheckedTraining(
        config=replace(
            config,
            model=resolved,
            fit=replace(config.fit, fold=fold),
            ray=ray,
            inputs=config.inputs.select(name, model_class.extra_inputs),
            init=init,
            tracking=replace(config.tracking, tracking_uri=tracking_uri),
        ),
        given_model=model,
        hashes=catalogue.hashes,
        remedy=remedy,
        init_weights=init_weights,
        windows=describe_windows(info, fold),
        notes=[] if record else describe_unread_columns(model_class, config.inputs),
    )


def check_origins(model: Any, init: str | None, end: int | None) -> None:
    """Raise UserError if a model is made from a checkpoint that was trained on later requests.

    Args:
        model: The resolved config, which may name a teacher.
        init: URI of a checkpoint whose weights the training begins with.
        end: Time in ms before which the training requests lie.
    """
    origins = {"the model of --init": init}
    for option in path_fields(type(model), "checkpoint"):
        origins[f"model.{option}"] = getattr(model, option)
    for noun, uri in origins.items():
        if uri:
            about = checkpoint.read(checkpoint.locate(uri))
            check_trained_before(about, end, noun)


def check_batch(batch_size: int, workers: int) -> None:
    """Raise UserError if workers cannot have equal parts of a batch."""
    if batch_size % workers:
        raise UserError(
            f"fit.batch_size {batch_size} does not divide by {workers} workers; choose a multiple of {workers}"
        )


def check_checkpoint_names(config: TrainConfig) -> None:
    """Raise UserError if a run is named where its folder is needed."""
    for option in path_fields(type(config.model), "checkpoint"):
        path = str(getattr(config.model, option) or "")
        folders = (path, join(path, "best"))
        if not path or "/" in path or any(map(CHECKPOINT.matches, folders)):
            continue
        run = join(config.storage, path)
        if CHECKPOINT.matches(run):
            raise UserError(
                f"model.{option} is {path}, the name of a run; give the run's folder, which is {run}"
            )


def locate_encoders(model: Any) -> Any:
    """Return a model's config with absolute paths of its text encoders."""
    encoders = path_fields(type(model), "encoder")
    return replace(
        model, **{name: resolve_encoder_path(getattr(model, name)) for name in encoders}
    )


def resolve_model(model: Any, catalogue: Any, record: dict[str, Any] | None) -> Any:
    """Return a model's config with the values that it takes from checkpoints.

    A finished run of the same config no longer needs the checkpoints that it was made
    from.

    Args:
        model: The config.
        catalogue: The model's catalogue.
        record: `run.json` of the run, or None for a new run.
    """
    model_class = registry.find_by_config(model)
    try:
        return model_class.resolve_config(model, catalogue)
    except UserError:
        given = model_class.config_to_dict(model)
        is_finished = record is not None and record["status"] == "finished"
        if not record or not is_finished or record.get("given") != given:
            raise
        return parse_options(record["config"]["model"])[1]


def describe_unread_columns(model_class: type[Model], inputs: Inputs) -> list[str]:
    """Return a note on the columns of the tables that a model does not read."""
    info = read_manifest(inputs.sequences, "sequences").info
    unread = model_class.list_unread(info)
    if not unread:
        return []
    return [
        f"'{model_class.name}' reads items and their order, of these tables not the {'; '.join(unread)}"
    ]
