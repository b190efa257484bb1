"""Write the result of an evaluation beside its checkpoint and into MLflow.

    path = record_result(*evaluate("runs/sasrec", Inputs(tables)))

In MLflow an evaluation is a run of its own: a child of its training, with its options
as params and the metrics of its split, such as `test/ndcg@10`. A repeated evaluation is
a new child; readers take the newest one of the weights that were evaluated last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlflow.exceptions import MlflowException

from models.metrics.per_user_metrics import PER_USER_PREFIX
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.tables import UserError, join
from models.storage.uri import write_file
from pipelines import tracking

OPTIONS_WITHOUT_EFFECT = ("batch_size", "user_stride")
"""Params that do not tell evaluations of one training apart."""


@dataclass
class Result:
    """The result of an evaluation, as `evaluation-SPLIT.json` beside the checkpoint."""

    model: str
    """Name in the registry."""
    checkpoint: str
    """Folder of the checkpoint."""
    split: str
    """`val` or `test`."""
    examples: int
    """Requests ranked."""
    users: int
    """Users with a ranked request."""
    skipped: int
    """Requests without a history, left out."""
    metrics: dict[str, float]
    """Metrics by name, such as `recall@10`."""
    users_per_s: float
    """Requests per second of `recommend`, summed over all shards."""
    seconds: float
    """Wall time of the evaluation."""
    seed: int | None
    """Seed of the training."""
    options: dict[str, Any]
    """Options of `recommend`, with batch size and user stride."""
    hashes: dict[str, str]
    """Hashes of the tables."""
    device: str
    """CPU threads or the GPU's name, after the number of shards if there are
    several."""
    by_user: dict[str, dict[str, str]]
    """Metrics per user (`models/metrics/per_user_metrics.py`, as text)."""

    def is_fresh(self, about: Checkpoint) -> bool:
        """Return whether the requests come from another log than the training."""
        return self.hashes.get("sequences") != about.hashes.get("sequences")

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics by their MLflow names: `test/ndcg@10`."""
        metrics = {
            **self.metrics,
            "examples": float(self.examples),
            "users": float(self.users),
            "users_per_s": self.users_per_s,
        }
        return {f"{self.split}/{name}": value for name, value in metrics.items()}

    def to_params(self) -> dict[str, Any]:
        """Return the params of an MLflow run: the split and all options."""
        return {"split": self.split, **self.options, "checkpoint": self.checkpoint}


def changed_options(
    options: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of an evaluation that differ from its checkpoint's own
    options.

    Args:
        options: Options of the evaluation.
        own: Config of the model.
    """
    return {
        name: value
        for name, value in sorted(options.items())
        if name not in OPTIONS_WITHOUT_EFFECT and own.get(name) != value
    }


def record_result(
    result: Result, about: Checkpoint, tracking_uri: str | None = None
) -> str:
    """Write a result to a file beside its checkpoint and to MLflow.

    Args:
        result: the result.
        about: the config of the checkpoint.
        tracking_uri: the MLflow store; by default the store of the training.

    Returns:
        The path of the file.

    Raises:
        UserError: if MLflow or the run of the training is gone.
    """
    changed = changed_options(result.options, about.model)
    name = "-".join(
        ["evaluation", result.split, *(f"{k}-{v}" for k, v in changed.items())]
    )
    if result.is_fresh(about):
        name += f"-fresh-{result.hashes['sequences'][:8]}"
    path = join(result.checkpoint, f"{name}.json")
    content = to_json(result)
    write_file(path, content.encode())
    if not about.tracking:
        return path
    training = tracking.RunRef(**about.tracking)
    if tracking_uri:
        training = tracking.RunRef(tracking_uri, training.experiment, training.run_id)
    try:
        weights = checkpoint.weights_hash(result.checkpoint)
        log_evaluation(training, result, changed, weights)
    except (MlflowException, UserError) as error:
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"the figures are in {path}, but not in MLflow: run {training.run_id} at "
            f"{training.uri} ({first}); give the --tracking_uri where that run is now, "
            f"and evaluate again"
        ) from error
    return path


def log_evaluation(
    training: tracking.RunRef,
    result: Result,
    changed: Mapping[str, Any],
    weights: str,
) -> None:
    """Log a result as a child run of its training.

    The child is finished last, so an evaluation that was cut short is never read.

    Args:
        training: the run of the training.
        result: the result.
        changed: options that differ from the checkpoint's own.
        weights: SHA-256 of the evaluated weights.
    """
    words = [
        name if value is True else f"{name} {value}" for name, value in changed.items()
    ]
    child = tracking.open_child(
        training,
        " ".join([result.split, *words]),
        params=result.to_params(),
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
    """Return the name of the artifact with a result, metrics per user included."""
    return f"evaluation-{split}.json"


def group_evaluations(runs: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the finished evaluations among MLflow runs by the id of their training.

    Evaluations of other weights than those that were evaluated last, as before a
    training was continued, are left out.
    """
    runs = list(runs)
    weights = {run.info.run_id: run.data.tags.get(tracking.WEIGHTS_TAG) for run in runs}
    evaluations: dict[str, list[Any]] = {}
    for run in runs:
        if run.data.tags.get(tracking.KIND_TAG) != tracking.EVALUATION:
            continue
        training = run.data.tags.get(tracking.PARENT_TAG, "")
        is_current = weights.get(training) == weights[run.info.run_id]
        if is_current and run.info.status == "FINISHED":
            evaluations.setdefault(training, []).append(run)
    return evaluations


def read_options(evaluation: Any, training: Any) -> dict[str, str]:
    """Return the options of an evaluation that differ from its checkpoint's own.

    Args:
        evaluation: an MLflow run of an evaluation.
        training: the MLflow run of its training.
    """
    own = training.data.params
    return {
        name: value
        for name, value in sorted(evaluation.data.params.items())
        if name not in ("split", "checkpoint", *OPTIONS_WITHOUT_EFFECT)
        and own.get(f"model.{name}") != value
    }


def read_fresh_log(evaluation: Any, training: Any) -> str:
    """Return the hash of an evaluation's log if it is not the log of the training."""
    trained, evaluated = (
        run.data.tags.get("table.sequences", "") for run in (training, evaluation)
    )
    return evaluated if trained and evaluated != trained else ""


def load_test_metrics(run: tracking.RunRef) -> dict[str, float]:
    """Return the metrics of a training's latest evaluation on test, by their MLflow names.

    Evaluations with other options than the checkpoint's do not count. The result is
    empty if the current weights were not evaluated on test.
    """
    client = tracking.connect(run.uri)
    training = client.get_run(run.run_id)
    children = client.search_runs(
        [training.info.experiment_id],
        f"tags.`{tracking.PARENT_TAG}` = '{run.run_id}'",
        order_by=["attributes.start_time ASC"],
    )
    evaluations = group_evaluations([training, *children]).get(run.run_id, [])
    tested = [
        evaluation
        for evaluation in evaluations
        if evaluation.data.params["split"] == "test"
        and not read_options(evaluation, training)
        and not read_fresh_log(evaluation, training)
    ]
    return dict(tested[-1].data.metrics) if tested else {}


def pop_per_user(sums: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Take the metrics per user out of the sums of an evaluation, and return them as text."""
    names = [name for name in sums if name.startswith(PER_USER_PREFIX)]
    return {
        name.removeprefix(PER_USER_PREFIX): sums.pop(name).to_text() for name in names
    }


def to_json(result: Result) -> str:
    """Return the result as JSON, with null for undefined metrics."""
    content = to_standard_json(asdict(result))
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False)


def to_standard_json(value: Any) -> Any:
    """Return nested content with None in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: to_standard_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
