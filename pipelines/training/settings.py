"""The settings of a training, checked as far as that goes before Ray starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from models import registry
from models.build import parse_options
from models.config import naming
from models.loaded_model import load_catalogue
from models.model import Model
from models.storage import checkpoint
from models.storage.input_folders import CHECKPOINT
from models.storage.inputs import Inputs
from models.storage.tables import UserError, join, read_manifest
from models.storage.uri import absolute
from models.text.text_encoder import resolve_encoder_path
from models.training.fit import FitConfig
from models.training_run import check_fit, check_init, trained_until
from pipelines.tracking import resolve_uri
from pipelines.training.ray_options import RayOptions
from pipelines.training.record import check_same, read_record


@dataclass(frozen=True)
class Checked:
    """A training that may begin."""

    name: str
    """Name of the run."""
    storage: str
    """Folder of all runs, absolute."""
    model_class: type[Model]
    """Class of the model."""
    config: dict[str, Any]
    """What the run is continued with: `model`, with what it takes from checkpoints that it names, `fit` and `ray`."""
    given: dict[str, Any]
    """The model as it was asked for."""
    fit: FitConfig
    """The training loop."""
    ray: RayOptions
    """Workers and their resources."""
    inputs: Inputs
    """What the model reads."""
    hashes: dict[str, str]
    """Of the tables that it reads."""
    init: str | None
    """The checkpoint whose weights it begins with."""
    uri: str
    """MLflow's tracking URI."""
    overwrite: bool
    """Whether what the run of this name has made is thrown away."""
    notes: list[str]
    """What is worth saying before the training."""
    remedy: str
    """What to do where the run of this name is another one."""

    @property
    def folder(self) -> str:
        """The run's folder."""
        return join(self.storage, self.name)

    @property
    def workers(self) -> int:
        """Training processes."""
        return int(self.config["ray"]["num_workers"])


def check(
    *,
    model: dict[str, Any],
    fit: FitConfig,
    ray_options: RayOptions,
    inputs: Inputs,
    storage: str,
    name: str,
    tracking_uri: str | None = None,
    overwrite: bool = False,
    remedy: str = "",
    init: str | None = None,
) -> Checked:
    """The training, or UserError for what the user can mend and is known without Ray. Nothing is written.

    `model` holds the model's `name` and fields; `remedy` is what to do where the run of this name is another one.
    """
    check_name(name)
    storage = absolute(storage)
    remedy = (
        remedy or f"choose another --name, or --overwrite the run '{name}' in {storage}"
    )
    uri = resolve_uri(tracking_uri, storage)
    model_class = registry.find(model["name"])
    check_checkpoints(model, model_class, storage)
    encoders = naming(model_class.config_class, "encoder")
    model = {
        key: resolve_encoder_path(value) if key in encoders else value
        for key, value in model.items()
    }
    catalogue = load_catalogue(model["name"], inputs)
    record = None if overwrite else read_record(join(storage, name))
    _, asked = parse_options(model)
    given = model_class.config_to_dict(asked)
    try:
        resolved = model_class.resolve_config(asked, catalogue)
        model = model_class.config_to_dict(resolved)
    except UserError:
        if not record or record["status"] != "finished" or record.get("given") != given:
            raise
        model = record["config"][
            "model"
        ]  # a finished run no longer needs the checkpoints that it was made from
    if ray_options.fsdp and not model_class.supports_fsdp:
        cut = ", ".join(
            name for name in registry.MODELS if registry.find(name).supports_fsdp
        )
        raise UserError(
            f"ray.fsdp is true, but '{model['name']}' is not trained in shards; {cut} are; leave it out"
        )
    workers = ray_options.num_workers if model_class.trains_by_gradient else 1
    for count in range(ray_options.least(workers), workers + 1):
        check_fit(fit, model_class, catalogue, count)
    config: dict[str, Any] = {
        "model": model,
        "fit": asdict(fit),
        "ray": {"num_workers": workers},
    }
    first = None
    if init:
        init = checkpoint.locate(init)
        first = checkpoint.read(init)
        check_init(first, init, catalogue.versions, model_class)
        config["init"] = first.sha256[checkpoint.WEIGHTS]
    trained_until(first, fit)
    notes = []
    if record is None:
        about_log = read_manifest(inputs.sequences, "sequences").info
        if unread := model_class.list_unread(about_log):
            notes = [
                f"'{model['name']}' reads items and their order, of these tables not the {'; '.join(unread)}"
            ]
    elif record["status"] != "opening":
        check_same(record, config, catalogue.hashes, remedy)
    inputs = inputs.select(model_class.name, model_class.extra_inputs)
    return Checked(
        name,
        storage,
        model_class,
        config,
        given,
        fit,
        ray_options,
        inputs,
        catalogue.hashes,
        init,
        uri,
        overwrite,
        notes,
        remedy,
    )


def check_name(name: str) -> None:
    if not name or name in (".", "..", "mlartifacts") or "/" in name:
        raise UserError(
            f"the run's name is '{name}'; it names a folder, so give a word without '/'"
        )


def check_checkpoints(
    model: dict[str, Any], model_class: type[Model], storage: str
) -> None:
    """UserError where an option that takes a run's folder has the name of a run in this storage."""
    for option in naming(model_class.config_class, "checkpoint"):
        given = str(model.get(option) or "")
        if (
            not given
            or "/" in given
            or any(CHECKPOINT.matches(place) for place in (given, join(given, "best")))
        ):
            continue
        if CHECKPOINT.matches(run := join(storage, given)):
            raise UserError(
                f"model.{option} is {given}, the name of a run; give the run's folder, which is {run}"
            )
