"""Process a new day of a growing log, from its files to a registered model.

    python -m jobs.daily --config shop_daily.yaml

The steps: append the day's files to the tables, audit them, make semantic IDs or text
embeddings of new items, evaluate the running model on the new day, continue its
training, evaluate the result, compare both models, and register the new one if no
metric drops by more than `max_drop`. An accepted model is the running model of the next
day. The config file holds the options of the jobs (docs/days.md). The same command
continues a stopped run after its last finished step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, field
from datetime import datetime
from math import isnan
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import absolute, hold_lock, join, read_json, write_file
from core.options import STRICT, Folder, Fraction, check_known, merge
from core.schemas import (
    DayRecord,
    EmbeddingsInfo,
    EventsInfo,
    Inputs,
    ItemsInfo,
    RunRef,
    SequencesInfo,
    SidsInfo,
    parse_record,
)
from core.tables import TableInfo, find_table, open_table
from jobs import cli

if TYPE_CHECKING:
    from models.model import Model
    from pipelines.evaluation.record import Result

DAYS = "days.json"
"""File in the output folder with a record of each day."""


@dataclass(config=STRICT)
class Config:
    """Options of jobs.daily."""

    output: Folder
    """Folder for tables, sids or text, runs, and `days.json`."""
    prepare: dict[str, Any]
    """Options of jobs.prepare. The split must be temporal, such as `split: {val_days:
    1, test_days: 1}`."""
    train: dict[str, Any]
    """Options of jobs.train on the first day."""
    continue_training: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.train that override `train` from the second day on, such as `fit:
    {replay_fraction: 0.2, max_epochs: 3}`."""
    tokenize: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.tokenize, for models that use semantic IDs."""
    encode: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.encode, for models that read text."""
    max_drop: dict[str, Fraction] = field(default_factory=dict)
    """Largest relative drop of each metric on the new day, compared with the running
    model; by default 0.05 for `fit.metric`. Larger values of the metrics must be
    better."""
    register: str | None = None
    """Name in MLflow's model registry under which accepted models are registered; by
    default they are not registered."""
    register_below_baseline: bool = False
    """Also register an accepted model whose metric is below that of the best model
    without training."""


def lowest_accepted(value: float, share: float) -> float:
    """Return the lowest value that a metric may drop to.

    Args:
        value: Value of the running model, of either sign.
        share: Largest allowed drop, as a share of the absolute value.
    """
    return value - share * abs(value)


class Day:
    """The jobs of one day of the log."""

    model_class: type[Model]
    """Class of the trained model, which `check` sets."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.output = absolute(config.output)
        self.tables = join(self.output, "tables")
        self.runs = join(self.output, "runs")
        self.inputs = {"tables": self.tables}
        if config.tokenize:
            self.inputs["sids"] = join(self.output, "sids")
        if config.encode:
            self.inputs["text"] = join(self.output, "text")
        self.days: list[DayRecord] = []

    def check(self) -> None:
        """Raise UserError for invalid options of any job, before the first job runs."""
        from models import registry

        first_training = cli.config_from_options("train", self.train_options("first"))
        self.model_class = registry.find(first_training.model.name)
        for job, options in (
            ("prepare", self.prepare_options()),
            ("tokenize", self.tokenize_options()),
            ("encode", self.encode_options()),
            ("train", self.train_options("next", self.runs)),
        ):
            if options:
                # raises for invalid options; each job builds its config again
                cli.config_from_options(job, options)
        reason = self.model_class.reason_not_served()
        if self.config.register and reason:
            raise UserError(
                f"register is {self.config.register}, and the model "
                f"'{self.model_class.name}' cannot be served: {reason}"
            )

    def read_days(self) -> None:
        """Read the records of the earlier days."""
        path = join(self.output, DAYS)
        try:
            content = read_json(path) or []
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error})", "damaged") from error
        self.days = [parse_record(DayRecord, day, path) for day in content]

    def prepare_options(self) -> dict[str, Any]:
        """Return the options of jobs.prepare."""
        return {**self.config.prepare, "output": self.tables, "append": True}

    def tokenize_options(self) -> dict[str, Any]:
        """Return the options of jobs.tokenize.

        With them, jobs.tokenize extends the semantic IDs if items were appended, and
        replaces them if the table of items was replaced. They are empty for a model
        without semantic IDs.
        """
        output = self.inputs.get("sids")
        if not output:
            return {}
        options = {**self.config.tokenize, "tables": self.tables, "output": output}
        sids = find_table(join(output, "sids"), SidsInfo)
        if sids is None:
            return options
        items = open_table(join(self.tables, "items"), ItemsInfo)
        if sids.info.items_hash in items.ancestry:
            return {**options, "extend": output}
        return {**options, "overwrite": True}

    def encode_options(self) -> dict[str, Any]:
        """Return the options of jobs.encode; empty for a model that reads no text."""
        output = self.inputs.get("text")
        if not output:
            return {}
        options = {**self.config.encode, "tables": self.tables, "output": output}
        return {**options, "overwrite": True} if self.is_text_outdated() else options

    def is_text_outdated(self) -> bool:
        """Return whether text embeddings were computed from earlier tables."""
        for text_table in ("items", "queries", "pairs"):
            text = find_table(join(self.inputs["text"], text_table), EmbeddingsInfo)
            for name, made_from in text.inputs.items() if text else ():
                table = find_table(join(self.tables, name), TableInfo)
                if table and table.hash != made_from:  # "encoder" is no table
                    return True
        return False

    def train_options(self, name: str, init: str = "") -> dict[str, Any]:
        """Return the options of jobs.train.

        Args:
            name: Name of the run.
            init: Folder of the model that is trained further; "" trains a new model.
                Models without gradients are always trained from scratch.
        """
        options = {**self.config.train, **self.inputs}
        options |= {"storage": self.runs, "name": name}
        if not init or not self.model_class.trains_by_gradient:
            return options
        return merge(options, {**self.config.continue_training, "init": init})

    def run_job(self, job: str, options: dict[str, Any]) -> Any:
        """Print the command line of a job after an empty line, and run the job."""
        print()
        return cli.run_job(job, options)

    def save(self) -> None:
        """Write the records of all days. A step whose result is recorded is done."""
        content = json.dumps([asdict(day) for day in self.days], indent=2)
        write_file(join(self.output, DAYS), content.encode())

    def begin(self) -> DayRecord:
        """Return the record of the newest day in the tables, added if it is new.

        The name of a day is the date of its last event, in the time zone of the
        mapping, and the start of the tables' hash.
        """
        from pipelines.prepare.reading.log import load_source

        sequences = open_table(join(self.tables, "sequences"), SequencesInfo)
        split = sequences.info.split
        if split.by != "temporal":
            raise UserError(
                f"prepare.split.by is '{split.by}', and jobs.daily needs temporal"
            )
        last_ms = open_table(join(self.tables, "events"), EventsInfo).info.last_ms
        source, _ = load_source(self.config.prepare["source"])
        zone = ZoneInfo((source.time and source.time.zone) or "UTC")
        date = datetime.fromtimestamp(last_ms / 1000, zone).date()
        name = f"{date}-{sequences.hash[:8]}"
        for day in self.days:
            if day.name == name:
                return day
        self.days.append(DayRecord(name=name))
        return self.days[-1]

    def run(self) -> None:
        """Run the steps of the day that are not finished."""
        from models.loaded_model import load_catalogue

        self.read_days()
        self.run_job("prepare", self.prepare_options())
        day = self.begin()
        if day.accepted is not None:
            self.explain_idle(day.name)
            return
        if not day.audited:
            self.run_job("audit", {"tables": self.tables})
            day.audited = True
            self.save()
        tokenize = self.tokenize_options()
        if tokenize:
            self.run_job("tokenize", tokenize)
        encode = self.encode_options()
        if encode:
            self.run_job("encode", encode)
        catalogue = load_catalogue(self.model_class.name, Inputs(**self.inputs))
        metrics = self.model_class.metric_names(catalogue)
        check_known(self.config.max_drop, metrics, "max_drop")
        running = self.measure_running(day)
        init = running.checkpoint if running else ""
        trained = self.run_job("train", self.train_options(day.name, init))
        result = None
        if day.after is None:
            result = self.evaluate(trained.checkpoint)
            day.checkpoint, day.after = trained.checkpoint, defined_metrics(result)
            self.save()
        if day.baselines is None:
            day.baselines = self.compare_with_baselines(trained.checkpoint, result)
            self.save()
        self.judge(day, trained.run)

    def explain_idle(self, name: str) -> None:
        """Print why there is nothing to do, and the files that the source ignores.

        Args:
            name: Name of the day that is finished.
        """
        from pipelines.prepare.reading.log import load_source
        from pipelines.prepare.reading.unread import describe_unread

        source, _ = load_source(self.config.prepare["source"])
        print(
            f"\n{name} is finished; nothing to do until there are new files that match "
            f"'{source.files}'"
        )
        for line in describe_unread(source, self.config.prepare["input"]):
            print(line)

    def compare_with_baselines(
        self, folder: str, result: Result | None
    ) -> list[dict[str, Any]]:
        """Compare a checkpoint on the day with the models that need no training.

        Args:
            folder: Folder of the checkpoint.
            result: Result of the checkpoint on the day, over all items; None to
                evaluate the checkpoint.

        Returns:
            One verdict per ranking, against the best of these models: over all items,
            and without the items of the user's history. The ranking over all items
            comes first if users often repeat items. Empty if the model itself needs no
            training or its kind has no such models.
        """
        from models import registry
        from models.training import checkpoint
        from pipelines.comparison.compare import REPEATS
        from pipelines.comparison.verdicts import judge_result
        from pipelines.evaluation.baselines import measure_baselines

        metadata = checkpoint.read(folder)
        model_class = registry.find(metadata.name)
        if model_class.is_baseline:
            return []
        rankings: list[dict[str, Any]] = [{}]
        if model_class.ranks == "catalogue":
            rankings.append({"unseen": True})
        all_baselines = measure_baselines(
            metadata.name, Inputs(self.tables), "test", rankings
        )
        verdicts = []
        for options, baselines in zip(rankings, all_baselines, strict=True):
            if not baselines:
                continue
            evaluated = result
            if options or evaluated is None:
                evaluated = self.evaluate(folder, **options)
            verdicts.append(judge_result(evaluated, baselines, metadata.fit["metric"]))
        if verdicts and verdicts[0]["repeats"] < REPEATS:
            verdicts.reverse()
        return verdicts

    def measure_running(self, day: DayRecord) -> DayRecord | None:
        """Evaluate the running model on the day, and record its metrics.

        Returns:
            The record of the day whose model is running. None if there is no running
            model, or if the tables do not extend the tables of its training, as after
            `jobs.prepare --overwrite`; a new model is then trained from scratch.
        """
        from models.loaded_model import read_versions
        from models.training import checkpoint

        accepted = [other for other in self.days if other.accepted]
        running = accepted[-1] if accepted else None
        if running is None or day.anew:
            return None
        if day.before is not None:
            return running
        folder = running.checkpoint
        metadata = checkpoint.read(folder)
        try:
            versions = read_versions(metadata.name, Inputs(**self.inputs))
            checkpoint.check(metadata, folder, versions, extending=True)
            day.before = defined_metrics(self.evaluate(folder))
        except checkpoint.OtherTablesError as error:
            print(
                f"\nthe model of {running.name} cannot be trained further, so a new "
                f"model is trained from scratch: {error}"
            )
            day.anew = str(error)
            self.save()
            return None
        day.running = running.name
        self.save()
        return running

    def evaluate(self, checkpoint: str, **options: Any) -> Result:
        """Evaluate a checkpoint on the test split, which holds the day.

        Args:
            checkpoint: Folder of the checkpoint.
            options: Further options of jobs.evaluate.
        """
        evaluate = {"checkpoint": checkpoint, **self.inputs, "split": "test", **options}
        result: Result = self.run_job("evaluate", evaluate)
        return result

    def judge(self, day: DayRecord, run: RunRef) -> None:
        """Accept or reject the day's model, and register an accepted model.

        Args:
            day: Record of the day; the decision is added.
            run: MLflow run of the day's training, which is tagged with the decision.
        """
        from models.training import checkpoint
        from pipelines import tracking

        before, after = day.before or {}, day.after or {}
        metadata = checkpoint.read(day.checkpoint)
        max_drop = self.config.max_drop or {metadata.fit["metric"]: 0.05}
        undefined = [name for name in max_drop if name not in after]
        dropped = find_drops(before, after, max_drop)
        running = day.running or "none"
        logger = tracking.Logger(run)
        running_metrics = {f"running/{name}": value for name, value in before.items()}
        logger.update(running_metrics, metadata.step)
        logger.tag(accepted=str(not dropped).lower(), running=running)
        self.print_comparison(day, metadata.name, max_drop)
        if undefined:
            print(
                f"note: {', '.join(undefined)} has no value on this day, and is not "
                f"compared"
            )
        if dropped and dropped == undefined:
            print(
                "not accepted: no metric of max_drop has a value; the running model "
                "stays"
            )
        elif dropped:
            print(
                f"not accepted: {', '.join(dropped)} dropped by more than max_drop "
                f"allows; the running model stays"
            )
        else:
            self.register(day, run, metadata.fit["metric"])
        day.accepted = not dropped
        self.save()
        compare = cli.command_line(
            "jobs.compare", experiment=run.experiment, tracking_uri=run.uri
        )
        print(f"next: {compare}")

    def print_comparison(
        self, day: DayRecord, model: str, max_drop: dict[str, float]
    ) -> None:
        """Print the metrics of the day's model beside the running model's metrics.

        Args:
            day: Record of the day.
            model: Name of the model in the registry.
            max_drop: Metrics that are compared, which are printed first.
        """
        from models import registry
        from pipelines.comparison.verdicts import describe_verdict

        before, after = day.before or {}, day.after or {}
        running = day.running or "no running model"
        print(f"\n{day.name}, compared with {running} on the same day")
        for name in dict.fromkeys([*max_drop, *registry.find(model).shown_metrics]):
            if name in after:
                old_value = f"{before[name]:.4f} to " if name in before else ""
                print(f"  {name:<12}  {old_value}{after[name]:.4f}")
        for verdict in day.baselines or []:
            print(f"  {describe_verdict(verdict)}")

    def register(self, day: DayRecord, run: RunRef, metric: str) -> None:
        """Register an accepted model, unless a model without training is better.

        Args:
            day: Record of the day.
            run: MLflow run of the day's training.
            metric: Metric that describes the version in the registry.
        """
        from pipelines.comparison.verdicts import BELOW
        from pipelines.serving.registered_model import register

        if not self.config.register:
            return
        verdicts = day.baselines or []
        is_below = bool(verdicts) and verdicts[0]["verdict"] == BELOW
        if is_below and not self.config.register_below_baseline:
            print(
                f"not registered: the model is below {verdicts[0]['baseline']}; "
                f"register_below_baseline: true registers such models from the next "
                f"day on"
            )
            return
        version = register(run, self.config.register, metric)
        print(f"registered: version {version.version} of {self.config.register}")


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
        max_drop: Largest share by which each metric may drop.
    """
    undefined = [name for name in max_drop if name not in after]
    if before and len(undefined) == len(max_drop):
        return undefined
    return [
        name
        for name, share in max_drop.items()
        if name in before
        and name in after
        and after[name] < lowest_accepted(before[name], share)
    ]


def run(config: Config) -> None:
    """Run the steps of the day, under a lock on the output folder."""
    day = Day(config)
    day.check()
    busy = f"another jobs.daily is writing to {config.output}; wait until it ends"
    with hold_lock(join(absolute(config.output), ".daily.lock"), busy):
        day.run()


if __name__ == "__main__":
    cli.main(run)
