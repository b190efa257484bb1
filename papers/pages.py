r"""Keep the runs of an experiment in the repository, and write their result pages.

    python -m papers.pages --keep retrieval/DATASET --tracking_uri STORE \
        --output papers/results/NAME.jsonl
    python -m papers.pages

The first command writes a line per MLflow run: params, tags (command, hardware, commit,
hashes of tables), metrics and metrics per user. The second writes a page to
docs/results per experiment and benchmark of papers/results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from jobs import cli
from models import registry
from models.metrics.per_user_metrics import decode_values
from pipelines import tracking
from pipelines.comparison.runs import search_runs
from pipelines.comparison.verdicts import (
    MIN_USERS,
    bootstrap_intervals,
    judge_difference,
    load_per_user,
)

PATH = re.compile(r"(?<![\w.~/-])(?:[a-z][a-z0-9+]*://|/)[^\s'\",\]}]+")
"""Absolute paths and URIs in a text, of which a kept run has the last two parts."""

PER_USER = "evaluation-test.json"
"""Key of a kept run's metrics per user."""

LEADING = {"retrieval": "ndcg@10", "search": "gauc", "actions": "eval_loss"}
"""Metric of each kind that sorts and compares its models, without the split."""

METRICS = re.compile(
    r"val/(ndcg@10|gauc|mean/rig)|test/(recall@5|recall@10|ndcg@5|ndcg@10|(mean/)?auc"
    r"|gauc|(\w+/)?normalised_entropy|log_loss|eval_loss|mean/rig"
    r"|coverage@10|new_items@10|gini@10)"
)
"""Metrics of the table of runs, as means over seeds with the standard deviation."""

COUNTS = {
    "test/examples": "requests",
    "train/parameters": "params",
    "val/epoch": "best epoch",
    "train/steps": "steps",
    "train/total_seconds": "train s",
    "test/requests_per_s": "requests/s",
}
"""Headings of the table of sizes and speeds by metric."""

Line = dict[str, Any]
Row = list[Line]


@dataclass
class Config:
    """Options of `python -m papers.pages`."""

    keep: str | None = None
    """MLflow experiment whose runs are kept; without it the pages are written."""
    tracking_uri: str = ""
    """MLflow store of the experiment."""
    output: str = "docs/results"
    """File of the kept runs (.jsonl), or folder of the pages."""


def run(config: Config) -> None:
    """Keep the runs of an experiment, or write all pages."""
    if config.keep:
        keep_runs(config.tracking_uri, config.keep, config.output)
        return
    pages: dict[str, list[Line]] = {}
    for file in sorted(Path(__file__).with_name("results").glob("*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            title = line.get("experiment") or f"benchmark/{line['benchmark']}"
            pages.setdefault(title, []).append(line | {"file": file.name})
    for title, lines in pages.items():
        tables = benchmark_tables if "benchmark" in lines[0] else run_tables
        files = ", ".join(dict.fromkeys(line["file"] for line in lines))
        origin = f"From `papers/results/` ({files}) by `python -m papers.pages`."
        page = "\n\n".join([f"# {title}", origin, *tables(lines)])
        file = Path(config.output, title.replace("/", "-") + ".md")
        file.write_text(page + "\n")


def keep_runs(uri: str, experiment: str, file: str) -> None:
    """Write the runs of an MLflow experiment as JSON lines."""
    lines = []
    for run in search_runs(uri, [experiment])[0]:
        tags = {
            name: value
            for name, value in run.data.tags.items()
            if "mlflow." not in name
            or name in (tracking.PARENT_TAG, tracking.COMMIT_TAG)
        }
        line = {
            "id": run.info.run_id,
            "name": run.info.run_name,
            "experiment": experiment,
            "status": run.info.status,
            "start_ms": run.info.start_time,
            "params": run.data.params,
            "tags": tags,
            "metrics": run.data.metrics,
        }
        text = json.dumps(line)
        short = PATH.sub(lambda path: "/".join(path[0].split("/")[-2:]), text)
        values = load_per_user(uri, run.info.artifact_uri)
        by_user = {PER_USER: values} if values else {}
        kept = json.loads(short) | {"by_user": by_user}
        lines.append(json.dumps(kept, sort_keys=True))
    Path(file).write_text("\n".join(lines) + "\n")


def read_runs(lines: Sequence[Line]) -> list[Line]:
    """Return a run per training and options of its evaluations, with all metrics."""
    weights = {
        line["tags"].get(tracking.WEIGHTS_TAG): line["id"]
        for line in lines
        if "model.name" in line["params"]
    }
    runs = {}
    for line in sorted(lines, key=lambda line: line["start_ms"]):
        # in reversed order the metrics of the best epoch replace those of the last one
        metrics = {
            name.replace("_at_", "@").replace("best/", "val/"): line["metrics"][name]
            for name in sorted(line["metrics"], reverse=True)
        }
        training = line["tags"].get(tracking.PARENT_TAG)
        if "model.name" in line["params"]:
            seed = line["params"]["fit.seed"]
            runs[line["id"], ""] = {
                **line,
                "model": line["params"]["model.name"],
                "row": re.sub(rf"[-_](seed-)?{seed}(-\w{{8}})?$", "", line["name"]),
                "options": "",
                "teacher": weights.get(line["params"].get("model.teacher_hash")),
                "metrics": metrics,
            }
        elif (training, "") in runs:
            plain = runs[training, ""]
            options = " ".join(
                f"{name} {value}"
                for name, value in sorted(line["params"].items())
                if name not in ("split", "checkpoint", "batch_size", "user_stride")
                and plain["params"].get(f"model.{name}") != value
            )
            earlier = runs.get((training, options))
            if not earlier:  # of the training, only what is no result of an evaluation
                costs = {
                    name: value
                    for name, value in plain["metrics"].items()
                    if name in COUNTS and "test/" not in name
                }
                row = f"{plain['row']} [{options}]"
                earlier = {**plain, "row": row, "options": options, "metrics": costs}
            runs[training, options] = {
                **earlier,
                "metrics": earlier["metrics"] | metrics,
                "by_user": line["by_user"],
            }
    return list(runs.values())


def run_tables(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the tables of an experiment: metrics, differences, sizes, origins."""
    metric = LEADING[lines[0]["experiment"].split("/")[0]]
    runs = read_runs(lines)
    keys = ["unseen", "model", "run"]
    values = pl.DataFrame(
        {
            "unseen": "unseen" in run["options"],
            "model": run["model"],
            "run": run["row"],
            "metric": name,
            "value": value,
        }
        for run in runs
        for name, value in run["metrics"].items()
    )
    means = values.group_by(*keys, "metric", maintain_order=True).agg(
        mean=pl.col("value").mean(), deviation=pl.col("value").std(), seeds=pl.len()
    )
    leading = pl.col("mean").filter(pl.col("metric") == f"test/{metric}").first()
    order = means.group_by(*keys, maintain_order=True).agg(
        leading if metric == "eval_loss" else -leading, pl.col("seeds").max()
    )
    order = order.sort("unseen", "mean", nulls_last=True).drop("mean")
    texts = means.with_columns(
        text=pl.struct("metric", "mean", "deviation").map_elements(
            format_mean, return_dtype=pl.String
        )
    )
    texts = texts.pivot("metric", index=keys, values="text").fill_null("-")
    table = order.join(texts, on=keys, maintain_order="left")
    measured = sorted(filter(METRICS.fullmatch, table.columns))
    yield to_markdown("Metrics", table.select("model", "run", "seeds", *measured))
    rows = [[run for run in runs if run["row"] == name] for name in table["run"]]
    differences = pl.DataFrame(compare_rows(rows, metric))
    if differences.height:
        yield to_markdown("On the same users", differences)
        yield (
            "Differences per user, averaged over the pairs of runs, with the 95% "
            "interval of a bootstrap over users, which does not cover other seeds. "
            f"Below {MIN_USERS} users there is no verdict."
        )
    costs = table.select("model", "run", *(name for name in COUNTS if name in table))
    yield to_markdown("Sizes and speeds", costs.rename(COUNTS, strict=False))
    origins = pl.DataFrame(
        {
            "hardware": line["tags"].get("hardware", ""),
            "commit": line["tags"].get(tracking.COMMIT_TAG, "")[:10],
            "run": line["name"],
        }
        for line in lines
        if "model.name" in line["params"]
    )
    by_commit = origins.group_by("hardware", "commit", maintain_order=True)
    yield to_markdown("Origins", by_commit.agg(runs=pl.col("run").str.join(", ")))


def format_mean(cell: dict[str, Any]) -> str:
    """Format the mean of a metric, with the deviation over several seeds."""
    if cell["metric"] in COUNTS:
        return f"{cell['mean']:,.0f}"
    if cell["deviation"] is None:
        return f"{cell['mean']:.4f}"
    return f"{cell['mean']:.4f} ± {cell['deviation']:.4f}"


def to_markdown(title: str, table: pl.DataFrame) -> str:
    """Return a table under a heading."""
    lines = [table.columns, ["---"] * table.width, *table.rows()]
    cells = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return f"## {title}\n\n{cells}"


def compare_rows(rows: Sequence[Row], metric: str) -> Iterator[Line]:
    """Compare rows, best first, with their best baseline, teacher and best row."""

    def read_users(run: Line) -> dict[str, str]:
        return run["by_user"].get(PER_USER, {}).get(metric, {})

    def is_baseline(row: Row) -> bool:
        model = row[0]["model"]
        return model in registry.MODELS and registry.find(model).is_baseline

    tested = [row for row in rows if read_users(row[0])]
    if not tested:
        return
    users = read_users(tested[0][0])["users"]
    cells, differences, base_means = [], [], []
    for row in tested:
        options = row[0]["options"]
        same_ranking = [
            other
            for other in tested
            if ("unseen" in other[0]["options"]) == ("unseen" in options)
        ]
        baselines = [other for other in same_ranking if is_baseline(other)]
        teachers = [
            other
            for other in tested
            if row[0]["teacher"] in [run["id"] for run in other]
            and other[0]["options"] in (options, "")
        ]
        teachers.sort(key=lambda other: other[0]["options"] != options)
        bases = [] if is_baseline(row) else baselines[:1]
        bases += teachers[:1] + same_ranking[:1]
        for name, base in {base[0]["row"]: base for base in bases}.items():
            pairs = [
                (read_users(run), read_users(other))
                for run in row
                for other in base
                if base not in teachers or run["teacher"] == other["id"]
            ]
            of_users = {values["users"] for values in chain(*pairs)}
            if base is row or of_users != {users}:
                continue
            # (2, U) means per user of the row and of its base
            mean, base_mean = np.mean(
                [[decode_values(encoded)[0] for encoded in pair] for pair in pairs], 0
            )
            cells.append({"run": row[0]["row"], "against": name, "pairs": len(pairs)})
            differences.append(mean - base_mean)
            base_means.append(base_mean)
    counts = decode_values(read_users(tested[0][0]))[1]
    intervals = bootstrap_intervals(np.stack(differences), counts)
    for cell, interval, base_mean in zip(
        cells, intervals.rows(), base_means, strict=True
    ):
        mean, low, high = interval
        yield {
            **cell,
            "users": f"{len(counts):,}",
            f"test/{metric}": f"{mean:+.4f}",
            "95%": f"{low:+.4f} to {high:+.4f}",
            "relative": f"{mean / np.average(base_mean, weights=counts):+.2%}",
            "verdict": judge_difference(low, high, len(counts), metric),
        }


def benchmark_tables(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a table per size of a benchmark, slowest variant first."""
    by_params: dict[str, list[Line]] = {}
    for line in lines:
        params = {
            name: "trained models" if isinstance(value, dict) else value
            for name, value in line["params"].items()
            if value not in (None, {})
        }
        title = ", ".join(f"{name} {value}" for name, value in params.items())
        by_params.setdefault(title, []).append(line)
    for title, group in by_params.items():
        variants = {line["variant"]: line for line in group}
        cells = []
        for line in sorted(group, key=lambda line: -line["median_s"]):
            cell = {"variant": line["variant"], "per s": f"{line['items_per_s']:,.0f}"}
            for name in ("median_s", "min_s", "max_s", "encode_s", "decode_s"):
                if name in line:
                    cell[f"{name[:-2]}, ms"] = f"{1000 * line[name]:,.1f}"
            if "peak_memory_mb" in line:
                cell["peak MB"] = f"{line['peak_memory_mb']:,.0f}"
            for name in ("hf", "tiger_shared_kv"):
                if name in variants:
                    speedup = variants[name]["median_s"] / line["median_s"]
                    cell[f"x {name}"] = f"{speedup:.2f}"
            cells.append(cell)
        yield to_markdown(title, pl.DataFrame(cells))


if __name__ == "__main__":
    cli.main(run)
