r"""Compare policies of training on a growing log: daily, once, or from scratch.

    python -m papers.days --log kuairand --data ../shared/data \
        --output runs/days --results papers/results/days

A log is split into days, which are appended to its tables one by one. The newest day is
the test split, the day before is validation, and all older days are training. Each of
the `POLICIES` measures its model on the test split, at the epoch with the best
validation. The same command continues from finished steps. `python -m papers.pages`
makes the page.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from matplotlib import rc_context
from matplotlib.ticker import MaxNLocator

from benchmarks.harness import describe_origin
from jobs import cli
from models.build import parse_options
from models.config import build, read_configs
from models.evaluation import measure_examples
from models.loaded_model import LoadedModel
from models.retrieval.data import RequestBatch
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import read_manifest
from models.training.fit import FitConfig, fit
from models.training_run import TrainingRun, resolve_training
from papers.kept import shorten_paths
from pipelines.comparison.svg import STYLE, Plot, to_svg
from pipelines.comparison.table import Table
from pipelines.figures import COLOURS, label_axes, new_figure

CONFIGS = Path(__file__).parents[1] / "jobs/configs"
BEGIN = 1_750_032_000_000
"""Midnight of the first generated day, in ms since 1970."""
DAY = 86_400_000
"""Length of a day in ms."""


@dataclass(frozen=True)
class Log:
    """A log, and the model that is trained on it."""

    folder: str
    """Folder of the raw log."""
    source: str
    """Source file in `jobs/configs/sources`, without suffix."""
    source_changes: dict[str, Any]
    """Keys of the source file that are replaced."""
    first_day: int
    """Number of days in the first tables; the last of them is the first test day."""
    configs: tuple[str, ...]
    """Configs of the model in `jobs/configs`."""
    model: dict[str, Any]
    """Options of the model that override the configs."""
    fit: dict[str, Any]
    """Options of all trainings that override the configs."""
    daily: dict[str, Any]
    """Options of a day's training that override `fit`."""
    last_day: int
    """Number of the last day, at which the policies `in full` have taken as many steps
    as `daily`."""
    requests: int = 0
    """Number of test requests per day that are ranked, spread evenly over the lengths
    of histories; 0 for all."""
    metrics: tuple[str, ...] = ()
    """Metrics that are saved for a model of actions."""


LOGS = {
    "kuairand": Log(
        "kuairand_pure",
        "kuairand_pure_actions",
        {},
        5,
        ("attn_mvp", "actions/attn_lfa"),
        {"num_layers": 2},
        {"patience": 0, "max_epochs": 4},
        {"replay_fraction": 0.2, "max_epochs": 1},
        last_day=14,
        metrics=("mean/rig", "mean/auc", "eval_loss"),
    ),
    "beauty": Log(
        "amazon14_beauty",
        "amazon14_beauty",
        {
            "files": "day_*.csv",
            "time": {"column": "time_ms", "unit": "ms"},
            "prepare": {"core": 0, "ties": "strict"},
        },
        12,
        ("tiger_small",),
        {},
        {"patience": 0, "max_epochs": 6, "eval_examples": 1000},
        {"lr": 0.002, "replay_fraction": 0.1, "max_epochs": 1},
        last_day=20,
        requests=2000,
    ),
}

ONCE_IN_FULL = "once, in full"
ANEW_IN_FULL = "anew, in full"
ANEW_WITH_CODES = "anew, in full, codes anew"
OLD_CATALOGUE = "old catalogue"
POLICIES = {
    "daily": "continues its previous model each day, on newer requests and a share of "
    "older ones (`fit.replay_fraction`)",
    "once": "trained on the first tables",
    ONCE_IN_FULL: "trained on the first tables, with all the steps that `daily` has "
    "taken until the last day",
    "anew": "trained from scratch each day, with the steps that `daily` takes on that "
    "day",
    ANEW_IN_FULL: "trained from scratch on the last day, with all the steps that "
    "`daily` has taken until then",
    ANEW_WITH_CODES: "the same as `anew, in full`, with semantic IDs made again for "
    "all items; the other policies extend the first semantic IDs",
    OLD_CATALOGUE: "the model of `daily` of the day before, which recommends the items "
    "of that day only",
}
"""Description of each policy, in the order of tables."""
METRICS = {
    "kuairand": ("mean/rig", "mean/auc"),
    "beauty": ("recall@10", "recall@10 new", "recall@10 old"),
}
"""Metrics in the tables of each log; the first is plotted."""
WEIGHTS = {"recall@10 new": "share new"}
"""Metrics that cover only a share of the requests, and the names of the shares."""


@dataclass
class Config:
    """Options of `python -m papers.days`."""

    log: Literal[tuple(LOGS)]  # type: ignore[valid-type]
    """Name of the log."""
    data: str
    """Folder with a subfolder per raw log."""
    output: str
    """Folder for tables, semantic IDs and checkpoints."""
    results: str
    """Folder for the file LOG.jsonl with the metrics."""
    seed: int = 42
    """Seed of the trainings."""


def read_kuairand_days(raw: Path) -> Iterator[list[list[str]]]:
    """Yield the rows of each date of KuaiRand, after the header."""
    with gzip.open(next(raw.glob("log_standard*.gz")), "rt", newline="") as file:
        header, *rows = csv.reader(file)
    column = header.index("date")
    rows_by_date: dict[str, list[list[str]]] = {}
    for row in rows:
        rows_by_date.setdefault(row[column], []).append(row)
    for _, rows_of_date in sorted(rows_by_date.items()):
        yield [header, *rows_of_date]


def read_beauty_days(raw: Path) -> Iterator[list[list[str]]]:
    """Yield twenty days of Amazon Beauty with equally many rows, after the header.

    The log has no clock, but Amazon's item ids increase with time. Users are sorted by
    their newest item, and all rows of a user follow each other.
    """
    with gzip.open(raw / "interactions.csv.gz", "rt", newline="") as file:
        rows = [
            (row["user_id"], row["item_id"], int(row["order"]))
            for row in csv.DictReader(file)
        ]
    newest: dict[str, str] = {}
    for user, item, _ in rows:
        newest[user] = max(newest.get(user, ""), item)
    rows.sort(key=lambda row: (newest[row[0]], row[0], row[2]))
    edges = [len(rows) * day // 20 for day in range(21)]
    for day, (first, end) in enumerate(pairwise(edges)):
        table = [["user_id", "item_id", "time_ms"]]
        for index, (user, item, _) in enumerate(rows[first:end]):
            time_ms = BEGIN + day * DAY + DAY * index // (end - first)
            table.append([user, item, str(time_ms)])
        yield table


NOTES = {
    "kuairand": "AttnLFA of two layers on `kuairand_pure`, cut into its fourteen "
    "dates; all impressions of a date are test. First tables: days 1 to 5, so 952 "
    "steps of batch 64 on days 1 to 3. A day of `daily` is one epoch of what is newer "
    "and a fifth of what is older.",
    "beauty": "TIGER (`tiger_small`) on `amazon14_beauty` in twenty parts of 9,925 "
    "interactions. The log has no clock: users come one after the other by the newest "
    "item that each has, as Amazon's numbers of items rise with time. 2,000 requests "
    "of each part are ranked, the same for all. New are items that no part before has. "
    "Rqkmeans of two levels on TF-IDF, PCA 128, core 0. First tables: parts 1 to 12, "
    "so 6 epochs on parts 1 to 10. A day of `daily` is one epoch of what is newer and "
    "a tenth of what is older, at rate 0.002, as in `jobs/configs/daily.yaml`.",
}
"""Notes below the tables of a log."""

DAY_READERS = {"kuairand": read_kuairand_days, "beauty": read_beauty_days}


def run_job(job: str, **options: Any) -> None:
    """Run a job in this process, with paths as strings."""
    paths = {
        name: str(value) for name, value in options.items() if isinstance(value, Path)
    }
    cli.run_job(job, {**options, **paths})
    # Jobs change the number of threads. Small steps are slower with a second thread.
    torch.set_num_threads(1)


class Days:
    """Experiment on one log: its tables, trainings, and saved metrics."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.log = LOGS[config.log]
        self.folder = Path(config.output) / config.log
        self.results = Path(config.results) / f"{config.log}.jsonl"
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]
        files = [str(CONFIGS / f"{name}.yaml") for name in self.log.configs]
        options = read_configs(files, "papers.days")
        self.model = {**options["model"], **self.log.model}
        self.fit = {**options["fit"], **self.log.fit, "seed": config.seed}
        self.has_sids = self.model["name"] == "tiger"

    def inputs(self, day: int, codes: str = "sids") -> Inputs:
        """Return the tables of a day, and the semantic IDs in its folder `codes`."""
        return Inputs(
            str(self.folder / f"{day}/tables"),
            str(self.folder / f"{day}/{codes}") if self.has_sids else None,
        )

    def count_items(self, day: int) -> int:
        """Return the number of items in the catalogue of a day."""
        return read_manifest(self.inputs(day).tables + "/items").rows

    def prepare(self) -> None:
        """Write the tables and semantic IDs of each day, unless they are finished."""
        raw = Path(self.config.data) / self.log.folder
        log = self.log
        source = yaml.safe_load((CONFIGS / f"sources/{log.source}.yaml").read_text())
        (self.folder / "raw").mkdir(parents=True, exist_ok=True)
        (self.folder / "source.yaml").write_text(
            yaml.safe_dump(source | log.source_changes)
        )
        for file in {*raw.glob("items*"), *raw.glob("video_features*")}:
            shutil.copy2(file, self.folder / "raw")
        pattern = log.source_changes.get("files", "log_standard_*.csv")
        for day, rows in enumerate(DAY_READERS[self.config.log](raw), 1):
            done = self.folder / f"{day}/done"
            if done.exists():
                continue
            path = self.folder / "raw" / pattern.replace("*", f"{day:02d}")
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(rows)
            if day < log.first_day:
                continue
            if day > log.last_day:
                break
            self.prepare_day(day)
            done.touch()

    def prepare_day(self, day: int) -> None:
        """Write the tables and semantic IDs of a day, extending the previous day."""
        folder = self.folder / str(day)
        previous = self.folder / str(day - 1)
        is_first = day == self.log.first_day
        shutil.rmtree(folder, ignore_errors=True)
        if not is_first:
            shutil.copytree(previous / "tables", folder / "tables")
        run_job(
            "prepare",
            source=self.folder / "source.yaml",
            input=self.folder / "raw",
            output=folder / "tables",
            append=True,
            split={"val_days": 1, "test_days": 1},
        )
        if self.has_sids:
            extend = {} if is_first else {"extend": previous / "sids"}
            self.tokenize(day, "sids", **extend)

    def tokenize(self, day: int, codes: str, **options: Any) -> None:
        """Write the semantic IDs of a day's items to its folder `codes`.

        Args:
            day: Number of the day.
            codes: Name of the folder.
            **options: Further options of jobs.tokenize.
        """
        folder = self.folder / str(day)
        run_job(
            "tokenize",
            tables=folder / "tables",
            tokenizer="rqkmeans",
            encoder="tfidf",
            pca=128,
            rqkmeans={"levels": 2},
            output=folder / codes,
            **options,
        )

    def train(
        self, policy: str, day: int, steps: int = 0, init: str = "", codes: str = "sids"
    ) -> tuple[str, int]:
        """Train a model of a policy on a day, unless it is finished.

        Args:
            policy: Name of the policy.
            day: Number of the day.
            steps: Approximate number of steps; 0 for all epochs.
            init: Checkpoint to start from, or "".
            codes: Folder of the semantic IDs.

        Returns:
            The checkpoint, and the number of its steps.
        """
        name = f"{policy}-{day}-{self.config.seed}".replace(", ", "-").replace(" ", "-")
        folder = self.folder / f"runs/{name}"
        steps_file = folder / "steps"
        if steps_file.exists():
            return str(folder), int(json.loads(steps_file.read_text()))
        fit_options = self.fit | (self.log.daily if init else {})
        options: FitConfig = build(FitConfig, fit_options, "fit.")
        config, inputs = resolve_training(
            parse_options(self.model)[1],
            options,
            self.inputs(day, codes),
            init or None,
        )
        run = TrainingRun.build(config, options, inputs, init=init or None)
        if steps:
            options = self._limit_steps(run, options, steps)
        last_step = self._fit(run, options, folder, f"{policy}, day {day}")
        steps_file.write_text(str(last_step))
        return str(folder), last_step

    @staticmethod
    def _limit_steps(run: TrainingRun, options: FitConfig, steps: int) -> FitConfig:
        """Return options for about `steps` steps, and sample the training examples."""
        epochs = math.ceil(steps / run.train.steps(0))
        run.train.dataset.keep_random(round(steps / epochs * options.batch_size))
        return replace(options, max_epochs=epochs)

    @staticmethod
    def _fit(run: TrainingRun, options: FitConfig, folder: Path, label: str) -> int:
        """Train, save the checkpoint of the best epoch, and return its steps."""
        last_step = 0
        for event in fit(
            run.model,
            run.train,
            run.validate,
            options,
            means=run.means,
            lr_multipliers=run.lr_multipliers,
        ):
            last_step = event.step
            if event.metrics:
                print(
                    f"{label}: epoch {event.epoch}, step {last_step}, "
                    f"{event.metrics[options.metric]:.4f}, {event.examples_per_s:.0f} "
                    f"examples/s",
                    flush=True,
                )
            if event.is_best:
                metadata = run.checkpoint(epoch=event.epoch, step=last_step)
                checkpoint.save(folder, run.model, metadata)
        return last_step

    def measure(
        self, folder: str, day: int, codes: str = "sids", num_allowed: int = 0
    ) -> dict[str, float]:
        """Measure a checkpoint on the test requests of one day.

        Args:
            folder: Folder of the checkpoint.
            day: Number of the day.
            codes: Folder of the semantic IDs.
            num_allowed: Recommend only the first items of the catalogue; 0 for all.

        Returns:
            Metrics by name.
        """
        inputs = self.inputs(day, codes)
        loaded = LoadedModel.load(folder, inputs)
        examples = loaded.load_examples(inputs, "test")
        device = torch.device("cpu")
        if not self.has_sids:
            sums = measure_examples(
                loaded.model, examples, batch_size=256, device=device
            ).sums
            metrics = loaded.model.metric_means(sums)
            return {name: metrics[name] for name in metrics if name in self.log.metrics}
        first_new = self.count_items(day - 1) if day > self.log.first_day else 0
        allowed = None
        if num_allowed:
            items = torch.arange(self.count_items(day))
            allowed = loaded.model.encode_allowed(items < num_allowed)

        def count_hits(batch: RequestBatch) -> dict[str, float]:
            items, _ = loaded.model.recommend(batch, 10, allowed=allowed)
            is_hit = (items == batch.target[:, None]).any(1)
            is_new = batch.target >= first_new
            return {
                "hits": float(is_hit.sum()),
                "new hits": float(is_hit[is_new].sum()),
                "new": float(is_new.sum()),
            }

        result = measure_examples(
            loaded.model,
            examples,
            measure=count_hits,
            limit=self.log.requests,
            batch_size=256,
            device=device,
        )
        sums, count = result.sums, result.num_examples
        old_hits = sums["hits"] - sums["new hits"]
        return {
            "requests": count,
            "share new": float(sums["new"]) / count if first_new else math.nan,
            "recall@10": float(sums["hits"]) / count,
            "recall@10 new": float(sums["new hits"] / sums["new"]),
            "recall@10 old": float(old_hits / (count - sums["new"])),
        }

    def save_metrics(
        self,
        policy: str,
        day: int,
        folder: str,
        steps: int,
        codes: str = "sids",
        num_allowed: int = 0,
    ) -> None:
        """Measure a checkpoint, and append the line to the results, unless it exists.

        Args:
            policy: Name of the policy.
            day: Number of the day.
            folder: Folder of the checkpoint.
            steps: Steps that the policy has taken on this day.
            codes: Folder of the semantic IDs.
            num_allowed: Recommend only the first items of the catalogue; 0 for all.
        """
        key = {
            "log": self.config.log,
            "policy": policy,
            "day": day,
            "seed": self.config.seed,
        }
        if any(key.items() <= line.items() for line in self.lines):
            return
        metrics = self.measure(folder, day, codes, num_allowed)
        line = {**key, "steps": steps, "metrics": metrics, **describe_origin()}
        command = f"python -m papers.days {shlex.join(sys.argv[1:])}"
        line["command"] = shorten_paths(command)
        self.lines.append(line)
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def run(self) -> None:
        """Run all policies; policies that need the steps of `daily` come last."""
        log, last = self.log, self.log.last_day
        self.prepare()
        first, first_steps = self.train("daily", log.first_day)
        newest = first
        steps_by_day: dict[int, int] = {}
        for day in range(log.first_day + 1, last + 1):
            is_first = day == log.first_day + 1
            self.save_metrics("once", day, first, first_steps if is_first else 0)
            if self.has_sids:
                num_items = self.count_items(day - 1)
                self.save_metrics(OLD_CATALOGUE, day, newest, 0, num_allowed=num_items)
            newest, steps = self.train("daily", day, init=newest)
            steps_by_day[day] = steps
            self.save_metrics("daily", day, newest, steps)
            self.save_metrics("anew", day, *self.train("anew", day, steps))
        total = first_steps + sum(steps_by_day.values())
        full, full_steps = self.train(ONCE_IN_FULL, log.first_day, total)
        for day in steps_by_day:
            self.save_metrics(ONCE_IN_FULL, day, full, full_steps if day == last else 0)
        self.save_metrics(ANEW_IN_FULL, last, *self.train(ANEW_IN_FULL, last, total))
        if self.has_sids:
            self.tokenize(last, "codes_anew")
            self.save_metrics(
                ANEW_WITH_CODES,
                last,
                *self.train(ANEW_WITH_CODES, last, total, codes="codes_anew"),
                codes="codes_anew",
            )


class Summary:
    """Saved metrics of a log, by policy and day."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.metrics: dict[tuple[str, int], list[dict[str, float]]] = {}
        for line in lines:
            key = (line["policy"], line["day"])
            self.metrics.setdefault(key, []).append(line["metrics"])
        self.days = sorted({line["day"] for line in lines})
        self.seeds = sorted({line["seed"] for line in lines})
        measured = {line["policy"] for line in lines}
        self.policies = [policy for policy in POLICIES if policy in measured]
        self.common_days = [
            day
            for day in self.days
            if all((policy, day) in self.metrics for policy in self.policies)
        ]
        self.steps = {
            policy: sum(line["steps"] for line in lines if line["policy"] == policy)
            for policy in self.policies
        }
        self.steps["daily"] += self.steps.get("once", 0)  # `daily` starts from `once`

    def mean(self, policy: str, days: list[int], name: str) -> float:
        """Return the mean of a metric over days and seeds.

        Metrics in `WEIGHTS` are weighted by the number of requests that they cover.

        Args:
            policy: Name of the policy.
            days: Days to average over.
            name: Name of the metric.

        Returns:
            The mean, or NaN if the policy lacks one of the days.
        """
        if not all((policy, day) in self.metrics for day in days):
            return math.nan
        total, total_weight = 0.0, 0.0
        for day in days:
            for metrics in self.metrics[policy, day]:
                weight = 1.0
                if name in WEIGHTS:
                    weight = metrics[WEIGHTS[name]] * metrics.get("requests", 1)
                total += metrics[name] * weight
                total_weight += weight
        return total / total_weight if total_weight else math.nan

    def format_mean(self, policy: str, days: list[int], name: str) -> str:
        """Return the mean of a metric as text; see `mean` for the arguments."""
        value = self.mean(policy, days, name)
        return "-" if math.isnan(value) else f"{value:.4f}"


def summarize(log: str, lines: list[dict[str, Any]]) -> tuple[list[Table], Plot]:
    """Return the tables and the plot of a log.

    Args:
        log: Name of the log, a key of `LOGS`.
        lines: Saved metrics of the log.
    """
    summary = Summary(lines)
    days, common = summary.days, summary.common_days
    metric = METRICS[log][0]
    spans = [days] if common in ([], days) else [days, common]
    header = ["policy", "steps"]
    for span in spans:
        label = f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0])
        header += [f"{name}, {label}" for name in METRICS[log]]
    overall = []
    for policy in summary.policies:
        steps = f"{summary.steps[policy] // len(summary.seeds):,}"
        cells = [policy, "-" if policy == OLD_CATALOGUE else steps]
        for span in spans:
            cells += [summary.format_mean(policy, span, name) for name in METRICS[log]]
        overall.append(cells)
    by_day = [
        [policy, *(summary.format_mean(policy, [day], metric) for day in days)]
        for policy in summary.policies
    ]
    if log == "beauty":
        shares = [summary.format_mean("daily", [day], "share new") for day in days]
        by_day.append(["share of requests for new items", *shares])
    notes = [
        f"{NOTES[log]} Seed {', '.join(map(str, summary.seeds))}; "
        f"{lines[0]['hardware']}; `{lines[0]['command']}`."
    ]
    tables = [
        Table(f"{log}: all in all", header, overall, notes, num_words=1),
        Table(
            f"{log}: {metric} by day", ["policy", *map(str, days)], by_day, num_words=1
        ),
    ]
    return tables, plot_policies(log, summary)


def plot_policies(log: str, summary: Summary) -> Plot:
    """Plot the first metric of each policy by day."""
    metric = METRICS[log][0]
    with rc_context(STYLE):
        figure, (axes,) = new_figure(1, width=6)
        for index, policy in enumerate(summary.policies):
            days = [day for day in summary.days if (policy, day) in summary.metrics]
            axes.plot(
                days,
                [summary.mean(policy, [day], metric) for day in days],
                color=COLOURS[index],
                marker="o",
                ms=3,
                lw=1.2,
                label=policy,
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        label_axes(axes, "day", metric, legend=True)
        return Plot(
            f"days-{log}",
            f"{log}: {metric} by day",
            "Higher is better.",
            to_svg(figure, f"days-{log}"),
        )


def pages(results: Path) -> Iterator[tuple[list[Table], Plot]]:
    """Yield the tables and the plot of each log from its saved metrics.

    Args:
        results: Folder with a file LOG.jsonl per log.
    """
    for file in sorted(results.glob("*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        yield summarize(file.stem, lines)


def run(config: Config) -> None:
    """Train and measure all policies on a log, and skip finished runs."""
    torch.set_num_threads(1)
    Days(config).run()


if __name__ == "__main__":
    cli.main(run, Config)
