"""Run all steps on a log within minutes, from tables to a comparison of models.

run_quickstart(QuickstartConfig(kind="search"))
run_quickstart(QuickstartConfig(data="shop", source="shop.yaml"))

`jobs/configs/quickstart.yaml` has the models of each kind of log. As many models are
trained at once as there are cores, each in a process with one thread. Packages are
imported when the flow runs, so that the command prints its first line early.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import redirect_stdout
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from core.errors import UserError, format_duration
from core.options import (
    STRICT,
    Seed,
    build,
    changed,
    merge,
    merge_config_files,
    read_yaml,
    to_words,
)
from models import registry
from pipelines import tracking
from pipelines.comparison.config import CompareConfig
from pipelines.encode.config import EncodeConfig, Encoder, TokenizeConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.training.config import TrainConfig

if TYPE_CHECKING:
    from core.schemas import ItemsInfo
    from core.tables import Table

CONFIGS = Path(__file__).parents[1] / "jobs/configs"
FLOWS = CONFIGS / "quickstart.yaml"

SEED = 42
"""Default seed of the simulated log and of trainings."""

TRAINING_S = 120
"""Seconds of a model's training on two quiet cores, unless one epoch takes longer."""


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
    checkpoints: dict[str, str] = field(default_factory=dict)
    """Names of the runs whose checkpoints are options of the model, such as its
    `teacher`."""
    epochs: PositiveInt = 1
    """Largest number of epochs."""
    ms: float = 0.05
    """Milliseconds per training request and epoch on two quiet cores."""


@dataclass(config=STRICT, frozen=True)
class Flow:
    """Models and additional tables of one kind of log."""

    models: list[ModelRun]
    """Models in the order in which they start; one that needs checkpoints of others
    starts after them."""
    extra: str = ""
    """Option that names the additional tables: `sids`, `text`, or empty for none."""
    validate: int = 0
    """Largest number of requests that a validation ranks; 0 for all."""
    simulate: dict[str, int | float | str] = field(default_factory=dict)
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
    output: Annotated[str, Field(pattern="^[^:]+$")] = "runs"
    """Folder of this machine for all output, with a subfolder per dataset."""
    encoder: Encoder = "tfidf"
    """Text encoder: tfidf, minilm (`make encoder` installs it), or the name or path of
    a transformers model."""
    epochs: PositiveInt | None = None
    """Epochs of each model; by default chosen by the number of requests, so that all
    commands take about ten minutes on two cores."""
    simulate: dict[str, int | float | str] = field(default_factory=dict)
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


class ModelSteps(NamedTuple):
    """The training and the evaluations of a model."""

    name: str
    after: set[str]
    """Names of the models that are trained before."""
    steps: list[Step]


def run_quickstart(config: QuickstartConfig) -> Path:
    """Run the flow of a kind of log, and return the page of the comparison."""
    from pipelines.comparison.report import compare_runs
    from pipelines.prepare.audit.rules import audit_tables
    from pipelines.prepare.kinds.registry import KINDS, simulate_log
    from pipelines.prepare.prepare import build_options, make_tables
    from pipelines.prepare.reading.log import load_source
    from pipelines.prepare.settings.simulation import SimulateOptions

    began = time.monotonic()
    name = KINDS[config.kind or "retrieval"].simulated_source
    if config.data:
        name = Path(config.data).resolve().name
    home = Path(config.output).absolute() / name
    source = config.source or find_source(config, home)
    kind = config.kind or load_source(source)[1].get("kind", "retrieval")
    flow = build(Flow, read_yaml(str(FLOWS))[kind], f"{kind}.")
    raw, tables = config.data or str(home / "raw"), str(home / "tables")
    uri = tracking.resolve_uri(None, str(home / "runs"))
    tracking.connect(uri)

    if taken := {"kind", "output"} & config.simulate.keys():
        raise UserError(f"the quickstart sets simulate.{min(taken)}")
    if not config.data:
        options = {"kind": kind, **flow.simulate, **config.simulate, "output": raw}
        announce("Simulate a raw log", "simulate", options, began)
        simulate_log(build(SimulateOptions, options, "simulate."))
    options = {"source": source, "input": raw, "output": tables, "kind": kind}
    announce("Raw log to tables", "prepare", options, began)
    prepared = make_tables(build_options(options))
    announce("Prove the tables free of leakage", "audit", {"tables": tables}, began)
    audit_tables(tables)

    extra = plan_extra(config, home, flow.extra, prepared.items)
    requests = prepared.sequences.info.requests
    models = [*plan_models(config, home, flow, requests, bool(extra))]
    total = len(extra) + len(models) + 1
    run_steps(extra, f"[1/{total}]", began)
    labels = [f"[{number}/{total}]" for number in range(len(extra) + 1, total)]
    run_models(models, labels, home / "logs", began)
    page = home / "compare.html"
    compare = CompareConfig(f"{kind}/{name}", html=str(page), tracking_uri=uri)
    steps = [Step("Compare", "compare", compare_runs, compare)]
    run_steps(steps, f"[{total}/{total}]", began)
    print(f"\nDone in {format_duration(time.monotonic() - began)}.")
    if not config.data:
        print("The log is simulated: the metrics show that the flow works, no more.")
    print(
        "Models and epochs are small, to take minutes; the files in "
        f"{CONFIGS / kind} describe full-size trainings.\n  tables, runs  {home}\n"
        f"  look at it    {page.as_uri()}"
    )
    return page


def announce(title: str, job: str, options: dict[str, Any], began: float) -> None:
    """Print the title and the command of a step, and the time since `began`."""
    elapsed = format_duration(time.monotonic() - began)
    print(f"\n{title}   ({elapsed} so far)")
    print(f"$ python -m jobs.{job} {shlex.join(to_words(options))}")


def run_steps(steps: Sequence[Step], label: str, began: float) -> None:
    """Run steps one after the other, each after its title with the label."""
    for step in steps:
        announce(f"{label} {step.title}", step.job, changed(step.config), began)
        step.run(step.config)


def run_models(
    models: Sequence[ModelSteps], labels: Sequence[str], logs: Path, began: float
) -> None:
    """Run the steps of models in parallel, in at most one process per core.

    A model's lines are printed when its steps have ended. If a step fails or the
    command is stopped, the other processes end.

    Args:
        models: Models, each after those that it needs.
        labels: Label of each model's steps.
        logs: Folder of a file per model with its lines.
        began: Start of the command, by `time.monotonic`.
    """
    logs.mkdir(exist_ok=True)
    processes = min(len(models), len(os.sched_getaffinity(0)))
    print(f"\n{processes} models at once; their progress is in {logs}")
    waiting = dict(zip(labels, models, strict=True))
    running: dict[Future[None], ModelSteps] = {}
    trained: set[str] = set()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, start_worker) as pool:
        try:
            while waiting or running:
                for label, model in [*waiting.items()]:
                    if model.after <= trained:
                        log = logs / f"{model.name}.txt"
                        future = pool.submit(
                            run_in_process, model.steps, label, began, log
                        )
                        running[future] = model
                        del waiting[label]
                # short waits, since a signal does not end a wait
                ended, _ = wait(running, 1, FIRST_COMPLETED)
                for future in ended:
                    name = running.pop(future).name
                    print(end=(logs / f"{name}.txt").read_text(encoding="utf-8"))
                    future.result()
                    trained.add(name)
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def start_worker() -> None:
    """Leave Ctrl-C to the main process, end with it, and use one thread."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def end_with_parent() -> None:
    """End this process when the main process has ended, for whatever reason."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def interrupt(*signal_and_frame: object) -> None:
    """Raise KeyboardInterrupt, at the first signal only."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_in_process(steps: Sequence[Step], label: str, began: float, log: Path) -> None:
    """Run steps in this process of the pool, and redirect their output to `log`."""
    signal.signal(signal.SIGTERM, interrupt)  # a training ends its MLflow run
    try:
        file = log.open("w", encoding="utf-8", buffering=1)
        with file, redirect_stdout(file):
            run_steps(steps, label, began)
    except KeyboardInterrupt:
        os._exit(1)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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


def plan_extra(
    config: QuickstartConfig, home: Path, extra: str, items: Table[ItemsInfo]
) -> list[Step]:
    """Return the step that makes semantic IDs or text embeddings, or None.

    There is none for a log with neither texts of items nor published semantic IDs.
    """
    from pipelines.encode.extend import make_sids
    from pipelines.encode.texts import encode_log

    raw = Path(config.data or "")
    folders: dict[str, Any] = {"tables": f"{home}/tables", "output": f"{home}/{extra}"}
    published = sorted([*raw.glob("*index*.json*"), *raw.glob("published_sids.csv*")])
    if extra == "text" and items.info.texts:
        encode = EncodeConfig(**folders, encoder=config.encoder)
        return [Step("Texts to embeddings", "encode", encode_log, encode)]
    if extra == "sids" and items.info.texts:
        # Two levels and the conflict code suffice for few items: a quarter fewer tokens
        # than with three, and fewer epochs. A code has at least 8 items.
        tokenizer = {
            "name": "rqkmeans",
            "levels": 2 if items.rows <= 16_384 else 3,
            "codebook_size": min(256, 2 ** max(1, (items.rows // 8).bit_length() - 1)),
        }
        tokenize = TokenizeConfig(
            **folders, tokenizer=tokenizer, encoder=config.encoder
        )
    elif extra == "sids" and published:
        file = str(published[0].absolute())
        tokenize = TokenizeConfig(**folders, tokenizer="published", published=file)
    else:
        return []
    return [Step("Items to semantic IDs", "tokenize", make_sids, tokenize)]


def plan_models(
    config: QuickstartConfig,
    home: Path,
    flow: Flow,
    requests: dict[str, int],
    has_extra: bool,
) -> Iterator[ModelSteps]:
    """Yield the training and the evaluations of each of the flow's models.

    Args:
        config: Options of the quickstart.
        home: Output folder of the dataset.
        flow: Flow of the kind of log.
        requests: Number of requests by split.
        has_extra: Whether there are semantic IDs or text embeddings.
    """
    from pipelines.evaluation.ranking import measure_checkpoint
    from pipelines.training.run import run_training

    suffix = f"-{config.seed}" if config.seed != SEED else ""
    runs = home / "runs"
    for run in flow.models:
        model_class = registry.find(run.model)
        if model_class.extra_inputs.get(flow.extra) and not has_extra:
            print(f"{run.model} is skipped: the log names no texts of items")
            continue
        inputs: dict[str, Any] = {"tables": str(home / "tables")}
        name = run.name or run.model
        fit = {}
        if model_class.trains_by_gradient:
            in_time = int(TRAINING_S / (run.ms / 1000 * requests["train"]))
            fit["max_epochs"] = config.epochs or min(run.epochs, max(1, in_time))
            if 0 < flow.validate < requests["val"]:
                fit["eval_examples"] = flow.validate
        if model_class.trains_by_gradient or model_class.stops_early:
            name += suffix
            fit["seed"] = config.seed
        files = [str(CONFIGS / f"{file}.yaml") for file in run.configs]
        base = merge_config_files({"config": files})
        options = {**inputs, "storage": str(runs), "name": name, "fit": fit}
        options["ray"] = {"threads": 1}
        options["model"] = {
            option: f"{runs}/{other}{suffix}"
            for option, other in run.checkpoints.items()
        }
        verb = "Distil" if "teacher" in run.checkpoints else "Train"
        train = build(TrainConfig, merge(base, run.options, options))
        if has_extra and flow.extra in model_class.inputs_of(train.model):
            inputs[flow.extra] = str(home / flow.extra)
            train = replace(train, **inputs)
        steps = [Step(f"{verb} {name}", "train", run_training, train)]
        evaluate = EvaluateConfig(checkpoint=train.folder, split="test", **inputs)
        title = f"Evaluate {name} on test"
        steps.append(Step(title, "evaluate", measure_checkpoint, evaluate))
        if model_class.ranks == "catalogue":
            title += ", known items left out"
            unseen = replace(evaluate, unseen=True)
            steps.append(Step(title, "evaluate", measure_checkpoint, unseen))
        yield ModelSteps(run.name or run.model, set(run.checkpoints.values()), steps)
