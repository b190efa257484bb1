"""The runs of an MLflow experiment side by side: one row per model and settings, seeds together.

An evaluation with other options than the checkpoint's own, such as the teacher without the trie, is a row
of its own. Below stand, where there is something to say, the students' non-inferiority to their teachers
and the temporal item shift.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.tables import UserError
from pipelines import tracking
from pipelines.evaluation.noninferiority import MARGIN, non_inferiority
from pipelines.evaluation.table import Table

SHOWN = (
    "val/ndcg@10", "test/recall@5", "test/recall@10", "test/ndcg@5", "test/ndcg@10",
    "val/gauc", "test/gauc", "test/auc", "test/normalised_entropy", "test/log_loss",
)  # fmt: skip
"""Metrics of the table, in order; those that no run has are left out."""

OTHER = {
    "model.name", "model.teacher", "model.encoder", "fit.seed", "fit.log_every_steps", "fit.eval_batch_size",
    "fit.checkpoint_every_steps",
}  # fmt: skip
"""Params in which runs of one row may differ; a teacher or an encoder is told by the hash of its weights."""

EVALUATION = re.compile(r"(?P<split>val|test)(?:-(?P<options>.+?))?/(?P<metric>.+)")
"""`test/ndcg@10`, or `test-beam-20/ndcg@10` where options were other than the checkpoint's."""


@dataclass
class Run:
    """One training and one way of evaluating it."""

    name: str
    """Name of the MLflow run."""
    seed: str
    """Seed of the training."""
    finished: bool
    """Whether it has ended well."""
    weights: str
    """SHA-256 of the weights that were evaluated, or nothing."""
    teacher: str
    """SHA-256 of its teacher's weights, or nothing."""
    metrics: dict[str, float]
    """Metrics by name; validation is at the best epoch."""


@dataclass
class Row:
    """Runs that differ in their seed alone, evaluated alike."""

    model: str
    """Name in the registry."""
    options: str
    """Options of the evaluation that differ from the checkpoint's, such as `beam-20`."""
    runs: list[Run] = field(default_factory=list)
    """Its runs, oldest first."""
    settings: dict[str, str] = field(default_factory=dict)
    """Params in which it differs from other rows of the same model."""

    @property
    def name(self) -> str:
        """What the names of the runs share, and the options of the evaluation."""
        name = self.runs[0].name
        for run in self.runs[1:]:
            name = shared_name(name, run.name)
        return f"{name} [{self.options}]" if self.options else name

    def values(self, metric: str) -> list[float]:
        """One value per run that has the metric."""
        return [run.metrics[metric] for run in self.runs if metric in run.metrics]

    def by_seed(self, metric: str) -> dict[str, float]:
        """One value per seed: the newest run's."""
        return {run.seed: run.metrics[metric] for run in self.runs if metric in run.metrics}

    def mean(self, metric: str) -> float:
        """Mean over the runs, or NaN."""
        values = self.values(metric)
        return statistics.fmean(values) if values else math.nan

    def deviation(self, metric: str) -> float:
        """Sample standard deviation over the runs, or NaN for one run."""
        values = self.values(metric)
        return statistics.stdev(values) if len(values) > 1 else math.nan


def read_rows(uri: str, experiment: str) -> list[Row]:
    """The experiment's runs, grouped; UserError with the nearest name for an experiment that is not there."""
    client = tracking.connect(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        known = [e.name for e in client.search_experiments() if e.name != "Default"]
        there = f"there are {', '.join(known)}" if known else "it holds none"
        raise UserError(f"the experiment '{experiment}' is not at {uri}; {there}")
    runs: list = []
    token: str | None = None
    while True:
        page = client.search_runs([found.experiment_id], order_by=["attributes.start_time ASC"], page_token=token)
        runs += page
        token = page.token
        if not token:
            break
    rows: dict[tuple, Row] = {}
    params: dict[tuple, dict[str, str]] = {}
    for run in runs:
        given, tags = run.data.params, run.data.tags
        if "model.name" not in given:
            continue
        alike = {key: value for key, value in given.items() if key not in OTHER and key.startswith(("model.", "fit."))}
        alike |= {key: value for key, value in tags.items() if key.startswith("table.")}
        for options, metrics in evaluations(run.data.metrics).items():
            key = (given["model.name"], *sorted(alike.items()), options)
            params[key] = alike
            rows.setdefault(key, Row(given["model.name"], options)).runs.append(
                Run(
                    run.info.run_name, given.get("fit.seed", ""), run.info.status == "FINISHED",
                    tags.get(tracking.WEIGHTS_TAG, ""), given.get("model.teacher_hash", ""), metrics,
                )
            )  # fmt: skip
    for key, row in rows.items():
        others = [p for other, p in params.items() if other[0] == key[0]]
        for name in sorted({name for p in others for name in p}):
            if len({p.get(name) for p in others}) > 1:
                row.settings[name] = params[key].get(name, "none")
    return list(rows.values())


def evaluations(logged: dict[str, float]) -> dict[str, dict[str, float]]:
    """The metrics of a run for each set of options that it was evaluated with; '' are the checkpoint's own."""
    found: dict[str, dict[str, float]] = {"": {}}
    training: dict[str, float] = {}
    for logged_name, value in logged.items():
        name = tracking.shown_name(logged_name)
        if evaluated := EVALUATION.fullmatch(name):
            options = evaluated["options"] or ""
            found.setdefault(options, {})[f"{evaluated['split']}/{evaluated['metric']}"] = value
        elif not name.startswith("best/"):
            training[name] = value
    best = {name.removeprefix("best/"): value for name, value in logged.items() if name.startswith("best/")}
    found[""] |= {f"val/{tracking.shown_name(name)}": value for name, value in best.items()}
    if "epoch" in best:
        training["val/epoch"] = best["epoch"]
    return {options: {**training, **metrics} for options, metrics in found.items()}


def shared_name(first: str, second: str) -> str:
    """What two names begin with, as `tiger-seed*`."""
    if first == second:
        return first
    common = Path(first.rstrip("*")).name
    while not second.startswith(common):
        common = common[:-1]
    return f"{common}*"


def compare(uri: str, experiment: str, metric: str | None = None) -> list[Table]:
    """The table of an experiment, best first by `metric` on test, then on val; and the tables below it."""
    rows, metric = ranked_rows(uri, experiment, metric)
    return [runs_table(rows, experiment, metric), *non_inferiority_tables(rows, metric), *item_shift_tables(rows)]


def ranked_rows(uri: str, experiment: str, metric: str | None = None) -> tuple[list[Row], str]:
    """The rows, best first, and the metric by which: left out, gauc where runs have it, else ndcg@10.

    UserError for an experiment without runs.
    """
    rows = read_rows(uri, experiment)
    if not rows:
        raise UserError(f"the experiment '{experiment}' at {uri} has no runs; train one with jobs.train")
    metric = metric or ("gauc" if any(row.values("val/gauc") or row.values("test/gauc") for row in rows) else "ndcg@10")

    def rank(row: Row) -> tuple[float, float]:
        test, val = row.mean(f"test/{metric}"), row.mean(f"val/{metric}")
        return (-test if math.isfinite(test) else math.inf, -val if math.isfinite(val) else math.inf)

    return sorted(rows, key=rank), metric


def runs_table(rows: Sequence[Row], experiment: str, metric: str) -> Table:
    """All rows with their metrics, sizes, times and users per second."""
    wanted = list(dict.fromkeys([f"val/{metric}", *SHOWN, f"test/{metric}"]))
    metrics = [name for name in wanted if any(row.values(name) for row in rows)]
    header = ["model", "run", "seeds", *metrics, "users", "params", "epoch", "train s", "users/s"]
    cells = [
        [
            row.model,
            row.name,
            str(len({run.seed for run in row.runs})),
            *(figure(row, name) for name in metrics),
            number(row, "test/examples"),
            number(row, "train/parameters"),
            number(row, "val/epoch"),
            number(row, "train/total_seconds"),
            number(row, "test/users_per_s"),
        ]
        for row in rows
    ]
    ranked = (
        "requests of test, candidates ranked in each"
        if metric.endswith("gauc")
        else ("requests ranked on test over the full catalogue, one each")
    )
    notes = [f"val: at the best epoch. users: {ranked}."]
    if any(row.options for row in rows):
        notes.append("[...]: evaluated with these options in place of the checkpoint's own.")
    if any(len({run.seed for run in row.runs}) > 1 for row in rows):
        notes.append("±: sample standard deviation over the runs of a row, which differ in their seed alone.")
    for row in rows:
        if row.options:
            continue
        if row.settings:
            shown = ", ".join(f"{name} {value[:12]}" for name, value in row.settings.items())
            notes.append(f"{row.name}: {shown}")
        if unfinished := sum(not run.finished for run in row.runs):
            notes.append(f"{row.name}: {unfinished} of {len(row.runs)} runs not finished")
    return Table(experiment, header, cells, notes)


def non_inferiority_tables(rows: Sequence[Row], metric: str) -> list[Table]:
    """Students beside each evaluation of their teacher, told by the hash of its weights; none without such pairs.

    A student that was evaluated with other options than its own stands beside a teacher with the same alone.
    """
    name = f"test/{metric}"
    cells = []
    for student in rows:
        taught_by = student.runs[0].teacher  # all runs of a row have the same
        teachers = {
            row.name: run.metrics[name]
            for row in rows
            for run in row.runs
            if taught_by and run.weights == taught_by and name in run.metrics
            if student.options in ("", row.options)
        }
        values = student.by_seed(name)
        for teacher, value in teachers.items() if values else ():
            found = non_inferiority(list(values.values()), value)
            mean = f"{found.mean:.4f}" + ("" if len(values) == 1 else f" ± {found.deviation:.4f}")
            p = "needs 2 seeds" if len(values) == 1 else f"{found.p:.3f}{' †' if found.p < 0.05 else ''}"
            cells.append([student.name, teacher, str(len(values)), mean, f"{value:.4f}", f"{found.difference:+.4f}", p])
    if not cells:
        return []
    header = ["student", "teacher", "seeds", name, "teacher's", "difference", "p"]
    notes = [
        f"p: one-sided t-test over seeds that the student loses no more than {MARGIN:.0%} (App. C.4 of SID-MLP); "
        f"† below 0.05: it does not."
    ]
    return [Table("Students and their teachers", header, cells, notes)]


def item_shift_tables(rows: Sequence[Row]) -> list[Table]:
    """NDCG@10 and Recall@10 on targets first seen late in the log; none where no run was so evaluated."""
    measured = {name for row in rows for run in row.runs for name in run.metrics}
    names = sorted({found[1] for name in measured if (found := re.fullmatch(r"test/(temporal\d+)/examples", name))})
    there = [row for row in rows if any(row.values(f"test/{name}/examples") for name in names)]
    if not there:
        return []
    header, cells = ["model", "run"], [[row.model, row.name] for row in there]
    for name in names:
        header += [f"{name} users", "recall@10", "ndcg@10"]
        for row, line in zip(there, cells, strict=True):
            line.append(number(row, f"test/{name}/examples"))
            line += [figure(row, f"test/{name}/{metric}") for metric in ("recall@10", "ndcg@10")]
    notes = [
        "test users whose target was first interacted with, by anyone, after the timestamp by which 80% (90%) of all "
        "interactions had happened (App. E.3 of SID-MLP)."
    ]
    return [Table("Temporal item shift", header, cells, notes)]


def figure(row: Row, metric: str) -> str:
    """Mean, with the deviation where there are several runs."""
    mean, deviation = row.mean(metric), row.deviation(metric)
    if math.isnan(mean):
        return "-"
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def number(row: Row, metric: str) -> str:
    """Mean as a whole number."""
    return "-" if math.isnan(row.mean(metric)) else f"{row.mean(metric):,.0f}"
