"""The steps from a raw log to a comparison of models, as jobs and flows run them.

    statistics = make_tables(PrepareOptions(source=..., input=..., output="tables"))
    audit_tables(AuditConfig("tables"))
    sids = make_sids(TokenizeConfig(tables="tables", output="sids", ...))

A step takes a typed config, prints its progress and its result, and returns the result.
Packages are imported when a step runs, so that commands print their first line early.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic.dataclasses import dataclass

from core.errors import UserError, pluralize
from core.files import storage_errors, write_file
from core.options import STRICT, Folder, as_base, changed, check_known, to_words
from core.schemas import RunRef, SidsInfo, TrieInfo
from core.tables import Table
from models import registry
from pipelines.comparison.config import CompareConfig
from pipelines.encode.config import EncodeConfig, TokenizeConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.start import start_ray
from pipelines.training.config import TrainConfig

if TYPE_CHECKING:
    from pipelines.comparison.compare import Comparison
    from pipelines.comparison.tables import Table as ComparisonTable
    from pipelines.evaluation.result import Result
    from pipelines.prepare.options import PrepareOptions, SimulateOptions
    from pipelines.training.run import TrainingResult

Config = TypeVar("Config")
Output = TypeVar("Output")

MAX_LINES = 60
"""Largest number of printed lines of a comparison with a long table."""

ERROR_LABELS = {
    "reconstruction_error": "embeddings, by the nearest codes",
    "quantization_error": "quantised space, by the chosen codes",
}
"""Printed labels of the errors that the manifest of SIDs records."""


def run_step(
    job: str,
    step: Callable[[Config], Output],
    config: Config,
    options: Mapping[str, Any] | None = None,
    title: str = "",
) -> Output:
    """Print the command line that repeats a step, and run the step.

    Args:
        job: Name of the command, such as `train`.
        step: Function of the step.
        config: Config of the step.
        options: Options of the command; by default those that are no defaults.
        title: Line to print before, with its line break.
    """
    words = shlex.join(to_words(options or changed(config)))
    print(f"\n{title}$ python -m jobs.{job} {words}", flush=True)
    return step(config)


def simulate_log(options: SimulateOptions) -> None:
    """Write a simulated log, unless the folder already holds the log of the options."""
    from pipelines.prepare.kinds.registry import KINDS
    from pipelines.prepare.kinds.simulation import Settings, write_log

    check_known([options.kind], KINDS, "kind")
    settings, draw_log = as_base(options, Settings), KINDS[options.kind].draw_log
    is_new = write_log(options.output, options.kind, settings, draw_log)
    print(
        f"{'simulated' if is_new else 'up to date:'} {settings.events:,} events of "
        f"{settings.users:,} users on {settings.items:,} items, seed {settings.seed}: "
        f"{options.output}"
    )


def make_tables(options: PrepareOptions) -> dict[str, Any]:
    """Make the tables of a raw log, and return the content of statistics.json."""
    from pipelines.prepare.kinds.registry import KINDS
    from pipelines.prepare.prepare import Existing, prepare
    from pipelines.prepare.reading.log import load_source

    start_s = time.perf_counter()
    source, settings = load_source(options.source)[0], options.settings
    print(f"reading {options.input}", flush=True)
    existing: Existing = "continue"
    if options.overwrite:
        existing = "overwrite"
    elif options.append:
        existing = "append"
    statistics = prepare(
        source, options.input, options.output, settings, existing, start=start_ray
    )
    print(
        f"\n{pluralize(statistics['users'], 'user')}, "
        f"{pluralize(statistics['items'], 'item')}, "
        f"{pluralize(statistics['interactions'], 'interaction')}; "
        f"sparsity {statistics['sparsity']:.2%}, "
        f"mean length {statistics['mean_length']:.2f}; "
        f"requests: {join_counts(statistics['requests'])}"
    )
    skipped = statistics.get("requests_without_history", {})
    if KINDS[settings.kind].needs_history and any(skipped.values()):
        print(
            f"requests without history (each user's first): {join_counts(skipped)}; "
            f"skipped in training and evaluation"
        )
    print(
        f"made in {time.perf_counter() - start_s:.1f} s: "
        f"{options.output}/{{events,items,sequences,rejects}} and "
        f"{options.output}/statistics.json"
    )
    return statistics


def join_counts(counts: dict[str, int]) -> str:
    """Return counts with their names, such as `10 train, 2 test`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


@dataclass(config=STRICT)
class AuditConfig:
    """Options of the audit."""

    tables: Folder
    """TABLES: folder or URI with the tables `events`, `items` and `sequences`."""


def audit_tables(config: AuditConfig) -> None:
    """Check tables for leakage and print the report.

    Raises:
        UserError: If a rule is violated.
    """
    from pipelines.prepare.audit.rules import audit, report

    start_s, tables = time.monotonic(), config.tables
    rules = audit(tables, lambda step: print(f"audit: {step}", file=sys.stderr))
    title = f"Audit of {tables}, {time.monotonic() - start_s:.1f} s"
    print(f"{title}\n{report(rules)}", flush=True)
    broken = [rule.name for rule in rules if rule.violations]
    if broken:
        total = pluralize(sum(rule.violations for rule in rules), "violation")
        raise UserError(
            f"{total} of {', '.join(broken)} in {tables}; do not train on these tables",
            "violation",
        )
    print("No violations.")


def start_clock() -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since this call."""
    start_s = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - start_s:6.1f}s] {message}", flush=True)

    return say


def make_sids(config: TokenizeConfig) -> Table[SidsInfo]:
    """Make the semantic IDs of items."""
    from pipelines.encode.extend import describe_drift, extend
    from pipelines.encode.tokenize import tokenize

    start_s, say = time.monotonic(), start_clock()
    make = extend if config.extend else tokenize
    sids, trie, is_new = make(config, say)
    print("\n".join(describe_quality(sids, trie)))
    if sids.info.drift:
        print(describe_drift(sids.info.drift))
    if is_new:
        print(
            f"made {config.output}: sids {sids.hash[:12]}, trie {trie.hash[:12]} in "
            f"{time.monotonic() - start_s:.0f} s"
        )
    else:
        print(f"nothing to do: {config.output} is up to date; overwrite makes it again")
    return sids


def describe_quality(sids: Table[SidsInfo], trie: Table[TrieInfo]) -> list[str]:
    """Return lines on the quality of the SIDs: errors, collisions, use of codes."""
    sizes, measures = sids.info.codebook_sizes, sids.info.measures
    lines = [
        f"{pluralize(sids.rows, 'item')}, {pluralize(len(sizes), 'code')} each, "
        f"codebooks {sizes}"
    ]
    errors = [
        f"{label} {error:.4f}"
        for name, label in ERROR_LABELS.items()
        if (error := getattr(measures, name)) is not None
    ]
    if errors:
        lines.append(f"share of variance not explained: {', '.join(errors)}")
    if measures.relaxed_items is not None:
        lines.append(
            f"{pluralize(measures.relaxed_items, 'item')} relaxed; collision rate "
            f"{measures.collision_rate_before:.4f} before, 0 after"
        )
    else:
        lines.append(
            f"collision rate {measures.collision_rate:.4f} before the conflict code: "
            f"{measures.distinct} distinct, "
            f"{pluralize(measures.duplicates, 'duplicate')}, largest group "
            f"{measures.largest_group}"
        )
    for number, level in enumerate(measures.levels, 1):
        lines.append(
            f"level {number}: {level.used} codes in use ({level.use:.1%}), "
            f"entropy {level.entropy_bits:.2f} bits"
        )
    branching = ", ".join(f"{mean:.2f}" for mean in trie.info.branching)
    lines.append(f"branching per level {branching}")
    return lines


def encode_texts(config: EncodeConfig) -> dict[str, Table[Any]]:
    """Encode the texts of a log, and return the tables by name."""
    from pipelines.encode.texts import encode_log

    start_s, say = time.monotonic(), start_clock()
    written = encode_log(
        config.tables,
        config.output,
        config.encoder,
        config.embed,
        config.overwrite,
        say,
    )
    counts = ", ".join(
        f"{written[name].rows:,} {name}"
        for name in ("items", "queries", "pairs")
        if name in written
    )
    width = written["items"].info.width
    seconds = time.monotonic() - start_s
    print(f"{counts}, width {width}, in {seconds:.0f} s: {config.output}")
    return written


def describe_no_gain(
    metrics: Mapping[str, float], metric: str, baseline: tuple[str, float] | None
) -> str:
    """Return a warning if the best epoch is no better than a model without training.

    Args:
        metrics: Validation metrics of the best epoch.
        metric: Metric of the training (`fit.metric`).
        baseline: Name of the best baseline, and its value of `metric`. With None, only
            chance level is compared, which `metrics` imply.
    """
    from models.metrics.ranking_metrics import describe_chance_level

    comparison = describe_chance_level(metrics)
    value = metrics.get(metric, math.nan)
    if baseline and value < baseline[1]:
        comparison = f"{metric} {value:.4f}, {baseline[0]} {baseline[1]:.4f}"
    if not comparison:
        return ""
    return f"warning: no better than without training ({comparison})\n"


def train_model(config: TrainConfig) -> TrainingResult:
    """Train a model, or continue or return the training of this name."""
    from models.metrics.ranking_metrics import format_metric
    from pipelines import tracking
    from pipelines.training.run import run_training

    result = run_training(config, say=partial(print, flush=True))
    best, metric = result.best, config.fit.metric
    model_class = registry.find(best.name)
    if result.was_finished:
        print(f"The run '{result.name}' is finished; nothing to do.")
    else:
        epochs = pluralize(result.epochs, "epoch")
        print(f"Trained {best.name} for {epochs} in {result.seconds:.0f} s.")
        if not (model_class.is_baseline or model_class.is_diagnostic):
            from pipelines.comparison.verdicts import best_trained_baseline

            baseline = best_trained_baseline(result.run, metric)
            print(describe_no_gain(best.metrics, metric, baseline), end="")
        if best.epoch == config.fit.max_epochs > config.fit.eval_every_epochs:
            print("note: the best epoch is the last (fit.max_epochs)")
    metrics = "  ".join(
        f"{name} {format_metric(best.metrics.get(name))}"
        for name in model_class.shown_metrics
    )
    print(
        f"  best epoch  {best.epoch}: {metrics} on val\n"
        f"  checkpoint  {result.checkpoint}\n"
        f"  MLflow run  {result.run.run_id} in {result.run.experiment}\n"
        f"  look at it  {tracking.view_command(result.run.uri)}"
    )
    return result


def measure_checkpoint(config: EvaluateConfig) -> Result:
    """Measure a checkpoint on a split, and write the metrics to a file and MLflow."""
    from models.metrics.ranking_metrics import describe_chance_level
    from models.training import checkpoint
    from pipelines import tracking
    from pipelines.evaluation.ranking import evaluate
    from pipelines.evaluation.result import record_result

    if config.tracking_uri:
        tracking.check_store(config.tracking_uri)
    # The driver of a submitted job runs on a node without GPUs, so tasks do the work.
    result, checked = evaluate(config, in_ray=bool(os.environ.get("RAY_ADDRESS")))
    metadata = checked.checkpoint
    model_class = registry.find(result.model)
    ranked = pluralize(result.users, "user")
    if model_class.eval_unit != "user":
        ranked = f"{pluralize(result.examples, 'request')} of {ranked}"
    print(f"{result.model} on {result.split}: {ranked}, seed {result.seed}")
    sequences = checked.versions["sequences"].uri
    if checkpoint.is_extended(metadata, "sequences", checked.versions):
        print(f"note: {sequences} extends the table of the training")
    elif result.is_fresh(metadata):
        print(f"note: {sequences} is of another log than the training's")
    for line in model_class.format_metrics(result.metrics):
        print(line)
    print(describe_first_time_items(result.metrics), end="")
    chance_level = describe_chance_level(result.metrics)
    if chance_level and not model_class.is_baseline:
        print(f"warning: no better than without a model ({chance_level})")
    if model_class.ranks == "catalogue":
        skipped = f"{pluralize(result.skipped, 'request')} without history left out"
        if result.without_history:
            values = [f"{n} {v:.4f}" for n, v in result.without_history.items()]
            skipped += f", where popularity reaches {', '.join(values)}"
        print(
            f"  {result.requests_per_s:,.0f} requests/s on {result.device}; {skipped}"
        )
    # Record the metrics after they are printed, in case MLflow does not answer.
    path = record_result(result, metadata, config.tracking_uri)
    print(f"  written to  {path}")
    return result


def describe_first_time_items(metrics: dict[str, float]) -> str:
    """Return a line on the requests whose target is new to the user, if measured."""
    from models.metrics.ranking_metrics import format_metric
    from models.retrieval.metrics import EXAMPLES, FIRST_PREFIX

    count = metrics.get(FIRST_PREFIX + EXAMPLES)
    if count is None:
        return ""
    values = [
        f", {name} {format_metric(metrics[FIRST_PREFIX + name])}"
        for name in ("recall@10", "ndcg@10")
        if FIRST_PREFIX + name in metrics
    ]
    return (
        f"  {FIRST_PREFIX.rstrip('/')}  {count:,.0f} requests whose target is not in "
        f"the history{''.join(values)}\n"
    )


def compare_runs(config: CompareConfig) -> list[Comparison]:
    """Print tables of runs, write the requested files, and register the best run.

    Returns:
        A comparison per experiment, whose `rows` are a frame.
    """
    from pipelines import tracking
    from pipelines.comparison.compare import compare, find_best_run
    from pipelines.comparison.tables import (
        best_tables,
        build_tables,
        to_markdown,
    )
    from pipelines.comparison.verdicts import measure_differences

    uri = tracking.find_store(config.tracking_uri)
    experiments = [[name] for name in config.experiment]
    if config.sweep or config.run:
        experiments = [config.experiment]
    comparisons = [
        compare(uri, names, config.sweep, config.run, config.metric)
        for names in experiments
    ]
    differences = list(map(measure_differences, comparisons))
    tables = []
    for pair in zip(comparisons, differences, strict=True):
        tables += build_tables(*pair)
    tables += best_tables(comparisons)
    shown = tables if config.all else map(shorten, tables)
    lines = "\n".join(map(to_markdown, shown)).splitlines()
    is_long = any(len(frame) > 30 for _, frame, _ in tables)
    if is_long and not config.all:
        lines = [line for line in lines if line]
        lines[MAX_LINES - 4 :] = ["more: --all true"]
    print("\n".join(lines))
    markdown = "\n".join(map(to_markdown, tables))
    if config.markdown:
        with storage_errors(config.markdown):
            write_file(config.markdown, markdown.encode())
        print(f"tables written to {config.markdown}")
    if config.html:
        from pipelines.comparison.page import build_page, log_page

        page = build_page(comparisons, differences, tables)
        with storage_errors(config.html):
            write_file(config.html, page.encode())
        name = log_page(comparisons[0], page, markdown)
        print(
            f"page written to {config.html}, and to MLflow as compare.html of '{name}'"
        )
    if config.register:
        from pipelines.serving.registered_model import register

        name, metric = config.register, f"val/{comparisons[0].metric}"
        best = find_best_run(comparisons[0])
        best_run = RunRef(uri, best["experiment"], best["training"])
        version = register(best_run, name, metric, config.trust_code).version
        print(
            f"registered: version {version} of {name} is the best checkpoint of "
            f"{best['name']} by validation\n"
            f"  load it   mlflow.pyfunc.load_model('models:/{name}/{version}')"
        )
    print(f"look at it: {tracking.view_command(uri)}")
    return comparisons


def shorten(table: ComparisonTable) -> ComparisonTable:
    """Return the best rows of a table that has more than 30."""
    title, frame, _ = table
    if len(frame) > 30:
        title = f"{title}: the best 4 of {len(frame)} rows (all: --all true)"
        return title, frame.head(4), []
    return table
