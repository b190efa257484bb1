"""Process a new day of a growing log, from its files to a registered model.

    day = process_day(DailyConfig(output="runs/week", prepare=..., train=..., ...))

The steps are functions with typed configs. `days.json` in the output folder records
what is done, so that the same call continues a stopped day after its last step. Large
packages are imported when a day runs, so that a config is checked early.
"""

from __future__ import annotations

import json
from dataclasses import asdict, field, replace
from datetime import datetime
from math import isnan
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import hold_lock, join, read_json, write_file
from core.options import STRICT, Folder, Fraction, check_known
from core.schemas import (
    DayRecord,
    EmbeddingsInfo,
    EventsInfo,
    Inputs,
    ItemsInfo,
    RunRef,
    SequencesInfo,
    SidsInfo,
    Verdict,
    parse_record,
)
from core.tables import TableInfo, find_table, open_table
from models import own_code, registry
from pipelines.comparison.config import ModelName
from pipelines.encode.config import EncodeConfig, TokenizeConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.prepare.options import PrepareOptions, list_changes
from pipelines.prepare.reading.log import load_source
from pipelines.steps import (
    AuditConfig,
    audit_tables,
    encode_texts,
    make_sids,
    make_tables,
    measure_checkpoint,
    run_step,
    train_model,
)
from pipelines.training.config import TrainConfig

if TYPE_CHECKING:
    from models.training.checkpoint import Checkpoint
    from pipelines.evaluation.result import Result

DAYS = "days.json"
"""File in the output folder with a record of each day."""


@dataclass(config=STRICT, kw_only=True)
class DailyConfig:
    """Options of jobs.daily: the options of its steps, without their folders."""

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


def process_day(config: DailyConfig) -> DayRecord:
    """Run the steps of the newest day that are not finished, and return its record.

    The steps: append the day's files to the tables, audit them, make semantic IDs or
    text embeddings of new items, evaluate the running model on the day, continue its
    training, evaluate the result, and register it if no metric drops too much.
    """
    from models.loaded_model import load_catalogue
    from models.training import checkpoint

    model_class = registry.find(config.train.model.name)
    reason = model_class.reason_not_served()
    if config.register and reason:
        raise UserError(
            f"register is {config.register}, and the model '{model_class.name}' cannot "
            f"be served: {reason}"
        )
    inputs = config.train.inputs
    busy = f"another process works on {config.output}; wait until it ends"
    with hold_lock(join(config.output, ".daily.lock"), busy):
        days = read_days(config.output)

        def save() -> None:
            content = json.dumps([asdict(day) for day in days], indent=2)
            write_file(join(config.output, DAYS), content.encode())

        def measure(folder: str, unseen: bool | None = None) -> Result:
            evaluate = EvaluateConfig(
                checkpoint=folder,
                tables=inputs.tables,
                sids=inputs.sids,
                text=inputs.text,
                split="test",
                unseen=unseen,
                trust_code=config.train.trust_code,
            )
            return run_step("evaluate", measure_checkpoint, evaluate)

        prepare = config.prepare
        run_step("prepare", make_tables, prepare, list_changes(prepare))
        day = find_day(prepare, days)
        if day.accepted is not None:
            explain_idle(prepare, day.name)
            return day
        if not day.audited:
            run_step("audit", audit_tables, AuditConfig(inputs.tables))
            day.audited = True
            save()
        if config.tokenize:
            run_step("tokenize", make_sids, update_tokenizer(config.tokenize))
        if config.encode:
            overwrite = is_text_outdated(config.encode)
            options = replace(config.encode, overwrite=overwrite)
            run_step("encode", encode_texts, options)
        metrics = model_class.metric_names(load_catalogue(model_class.name, inputs))
        check_known(config.max_drop, metrics, "max_drop")

        accepted = [other for other in days if other.accepted]
        running = accepted[-1] if accepted else None
        if running and not (day.anew or day.before is not None):
            day.anew = describe_other_tables(running, config.train)
            if not day.anew:
                day.before = defined_metrics(measure(running.checkpoint))
                day.running = running.name
            save()
        train = config.train
        if running and not day.anew and model_class.trains_by_gradient:
            train = replace(config.continue_training, init=running.checkpoint)
        trained = run_step("train", train_model, replace(train, name=day.name))
        day.checkpoint = trained.checkpoint
        result = None
        if day.after is None:
            result = measure(trained.checkpoint)
            day.after = defined_metrics(result)
            save()
        metadata = checkpoint.read(trained.checkpoint)
        if day.baselines is None:
            day.baselines = []
            if not model_class.is_baseline:
                result = result or measure(trained.checkpoint)
                unseen = None
                if model_class.ranks == "catalogue":
                    unseen = measure(trained.checkpoint, unseen=True)
                day.baselines = judge_by_baselines(metadata, inputs, result, unseen)
            save()
        day.accepted = judge(config, day, metadata, trained.run)
        save()
    return day


def read_days(output: str) -> list[DayRecord]:
    """Read the records of the earlier days."""
    path = join(output, DAYS)
    try:
        content = read_json(path) or []
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})", "damaged") from error
    return [parse_record(DayRecord, day, path) for day in content]


def find_day(prepare: PrepareOptions, days: list[DayRecord]) -> DayRecord:
    """Return the record of the newest day in the tables, appended if it is new.

    The name of a day is the date of its last event, in the time zone of the mapping,
    and the start of the tables' hash.
    """
    sequences = open_table(join(prepare.output, "sequences"), SequencesInfo)
    split = sequences.info.split
    if split.by != "temporal":
        raise UserError(f"prepare.split.by is '{split.by}', a day needs temporal")
    last_ms = open_table(join(prepare.output, "events"), EventsInfo).info.last_ms
    time = load_source(prepare.source)[0].time
    zone = ZoneInfo((time and time.zone) or "UTC")
    date = datetime.fromtimestamp(last_ms / 1000, zone).date()
    name = f"{date}-{sequences.hash[:8]}"
    for day in days:
        if day.name == name:
            return day
    days.append(DayRecord(name=name))
    return days[-1]


def explain_idle(prepare: PrepareOptions, name: str) -> None:
    """Print why there is nothing to do, and the files that the source ignores."""
    from pipelines.prepare.reading.unread import describe_unread

    source, _ = load_source(prepare.source)
    print(
        f"\n{name} is finished; nothing to do until there are new files that match "
        f"'{source.files}'"
    )
    for line in describe_unread(source, prepare.input):
        print(line)


def update_tokenizer(config: TokenizeConfig) -> TokenizeConfig:
    """Extend semantic IDs of an earlier day, or replace those of a replaced table."""
    sids = find_table(join(config.output, "sids"), SidsInfo)
    if sids is None:
        return config
    items = open_table(join(config.tables, "items"), ItemsInfo)
    if sids.info.items_hash in items.ancestry:
        return replace(config, extend=config.output)
    return replace(config, overwrite=True)


def is_text_outdated(config: EncodeConfig) -> bool:
    """Return whether text embeddings were computed from earlier tables."""
    for text_table in ("items", "queries", "pairs"):
        text = find_table(join(config.output, text_table), EmbeddingsInfo)
        for name, made_from in text.inputs.items() if text else ():
            table = find_table(join(config.tables, name), TableInfo)
            if table and table.hash != made_from:  # "encoder" is no table
                return True
    return False


def describe_other_tables(running: DayRecord, config: TrainConfig) -> str:
    """Return why the tables do not extend those of the running model; "" if they do.

    They do not after `jobs.prepare --overwrite`; a new model is then trained.
    """
    from models.loaded_model import read_versions
    from models.training import checkpoint

    metadata = checkpoint.read(running.checkpoint)
    own_code.accept_code(metadata.code, running.checkpoint, config.trust_code)
    versions = read_versions(metadata.name, config.inputs)
    try:
        checkpoint.check(metadata, running.checkpoint, versions, extending=True)
    except checkpoint.OtherTablesError as error:
        print(
            f"\nthe model of {running.name} cannot be trained further, so a new "
            f"model is trained from scratch: {error}"
        )
        return str(error)
    return ""


def judge_by_baselines(
    metadata: Checkpoint, inputs: Inputs, result: Result, unseen: Result | None
) -> list[Verdict]:
    """Compare results of a checkpoint on the day with models that need no training.

    Args:
        metadata: Content of the checkpoint's `config.json`.
        inputs: Folders of the tables.
        result: Result over all items.
        unseen: Result without the items of the user's history; None for a model that
            ranks candidates.

    Returns:
        One verdict per ranking, against the best of these models. The ranking over all
        items comes first if users often repeat items. Empty for a kind without such
        models.
    """
    from pipelines.comparison.compare import REPEATS
    from pipelines.comparison.verdicts import judge_result
    from pipelines.evaluation.baselines import measure_baselines

    results = [result] if unseen is None else [result, unseen]
    rankings: list[dict[str, Any]] = [{}, {"unseen": True}][: len(results)]
    all_baselines = measure_baselines(
        metadata.name, Inputs(inputs.tables), "test", rankings
    )
    verdicts = [
        judge_result(measured, baselines, metadata.fit["metric"])
        for measured, baselines in zip(results, all_baselines, strict=True)
        if baselines
    ]
    if verdicts and verdicts[0].repeats < REPEATS:
        verdicts.reverse()
    return verdicts


def judge(
    config: DailyConfig, day: DayRecord, metadata: Checkpoint, run: RunRef
) -> bool:
    """Return whether the day's model is accepted, and register an accepted model.

    Args:
        config: Options of the day.
        day: Record of the day, with all metrics.
        metadata: Content of the model's `config.json`.
        run: MLflow run of the day's training, which is tagged with the decision.
    """
    from pipelines import tracking
    from pipelines.comparison.verdicts import BELOW, describe_verdict
    from pipelines.evaluation.baselines import build_fit
    from pipelines.serving.registered_model import register

    before, after = day.before or {}, day.after or {}
    metric = metadata.fit["metric"]
    max_drop = config.max_drop or {metric: 0.05}
    undefined = [name for name in max_drop if name not in after]
    dropped = find_drops(before, after, max_drop)
    logger = tracking.Logger(run)
    running_metrics = {f"running/{name}": value for name, value in before.items()}
    logger.update(running_metrics, metadata.step)
    logger.tag(accepted=str(not dropped).lower(), running=day.running or "none")

    running = day.running or "no running model"
    print(f"\n{day.name}, compared with {running} on the same day")
    shown = registry.find(metadata.name).shown_metrics
    for name in dict.fromkeys([*max_drop, *shown]):
        if name in after:
            old_value = f"{before[name]:.4f} to " if name in before else ""
            print(f"  {name:<12}  {old_value}{after[name]:.4f}")
    verdicts = day.baselines or []
    for verdict in verdicts:
        print(f"  {describe_verdict(verdict)}")
    if undefined:
        print(f"note: {', '.join(undefined)} has no value, and is not compared")
    if dropped:
        reason = f"{', '.join(dropped)} dropped by more than max_drop allows"
        if dropped == undefined:
            reason = "no metric of max_drop has a value"
        print(f"not accepted: {reason}; the running model stays")
        return False
    if config.register and verdicts and verdicts[0].verdict == BELOW:
        name = verdicts[0].baseline_model
        print(f"the model is below {verdicts[0].baseline}, registered in its place")
        baseline = replace(
            config.train,
            model=registry.build_model_config({"name": name}),
            fit=build_fit(name, metric=metric),
            name=f"{day.name}-{name}",
        )
        run = run_step("train", train_model, baseline).run
    if config.register:
        version = register(run, config.register, metric)
        print(f"registered: version {version.version} of {config.register}")
    return True


def defined_metrics(result: Result) -> dict[str, float]:
    """Return the metrics of a result by name, without metrics that are NaN."""
    metrics = result.metrics
    return {name: value for name, value in metrics.items() if not isnan(value)}


def find_drops(
    before: dict[str, float], after: dict[str, float], max_drop: dict[str, float]
) -> list[str]:
    """Return the metrics that drop too much.

    A metric without a value is not compared. If no metric has a value, return all.

    Args:
        before: Metrics of the running model on the day; empty if there is none.
        after: Metrics of the day's model.
        max_drop: Largest share of its absolute value by which each metric may drop.
    """
    undefined = [name for name in max_drop if name not in after]
    if before and len(undefined) == len(max_drop):
        return undefined
    return [
        name
        for name, share in max_drop.items()
        if name in before
        and name in after
        and after[name] < before[name] - share * abs(before[name])
    ]
