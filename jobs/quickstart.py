"""Run all commands on a log within minutes, from tables to a comparison of models.

    python -m jobs.quickstart                   # next items: floors, SASRec, SID-MLP
    python -m jobs.quickstart --family search   # searches: floors, Base and QGS
    python -m jobs.quickstart --family actions  # a feed: floors, AttnLFA, AttnMVP
    python -m jobs.quickstart --data FOLDER     # a real log
    python -m jobs.quickstart --seed 43         # another seed, added to the comparison

Floors are models without training. Without `--data` the log is simulated, and the
results are labelled as simulated. The source file of a real log is `--source`, or
`FOLDER_FAMILY.yaml` or `FOLDER.yaml` in `jobs/configs/sources`, or a guess from the log
(`jobs.prepare --suggest`), which is written to `OUTPUT/FOLDER/source.yaml` for you to
correct. If the guess is ambiguous, such as between two columns of users, the quickstart
stops. The command of each step is printed before it runs, so that you can repeat it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn

from jobs import cli, simulate, time_budget, train
from jobs.options import merge_options
from jobs.time_budget import Probe, Schedule
from models.config import check_positive, pluralize
from models.storage.tables import UserError, join, read_manifest
from pipelines.data.kinds import KINDS
from pipelines.data.reading.log import load_source
from pipelines.data.suggestion.suggest import suggest

CONFIGS = Path(__file__).parent / "configs"

SEED = 42
"""Default seed of the simulated log and of trainings."""


@dataclass(frozen=True)
class ModelRun:
    """A model that a flow trains and evaluates."""

    model: str
    """Name of the model in the registry."""
    configs: tuple[str, ...]
    """Files in `jobs/configs`, without suffix; later files override earlier ones."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.train that override the files."""
    name: str = ""
    """Name of the run; by default the name of the model."""
    teacher: str = ""
    """Name of the run whose model is the teacher; empty if there is no teacher."""
    epochs: int = 20
    """Largest number of epochs, which the time budget may reduce."""


@dataclass(frozen=True)
class Flow:
    """Models and additional tables of one kind of log."""

    models: tuple[ModelRun, ...]
    """Models in the order of training; a teacher comes before its student."""
    extra: str = ""
    """Option that names the additional tables: `sids`, `text`, or empty for none."""
    events: int = 1
    """Events of the simulated log per event of `--events`."""
    simulate: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.simulate other than the size."""


SMALL_ACTIONS: dict[str, Any] = {
    "model": {"num_layers": 2},
    "fit": {"batch_size": 16, "lr": 0.0005, "patience": 0},
}
"""Options of small models of actions."""
NO_ACTIONS = merge_options(SMALL_ACTIONS, {"model": {"action_weight": 0}})
"""Options of a small model of actions that ignores the actions in the history."""
SEARCH_STEPS = {
    "model": {"batch_unit": "requests"},
    "fit": {
        "batch_size": 512,
        "optimizer": "adamw",
        "lr": 0.002,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "warmup_steps": 10_000,
        "warmup_share": 0.05,
        "patience": 0,
    },
}
"""Options of Base that equal search/history.yaml, so that it differs from QGS only in
the history."""
ONE_THREAD = {"ray": {"threads": 1}}
"""Option of models whose steps are so small that a second thread slows them down."""
FLOWS = {
    "retrieval": Flow(
        (
            ModelRun("popularity", ("popularity",)),
            ModelRun("own_items", ("own_items",)),
            ModelRun("item_knn", ("item_knn",)),
            ModelRun("ease", ("ease",)),
            ModelRun("sasrec", ("sasrec",), ONE_THREAD, epochs=60),
            ModelRun("tiger", ("tiger_small",), ONE_THREAD, epochs=35),
            ModelRun("sid_mlp", ("sid_mlp_small",), ONE_THREAD, teacher="tiger"),
        ),
        extra="sids",
    ),
    "search": Flow(
        (
            ModelRun("pair_ctr", ("search/pair_ctr",)),
            ModelRun("item_ctr", ("search/item_ctr",)),
            ModelRun("log_order", ("search/log_order",)),
            ModelRun("boosted", ("search/boosted",)),
            ModelRun("base", ("search/base",), SEARCH_STEPS, epochs=6),
            ModelRun("qgs", ("qgs", "search/small", "search/history"), epochs=6),
        ),
        extra="text",
        simulate={"taste": "class", "disliked_click": 0.05},
    ),
    "actions": Flow(
        (
            ModelRun("base_rate", ("actions/base_rate",)),
            ModelRun("item_rate", ("actions/item_rate",)),
            ModelRun("boosted_actions", ("actions/boosted",)),
            ModelRun(
                "interleaved",
                ("attn_mvp", "actions/interleaved"),
                SMALL_ACTIONS,
                epochs=12,
            ),
            ModelRun(
                "attn_lfa", ("attn_mvp", "actions/attn_lfa"), SMALL_ACTIONS, epochs=12
            ),
            ModelRun("attn_mvp", ("attn_mvp",), SMALL_ACTIONS, epochs=12),
            ModelRun(
                "attn_mvp",
                ("attn_mvp", "actions/attn_mvp_no_lfa"),
                NO_ACTIONS,
                name="without_actions",
                epochs=12,
            ),
        ),
        events=2,
    ),
}
"""Flows by kind of request."""


@dataclass
class Config:
    """Options of jobs.quickstart."""

    family: Literal[tuple(FLOWS)] | None = None  # type: ignore[valid-type]
    """Family of models: `retrieval` recommends the next item of a catalogue, `search`
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
    epochs: int | None = None
    """Epochs of each model; by default chosen so that all commands take about ten
    minutes on this machine."""
    users: int = 1500
    """Users of the simulated log."""
    items: int = 400
    """Items of the simulated log."""
    events: int = 15000
    """Events or searches of the simulated log; a feed has twice as many
    impressions."""
    seed: int = SEED
    """Seed of the trainings. Names of runs contain a seed other than 42, and the
    comparison averages over seeds."""

    def __post_init__(self) -> None:
        check_positive(self, ["epochs", "users", "items", "events"])


class Steps:
    """Runner of jobs in this process, which prints the number and command of each."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_started = 0
        self.started = time.monotonic()

    def run(self, title: str, job: str, options: dict[str, Any]) -> Any:
        """Print the number, title and command of a step, and run its job.

        Args:
            title: Title of the step.
            job: Name of the job, such as `train`.
            options: Nested options of the job.
        """
        self.num_started += 1
        elapsed = time.monotonic() - self.started
        print(
            f"\n[{self.num_started}/{self.num_steps}] {title}   "
            f"({elapsed:.0f} s so far)",
            flush=True,
        )
        return cli.run_job(job, options)


@dataclass(frozen=True)
class Folders:
    """Paths that a flow reads and writes."""

    dataset: str
    """Name of the dataset."""
    family: str
    """Kind of the log: retrieval, search or actions."""
    source: str
    """Source file that describes the log."""
    raw: Path
    """Folder of the raw log."""
    tables: str
    """Folder of the tables."""
    extra: str
    """Folder of semantic IDs or text embeddings."""
    runs: str
    """Folder of the runs."""


@dataclass(frozen=True)
class Training:
    """Name, inputs and options of one training."""

    name: str
    """Name of the run."""
    inputs: dict[str, str]
    """Options of jobs.train and jobs.evaluate that name the model's input folders."""
    options: dict[str, Any]
    """Options of jobs.train, without the options that a `Schedule` adds."""


def plan_training(config: Config, folders: Folders, model_run: ModelRun) -> Training:
    """Return the name, inputs and options with which a model is trained."""
    from models import registry

    model_class = registry.find(model_run.model)
    seed_suffix = f"-{config.seed}" if config.seed != SEED else ""
    depends_on_seed = model_class.trains_by_gradient or model_class.stops_early
    name = model_run.name or model_run.model
    if depends_on_seed:
        name += seed_suffix
    inputs = {"tables": folders.tables}
    if FLOWS[folders.family].extra:
        inputs |= dict.fromkeys(model_class.extra_inputs, folders.extra)
    options: dict[str, Any] = {
        "config": [str(CONFIGS / f"{file}.yaml") for file in model_run.configs],
        **inputs,
        "storage": folders.runs,
        "name": name,
    }
    options = merge_options(options, model_run.options)
    if model_run.teacher:
        teacher = f"{folders.runs}/{model_run.teacher}{seed_suffix}"
        options = merge_options(options, {"model": {"teacher": teacher}})
    if depends_on_seed:
        options = merge_options(options, {"fit": {"seed": config.seed}})
    return Training(name, inputs, options)


def train_and_evaluate(
    config: Config,
    folders: Folders,
    steps: Steps,
    model_run: ModelRun,
    schedule: Schedule,
) -> None:
    """Train a model, and evaluate it on the test split.

    A model that ranks the catalogue is also evaluated without the items of the history.

    Args:
        config: Options of the quickstart.
        folders: Paths of the flow.
        steps: Runner of the jobs.
        model_run: Model with its config files and options.
        schedule: Epochs of the training and share of users of the evaluation.
    """
    from models import registry

    training = plan_training(config, folders, model_run)
    name = training.name
    options = merge_options(training.options, schedule.training.get(name, {}))
    verb = "Distil" if model_run.teacher else "Train"
    steps.run(f"{verb} {name}", "train", options)
    evaluate = {
        "checkpoint": f"{folders.runs}/{name}",
        **schedule.evaluation,
        **training.inputs,
        "split": "test",
    }
    steps.run(f"Evaluate {name} on test", "evaluate", evaluate)
    if registry.find(model_run.model).ranks == "catalogue":
        title = f"Evaluate {name} on test, known items left out"
        steps.run(title, "evaluate", {**evaluate, "unseen": True})


def count_steps(model_run: ModelRun) -> int:
    """Return the number of commands that train and evaluate a model."""
    from models import registry

    return 3 if registry.find(model_run.model).ranks == "catalogue" else 2


def make_schedule(
    config: Config, folders: Folders, models: Sequence[ModelRun], steps: Steps
) -> Schedule:
    """Choose the epochs of each model, and print the choice.

    `--epochs` sets them. Otherwise they are read from the schedule of an earlier start
    of the same flow, or chosen by the time budget.

    Args:
        config: Options of the quickstart.
        folders: Paths of the flow.
        models: Models of the flow, also models without training.
        steps: Runner of the jobs, which knows the elapsed time.
    """
    from models import registry

    gradient_models = [
        model_run
        for model_run in models
        if registry.find(model_run.model).trains_by_gradient
    ]
    trainings = [plan_training(config, folders, model) for model in gradient_models]
    if config.epochs or not trainings:
        epochs = {"fit": {"max_epochs": config.epochs}}
        return Schedule({training.name: epochs for training in trainings})
    tables_hash = read_manifest(join(folders.tables, "sequences"), "sequences").hash
    file = Path(folders.runs).parent / f"schedule-{config.seed}.json"
    earlier = Schedule.read(str(file), tables_hash)
    if earlier and all(training.name in earlier.training for training in trainings):
        print(f"\nEpochs are read from the earlier schedule {file}", flush=True)
        return earlier
    print("\nTiming some steps of each model to choose its epochs", flush=True)
    probes = time_models(gradient_models, trainings)
    schedule, lines = time_budget.make_schedule(
        probes,
        [model_run.epochs for model_run in gradient_models],
        split_sizes(folders.tables),
        others=len(models) - len(gradient_models),
        elapsed_s=time.monotonic() - steps.started,
    )
    for line in lines:
        print(line, flush=True)
    schedule.write(str(file), tables_hash)
    return schedule


def time_models(
    models: Sequence[ModelRun], trainings: Sequence[Training]
) -> dict[str, Probe]:
    """Time some training steps of each model, with untrained teachers for students.

    Args:
        models: Models that are trained by gradient, teachers before their students.
        trainings: Options of the models, in this order.

    Returns:
        Measured speeds by the name of the run.
    """
    probes = {}
    teachers = {model_run.teacher for model_run in models}
    with TemporaryDirectory(prefix="trieline-") as scratch:
        for model_run, training in zip(models, trainings, strict=True):
            options = training.options
            if model_run.teacher:
                teacher = f"{scratch}/{model_run.teacher}"
                options = merge_options(options, {"model": {"teacher": teacher}})
            save = None
            if model_run.model in teachers:
                save = f"{scratch}/{model_run.model}"
            train_config = cli.config_from_options(train, options)
            probes[training.name] = time_budget.probe(train_config, save)
    return probes


def split_sizes(tables: str) -> time_budget.SplitSizes:
    """Return the number of users, training requests and test requests of the tables."""
    users = read_manifest(join(tables, "sequences"), "sequences").rows
    counts = count_requests(tables)
    return time_budget.SplitSizes(users, counts["train"], counts["test"])


def count_requests(tables: str) -> dict[str, int]:
    """Return the number of requests per split; of impressions in an actions log."""
    info = read_manifest(join(tables, "sequences"), "sequences").info
    return dict(info.get("requests") or info["events"])


def locate(config: Config) -> Folders:
    """Return the paths of a flow.

    Raises:
        UserError: if the log or its source file is missing, the guess of a source file
            is ambiguous, or the source file is of another family.
    """
    if config.source and not config.data:
        raise UserError(
            f"--source is {config.source}, which describes a real log; give its folder "
            f"with --data"
        )
    if "://" in config.output:
        raise UserError(
            f"--output is {config.output}; the quickstart writes to a local folder, "
            f"give a local path"
        )
    if config.data:
        name = Path(config.data).resolve().name
    else:
        name = KINDS[config.family or "retrieval"].simulated_source
    home = Path(config.output).absolute() / name
    source = config.source or find_source(config, name, home)
    if not Path(source).is_file():
        raise UserError(
            f"the source file {source} for {config.data} does not exist; remove "
            f"--source to get a suggestion"
        )
    kind = load_source(source)[1].get("kind", "retrieval")
    if config.family and kind != config.family:
        raise UserError(
            f"{source} makes tables of kind '{kind}', not '{config.family}'; give "
            f"--family {kind}"
        )
    return Folders(
        dataset=name,
        family=kind,
        source=source,
        raw=Path(config.data).absolute() if config.data else home / "raw",
        tables=str(home / "tables"),
        extra=str(home / (FLOWS[kind].extra or "sids")),
        runs=str(home / "runs"),
    )


def find_source(config: Config, name: str, home: Path) -> str:
    """Return the source file that is named after a log's folder, or write a suggestion.

    Args:
        config: Options of the quickstart.
        name: Name of the log's folder.
        home: Output folder of the dataset.

    Raises:
        UserError: if the suggestion is ambiguous.
    """
    stems = [f"{name}_{config.family}", name] if config.family else [name]
    for stem in stems:
        file = CONFIGS / "sources" / f"{stem}.yaml"
        if file.is_file():
            return str(file)
    guess = home / "source.yaml"
    if not guess.is_file():
        suggestion = suggest(str(config.data), config.family)
        if suggestion.doubts:
            refuse_ambiguous(config, name, suggestion.doubts)
        home.mkdir(parents=True, exist_ok=True)
        guess.write_text(suggestion.text)
    print(f"{guess} is a guess at the format of {config.data}; check and correct it:")
    for line in guess.read_text().splitlines():
        print(f"    {line}", flush=True)
    return str(guess)


def refuse_ambiguous(config: Config, name: str, doubts: list[str]) -> NoReturn:
    """Print the ambiguous lines of a suggested source file, and raise UserError.

    Args:
        config: Options of the quickstart.
        name: Name of the dataset.
        doubts: Lines that may be wrong and change what is trained.
    """
    print(f"The format of {config.data} is ambiguous:")
    for doubt in doubts:
        print(f"    {doubt}", flush=True)
    file = f"{name}.yaml"
    kind = {"kind": config.family} if config.family else {}
    write = cli.command_line(
        "jobs.prepare", suggest=str(config.data), **kind, output=file
    )
    changed = {
        option.name: getattr(config, option.name)
        for option in fields(config)
        if getattr(config, option.name) != option.default
    }
    again = cli.command_line("jobs.quickstart", **{**changed, "source": file})
    raise UserError(
        f"{pluralize(len(doubts), 'line')} of the source file for {config.data} may be "
        f"wrong and would change what is trained; write the file with `{write}`, check "
        f"these lines, and run `{again}`"
    )


def find_published_sids(folder: Path) -> Path | None:
    """Return the file of published semantic IDs in a raw log's folder, or None."""
    files = sorted([*folder.glob("*index*.json*"), *folder.glob("published_sids.csv*")])
    return files[0] if files else None


def make_extra(config: Config, folders: Folders, steps: Steps) -> bool:
    """Make the semantic IDs or text embeddings of a flow.

    Returns:
        False if the log has neither texts of items nor published semantic IDs.
    """
    output = {"tables": folders.tables, "output": folders.extra}
    items = read_manifest(join(folders.tables, "items"), "items")
    has_texts = bool(items.info["texts"])
    if FLOWS[folders.family].extra == "text":
        if has_texts:
            encode = {"encoder": config.encoder, **output}
            steps.run("Texts to embeddings", "encode", encode)
        return has_texts
    if has_texts:
        # Two levels and the conflict code suffice for few items: a quarter fewer tokens
        # than with three, and fewer epochs.
        levels = 2 if items.rows <= 16_384 else 3
        size = {"levels": levels, "codebook_size": codebook_size(items.rows)}
        tokenize = {
            "encoder": config.encoder,
            "tokenizer": "rqkmeans",
            "rqkmeans": size,
            **output,
        }
        steps.run("Items to semantic IDs", "tokenize", tokenize)
        return True
    published = find_published_sids(folders.raw) if config.data else None
    if not published:
        return False
    tokenize = {"tokenizer": "published", "published": str(published), **output}
    steps.run("Published semantic IDs", "tokenize", tokenize)
    return True


def codebook_size(num_items: int) -> int:
    """Return the number of codes per level for a number of items.

    It is the largest power of two from 2 to 256 with at least 8 items per code.
    """
    return min(256, 2 ** max(1, (num_items // 8).bit_length() - 1))


def simulate_log(config: Config, folders: Folders, steps: Steps) -> None:
    """Run jobs.simulate for the raw log of a family."""
    flow = FLOWS[folders.family]
    options = {
        "output": str(folders.raw),
        "users": config.users,
        "items": config.items,
        "events": config.events * flow.events,
        **flow.simulate,
        "seed": SEED,
    }
    if folders.family != simulate.Config.kind:
        options = {"kind": folders.family, **options}
    steps.run("Simulate a raw log", "simulate", options)


def prepare_tables(folders: Folders, steps: Steps) -> None:
    """Make tables of the raw log, and audit the tables.

    Raises:
        UserError: if the validation or test split is empty.
    """
    prepare = {
        "source": folders.source,
        "input": str(folders.raw),
        "output": folders.tables,
    }
    steps.run("Raw log to tables", "prepare", prepare)
    sizes = count_requests(folders.tables)
    empty = [name for name in ("val", "test") if not sizes[name]]
    if empty:
        raise UserError(
            f"with {folders.source} the split {' and '.join(empty)} is empty; see the "
            f"warnings above"
        )
    audit = {"tables": folders.tables}
    steps.run("Prove the tables free of leakage", "audit", audit)


def run(config: Config) -> None:
    """Run the flow of a family, and print where its results are."""
    cli.say_loading("torch", "ray", "mlflow")
    folders = locate(config)  # reports an invalid log before the slow imports
    from pipelines.tracking import resolve_uri

    flow = FLOWS[folders.family]
    cli.preflight(output=config.output)
    num_steps = 3 + sum(count_steps(model_run) for model_run in flow.models)
    if flow.extra:
        num_steps += 1
    if not config.data:
        num_steps += 1
    steps = Steps(num_steps)
    if not config.data:
        simulate_log(config, folders, steps)
    prepare_tables(folders, steps)
    has_extra = bool(flow.extra) and make_extra(config, folders, steps)
    models = flow.models
    if flow.extra and not has_extra:
        models = drop_models_with_extra(flow, folders, steps)
    schedule = make_schedule(config, folders, models, steps)
    for model_run in models:
        train_and_evaluate(config, folders, steps, model_run, schedule)
    page = Path(folders.runs).parent / "compare.html"
    compare = {
        "experiment": [f"{folders.family}/{folders.dataset}"],
        "html": str(page),
        "tracking_uri": resolve_uri(None, folders.runs),
    }
    steps.run("Compare", "compare", compare)
    simulated = ""
    if not config.data:
        simulated = (
            " The log is simulated: the metrics show that the flow works, nothing more."
        )
    print(f"\nDone in {time.monotonic() - steps.started:.0f} s.{simulated}")
    print(
        "Models and epochs are small, to take minutes; the config files in the "
        "commands describe full-size trainings."
    )
    print(f"  tables        {folders.tables}")
    if has_extra:
        print(f"  {flow.extra:<12}  {folders.extra}")
    print(f"  checkpoints   {folders.runs}")
    print(f"  look at it    {page.as_uri()}")
    serve = (
        f"python3 -m http.server 8000 --bind localhost --directory "
        f"{shlex.quote(str(page.parent))}"
    )
    print(
        f"  over ssh      ssh -L 8000:localhost:8000 HOST {serve}, then "
        f"http://localhost:8000/{page.name}"
    )


def drop_models_with_extra(
    flow: Flow, folders: Folders, steps: Steps
) -> tuple[ModelRun, ...]:
    """Return the models that need neither semantic IDs nor embeddings.

    The number of steps is reduced by the step of `make_extra` and the steps of the
    skipped models. A printed note explains why models are skipped.

    Args:
        flow: Flow of a family that has models with an extra input.
        folders: Folders of the flow.
        steps: Steps of the flow, whose number is changed.
    """
    from models import registry

    models = tuple(
        model_run
        for model_run in flow.models
        if flow.extra not in registry.find(model_run.model).extra_inputs
    )
    skipped_steps = 1  # of make_extra
    for model_run in flow.models:
        if model_run not in models:
            skipped_steps += count_steps(model_run)
    steps.num_steps -= skipped_steps
    extra = {"sids": "semantic IDs", "text": "embeddings"}[flow.extra]
    print(
        f"note: {folders.source} names no texts of items, which {extra} require; "
        f"models that use {extra} are skipped"
    )
    return models


if __name__ == "__main__":
    cli.main(run, Config)
