r"""Models of a growing log: trained further every day, trained once, or anew.

    python -m papers.days --log kuairand --data ../shared/data \
        --output runs/days --results papers/results/days

A log is split into days, which are added to its tables one by one. The newest day is
test, the day before validation, and all older days are training. Each of the `POLICIES`
measures its model on test. The best validation of a training counts. The same command
line continues from finished steps. `python -m papers.pages` makes the page.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import operator
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
BEGIN, DAY = 1_750_032_000_000, 86_400_000
"""Midnight in ms of the first generated day, and the length of a day."""


@dataclass(frozen=True)
class Log:
    """A log, and the model that is trained on it."""

    folder: str
    """Folder of the raw log."""
    source: str
    """Its mapping file in `jobs/configs/sources`."""
    changed: dict[str, Any]
    """Changes of the mapping for the days."""
    first: int
    """Number of the first day to test on, from 1."""
    configs: tuple[str, ...]
    """Configs of the model in `jobs/configs`."""
    model: dict[str, Any]
    """Options of the model that override the configs."""
    fit: dict[str, Any]
    """Options of the training that override the configs; `max_epochs` of the first
    one."""
    daily: dict[str, Any]
    """Options of a day's training that override `fit`, such as those of jobs.daily."""
    last: int
    """Number of the last day, for which the policies `in full` have as many steps as
    `daily`."""
    requests: int = 0
    """Requests of a day to rank, spread evenly over the lengths of histories; 0 for
    all."""
    shown: tuple[str, ...] = ()
    """Metrics to save of models that do not rank a catalogue."""


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
        last=14,
        shown=("mean/rig", "mean/auc", "eval_loss"),
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
        last=20,
        requests=2000,
    ),
}

ONCE_IN_FULL, ANEW_IN_FULL, ANEW_WITH_CODES, OLD_CATALOGUE = (
    "once, in full",
    "anew, in full",
    "anew, in full, codes anew",
    "old catalogue",
)
POLICIES = {
    "daily": "goes on each day from its last model, with what is newer and a share of what is older (`fit.replay_fraction`)",
    "once": "trained on the first tables",
    ONCE_IN_FULL: "likewise, with all the steps that `daily` has taken until the last day",
    "anew": "begins anew each day, with the steps that `daily` takes on that day",
    ANEW_IN_FULL: "begins anew on the last day, with all the steps that `daily` has taken until then",
    ANEW_WITH_CODES: "likewise, and the semantic IDs are made anew of all items; else those of new items extend the first ones",
    OLD_CATALOGUE: "`daily` as it was the day before, with the items of then alone",
}
"""Description of each policy, in the order of tables."""
METRICS = {
    "kuairand": ("mean/rig", "mean/auc"),
    "beauty": ("recall@10", "recall@10 new", "recall@10 old"),
}
"""Metrics in the tables of each log; the first is plotted."""
WEIGHTS = {"recall@10 new": "share new"}
"""Share of the requests that a metric covers."""


@dataclass
class Config:
    """Options of `python -m papers.days`."""

    log: Literal[tuple(LOGS)]  # type: ignore[valid-type]
    """Name of the log."""
    data: str
    """Folder of the folders of raw logs."""
    output: str
    """Folder for tables, semantic IDs and checkpoints."""
    results: str
    """Folder for the figures, in LOG.jsonl."""
    seed: int = 42
    """Seed of the trainings."""


def kuairand_days(raw: Path) -> Iterator[list[list[str]]]:
    """Yield the rows of each date, with their header."""
    with gzip.open(next(raw.glob("log_standard*.gz")), "rt", newline="") as file:
        header, *rows = csv.reader(file)
    at = header.index("date")
    for date in sorted({row[at] for row in rows}):
        yield [header, *(row for row in rows if row[at] == date)]


def beauty_days(raw: Path) -> Iterator[list[list[str]]]:
    """Yield twenty days of equally many rows.

    Users come one after the other, by the newest item of each: Amazon's item numbers
    rise with time, and the log has no other clock.
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
        times = (
            BEGIN + day * DAY + DAY * place // (end - first)
            for place in range(end - first)
        )
        made = zip(rows[first:end], times, strict=True)
        yield [
            ["user_id", "item_id", "time_ms"],
            *([user, item, str(ms)] for (user, item, _), ms in made),
        ]


NOTES = {
    "kuairand": "AttnLFA of two layers on `kuairand_pure`, cut into its fourteen dates; all impressions of a date are "
    "test. First tables: days 1 to 5, so 952 steps of batch 64 on days 1 to 3. A day "
    "of `daily` is one epoch of what is newer and a fifth of what is older.",
    "beauty": "TIGER (`tiger_small`) on `amazon14_beauty` in twenty parts of 9,925 interactions. "
    "The log has no clock: users come one after the other by the newest item that each "
    "has, as Amazon's numbers of items rise with time. 2,000 requests of each part are "
    "ranked, the same for all. New are items that no part before has. Rqkmeans of two "
    "levels on TF-IDF, PCA 128, core 0. First tables: parts 1 to 12, so 6 epochs on "
    "parts 1 to 10. A day of `daily` is one epoch of what is newer and a tenth of what "
    "is older, at rate 0.002, as in `jobs/configs/daily.yaml`.",
}
"""Notes below the tables of a log."""


DAY_READERS = {"kuairand": kuairand_days, "beauty": beauty_days}


def run_job(job: str, **options: Any) -> None:
    """Run a job in this process."""
    paths = {key: str(v) for key, v in options.items() if isinstance(v, Path)}
    cli.run_job(job, {**options, **paths})
    torch.set_num_threads(
        1
    )  # a job has its own; small steps lose more to a second one than it takes from them


class Days:
    """The experiment on one log."""

    def __init__(self, config: Config) -> None:
        self.config, self.log = config, LOGS[config.log]
        self.folder = Path(config.output) / config.log
        self.results = Path(config.results) / f"{config.log}.jsonl"
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]
        read = read_configs(
            [str(CONFIGS / f"{name}.yaml") for name in self.log.configs], "papers.days"
        )
        self.model = {**read["model"], **self.log.model}
        self.fit = {**read["fit"], **self.log.fit, "seed": config.seed}
        self.sids = self.model["name"] == "tiger"

    def inputs(self, day: int, codes: str = "sids") -> Inputs:
        return Inputs(
            str(self.folder / f"{day}/tables"),
            str(self.folder / f"{day}/{codes}") if self.sids else None,
        )

    def items(self, day: int) -> int:
        return read_manifest(self.inputs(day).tables + "/items").rows

    def prepare(self) -> None:
        """Write tables and semantic IDs of each day, extending the day before."""
        raw, log = Path(self.config.data) / self.log.folder, self.log
        mapping = (
            yaml.safe_load((CONFIGS / f"sources/{log.source}.yaml").read_text())
            | log.changed
        )
        (self.folder / "raw").mkdir(parents=True, exist_ok=True)
        (self.folder / "source.yaml").write_text(yaml.safe_dump(mapping))
        for file in {*raw.glob("items*"), *raw.glob("video_features*")}:
            shutil.copy2(file, self.folder / "raw")
        name = log.changed.get("files", "log_standard_*.csv").replace("*", "{:02d}")
        for day, rows in enumerate(DAY_READERS[self.config.log](raw), 1):
            if (done := self.folder / f"{day}/done").exists():
                continue
            with (self.folder / "raw" / name.format(day)).open("w", newline="") as file:
                csv.writer(file).writerows(rows)
            if day < log.first:
                continue
            if day > log.last:
                break
            here, before = self.folder / str(day), self.folder / str(day - 1)
            shutil.rmtree(here, ignore_errors=True)
            if day > log.first:
                shutil.copytree(before / "tables", here / "tables")
            run_job(
                "prepare",
                source=self.folder / "source.yaml",
                input=self.folder / "raw",
                output=here / "tables",
                append=True,
                split={"val_days": 1, "test_days": 1},
            )
            if self.sids:
                self.tokenize(
                    day,
                    "sids",
                    **({"extend": before / "sids"} if day > log.first else {}),
                )
            done.touch()

    def tokenize(self, day: int, codes: str, **more: Any) -> None:
        """Write semantic IDs of the day's items."""
        here = self.folder / str(day)
        run_job(
            "tokenize",
            tables=here / "tables",
            tokenizer="rqkmeans",
            encoder="tfidf",
            pca=128,
            rqkmeans={"levels": 2},
            output=here / codes,
            **more,
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
        place = self.folder / f"runs/{policy}-{day}-{self.config.seed}".replace(
            ", ", "-"
        ).replace(" ", "-")
        if (place / "steps").exists():
            return str(place), int(json.loads((place / "steps").read_text()))
        given = self.fit | (self.log.daily if init else {})
        options: FitConfig = build(FitConfig, given, "fit.")
        config, inputs = resolve_training(
            parse_options(self.model)[1],
            options,
            self.inputs(day, codes),
            init or None,
        )
        setup = TrainingRun.build(config, options, inputs, init=init or None)
        if steps:
            epochs = -(-steps // setup.train.steps(0))
            setup.train.dataset.keep_random(round(steps / epochs * options.batch_size))
            options = replace(options, max_epochs=epochs)
        last = 0
        for event in fit(
            setup.model,
            setup.train,
            setup.validate,
            options,
            means=setup.means,
            lr_multipliers=setup.lr_multipliers,
        ):
            last = event.step
            if event.metrics:
                print(
                    f"{policy}, day {day}: epoch {event.epoch}, step {last}, "
                    f"{event.metrics[options.metric]:.4f}, {event.examples_per_s:.0f} "
                    f"examples/s",
                    flush=True,
                )
            if event.is_best:
                checkpoint.save(
                    place, setup.model, setup.checkpoint(epoch=event.epoch, step=last)
                )
        (place / "steps").write_text(str(last))
        return str(place), last

    def measure(
        self, where: str, day: int, codes: str = "sids", known: int = 0
    ) -> dict[str, float]:
        """Measure a checkpoint on the test requests of one day.

        Args:
            where: Checkpoint.
            day: Number of the day.
            codes: Folder of the semantic IDs.
            known: Recommend only the first `known` items of the catalogue; 0 for all.

        Returns:
            Metrics by name.
        """
        inputs = self.inputs(day, codes)
        loaded = LoadedModel.load(where, inputs)
        examples, new = (
            loaded.load_examples(inputs, "test"),
            self.items(day - 1) if day > self.log.first else 0,
        )
        common: dict[str, Any] = {"batch_size": 256, "device": torch.device("cpu")}
        if not self.sids:
            sums = measure_examples(loaded.model, examples, **common).sums
            return {
                name: value
                for name, value in loaded.model.metric_means(sums).items()
                if name in self.log.shown
            }
        allowed = (
            loaded.model.encode_allowed(torch.arange(self.items(day)) < known)
            if known
            else None
        )

        def hits(batch: RequestBatch) -> dict[str, float]:
            found = (
                loaded.model.recommend(batch, 10, allowed=allowed)[0]
                == batch.target[:, None]
            ).any(1)
            of_new = batch.target >= new
            return {
                "all": float(found.sum()),
                "new": float(found[of_new].sum()),
                "of new": float(of_new.sum()),
            }

        result = measure_examples(
            loaded.model,
            examples,
            measure=hits,
            limit=self.log.requests,
            **common,
        )
        sums, count = result.sums, result.num_examples
        share = float(sums["of new"]) / count if new else float("nan")
        return {
            "requests": count,
            "share new": share,
            "recall@10": float(sums["all"]) / count,
            "recall@10 new": float(sums["new"] / sums["of new"]),
            "recall@10 old": float(
                (sums["all"] - sums["new"]) / (count - sums["of new"])
            ),
        }

    def note(
        self,
        policy: str,
        day: int,
        where: str,
        steps: int,
        codes: str = "sids",
        known: int = 0,
    ) -> None:
        """Measure a checkpoint and save the line, unless it exists."""
        key = {
            "log": self.config.log,
            "policy": policy,
            "day": day,
            "seed": self.config.seed,
        }
        if any(key.items() <= line.items() for line in self.lines):
            return
        line = (
            key
            | {"steps": steps, "metrics": self.measure(where, day, codes, known)}
            | describe_origin()
        )
        line["command"] = shorten_paths(
            f"python -m papers.days {shlex.join(sys.argv[1:])}"
        )
        self.lines.append(line)
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def run(self) -> None:
        """Run all policies; policies that need the steps of `daily` come last."""
        log, last = self.log, self.log.last
        self.prepare()
        first, begun = self.train("daily", log.first)
        where, taken = first, dict[int, int]()
        for day in range(log.first + 1, last + 1):
            self.note("once", day, first, begun if day == log.first + 1 else 0)
            if self.sids:
                self.note(OLD_CATALOGUE, day, where, 0, known=self.items(day - 1))
            where, taken[day] = self.train("daily", day, init=where)
            self.note("daily", day, where, taken[day])
            self.note("anew", day, *self.train("anew", day, taken[day]))
        total = begun + sum(taken.values())
        where, steps = self.train(ONCE_IN_FULL, log.first, total)
        for day in taken:
            self.note(ONCE_IN_FULL, day, where, steps if day == last else 0)
        self.note(ANEW_IN_FULL, last, *self.train(ANEW_IN_FULL, last, total))
        if self.sids:
            self.tokenize(last, "codes_anew")
            self.note(
                ANEW_WITH_CODES,
                last,
                *self.train(ANEW_WITH_CODES, last, total, codes="codes_anew"),
                codes="codes_anew",
            )


def summarize(log: str, lines: list[dict[str, Any]]) -> tuple[list[Table], Plot]:
    """Make the tables and the plot of a log."""
    days = sorted({line["day"] for line in lines})
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for line in lines:
        found.setdefault((line["policy"], line["day"]), []).append(line["metrics"])
    there = [
        policy for policy in POLICIES if any((policy, day) in found for day in days)
    ]
    common = [day for day in days if all((policy, day) in found for policy in there)]
    steps = {
        policy: sum(line["steps"] for line in lines if line["policy"] == policy)
        for policy in there
    }
    steps["daily"] += steps.get("once", 0)  # it goes on from it
    seeds = sorted({line["seed"] for line in lines})

    def mean(policy: str, some: list[int], name: str) -> float:
        """Average a metric over days and seeds, weighted by its number of requests."""
        every = [each for day in some for each in found.get((policy, day), ())]
        weights = [
            each[WEIGHTS[name]] * each.get("requests", 1) if name in WEIGHTS else 1.0
            for each in every
        ]
        whole = all((policy, day) in found for day in some)
        values = [each[name] for each in every]
        total = sum(weights)
        return (
            sum(map(operator.mul, values, weights), 0.0) / total
            if whole and total
            else math.nan
        )

    def cell(value: float) -> str:
        return "-" if math.isnan(value) else f"{value:.4f}"

    metric = METRICS[log][0]
    spans = [days] if common in ([], days) else [days, common]
    told = [
        f"{some[0]} to {some[-1]}" if len(some) > 1 else str(some[0]) for some in spans
    ]
    header = [
        "policy",
        "steps",
        *(f"{name}, {span}" for span in told for name in METRICS[log]),
    ]
    summary = [
        [
            policy,
            f"{steps[policy] // len(seeds):,}" if policy != OLD_CATALOGUE else "-",
            *(
                cell(mean(policy, some, name))
                for some in spans
                for name in METRICS[log]
            ),
        ]
        for policy in there
    ]
    by_day = [
        [policy, *(cell(mean(policy, [day], metric)) for day in days)]
        for policy in there
    ]
    if log == "beauty":
        by_day.append(
            [
                "share of requests for new items",
                *(cell(mean("daily", [day], "share new")) for day in days),
            ]
        )
    notes = [
        f"{NOTES[log]} Seed {', '.join(map(str, seeds))}; {lines[0]['hardware']}; "
        f"`{lines[0]['command']}`."
    ]
    tables = [
        Table(f"{log}: all in all", header, summary, notes, num_words=1),
        Table(
            f"{log}: {metric} by day", ["policy", *map(str, days)], by_day, num_words=1
        ),
    ]
    with rc_context(STYLE):
        figure, (axes,) = new_figure(1, width=6)
        for number, policy in enumerate(there):
            points = [
                (day, mean(policy, [day], metric))
                for day in days
                if (policy, day) in found
            ]
            axes.plot(
                *zip(*points, strict=True),
                color=COLOURS[number],
                marker="o",
                ms=3,
                lw=1.2,
                label=policy,
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        label_axes(axes, "day", metric, legend=True)
        plot = Plot(
            f"days-{log}",
            f"{log}: {metric} by day",
            "Higher is better.",
            to_svg(figure, f"days-{log}"),
        )
    return tables, plot


def pages(results: Path) -> Iterator[tuple[list[Table], Plot]]:
    """Yield the tables and the plot of each log from its saved figures."""
    for file in sorted(results.glob("*.jsonl")):
        yield summarize(
            file.stem, [json.loads(line) for line in file.read_text().splitlines()]
        )


def run(config: Config) -> None:
    """Train and measure all policies, except finished runs."""
    torch.set_num_threads(1)
    Days(config).run()


if __name__ == "__main__":
    cli.main(run, Config)
