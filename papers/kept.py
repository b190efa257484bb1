r"""Save MLflow runs in small files of the repository, and read them back as a store.

    python -m papers.kept --experiment retrieval/DATASET --tracking_uri STORE \
        --output papers/results/NAME.jsonl

A line holds one run: its params, tags (command, hardware, commit, hashes of tables),
last metrics, metrics per user from evaluations, and the curves of plots. Paths are
shortened to their last two parts, and system metrics are left out. `store` writes the
runs to an MLflow store in a temporary folder, from which tables, plots and claims are
made as from the original store. JSON lines of `python -m benchmarks` are kept in the
same folder.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from jobs import cli
from models.config import pluralize
from models.storage.tables import UserError
from pipelines import tracking
from pipelines.comparison.over_users import download_per_user
from pipelines.comparison.page import write
from pipelines.comparison.runs import (
    Selection,
    filter_trainings,
    is_sweep,
    search_runs,
    select,
)
from pipelines.evaluation.record import group_evaluations
from pipelines.tracking import PARENT_TAG

RESULTS = Path(__file__).with_name("results")
"""Folder of the saved runs."""

MAX_CURVE_POINTS = 100
"""Largest number of points of a saved curve, apart from the last point."""

EXCLUDED_METRICS = ("system/",)
"""Prefixes of system metrics, which are not saved."""

PATH_PATTERN = re.compile(r"(?<![\w.~/-])(?:[a-z][a-z0-9+]*://|/)[^\s'\",\]}]+")
"""Pattern of absolute paths and URIs in a text."""

INCLUDED_TAGS = (PARENT_TAG, tracking.COMMIT_TAG)
"""Tags of MLflow that are saved, in addition to all other tags."""

GRID_ARTIFACT = "grid.yaml"
"""Artifact of a sweep's run with its grid file."""

Line = dict[str, Any]


@dataclass
class Config:
    """Options of `python -m papers.kept`."""

    tracking_uri: str
    """MLflow store of the runs."""
    output: str
    """File to write (.jsonl)."""
    experiment: str
    """MLflow experiment: family/dataset."""
    sweep: str | None = None
    """Name or run id of a sweep of the experiment, instead of all runs."""


def run(config: Config) -> None:
    """Write the runs of an experiment or sweep as JSON lines.

    The sweeps of the runs, all trials of these sweeps, and the runs' evaluations are
    written as well.
    """
    selection = select(config.tracking_uri, [config.experiment], config.sweep)
    selected = {run.info.run_id for run in [*selection.runs, *selection.teachers]}
    all_runs = search_runs(selection.client, list(selection.experiments))
    parents = {
        run.data.tags.get(PARENT_TAG) for run in all_runs if run.info.run_id in selected
    }
    sweeps = parents - {None}
    runs = [
        run
        for run in all_runs
        if run.info.run_id in selected | sweeps
        or run.data.tags.get(PARENT_TAG) in sweeps
    ]
    evaluations = group_evaluations(all_runs)
    for run in list(runs):
        runs += evaluations.get(run.info.run_id, [])
    lines = [read_line(selection, run) for run in runs]
    lines.sort(key=lambda line: (line["experiment"], line["start_ms"], line["id"]))
    write(
        "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines),
        config.output,
    )
    print(f"{pluralize(len(lines), 'run')} written to {config.output}")


def read_line(selection: Selection, run: Any) -> Line:
    """Read the values of a run that are saved, as a JSON object."""
    metrics = {
        name: value
        for name, value in run.data.metrics.items()
        if not name.startswith(EXCLUDED_METRICS)
    }
    metric = tracking.to_mlflow_name(run.data.params.get("fit.metric", ""))
    curves = {"train/loss", f"val/{metric}"} & metrics.keys()
    tags = {
        name: shorten_paths(value)
        for name, value in run.data.tags.items()
        if name in INCLUDED_TAGS or "mlflow." not in name
    }
    line = {
        "id": run.info.run_id,
        "name": run.info.run_name,
        "experiment": selection.experiments[run.info.experiment_id],
        "status": run.info.status,
        "start_ms": run.info.start_time,
        "end_ms": run.info.end_time,
        "params": {
            name: shorten_paths(value) for name, value in run.data.params.items()
        },
        "tags": tags,
        "metrics": metrics,
        "curves": {
            name: read_curve(selection.client, run.info.run_id, name)
            for name in sorted(curves)
        },
        "by_user": download_per_user(selection.uri, run.info.run_id),
    }
    if is_sweep(run):
        line["grid"] = grid_text(run)
    return line


def read_curve(client: MlflowClient, run_id: str, name: str) -> list[list[float]]:
    """Return the [step, value] pairs of a metric, sorted by step.

    Every n-th point is returned, at most `MAX_CURVE_POINTS`, and the last point. Values
    are rounded to 5 digits.

    Args:
        client: Client of the MLflow store.
        run_id: Id of the run.
        name: Name of the metric.
    """
    points = sorted(
        (point.step, float(f"{point.value:.5g}"))
        for point in client.get_metric_history(run_id, name)
    )
    stride = max(1, math.ceil(len(points) / MAX_CURVE_POINTS))
    return [
        list(point)
        for index, point in enumerate(points)
        if index % stride == 0 or index == len(points) - 1
    ]


def shorten_paths(value: str) -> str:
    """Shorten all absolute paths and URIs in a text to their last two parts."""
    return PATH_PATTERN.sub(
        lambda match: "/".join(match[0].rstrip("/").rsplit("/", 2)[-2:]), value
    )


def grid_text(sweep: Any) -> str:
    """Return the text of a sweep's grid file, or an empty string if it is missing."""
    try:
        return str(
            mlflow.artifacts.load_text(f"{sweep.info.artifact_uri}/{GRID_ARTIFACT}")
        )
    except (MlflowException, OSError):
        return ""


def read(path: str | Path) -> tuple[list[Line], list[Line]]:
    """Read runs and timings from a file, or from all `*.jsonl` files of a folder.

    Returns:
        The runs, and the lines of benchmarks.

    Raises:
        UserError: If a file cannot be read, or a line is neither a run nor a timing.
    """
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    runs: list[Line] = []
    timings: list[Line] = []
    for file in files:
        try:
            lines = [
                json.loads(text)
                for text in file.read_text().splitlines()
                if text.strip()
            ]
            for line in lines:
                if "benchmark" in line:
                    timings.append(line)
                elif "curves" in line:
                    runs.append(line)
                else:
                    raise UserError(
                        f"a line of {file} is neither a run nor a timing; write it "
                        f"with papers.kept"
                    )
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"cannot read {file} ({error}); write it with papers.kept"
            ) from error
    if not runs and not timings:
        raise UserError(f"{path} holds no runs; write a .jsonl file with papers.kept")
    return runs, timings


@contextmanager
def store(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the tracking URI of a temporary MLflow store with saved runs.

    The runs get new ids; tags that refer to a run are changed accordingly.
    """
    with tempfile.TemporaryDirectory(prefix="trieline-results-") as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        client = tracking.connect(uri)
        experiments = {
            name: client.create_experiment(
                name, artifact_location=f"{folder}/artifacts"
            )
            for name in dict.fromkeys(line["experiment"] for line in lines)
        }
        new_ids = {}
        for line in lines:
            run = client.create_run(
                experiments[line["experiment"]],
                line["start_ms"],
                run_name=line["name"],
            )
            new_ids[line["id"]] = run.info.run_id
        for line in lines:
            log_line(client, line, new_ids)
        yield uri


def log_line(client: MlflowClient, line: Line, new_ids: dict[str, str]) -> None:
    """Log the values of a saved run to its new run.

    Args:
        client: Client of the new store.
        line: Saved run.
        new_ids: Ids in the new store by original id.
    """
    run_id = new_ids[line["id"]]
    tags = dict(line["tags"])
    for name in (PARENT_TAG, tracking.BEST_TAG):
        if name in tags:
            tags[name] = new_ids.get(tags[name], tags[name])
    params = [Param(name, value) for name, value in line["params"].items()]
    last_steps = {name: curve[-1][0] for name, curve in line["curves"].items()}
    last_values = dict(line["metrics"])
    if last_steps:  # early runs did not log their number of steps
        last_values.setdefault("train/steps", max(last_steps.values()))
    metrics = []
    for name, curve in line["curves"].items():
        for step, value in curve[:-1]:
            metrics.append(Metric(name, value, line["start_ms"], int(step)))
    for name, value in last_values.items():
        step = int(last_steps.get(name, 0))
        metrics.append(Metric(name, value, line["start_ms"], step))
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    for start in range(0, max(len(params), len(metrics)), tracking.MAX_METRICS):
        part = slice(start, start + tracking.MAX_METRICS)
        client.log_batch(run_id, metrics=metrics[part], params=params[part])
    for name, values in line.get("by_user", {}).items():
        client.log_dict(run_id, {"by_user": values}, name)
    client.set_terminated(run_id, line["status"], line["end_ms"])


def select_all(uri: str) -> Selection:
    """Select all trainings and trials of an MLflow store."""
    client = tracking.connect(uri)
    experiments = client.search_experiments()
    names = {
        str(experiment.experiment_id): experiment.name for experiment in experiments
    }
    runs = search_runs(client, list(names))
    evaluations = group_evaluations(runs)
    return Selection(
        uri, "all runs", filter_trainings(runs), names, evaluations=evaluations
    )


if __name__ == "__main__":
    cli.main(run, Config)
