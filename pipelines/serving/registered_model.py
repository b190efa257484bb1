"""Register the best checkpoint of a run in MLflow's model registry.

    version = register(RunRef(uri, experiment, run_id), "industrial")
    model = mlflow.pyfunc.load_model("models:/industrial/1")
    model.predict(pandas.DataFrame({"history": [["item-1", "item-7"]]}))

A version has the hashes of its weights, tables, semantic IDs and trie as tags, which
are checked when it is loaded. `served_model.py` documents requests and answers.
"""

from __future__ import annotations

from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from core.errors import UserError
from core.schemas import Inputs, RunRef
from models import own_code, registry
from models.training import checkpoint
from pipelines import tracking
from pipelines.serving import package

RUN_TAG = "trieline.run"
"""Tag of a version with the name of its run."""


def register(
    run: RunRef, name: str, metric: str | None = None, trust_code: bool = False
) -> ModelVersion:
    """Register the best checkpoint of a run, or return the version that it has already.

    The model is logged to the run first if needed.

    Args:
        run: MLflow run of a training.
        name: Name of the registered model.
        metric: Metric on validation (`val/...`) for the version's description.
        trust_code: Whether to run code that the checkpoint contains.
    """
    client = tracking.connect(run.uri)
    training = client.get_run(run.run_id)
    params, tags = training.data.params, training.data.tags
    check_servable(training, run, trust_code)
    weights = checkpoint.weights_hash(tags["checkpoint"])
    with package.use_store(run.uri):
        for version in find_versions(client, name):
            is_same = version.tags.get(tracking.WEIGHTS_TAG) == weights
            if version.run_id == run.run_id and is_same:
                return version
    model = tags.get("model")
    if not model:
        inputs = Inputs(params["tables"], params.get("sids"), params.get("text"))
        model = package.log_model(run, tags["checkpoint"], inputs)
        client.set_tag(run.run_id, "model", model)
    run_name = str(training.info.run_name)
    version_tags = {
        **{key: value for key, value in tags.items() if key.startswith("table.")},
        tracking.WEIGHTS_TAG: weights,
        RUN_TAG: run_name,
        "model": params["model.name"],
    }
    with package.use_store(run.uri):
        version = mlflow.register_model(model, name, tags=version_tags)
        best = f"best/{(metric or '').removeprefix('val/')}"
        value = training.data.metrics.get(tracking.to_mlflow_name(best))
        if value is not None:
            description = f"{run_name}: {metric} {value:.4f}"
            client.update_model_version(name, version.version, description)
    return version


def check_servable(training: Any, run: RunRef, trust_code: bool) -> None:
    """Raise UserError if a run has no checkpoint, or its model cannot be served.

    Args:
        training: MLflow run of the training.
        run: Reference to the run, for messages.
        trust_code: Whether to run code that the checkpoint contains.
    """
    params, tags = training.data.params, training.data.tags
    name = training.info.run_name
    if "model.name" not in params or "checkpoint" not in tags:
        raise UserError(f"the run '{name}' at {run.uri} has no checkpoint to register")
    saved = checkpoint.read(tags["checkpoint"])
    own_code.accept_code(saved.code, tags["checkpoint"], trust_code)
    registry.find(params["model.name"]).check_served()
    owner = saved.tracking.get("run_id")
    if owner != run.run_id:
        raise UserError(
            f"the checkpoint {tags['checkpoint']} is now of the MLflow run {owner}, "
            f"not of '{name}' ({run.run_id}), which was overwritten"
        )


def find_versions(client: Any, name: str) -> list[ModelVersion]:
    """Return all versions of a registered model, [] if it does not exist."""
    try:
        return list(client.search_model_versions(f"name = '{name}'"))
    except MlflowException as error:
        raise UserError(
            f"'{name}' is no name for a registered model ({error.message})"
        ) from error
