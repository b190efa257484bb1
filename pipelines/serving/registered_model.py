"""The MLflow model registry: the best checkpoint of a run as a version of a named model, with what it stands on.

    version = register(RunRef(uri, experiment, run_id), "industrial")
    mlflow.pyfunc.load_model("models:/industrial/1").predict(pandas.DataFrame({"history": [["item-1", "item-7"]]}))

Retrieval models rank their catalogue, models of search and of actions the candidates of a request
(`served_model.py`).

A version carries the hashes of its weights, tables, semantic IDs and trie as tags; loading checks them again.
"""

from __future__ import annotations

from typing import Any

import mlflow
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from models import registry
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from pipelines import tracking
from pipelines.serving import package

RUN_TAG = "trieline.run"
"""Tag of a version with the name of the run that it is from."""


def register(
    run: tracking.RunRef, name: str, metric: str | None = None
) -> ModelVersion:
    """A new version of the model `name` from the run's best checkpoint, or the version that this already is.

    The checkpoint is logged to the run first, where that is not done. `metric` (`val/...`) stands in the version's
    description. UserError for a run that has no checkpoint yet, whose checkpoint was replaced by that of a later run,
    or whose model ranks nothing.
    """
    client = tracking.connect(run.uri)
    found = client.get_run(run.run_id)
    params, tags = found.data.params, found.data.tags
    model_class = (
        registry.find(params.get("model.name", "")) if "model.name" in params else None
    )
    if model_class is None or "checkpoint" not in tags:
        raise UserError(
            f"the run '{found.info.run_name}' at {run.uri} has no checkpoint to register; name a finished one"
        )
    if reason := model_class.reason_not_served():
        raise UserError(
            f"the model '{params['model.name']}' is not served: {reason}; register another"
        )
    if (
        owner := checkpoint.read(tags["checkpoint"]).tracking.get("run_id")
    ) != run.run_id:
        raise UserError(
            f"the checkpoint {tags['checkpoint']} is now of the MLflow run {owner}, not of '{found.info.run_name}' "
            f"({run.run_id}), which was overwritten; register that one, or mlflow runs delete --run-id {run.run_id}"
        )
    weights = checkpoint.weights_hash(tags["checkpoint"])
    with package.at(run.uri):
        for version in versions(client, name):
            if (
                version.run_id == run.run_id
                and version.tags.get(tracking.WEIGHTS_TAG) == weights
            ):
                return version
    model = tags.get("model")
    if not model:
        inputs = Inputs(params["tables"], params.get("sids"), params.get("text"))
        model = package.log_model(run, tags["checkpoint"], inputs)
        client.set_tag(run.run_id, "model", model)
    kept = {key: value for key, value in tags.items() if key.startswith("table.")}
    kept |= {
        tracking.WEIGHTS_TAG: weights,
        RUN_TAG: str(found.info.run_name),
        "model": params["model.name"],
    }
    with package.at(run.uri):
        version = mlflow.register_model(model, name, tags=kept)
        value = found.data.metrics.get(
            tracking.metric_name(f"best/{(metric or '').removeprefix('val/')}")
        )
        if value is not None:
            client.update_model_version(
                name, version.version, f"{found.info.run_name}: {metric} {value:.4f}"
            )
    return version


def versions(client: Any, name: str) -> list[ModelVersion]:
    """All versions of a registered model; none of one that is not there."""
    try:
        return list(client.search_model_versions(f"name = '{name}'"))
    except MlflowException as error:
        raise UserError(
            f"'{name}' is no name for a registered model ({error.message}); choose another"
        ) from error
