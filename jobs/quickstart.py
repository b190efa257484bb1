"""The whole flow in minutes: a log, tables, audit, the models of a family, compared.

    python -m jobs.quickstart                     # next items: models without training, SASRec, TIGER, SID-MLP
    python -m jobs.quickstart --family search     # searches: text embeddings, boosted trees, Base and QGS
    python -m jobs.quickstart --family actions    # a feed: interleaved, AttnLFA, AttnMVP; without actions
    python -m jobs.quickstart --data FOLDER       # a real log
    python -m jobs.quickstart --seed 43           # the same with another seed, beside what is there

Without `--data` it simulates a small log (`results are labelled simulated`). The
mapping of a real one is the file that `--source` names, else
`jobs/configs/sources/FOLDER_FAMILY.yaml` or `FOLDER.yaml` there, else a first one that
is guessed from the log (`jobs.prepare --suggest`) and written to
`OUTPUT/FOLDER/source.yaml`, to be corrected. It stops where the guess is in doubt, such
as about which of two columns is the user. Every step is one of the other commands and
is printed as such before it runs, so each can be repeated on its own.
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
from jobs.time_budget import Schedule
from models.config import check_positive, pluralize
from models.storage.input_folders import require_folders
from models.storage.tables import UserError, join, read_manifest
from models.text.text_encoder import check_encoder
from pipelines.data.kinds import KINDS
from pipelines.data.reading.log import load_source
from pipelines.data.suggestion.suggest import suggest

CONFIGS = Path(__file__).parent / "configs"

SEED = 42
"""Of the simulated log, and of trainings."""


@dataclass(frozen=True)
class Trained:
    """A model that is trained and evaluated."""

    model: str
    """Its name in the registry."""
    configs: tuple[str, ...]
    """Files under `jobs/configs`, without their ending; later ones win."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.train that win over the files."""
    name: str = ""
    """Name of the run; by default the model's."""
    teacher: str = ""
    """The run of this flow that it learns from."""
    epochs: int = 20
    """Most epochs; fewer where the time budget does not hold them."""


@dataclass(frozen=True)
class Flow:
    """Models and further tables of a kind of log."""

    models: tuple[Trained, ...]
    """In the order of training; a teacher comes before its student."""
    extra: str = ""
    """Option that names the further tables: `sids`, `text` or nothing."""
    events: int = 1
    """Events of the simulated log per event of `--events`."""
    simulate: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.simulate beside its size."""


SMALL: dict[str, Any] = {
    "model": {"num_layers": 2},
    "fit": {"batch_size": 16, "lr": 0.0005, "patience": 0},
}
NO_ACTIONS = merge_options(SMALL, {"model": {"action_weight": 0}})
# Base in the steps of search/history.yaml, so that it lacks only the history beside QGS
STEPS = {
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
# small steps lose more to a second thread than it takes from them
ONE_THREAD = {"ray": {"threads": 1}}
FLOWS = {
    "retrieval": Flow(
        (
            Trained("popularity", ("popularity",)),
            Trained("own_items", ("own_items",)),
            Trained("item_knn", ("item_knn",)),
            Trained("ease", ("ease",)),
            Trained("sasrec", ("sasrec",), ONE_THREAD, epochs=60),
            Trained("tiger", ("tiger_small",), ONE_THREAD, epochs=35),
            Trained("sid_mlp", ("sid_mlp_small",), ONE_THREAD, teacher="tiger"),
        ),
        extra="sids",
    ),
    "search": Flow(
        (
            Trained("pair_ctr", ("search/pair_ctr",)),
            Trained("item_ctr", ("search/item_ctr",)),
            Trained("log_order", ("search/log_order",)),
            Trained("boosted", ("search/boosted",)),
            Trained("base", ("search/base",), STEPS, epochs=6),
            Trained("qgs", ("qgs", "search/small", "search/history"), epochs=6),
        ),
        extra="text",
        simulate={"taste": "class", "disliked_click": 0.05},
    ),
    "actions": Flow(
        (
            Trained("base_rate", ("actions/base_rate",)),
            Trained("item_rate", ("actions/item_rate",)),
            Trained("boosted_actions", ("actions/boosted",)),
            Trained(
                "interleaved", ("attn_mvp", "actions/interleaved"), SMALL, epochs=12
            ),
            Trained("attn_lfa", ("attn_mvp", "actions/attn_lfa"), SMALL, epochs=12),
            Trained("attn_mvp", ("attn_mvp",), SMALL, epochs=12),
            Trained(
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
"""By kind of request."""


@dataclass
class Config:
    """Options of jobs.quickstart."""

    family: Literal[tuple(FLOWS)] | None = None  # type: ignore[valid-type]
    """Which models: `retrieval` finds the next item in a catalogue, `search` ranks what
    a search shows, `actions` predicts what a user will do with an item; by default what
    the mapping file is of, and without one retrieval."""
    data: str | None = None
    """Folder of a real raw log; without it a log is simulated."""
    source: str | None = None
    """Mapping file of the real log; by default the one named after the folder, else a
    guess."""
    output: str = "runs"
    """Folder for everything that is made: one folder below it per dataset."""
    encoder: str = "tfidf"
    """Encoder of the texts: tfidf, minilm (make encoder), or a transformers name or
    path."""
    epochs: int | None = None
    """Epochs of each model; by default what fits some ten minutes in all on this
    machine, by timed steps of each."""
    users: int = 1500
    """Users of the simulated log."""
    items: int = 400
    """Items of the simulated log."""
    events: int = 15000
    """Events or searches of the simulated log; impressions of a feed are twice as
    many."""
    seed: int = SEED
    """Seed of the trainings; runs of another one than 42 have it in their names, and
    join the comparison."""

    def __post_init__(self) -> None:
        check_positive(self, ["epochs", "users", "items", "events"])
        check_encoder(self.encoder)


class Steps:
    """Runs jobs in this process one after the other, each printed as the line to repeat it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.number = 0
        self.started = time.monotonic()

    def run(self, title: str, job: str, options: dict[str, Any]) -> Any:
        """Run a job with some options."""
        self.number += 1
        elapsed = time.monotonic() - self.started
        print(
            f"\n[{self.number}/{self.count}] {title}   ({elapsed:.0f} s so far)",
            flush=True,
        )
        return cli.run_job(job, options)


@dataclass(frozen=True)
class Folders:
    """Folders that a flow reads and writes."""

    dataset: str
    """Name of the dataset."""
    family: str
    """Kind of tables that its mapping file makes."""
    source: str
    """Mapping file of the log."""
    raw: Path
    """Folder of the log."""
    tables: str
    """Folder of the tables."""
    extra: str
    """Folder of semantic IDs or text embeddings."""
    runs: str
    """Folder of the runs."""


@dataclass(frozen=True)
class Run:
    """The options of a training."""

    name: str
    """Name of the run."""
    inputs: dict[str, str]
    """Folders that the model reads, for jobs.train and jobs.evaluate."""
    options: dict[str, Any]
    """Options of jobs.train, without those of its `Schedule`."""


def plan_run(config: Config, folders: Folders, trained: Trained) -> Run:
    """Return the options that a model is trained with."""
    from models import registry

    model_class = registry.find(trained.model)
    seed = f"-{config.seed}" if config.seed != SEED else ""
    seeded = model_class.trains_by_gradient or model_class.stops_early
    name = (trained.name or trained.model) + (seed if seeded else "")
    inputs = {"tables": folders.tables}
    if FLOWS[folders.family].extra:
        inputs |= dict.fromkeys(model_class.extra_inputs, folders.extra)
    options: dict[str, Any] = {
        "config": [str(CONFIGS / f"{file}.yaml") for file in trained.configs],
        **inputs,
        "storage": folders.runs,
        "name": name,
    }
    options = merge_options(options, trained.options)
    if trained.teacher:
        teacher = f"{folders.runs}/{trained.teacher}{seed}"
        options = merge_options(options, {"model": {"teacher": teacher}})
    if seeded:
        options = merge_options(options, {"fit": {"seed": config.seed}})
    return Run(name, inputs, options)


def measure(
    config: Config,
    folders: Folders,
    steps: Steps,
    trained: Trained,
    schedule: Schedule,
) -> None:
    """Train a model, and evaluate it on test."""
    from models import registry

    run = plan_run(config, folders, trained)
    training = merge_options(run.options, schedule.training.get(run.name, {}))
    verb = "Distil" if trained.teacher else "Train"
    steps.run(f"{verb} {run.name}", "train", training)
    evaluate = {
        "checkpoint": f"{folders.runs}/{run.name}",
        **schedule.evaluation,
        **run.inputs,
        "split": "test",
    }
    steps.run(f"Evaluate {run.name} on test", "evaluate", evaluate)
    if registry.find(trained.model).ranks == "catalogue":
        title = f"Evaluate {run.name} on test, known items left out"
        steps.run(title, "evaluate", {**evaluate, "unseen": True})


def count_steps(trained: Trained) -> int:
    """Return the number of commands that train and evaluate a model."""
    from models import registry

    return 3 if registry.find(trained.model).ranks == "catalogue" else 2


def make_schedule(
    config: Config, folders: Folders, models: Sequence[Trained], steps: Steps
) -> Schedule:
    """Choose how much each model is trained, and print the choice.

    `--epochs` decides, then an earlier start of the same flow, then the time budget by
    timed steps of each model.
    """
    from models import registry

    learned = [one for one in models if registry.find(one.model).trains_by_gradient]
    runs = [plan_run(config, folders, one) for one in learned]
    if config.epochs or not runs:
        epochs = {"fit": {"max_epochs": config.epochs}}
        return Schedule({run.name: epochs for run in runs})
    tables = read_manifest(join(folders.tables, "sequences"), "sequences").hash
    file = Path(folders.runs).parent / f"schedule-{config.seed}.json"
    earlier = Schedule.read(str(file), tables)
    if earlier and all(run.name in earlier.training for run in runs):
        print(f"\nepochs as chosen before, in {file}", flush=True)
        return earlier
    print("\nTiming some steps of each model, to choose its epochs", flush=True)
    probes = []
    with TemporaryDirectory(prefix="trieline-") as scratch:
        for one, run in zip(learned, runs, strict=True):
            options = run.options
            if one.teacher:
                teacher = f"{scratch}/{one.teacher}"
                options = merge_options(options, {"model": {"teacher": teacher}})
            is_teacher = any(other.teacher == one.model for other in learned)
            save = f"{scratch}/{one.model}" if is_teacher else None
            training = cli.config_from_options(train, options)
            probes.append(time_budget.probe(training, save))
    schedule, lines = time_budget.make_schedule(
        {run.name: probe for run, probe in zip(runs, probes, strict=True)},
        [one.epochs for one in learned],
        split_sizes(folders.tables),
        others=len(models) - len(learned),
        elapsed_s=time.monotonic() - steps.started,
    )
    for line in lines:
        print(line, flush=True)
    schedule.write(str(file), tables)
    return schedule


def split_sizes(tables: str) -> time_budget.SplitSizes:
    """Return the sizes of the test split, by which its evaluation is planned."""
    rows = read_manifest(join(tables, "sequences"), "sequences").rows
    counts = count_requests(tables)
    return time_budget.SplitSizes(rows, counts["train"], counts["test"])


def count_requests(tables: str) -> dict[str, int]:
    """Return the number of requests per split, for a feed of impressions."""
    info = read_manifest(join(tables, "sequences"), "sequences").info
    return dict(info.get("requests") or info["events"])


def locate(config: Config) -> Folders:
    """Return the folders of a flow, or raise UserError for a log that is missing, unclear or of another family."""
    if config.source and not config.data:
        raise UserError(
            f"--source is {config.source}, which describes a real log; give its folder with --data"
        )
    if "://" in config.output:
        raise UserError(
            f"--output is {config.output}, and the quickstart keeps its files in a local folder; name one"
        )
    require_folders(data=config.data)
    name = (
        Path(config.data).resolve().name
        if config.data
        else KINDS[config.family or "retrieval"].simulated_source
    )
    home = Path(config.output).absolute() / name
    source = config.source or find_mapping(config, name, home)
    if not Path(source).is_file():
        raise UserError(
            f"there is no mapping file {source} for {config.data}; leave out --source for a first one"
        )
    made = load_source(source)[1].get("kind", "retrieval")
    if made != (config.family or made):
        raise UserError(
            f"{source} makes tables of kind '{made}', not '{config.family}'; give --family {made}"
        )
    raw = Path(config.data).absolute() if config.data else home / "raw"
    return Folders(
        name,
        made,
        source,
        raw,
        str(home / "tables"),
        str(home / (FLOWS[made].extra or "sids")),
        str(home / "runs"),
    )


def find_mapping(config: Config, name: str, home: Path) -> str:
    """Return the mapping file that is named after a log's folder, or write a suggested one.

    Args:
        config: Options of the quickstart.
        name: Name of the log's folder.
        home: Folder for everything that is made.
    """
    stems = [f"{name}_{config.family}", name] if config.family else [name]
    known = [CONFIGS / "sources" / f"{stem}.yaml" for stem in stems]
    if found := next((file for file in known if file.is_file()), None):
        return str(found)
    guess = home / "source.yaml"
    if not guess.is_file():
        suggestion = suggest(str(config.data), config.family)
        if suggestion.doubts:
            refuse_doubts(config, name, suggestion.doubts)
        home.mkdir(parents=True, exist_ok=True)
        guess.write_text(suggestion.text)
    print(
        f"{guess} describes {config.data} as far as can be guessed; read it and fix what is wrong:"
    )
    print(
        "".join(f"    {line}\n" for line in guess.read_text().splitlines()),
        end="",
        flush=True,
    )
    return str(guess)


def refuse_doubts(config: Config, name: str, doubts: list[str]) -> NoReturn:
    """Print the doubtful lines of a suggested mapping, and raise UserError.

    Args:
        config: Options of the quickstart.
        name: Name of the dataset.
        doubts: Lines that decide what is trained, and could be others.
    """
    print(f"What {config.data} holds cannot be told for sure:")
    for each in doubts:
        print(f"    {each}", flush=True)
    file = f"{name}.yaml"
    kind = {"kind": config.family} if config.family else {}
    write = cli.command_line(
        "jobs.prepare", suggest=str(config.data), **kind, output=file
    )
    given = {
        option.name: getattr(config, option.name)
        for option in fields(config)
        if getattr(config, option.name) != option.default
    }
    again = cli.command_line("jobs.quickstart", **{**given, "source": file})
    raise UserError(
        f"{pluralize(len(doubts), 'line')} of the mapping of {config.data} could be "
        f"others, and decide what is trained; write it with `{write}`, check these "
        f"lines, and run `{again}`"
    )


def published_sids(folder: Path) -> Path | None:
    """Return the file of published semantic IDs in a raw folder, or None."""
    found = sorted([*folder.glob("*index*.json*"), *folder.glob("published_sids.csv*")])
    return found[0] if found else None


def make_extra(config: Config, folders: Folders, steps: Steps) -> bool:
    """Make the semantic IDs or text embeddings of a flow.

    Returns:
        Whether the log has anything to make them from.
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
        # for few items two levels and the code of duplicates: a quarter fewer tokens,
        # learned in fewer epochs
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
    published = published_sids(folders.raw) if config.data else None
    if not published:
        return False
    tokenize = {"tokenizer": "published", "published": str(published), **output}
    steps.run("Published semantic IDs", "tokenize", tokenize)
    return True


def codebook_size(items: int) -> int:
    """Return the codes per level: a power of two, with 8 items or more per code, at most 256."""
    return min(256, 2 ** max(1, (items // 8).bit_length() - 1))


def simulate_log(config: Config, folders: Folders, steps: Steps) -> None:
    """Simulate the raw log of a family."""
    flow, simulated = FLOWS[folders.family], KINDS[folders.family].simulated_name
    options = {
        "output": str(folders.raw),
        "users": config.users,
        "items": config.items,
        "events": config.events * flow.events,
        **flow.simulate,
        "seed": SEED,
    }
    if simulated != simulate.Config.kind:
        options = {"kind": simulated, **options}
    steps.run("Simulate a raw log", "simulate", options)


def prepare_tables(folders: Folders, steps: Steps) -> None:
    """Make tables of the raw log, and audit them."""
    prepare = {
        "source": folders.source,
        "input": str(folders.raw),
        "output": folders.tables,
    }
    steps.run("Raw log to tables", "prepare", prepare)
    sizes = count_requests(folders.tables)
    if empty := [name for name in ("val", "test") if not sizes[name]]:
        raise UserError(
            f"{folders.source} leaves nothing for {' and '.join(empty)}; see the warnings above"
        )
    audit = {"tables": folders.tables}
    steps.run("Prove the tables free of leakage", "audit", audit)


def run(config: Config) -> None:
    """Run the flow."""
    cli.say_loading("torch", "ray", "mlflow")
    folders = locate(config)  # before the imports, as the log may be wrong
    from models import registry
    from pipelines.tracking import resolve_uri

    flow = FLOWS[folders.family]
    cli.preflight(output=config.output)
    steps = Steps(
        count=3
        + (not config.data)
        + bool(flow.extra)
        + sum(map(count_steps, flow.models))
    )
    if not config.data:
        simulate_log(config, folders, steps)
    prepare_tables(folders, steps)
    models = flow.models
    if flow.extra and not make_extra(config, folders, steps):
        models = tuple(
            model
            for model in models
            if flow.extra not in registry.find(model.model).extra_inputs
        )
        left_out = [model for model in flow.models if model not in models]
        steps.count -= 1 + sum(map(count_steps, left_out))
        made = {"sids": "semantic IDs", "text": "embeddings"}[flow.extra]
        print(
            f"note: {folders.source} names no texts of items to make {made} of; models of these are left out"
        )
    schedule = make_schedule(config, folders, models, steps)
    for trained in models:
        measure(config, folders, steps, trained, schedule)
    uri = resolve_uri(None, folders.runs)  # where the trainings logged
    page = Path(folders.runs).parent / "compare.html"
    experiment = f"{folders.family}/{folders.dataset}"
    compare = {"experiment": [experiment], "html": str(page), "tracking_uri": uri}
    steps.run("Compare", "compare", compare)
    label = (
        ""
        if config.data
        else " This is simulated data: the figures show that the flow works, nothing more."
    )
    print(f"\nDone in {time.monotonic() - steps.started:.0f} s.{label}")
    print(
        "Sizes and epochs are for minutes; the configs that the commands name say what is for figures."
    )
    print(f"  tables        {folders.tables}")
    if len(models) == len(flow.models) and flow.extra:
        print(f"  {flow.extra:<12}  {folders.extra}")
    print(f"  checkpoints   {folders.runs}")
    print(f"  look at it    {page.as_uri()}")
    serve = f"python3 -m http.server 8000 --bind localhost --directory {shlex.quote(str(page.parent))}"
    print(
        f"  over ssh      ssh -L 8000:localhost:8000 HOST {serve}, then http://localhost:8000/{page.name}"
    )


if __name__ == "__main__":
    cli.main(run, Config)
