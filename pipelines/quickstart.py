"""Run all steps on a log within minutes, from tables to a comparison of models.

run_quickstart(QuickstartConfig(kind="search"))
run_quickstart(QuickstartConfig(data="shop", source="shop.yaml"))

`jobs/configs/quickstart.yaml` has the models of each kind of log. Packages are imported
when the flow runs, so that the command prints its first line early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError, format_duration
from core.options import STRICT, Seed, build, merge, read_configs, read_yaml
from core.schemas import ItemsInfo, SequencesInfo
from core.tables import open_table
from models import registry
from pipelines.comparison.config import CompareConfig
from pipelines.encode.config import EncodeConfig, TokenizeConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.steps import (
    AuditConfig,
    audit_tables,
    compare_runs,
    encode_texts,
    make_sids,
    make_tables,
    measure_checkpoint,
    run_step,
    simulate_log,
    train_model,
)
from pipelines.training.config import TrainConfig

CONFIGS = Path(__file__).parents[1] / "jobs/configs"
FLOWS = CONFIGS / "quickstart.yaml"

SEED = 42
"""Default seed of the simulated log and of trainings."""

TRAINING_S = 120
"""Seconds of a model's training on two quiet cores, unless one epoch takes longer."""

STEP_S = 5
"""Seconds of a step for starting and for MLflow."""

RANKING = 4
"""Time to rank a request, in times of an epoch's time per request."""


@dataclass(config=STRICT, frozen=True)
class ModelRun:
    """A model that a flow trains and evaluates."""

    model: str
    """Name of the model in the registry."""
    configs: list[str]
    """Files in `jobs/configs`, without suffix; later files override earlier ones."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.train that override the files."""
    name: str = ""
    """Name of the run; by default the name of the model."""
    teacher: str = ""
    """Name of the run whose model is the teacher; empty if there is no teacher."""
    epochs: PositiveInt = 1
    """Largest number of epochs."""
    ms: float = 0.05
    """Milliseconds per training request and epoch on two quiet cores."""


@dataclass(config=STRICT, frozen=True)
class Flow:
    """Models and additional tables of one kind of log."""

    models: list[ModelRun]
    """Models in the order of training."""
    extra: str = ""
    """Option that names the additional tables: `sids`, `text`, or empty for none."""
    validate: int = 0
    """Largest number of requests that a validation ranks; 0 for all."""
    simulate: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.simulate."""


@dataclass(config=STRICT)
class QuickstartConfig:
    """Options of jobs.quickstart."""

    kind: Literal["retrieval", "search", "actions"] | None = None
    """Kind of requests: `retrieval` recommends the next item of a catalogue, `search`
    ranks the results of a search, `actions` predicts what a user does with an item. By
    default the kind of the source file, or retrieval for a simulated log."""
    data: str | None = None
    """Folder of a real raw log; by default a log is simulated."""
    source: str | None = None
    """Source file of the real log; by default the file named after the folder, or a
    guess."""
    output: str = "runs"
    """Folder for all output, with a subfolder per dataset."""
    encoder: str = "tfidf"
    """Text encoder: tfidf, minilm (`make encoder` installs it), or the name or path of
    a transformers model."""
    epochs: PositiveInt | None = None
    """Epochs of each model; by default chosen by the number of requests, so that all
    commands take about ten minutes on two cores."""
    simulate: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.simulate, such as `--simulate.users 500`."""
    seed: Seed = SEED
    """Seed of the trainings. Names of runs contain a seed other than 42, and the
    comparison averages over seeds."""


class Step(NamedTuple):
    """A step of the quickstart."""

    title: str
    job: str
    """Name of the command, such as `train`."""
    run: Callable[[Any], Any]
    """Function of the step."""
    config: Any
    seconds: float = STEP_S
    """Estimated time on two quiet cores."""


def run_quickstart(config: QuickstartConfig) -> Path:
    """Run the flow of a kind of log, and return the page of the comparison."""
    from pipelines.prepare.kinds.registry import KINDS
    from pipelines.prepare.options import SimulateOptions, build_options, list_changes
    from pipelines.prepare.reading.log import load_source
    from pipelines.tracking import resolve_uri

    start_s = time.monotonic()
    name = KINDS[config.kind or "retrieval"].simulated_source
    if config.data:
        name = Path(config.data).resolve().name
    home = Path(config.output).absolute() / name
    source = config.source or find_source(config, home)
    kind = config.kind or load_source(source)[1].get("kind", "retrieval")
    flow = build(Flow, read_yaml(str(FLOWS))[kind], f"{kind}.")
    raw, tables = config.data or str(home / "raw"), str(home / "tables")
    options = {"source": source, "input": raw, "output": tables, "kind": kind}

    def run(step: Step, progress: str = "", options: Any = None) -> None:
        elapsed = format_duration(time.monotonic() - start_s)
        title = f"{step.title}   ({elapsed} so far{progress})\n"
        run_step(step.job, step.run, step.config, options, title)

    if not config.data:
        simulate = {"kind": kind, **flow.simulate, **config.simulate, "output": raw}
        options_of_log = build(SimulateOptions, simulate, "simulate.")
        run(Step("Simulate a raw log", "simulate", simulate_log, options_of_log))
    prepare = build_options(options)
    step = Step("Raw log to tables", "prepare", make_tables, prepare)
    run(step, options=list_changes(prepare))
    audit = AuditConfig(tables)
    run(Step("Prove the tables free of leakage", "audit", audit_tables, audit))

    info = open_table(f"{tables}/sequences", SequencesInfo).info
    extra = plan_extra(config, home, flow.extra) if flow.extra else None
    page = home / "compare.html"
    compare = CompareConfig(
        experiment=[f"{kind}/{name}"],
        html=str(page),
        tracking_uri=resolve_uri(None, str(home / "runs")),
    )
    steps = [
        *([extra] if extra else []),
        *plan_models(config, home, flow, info.requests, extra is not None),
        Step("Compare", "compare", compare_runs, compare),
    ]
    total = format_duration(sum(step.seconds for step in steps))
    print(f"\n{len(steps)} more steps, about {total} on two cores", flush=True)
    for number, step in enumerate(steps, 1):
        left = format_duration(sum(later.seconds for later in steps[number - 1 :]))
        title = f"[{number}/{len(steps)}] {step.title}"
        run(step._replace(title=title), f", about {left} left")
    print(f"\nDone in {format_duration(time.monotonic() - start_s)}.")
    if not config.data:
        print("The log is simulated: the metrics show that the flow works, no more.")
    print(
        "Models and epochs are small, to take minutes; the files in "
        f"{CONFIGS / kind} describe full-size trainings.\n  tables, runs  {home}\n"
        f"  look at it    {page.as_uri()}"
    )
    return page


def find_source(config: QuickstartConfig, home: Path) -> str:
    """Return the source file that is named after a log's folder, or write a guess.

    Args:
        config: Options of the quickstart.
        home: Output folder of the dataset, which is named after the log's folder.
    """
    from pipelines.prepare.suggest.suggest import suggest

    for stem in (f"{home.name}_{config.kind}", home.name):
        file = CONFIGS / "sources" / f"{stem}.yaml"
        if file.is_file():
            return str(file)
    guess = home / "source.yaml"
    if not guess.is_file():
        suggestion = suggest(str(config.data), config.kind)
        if suggestion.doubts:
            print(*suggestion.doubts, sep="\n")
            raise UserError(
                f"the lines above may be wrong for {config.data}, and change what is "
                f"trained",
                "guess",
            )
        home.mkdir(parents=True, exist_ok=True)
        guess.write_text(suggestion.text, encoding="utf-8")
    print(f"{guess} is a guess at the format of {config.data}; check and correct it:")
    print(guess.read_text(encoding="utf-8"))
    return str(guess)


def plan_extra(config: QuickstartConfig, home: Path, extra: str) -> Step | None:
    """Return the step that makes semantic IDs or text embeddings.

    It is None if the log has neither texts of items nor published semantic IDs.
    """
    tables, output = str(home / "tables"), str(home / extra)
    items = open_table(f"{tables}/items", ItemsInfo)
    title = "Items to semantic IDs"
    if items.info.texts and extra == "text":
        encode = EncodeConfig(tables=tables, output=output, encoder=config.encoder)
        return Step("Texts to embeddings", "encode", encode_texts, encode, 20)
    if items.info.texts:
        # Two levels and the conflict code suffice for few items: a quarter fewer tokens
        # than with three, and fewer epochs. A code has at least 8 items.
        tokenizer = {
            "name": "rqkmeans",
            "levels": 2 if items.rows <= 16_384 else 3,
            "codebook_size": min(256, 2 ** max(1, (items.rows // 8).bit_length() - 1)),
        }
        tokenize = TokenizeConfig(
            tables=tables, output=output, tokenizer=tokenizer, encoder=config.encoder
        )
        return Step(title, "tokenize", make_sids, tokenize, 20)
    raw = Path(config.data or "")
    published = sorted([*raw.glob("*index*.json*"), *raw.glob("published_sids.csv*")])
    if extra == "text" or not published:
        return None
    tokenize = TokenizeConfig(
        tables=tables,
        output=output,
        tokenizer="published",
        published=str(published[0].absolute()),
    )
    return Step("Published semantic IDs", "tokenize", make_sids, tokenize)


def plan_models(
    config: QuickstartConfig,
    home: Path,
    flow: Flow,
    requests: dict[str, int],
    has_extra: bool,
) -> Iterator[Step]:
    """Yield the trainings and evaluations of the flow's models.

    Args:
        config: Options of the quickstart.
        home: Output folder of the dataset.
        flow: Flow of the kind of log.
        requests: Number of requests by split.
        has_extra: Whether there are semantic IDs or text embeddings.
    """
    suffix = f"-{config.seed}" if config.seed != SEED else ""
    runs = home / "runs"
    for run in flow.models:
        model_class = registry.find(run.model)
        if model_class.extra_inputs.get(flow.extra) and not has_extra:
            print(f"{run.model} is skipped: the log names no texts of items")
            continue
        inputs = {"tables": str(home / "tables")}
        name = run.name or run.model
        epoch_s = run.ms / 1000 * requests["train"]
        epochs, fit = 1, {}
        if model_class.trains_by_gradient:
            epochs = config.epochs or min(run.epochs, max(1, int(TRAINING_S / epoch_s)))
            fit["max_epochs"] = epochs
            if 0 < flow.validate < requests["val"]:
                fit["eval_examples"] = flow.validate
        if model_class.trains_by_gradient or model_class.stops_early:
            name += suffix
            fit["seed"] = config.seed
        files = read_configs(str(CONFIGS / f"{file}.yaml") for file in run.configs)
        options = {**inputs, "storage": str(runs), "name": name, "fit": fit}
        verb = "Train"
        if run.teacher:
            verb = "Distil"
            options["model"] = {"teacher": f"{runs}/{run.teacher}{suffix}"}
        train = build(TrainConfig, merge(files, run.options, options))
        if has_extra and flow.extra in model_class.inputs_of(train.model):
            inputs[flow.extra] = str(home / flow.extra)
            train = build(TrainConfig, merge(files, run.options, options, inputs))
        seconds = STEP_S + epochs * epoch_s
        yield Step(f"{verb} {name}", "train", train_model, train, seconds)
        options = {"checkpoint": f"{runs}/{name}", **inputs, "split": "test"}
        evaluate = build(EvaluateConfig, options)
        rank_s = STEP_S + RANKING * run.ms / 1000 * requests["test"]
        title = f"Evaluate {name} on test"
        yield Step(title, "evaluate", measure_checkpoint, evaluate, rank_s)
        if model_class.ranks == "catalogue":
            title += ", known items left out"
            unseen = replace(evaluate, unseen=True)
            yield Step(title, "evaluate", measure_checkpoint, unseen, rank_s)
