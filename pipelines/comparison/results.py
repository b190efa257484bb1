"""Runs as a small file that is kept in a repository, and back as a store that a comparison reads.

    python -m jobs.compare --experiment retrieval/DATASET --export results/NAME.jsonl
    python -m jobs.compare --from results --markdown docs/results

A line is a run: its params, tags (command, hardware, commit, hashes of tables), last metrics, those that evaluations
kept of every user, and the curves that plots show. Of paths only the last two parts are kept, and nothing of what the
machine was doing beside. Read back they are an MLflow store in a temporary folder, so tables, plots and claims come
about as from the store that the runs were made in.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from models.tables import UserError
from pipelines import tracking
from pipelines.comparison.over_users import evaluated
from pipelines.comparison.page import write
from pipelines.comparison.runs import BEST, PARENT, Selection, is_sweep, search
from pipelines.comparison.sweep_plots import GRID, grid_text

POINTS = 100
"""Points of a curve that are kept, at most: every so-manieth and the last."""

LEFT_OUT = ("system/",)
"""Metrics that say what the machine did."""

PLACE = re.compile(r"(?<![\w.~/-])(?:[a-z][a-z0-9+]*://|/)[^\s'\",\]}]+")
"""An absolute path or a URI within a text."""

KEPT = ("mlflow.parentRunId", tracking.COMMIT_TAG)
"""Tags of MLflow's own that are kept; all of ours are."""

Line = dict[str, Any]


def export(selections: Iterable[Selection], path: str) -> int:
    """Writes the runs that the selections are of, with their sweeps, as JSON lines; their number."""
    lines: dict[str, Line] = {}
    for selection in selections:
        for run in everything(selection):
            lines[run.info.run_id] = line_of(selection, run)
    ordered = sorted(lines.values(), key=lambda line: (line["experiment"], line["start_ms"], line["id"]))
    write("".join(json.dumps(line, sort_keys=True) + "\n" for line in ordered), path)
    return len(ordered)


def everything(selection: Selection) -> list[Any]:
    """Its runs and teachers, and the sweeps that they are trials of, whole."""
    chosen = {run.info.run_id for run in [*selection.runs, *selection.teachers]}
    there = search(selection.client, list(selection.experiments))
    sweeps = {run.data.tags.get(PARENT) for run in there if run.info.run_id in chosen} - {None}
    wanted = chosen | sweeps
    return [run for run in there if run.info.run_id in wanted or run.data.tags.get(PARENT) in sweeps]


def line_of(selection: Selection, run: Any) -> Line:
    """What is kept of a run."""
    metrics = {name: value for name, value in run.data.metrics.items() if not name.startswith(LEFT_OUT)}
    curves = {"train/loss", f"val/{tracking.metric_name(run.data.params.get('fit.metric', ''))}"} & metrics.keys()
    tags = {name: short(value) for name, value in run.data.tags.items() if name in KEPT or "mlflow." not in name}
    line = {
        "id": run.info.run_id, "name": run.info.run_name, "experiment": selection.experiments[run.info.experiment_id],
        "status": run.info.status, "start_ms": run.info.start_time, "end_ms": run.info.end_time,
        "params": {name: short(value) for name, value in run.data.params.items()}, "tags": tags, "metrics": metrics,
        "curves": {name: curve(selection.client, run.info.run_id, name) for name in sorted(curves)},
        "by_user": evaluated(selection.client, run.info.run_id),
    }  # fmt: skip
    if is_sweep(run):
        line["grid"] = grid_text(run)
    return line


def curve(client: MlflowClient, run_id: str, name: str) -> list[list[float]]:
    """[step, value] in the order of steps."""
    points = sorted((point.step, float(f"{point.value:.5g}")) for point in client.get_metric_history(run_id, name))
    stride = max(1, -(-len(points) // POINTS))
    return [list(point) for place, point in enumerate(points) if place % stride == 0 or place == len(points) - 1]


def short(value: str) -> str:
    """Every absolute path or URI in the text by its last two parts."""
    return PLACE.sub(lambda found: "/".join(found[0].rstrip("/").rsplit("/", 2)[-2:]), value)


@contextmanager
def store(paths: Sequence[str]) -> Iterator[str]:
    """The tracking URI of a store that holds the runs of the files, or of all `*.jsonl` in the folders.

    UserError for a file that is not there, or holds something else.
    """
    lines = [line for path in paths for file in files(path) for line in read(file)]
    with tempfile.TemporaryDirectory(prefix="trieline-results-") as folder:
        uri = f"sqlite:///{folder}/mlflow.db"
        client = tracking.connect(uri)
        places = {
            name: client.create_experiment(name, artifact_location=f"{folder}/artifacts")
            for name in dict.fromkeys(line["experiment"] for line in lines)
        }
        made = {
            line["id"]: client.create_run(places[line["experiment"]], line["start_ms"], run_name=line["name"])
            for line in lines
        }
        ids = {before: run.info.run_id for before, run in made.items()}
        for line in lines:
            fill(client, ids[line["id"]], line, ids)
        yield uri


def fill(client: MlflowClient, run_id: str, line: Line, ids: dict[str, str]) -> None:
    """Gives the run what its line says; tags that name a run name the new one."""
    tags = {name: ids.get(value, value) if name in (PARENT, BEST) else value for name, value in line["tags"].items()}
    params = [Param(name, value) for name, value in line["params"].items()]
    last = {name: points[-1][0] for name, points in line["curves"].items()}
    points = [(name, value, int(step)) for name, curve in line["curves"].items() for step, value in curve[:-1]]
    points += [(name, value, int(last.get(name, 0))) for name, value in line["metrics"].items()]
    metrics = [Metric(name, value, line["start_ms"], step) for name, value, step in points]
    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
    for start in range(0, max(len(params), len(metrics)), tracking.BATCH):
        part = slice(start, start + tracking.BATCH)
        client.log_batch(run_id, metrics=metrics[part], params=params[part])
    if line.get("grid"):
        client.log_text(run_id, line["grid"], GRID)
    for name, values in line.get("by_user", {}).items():
        client.log_dict(run_id, {"by_user": values}, name)
    client.set_terminated(run_id, line["status"], line["end_ms"])


def files(path: str) -> list[Path]:
    """The file, or those of the folder."""
    found = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    if not found:
        raise UserError(f"{path} holds no .jsonl files; write one with jobs.compare --export")
    return found


def read(file: Path) -> list[Line]:
    """The runs of a file."""
    try:
        lines = [json.loads(text) for text in file.read_text().splitlines() if text.strip()]
        missing = {"id", "name", "experiment", "status", "start_ms", "params", "tags", "metrics", "curves"}
        for number, line in enumerate(lines, 1):
            if absent := sorted(missing - line.keys()):
                raise UserError(f"line {number} of {file} has no {absent[0]}; write it with jobs.compare --export")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read {file} ({error}); write it with jobs.compare --export") from error
    return lines
