"""Check a training before Ray starts, and resolve the values of its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from core.errors import UserError
from core.options import path_fields
from core.schemas import Inputs, RunRecord
from models import registry
from models.loaded_model import load_catalogue
from models.text.pretrained import resolve_encoder_path
from models.training import checkpoint
from models.training_run import check_fit, check_init
from pipelines.tracking import resolve_uri
from pipelines.training.config import TrainConfig
from pipelines.training.record import read_record


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
    tracking_uri = resolve_uri(config.tracking_uri, config.storage)
    model = locate_encoders(config.model)
    catalogue = load(name, config.inputs)
    record = None if config.overwrite else read_record(config.folder)
    resolved = resolve_model(model, catalogue, record)
    ray = config.ray
    if not model_class.trains_by_gradient:
        ray = replace(ray, num_workers=1, min_workers=0)
    check_fit(config.fit, model_class, catalogue)
    for workers in range(ray.fewest_workers, ray.num_workers + 1):
        check_batch(config.fit.batch_size, workers)
    init = config.init
    if init:
        init = checkpoint.locate(init)
        content = checkpoint.read(init)
        check_init(content, init, catalogue.versions, model_class, config.fit)
    resolved_config = replace(
        config,
        model=resolved,
        ray=ray,
        **vars(config.inputs.select(name, model_class.extra_inputs)),
        init=init,
        tracking_uri=tracking_uri,
    )
    return resolved_config, catalogue.hashes


def check_batch(batch_size: int, workers: int) -> None:
    """Raise UserError if a batch cannot be divided equally among the workers."""
    if batch_size % workers:
        raise UserError(
            f"fit.batch_size {batch_size} does not divide by {workers} workers"
        )


def locate_encoders(model: Any) -> Any:
    """Return a model's config with the paths of its text encoders made absolute."""
    encoders = path_fields(type(model), "encoder")
    return replace(
        model, **{name: resolve_encoder_path(getattr(model, name)) for name in encoders}
    )


def resolve_model(model: Any, catalogue: Any, record: RunRecord | None) -> Any:
    """Return a model's config with the values that it takes from checkpoints.

    If a finished run has the same config, its resolved config replaces checkpoints that
    no longer exist.

    Args:
        model: Config as the user gave it.
        catalogue: The model's catalogue.
        record: `run.json` of the run, or None for a new run.
    """
    model_class = registry.find(model.name)
    try:
        return model_class.resolve_config(model, catalogue)
    except UserError:
        given_model = model_class.config_to_dict(model)
        is_finished = record is not None and record.status == "finished"
        if not record or not is_finished or record.given != given_model:
            raise
        return registry.build_model_config(record.config["model"])
