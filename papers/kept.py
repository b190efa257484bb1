r"""Runs as a small file in the repository, and back as a store that comparisons read.

    python -m papers.kept --experiment retrieval/DATASET --tracking_uri STORE \
        --output papers/results/NAME.jsonl

A line is a run: its params, tags (command, hardware, commit, hashes of tables), last
metrics, metrics per user from evaluations, and the curves in plots. Paths are shortened
to their last two parts, and system metrics are left out. Read back, the runs are an
MLflow store in a temporary folder, so tables, plots and claims are about those of the
original store. Lines of `python -m benchmarks` are in the same folder.
"""

from __future__ import annotations

import json
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
"""Most points of a saved curve, at a constant stride, with the last one."""

EXCLUDED_METRICS = ("system/",)
"""Prefixes of system metrics, which are not saved."""

PATH_PATTERN = re.compile(r"(?<![\w.~/-])(?:[a-z][a-z0-9+]*://|/)[^\s'\",\]}]+")
"""An absolute path or a URI within a text."""

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
    """File to write (.jsonl), small enough to be kept in a repository."""
    experiment: str
    """MLflow experiment: family/dataset."""
    sweep: str | None = None
    """Name or run id of a sweep of the experiment, instead of all runs."""


def run(config: Config) -> None:
    """Write the runs of an experiment or sweep, with their parents, as JSON lines."""
    selection = select(config.tracking_uri, [config.experiment], config.sweep)
    chosen = {run.info.run_id for run in [*selection.runs, *selection.teachers]}
    there = search_runs(selection.client, list(selection.experiments))
    sweeps = {
        run.data.tags.get(PARENT_TAG) for run in there if run.info.run_id in chosen
    } - {None}
    whole = [
        run
        for run in there
        if run.info.run_id in chosen | sweeps or run.data.tags.get(PARENT_TAG) in sweeps
    ]
    evaluations = group_evaluations(there)
    whole += [each for run in whole for each in evaluations.get(run.info.run_id, [])]
    lines = [to_line(selection, run) for run in whole]
    lines.sort(key=lambda line: (line["experiment"], line["start_ms"], line["id"]))
    write(
        "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines),
        config.output,
    )
    print(f"{pluralize(len(lines), 'run')} written to {config.output}")


def to_line(selection: Selection, run: Any) -> Line:
    """Return the saved content of a run."""
    metrics = {
        name: value
        for name, value in run.data.metrics.items()
        if not name.startswith(EXCLUDED_METRICS)
    }
    curves = {
        "train/loss",
        f"val/{tracking.to_mlflow_name(run.data.params.get('fit.metric', ''))}",
    } & metrics.keys()
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

    They are thinned to about `MAX_CURVE_POINTS`, and values rounded to 5 digits.
    """
    points = sorted(
        (point.step, float(f"{point.value:.5g}"))
        for point in client.get_metric_history(run_id, name)
    )
    stride = max(1, -(-len(points) // MAX_CURVE_POINTS))
    return [
        list(point)
        for place, point in enumerate(points)
        if place % stride == 0 or place == len(points) - 1
    ]


def shorten_paths(value: str) -> str:
    """Shorten all absolute paths and URIs in a text to their last two parts."""
    return PATH_PATTERN.sub(
        lambda found: "/".join(found[0].rstrip("/").rsplit("/", 2)[-2:]), value
    )


def grid_text(sweep: Any) -> str:
    """Return the grid file of a sweep's run, or "" if the run has none."""
    try:
        return str(
            mlflow.artifacts.load_text(f"{sweep.info.artifact_uri}/{GRID_ARTIFACT}")
        )
    except (MlflowException, OSError):
        return ""


def read(path: str | Path) -> tuple[list[Line], list[Line]]:
    """Read runs and timings from a file, or from all `*.jsonl` of a folder.

    Raises:
        UserError: If a file has other content.
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
                (timings if "benchmark" in line else runs).append(line)
                if "benchmark" not in line and "curves" not in line:
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
    """Yield the tracking URI of a temporary store with the runs."""
    with tempfile.TemporaryDirectory(prefix="trieline-results-") as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        client = tracking.connect(uri)
        places = {
            name: client.create_experiment(
                name, artifact_location=f"{folder}/artifacts"
            )
            for name in dict.fromkeys(line["experiment"] for line in lines)
        }
        made = {
            line["id"]: client.create_run(
                places[line["experiment"]], line["start_ms"], run_name=line["name"]
            )
            for line in lines
        }
        ids = {before: run.info.run_id for before, run in made.items()}
        for line in lines:
            fill(client, ids[line["id"]], line, ids)
        yield uri


def fill(client: MlflowClient, run_id: str, line: Line, ids: dict[str, str]) -> None:
    """Log the content of a line to a run; tags with the id of a run get the new id."""
    tags = {
        name: ids.get(value, value)
        if name in (PARENT_TAG, tracking.BEST_TAG)
        else value
        for name, value in line["tags"].items()
    }
    params = [Param(name, value) for name, value in line["params"].items()]
    last = {name: points[-1][0] for name, points in line["curves"].items()}
    points = [
        (name, value, int(step))
        for name, curve in line["curves"].items()
        for step, value in curve[:-1]
    ]
    steps = (
        {"train/steps": max(last.values())} if last else {}
    )  # of runs from before it was logged
    points += [
        (name, value, int(last.get(name, 0)))
        for name, value in (steps | line["metrics"]).items()
    ]
    metrics = [
        Metric(name, value, line["start_ms"], step) for name, value, step in points
    ]
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    for start in range(0, max(len(params), len(metrics)), tracking.MAX_METRICS):
        part = slice(start, start + tracking.MAX_METRICS)
        client.log_batch(run_id, metrics=metrics[part], params=params[part])
    for name, values in line.get("by_user", {}).items():
        client.log_dict(run_id, {"by_user": values}, name)
    client.set_terminated(run_id, line["status"], line["end_ms"])


def select_all(uri: str) -> Selection:
    """Select all trainings and trials of a store."""
    client = tracking.connect(uri)
    names = {str(e.experiment_id): e.name for e in client.search_experiments()}
    runs = search_runs(client, list(names))
    evaluations = group_evaluations(runs)
    return Selection(
        uri, "all runs", filter_trainings(runs), names, evaluations=evaluations
    )


if __name__ == "__main__":
    cli.main(run, Config)
