"""Write the result of an evaluation beside its checkpoint and into MLflow.

    path = record_result(*evaluate("runs/sasrec", Inputs(tables)))

In MLflow an evaluation is a child run of its training, with its options as params and
the metrics of its split, such as `test/ndcg@10`. A repeated evaluation is a further
child run, and the newest one counts. Evaluations of weights from before the training
was continued are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from pydantic import TypeAdapter

from core.errors import UserError, one_line
from core.files import join, write_file
from core.schemas import RunRef
from models.metrics.per_user_metrics import PER_USER_PREFIX
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from pipelines import tracking


@dataclass
class Result:
    """The result of an evaluation, which `evaluation-SPLIT.json` contains."""

    model: str
    """Name of the model in the registry."""
    checkpoint: str
    """Folder of the checkpoint."""
    split: str
    """`val` or `test`."""
    examples: int
    """Number of ranked requests."""
    users: int
    """Number of users with a ranked request."""
    skipped: int
    """Number of requests without a history, which are not ranked."""
    without_history: dict[str, float]
    """Metrics of the most popular items on these requests; empty if there are none."""
    metrics: dict[str, float]
    """Metrics by name, such as `recall@10`."""
    requests_per_s: float
    """Requests per second of `recommend`, summed over all shards."""
    seconds: float
    """Wall time of the evaluation."""
    seed: int | None
    """Seed of the training."""
    options: dict[str, bool | int | float | str | None]
    """Options of `recommend`, with batch size."""
    hashes: dict[str, str]
    """Hashes of the tables, by table name."""
    device: str
    """Name of the GPU, or `cpu` with the number of threads; several shards are counted
    before it."""
    by_user: dict[str, dict[str, str]]
    """Metrics per user, encoded as text (`models/metrics/per_user_metrics.py`)."""

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics by their MLflow names, like `test/ndcg@10`."""
        metrics = {
            **self.metrics,
            "examples": float(self.examples),
            "users": float(self.users),
            "requests_per_s": self.requests_per_s,
        }
        return {f"{self.split}/{name}": value for name, value in metrics.items()}


def record_result(
    result: Result, evaluated: Checkpoint, tracking_uri: str | None = None
) -> str:
    """Write a result to a file beside its checkpoint and to MLflow.

    Args:
        result: Metrics of the evaluation.
        evaluated: Content of the checkpoint's `config.json`.
        tracking_uri: Tracking URI; by default MLFLOW_TRACKING_URI, else the SQLite file
            of the training. Nothing is logged to a store that only the checkpoint
            names.

    Returns:
        The path of the file.
    """
    changed = {  # options that differ from the model's config
        name: value
        for name, value in sorted(result.options.items())
        if name != "batch_size" and evaluated.model.get(name) != value
    }
    option_names = [f"{name}-{value}" for name, value in changed.items()]
    file_name = "-".join(["evaluation", result.split, *option_names])
    if result.hashes.get("sequences") != evaluated.hashes.get("sequences"):
        file_name += f"-fresh-{result.hashes['sequences'][:8]}"
    path = join(result.checkpoint, f"{file_name}.json")
    content = to_json(result)
    write_file(path, content.encode())
    if not evaluated.tracking:
        return path
    try:
        uri = choose_store(result.checkpoint, evaluated, tracking_uri)
        if not uri:
            print("note: not logged to the MLflow store that only the checkpoint names")
            return path
        training = replace(RunRef(**evaluated.tracking), uri=uri)
        weights = checkpoint.weights_hash(result.checkpoint)
        log_evaluation(training, result, changed, weights)
    except (MlflowException, UserError) as error:
        raise UserError(
            f"the metrics are in {path}, but not in MLflow: run "
            f"{evaluated.tracking['run_id']} ({one_line(error)})"
        ) from error
    return path


def choose_store(folder: str, evaluated: Checkpoint, tracking_uri: str | None) -> str:
    """Return the tracking URI to log to; empty if only the checkpoint names a store.

    A checkpoint may come from anyone, and MLflow sends credentials to servers and
    creates tables in any SQLite file. So a store that only the checkpoint names is used
    only if it is the `mlflow.db` of a folder above the checkpoint, and its artifacts
    are local.

    Args:
        folder: Folder of the checkpoint.
        evaluated: Content of the checkpoint's `config.json`.
        tracking_uri: Tracking URI of the user.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri and "://" not in folder:
        file = Path(tracking.sqlite_file(evaluated.tracking["uri"])).resolve()
        stores = [
            parent / "mlflow.db"
            for parent in Path(folder).expanduser().resolve().parents
        ]
        if file in stores and file.is_file():
            uri = tracking.sqlite_uri(file)
            client = tracking.connect(uri)
            training = client.get_run(evaluated.tracking["run_id"]).info
            experiment = client.get_experiment(training.experiment_id)
            if not experiment.artifact_location.startswith("file://"):
                return ""
    return uri


def log_evaluation(
    training: RunRef,
    result: Result,
    changed: Mapping[str, Any],
    weights: str,
) -> None:
    """Log a result as a child run of its training.

    The status of the child becomes FINISHED last, so that readers never use an
    interrupted evaluation.

    Args:
        training: MLflow run of the training.
        result: Metrics of the evaluation.
        changed: Options that differ from the model's config.
        weights: SHA-256 of the evaluated weights.
    """
    words = [
        name if value is True else f"{name} {value}" for name, value in changed.items()
    ]
    child = tracking.open_child(
        training,
        " ".join([result.split, *words]),
        params={
            "split": result.split,
            **result.options,
            "checkpoint": result.checkpoint,
        },
        hashes=result.hashes,
        tags={
            tracking.KIND_TAG: tracking.EVALUATION,
            tracking.WEIGHTS_TAG: weights,
            "device": result.device,
        },
    )
    logger = tracking.Logger(child)
    logger.update(result.to_metrics(), 0)
    tracking.log_text(child, to_json(result), artifact_name(result.split))
    logger.end()
    tracking.Logger(training).tag(**{tracking.WEIGHTS_TAG: weights})


def artifact_name(split: str) -> str:
    """Return the name of the artifact with a result and its metrics per user."""
    return f"evaluation-{split}.json"


def load_test_metrics(run: RunRef) -> dict[str, float]:
    """Return the metrics of a training's latest evaluation on test, by MLflow name.

    Evaluations with options that differ from the model's config do not count. The
    result is empty if the current weights were not evaluated on test.
    """
    client = tracking.connect(run.uri)
    training = client.get_run(run.run_id)
    weights = training.data.tags.get(tracking.WEIGHTS_TAG, "")
    evaluations = client.search_runs(
        [training.info.experiment_id],
        f"tags.`{tracking.PARENT_TAG}` = '{run.run_id}' and run_name = 'test' "
        f"and tags.`{tracking.WEIGHTS_TAG}` = '{weights}' and status = 'FINISHED'",
        max_results=1,
    )
    return dict(evaluations[0].data.metrics) if evaluations else {}


def pop_per_user(sums: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Remove the metrics per user from the sums, and return them encoded as text."""
    names = [name for name in sums if name.startswith(PER_USER_PREFIX)]
    return {
        name.removeprefix(PER_USER_PREFIX): sums.pop(name).to_text() for name in names
    }


def to_json(result: Result) -> str:
    """Return a result as JSON, with null for undefined metrics."""
    return TypeAdapter(Result).dump_json(result, indent=2).decode()
