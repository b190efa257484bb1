"""Process a new day of a growing log, from its files to a registered model.

    day = process_day(DailyConfig(output="runs/week", prepare=..., train=..., ...))

The steps are functions with typed configs. `days.json` in the output folder records
what is done, so that the same call continues a stopped day after its last step. Large
packages are imported when a day runs, so that a config is checked early.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from pydantic import model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from core.errors import UserError
from core.files import absolute, hold_lock, join, read_json, write_file
from core.options import STRICT, Folder, Fraction, build, check_known, merge
from models import registry
from pipelines import tracking
from pipelines.comparison.config import ModelName
from pipelines.encode.config import EncodeConfig, TokenizeConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.prepare.settings.config import PrepareOptions
from pipelines.training.config import TrainConfig

if TYPE_CHECKING:
    from core.schemas import DayRecord, ItemsInfo, RunRef
    from core.tables import Table
    from pipelines.evaluation.result import Result
    from pipelines.prepare.prepare import Prepared

DAYS = "days.json"
"""File in the output folder with a record of each day."""


@dataclass(config=STRICT, kw_only=True)
class DailyConfig:
    """Options of jobs.daily: the options of its steps, without their folders.

    A section is a mapping; the folders of its step are below `output`.
    """

    output: Folder
    """Folder for tables, sids or text, runs, and `days.json`."""
    prepare: PrepareOptions
    """Options of jobs.prepare. The split must be temporal, such as `split: {val_days:
    1, test_days: 1}`."""
    train: TrainConfig
    """Options of jobs.train on the first day."""
    continue_training: TrainConfig
    """Options of jobs.train that override `train` from the second day on, such as `fit:
    {replay_fraction: 0.2, max_epochs: 3}`."""
    tokenize: TokenizeConfig | None = None
    """Options of jobs.tokenize, for models that use semantic IDs."""
    encode: EncodeConfig | None = None
    """Options of jobs.encode, for models that read text."""
    max_drop: dict[str, Fraction] = field(default_factory=dict)
    """Largest relative drop of each metric on the new day, compared with the running
    model; by default 0.05 for `fit.metric`. Larger values of the metrics must be
    better."""
    register: ModelName | None = None
    """Name in MLflow's model registry under which accepted models are registered; by
    default they are not registered. The best baseline is registered in place of a model
    that is below it."""

    @model_validator(mode="before")
    @classmethod
    def build_steps(cls, given: Any) -> dict[str, Any]:
        """Build the options of the steps from their sections and the day's folders."""
        from pipelines.prepare.prepare import build_options

        content = dict(given.kwargs or {} if isinstance(given, ArgsKwargs) else given)

        def complete(name: str, /, **fixed: Any) -> dict[str, Any]:
            section = content.get(name) or {}
            if not isinstance(section, Mapping):
                raise UserError(f"{name} is {section!r:.200}; it must be a mapping")
            for key in fixed.keys() & section:
                raise UserError(f"{name}.{key} is {section[key]!r:.200}; a day sets it")
            return merge(section, fixed)

        output = absolute(str(content.get("output", "")))
        tables, runs = join(output, "tables"), join(output, "runs")
        prepare = complete("prepare", output=tables, append=True)
        content["prepare"] = build_options(prepare, "prepare.")
        folders: dict[str, Any] = {"tables": tables, "sids": None, "text": None}
        steps = ("tokenize", "sids", TokenizeConfig), ("encode", "text", EncodeConfig)
        for name, option, config_class in steps:
            section = complete(name, tables=tables, output=join(output, option))
            is_given = bool(content.get(name))
            content[name] = None
            if is_given:
                folders[option] = section["output"]
                content[name] = build(config_class, section, f"{name}.")
        folders |= {"storage": runs, "name": "day"}
        train = complete("train", **folders)
        later = merge(train, complete("continue_training", **folders, init=runs))
        content["train"] = build(TrainConfig, train, "train.")
        content["continue_training"] = build(TrainConfig, later, "continue_training.")
        model = content["train"].model
        reads = registry.find(model.name).inputs_of(model)
        for name, option, _ in steps:
            if reads.get(option) and not content[name]:
                raise UserError(f"the model '{model.name}' needs the section {name}")
        return content


def process_day(config: DailyConfig) -> DayRecord:
    """Run the steps of the newest day that are not finished, and return its record.

    The steps: append the day's files to the tables, audit them, make semantic IDs or
    text embeddings of new items, evaluate the running model on the day, continue its
    training, evaluate the result, and register it if no metric drops too much.
    """
    from core.schemas import DayRecord, parse_record
    from models.training import checkpoint
    from models.training.checkpoint import OtherTablesError
    from models.training.loop import drop_undefined
    from models.training_run import check_fit
    from pipelines.comparison.verdicts import judge_results
    from pipelines.encode.extend import make_sids
    from pipelines.encode.texts import encode_log
    from pipelines.evaluation.ranking import measure_checkpoint
    from pipelines.prepare.audit.rules import audit_tables
    from pipelines.prepare.prepare import make_tables
    from pipelines.prepare.reading.log import load_source
    from pipelines.training.backends import wants_gpu
    from pipelines.training.run import run_training

    model_class = registry.find(config.train.model.name)
    if config.register:
        model_class.check_served()
    log, _ = load_source(config.prepare.source)
    by = config.prepare.split.resolve(log.info.clock)
    if by != "temporal":
        raise UserError(f"prepare.split.by is '{by}', a day needs temporal")
    labelled = SimpleNamespace(
        labels=[*config.prepare.actions.tasks, *log.info.bool_labels]
    )
    check_fit(config.train.fit, model_class, labelled, "train.")
    check_fit(config.continue_training.fit, model_class, labelled, "continue_training.")
    check_known(config.max_drop, model_class.metric_names(labelled), "max_drop")
    wants_gpu(config.train.ray)
    if config.train.init:
        checkpoint.locate(config.train.init)
    storage = config.train.storage
    tracking.connect(tracking.resolve_uri(config.train.tracking_uri, storage))
    inputs, file = config.train.inputs, join(config.output, DAYS)
    busy = f"another process works on {config.output}; wait until it ends"
    with hold_lock(join(config.output, ".daily.lock"), busy):
        content = read_json(file) or []
        days = [parse_record(DayRecord, day, file) for day in content]

        def save() -> None:
            content = json.dumps([asdict(day) for day in days], indent=2)
            write_file(file, content.encode())

        def measure(uri: str, unseen: bool | None = None) -> Result:
            return measure_checkpoint(
                EvaluateConfig(
                    checkpoint=uri,
                    **vars(inputs),
                    split="test",
                    unseen=unseen,
                    trust_code=config.train.trust_code,
                )
            )

        prepared = make_tables(config.prepare)
        day = find_day(prepared, days)
        if day.accepted is not None:
            print(
                f"{day.name} is finished; nothing to do until there are new files that "
                f"match '{prepared.source.files}'"
            )
            return day
        if not day.audited:
            audit_tables(inputs.tables)
            day.audited = True
            save()
        if config.tokenize:
            make_sids(choose_tokenize_config(config.tokenize, prepared.items))
        if config.encode:
            encode_log(config.encode)
        accepted = [other for other in days if other.accepted]
        trained = None
        if accepted and not day.anew:
            running = accepted[-1]
            try:
                if day.before is None:
                    day.before = drop_undefined(measure(running.checkpoint).metrics)
                    day.running = running.name
                    save()
                if model_class.trains_by_gradient:
                    init = running.checkpoint
                    trained = run_training(
                        replace(config.continue_training, name=day.name, init=init)
                    )
            except OtherTablesError as error:  # after an overwrite of the tables
                day.anew, day.before, day.running = str(error), None, ""
                print(
                    f"the model of {running.name} cannot be trained further, so a new "
                    f"model is trained from scratch: {error}"
                )
                save()
        trained = trained or run_training(replace(config.train, name=day.name))
        if day.after is None:
            results = [measure(trained.checkpoint)]
            day.baselines = []
            if not model_class.is_baseline:
                if model_class.ranks == "catalogue":
                    results.append(measure(trained.checkpoint, unseen=True))
                day.baselines = judge_results(results, inputs, trained.best)
            day.checkpoint = trained.checkpoint
            day.after = drop_undefined(results[0].metrics)
            save()
        metric = trained.best.fit.metric
        is_accepted = judge(config, day, metric)
        if config.register and is_accepted:
            register_best(config, day, trained.run, metric)
        day.accepted = is_accepted
        save()
    return day


def find_day(prepared: Prepared, days: list[DayRecord]) -> DayRecord:
    """Return the record of the newest day in the tables, appended if it is new.

    The name of a day is the date of its last event, in the time zone of the mapping,
    and the start of the tables' hash.
    """
    from core.schemas import DayRecord

    time = prepared.source.time
    zone = ZoneInfo((time and time.zone) or "UTC")
    last = datetime.fromtimestamp(prepared.events.info.last_ms / 1000, zone)
    name = f"{last.date()}-{prepared.sequences.hash[:8]}"
    for day in days:
        if day.name == name:
            return day
    days.append(DayRecord(name=name))
    return days[-1]


def choose_tokenize_config(
    config: TokenizeConfig, items: Table[ItemsInfo]
) -> TokenizeConfig:
    """Return the config that extends the semantic IDs of an earlier day.

    Those of replaced tables are overwritten.
    """
    from core.schemas import SidsInfo
    from core.tables import find_table

    sids = find_table(join(config.output, "sids"), SidsInfo)
    if sids is None:
        return config
    if sids.info.items_hash in items.ancestry:
        return replace(config, extend=config.output)
    return replace(config, overwrite=True)


def judge(config: DailyConfig, day: DayRecord, metric: str) -> bool:
    """Print the metrics of a day, and return whether the day's model is accepted.

    By default the `metric` of the training may drop by 5%. A metric without a
    value on the day is not compared.
    """
    from pipelines.comparison.verdicts import describe_verdict

    before, after = day.before or {}, day.after or {}
    max_drop = config.max_drop or {metric: 0.05}
    dropped = [
        name
        for name, share in max_drop.items()
        if name in before.keys() & after
        and after[name] < before[name] - share * abs(before[name])
    ]
    running = day.running or "no running model"
    print(f"\n{day.name}, compared with {running} on the same day")
    shown = registry.find(config.train.model.name).shown_metrics()
    for name in dict.fromkeys([*max_drop, *shown]):
        if name in after:
            old_value = f"{before[name]:.4f} to " if name in before else ""
            print(f"  {name:<12}  {old_value}{after[name]:.4f}")
    for verdict in day.baselines or []:
        print(f"  {describe_verdict(verdict)}")
    if dropped:
        print(
            f"not accepted: {', '.join(dropped)} dropped by more than max_drop allows; "
            f"the running model stays"
        )
    return not dropped


def register_best(
    config: DailyConfig, day: DayRecord, run: RunRef, metric: str
) -> None:
    """Register a day's model, or the best baseline in place of a model below it."""
    from pipelines.comparison.verdicts import BELOW, build_fit
    from pipelines.serving.registered_model import register
    from pipelines.training.run import run_training

    if day.baselines and day.baselines[0].verdict == BELOW:
        verdict = day.baselines[0]
        name = verdict.baseline_model
        print(f"the model is below {verdict.baseline}, registered in its place")
        baseline = replace(
            config.train,
            model=registry.build_model_config({"name": name}),
            fit=build_fit(name, metric=metric),
            name=f"{day.name}-{name}",
        )
        run = run_training(baseline).run
    version = register(run, str(config.register), metric)
    print(f"registered: version {version.version} of {config.register}")
