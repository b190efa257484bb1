"""Add a day to a growing log: append its files, measure the running model on it, and continue the training.

    python -m jobs.daily --config shop_daily.yaml

The file has the options of the jobs that run, as docs/days.md shows: append, audit,
semantic IDs or texts of new items, evaluation of the running model on the new day
before anything is trained on it, training from its weights, evaluation, comparison, and
registration if no metric drops by more than `max_drop`. An accepted model is the
running one from then on. Finished steps are not repeated, so a run that was stopped
continues.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isnan
from typing import TYPE_CHECKING, Any

from jobs import cli
from jobs.options import merge_options
from models.config import did_you_mean
from models.storage.inputs import Inputs
from models.storage.locks import hold_lock
from models.storage.tables import UserError, has_manifest, join, read_manifest
from models.storage.uri import absolute, check_writable, read_json, write_file

if TYPE_CHECKING:
    from pipelines import tracking

DAYS = "days.json"
"""File of the output folder with a record of each day."""


@dataclass
class Config:
    """Options of jobs.daily."""

    output: str
    """Folder for tables, sids or text, runs, and `days.json`."""
    prepare: dict[str, Any]
    """Options of jobs.prepare; the split has to be by time, such as `split: {val_days:
    1, test_days: 1}`."""
    train: dict[str, Any]
    """Options of jobs.train on the first day."""
    continue_training: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.train that win from the second day on, such as `fit:
    {replay_fraction: 0.2, max_epochs: 3}`."""
    tokenize: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.tokenize, for models of semantic IDs."""
    encode: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.encode, for models that read text."""
    max_drop: dict[str, float] = field(default_factory=dict)
    """By metric of which larger is better: the largest share by which it may be below
    that of the running model on the new day; by default 0.05 for `fit.metric`."""
    register: str | None = None
    """Name of the model in MLflow's registry that accepted ones become versions of; by
    default none is registered."""

    register_below_floor: bool = False
    """Register a model that is below the best model without training on the day,
    too."""

    def __post_init__(self) -> None:
        for metric, share in self.max_drop.items():
            if not 0 <= share <= 1:
                raise ValueError(
                    f"max_drop.{metric} is {share}, it must be from 0 to 1, such as 0.05"
                )


def lowest_accepted(value: float, share: float) -> float:
    """Return the lowest value that a metric of either sign may drop to from `value`."""
    return value - share * abs(value)


def build_config(job: str, options: dict[str, Any]) -> Any:
    """Build the configuration of a job, or raise UserError for invalid options."""
    return cli.config_from_options(importlib.import_module(f"jobs.{job}"), options)


def read_ancestry(uri: str) -> list[str]:
    """Return the hashes of a table and of the versions that the table extends."""
    manifest = read_manifest(uri)
    return [*manifest.extends, manifest.hash]


class Day:
    """The jobs of one day of the log."""

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
        self.days: list[dict[str, Any]] = []

    def check(self) -> None:
        """Raise UserError for invalid options of any job, before any work."""
        for job, options in (
            ("prepare", self.prepare_options()),
            ("tokenize", self.tokenize_options()),
            ("encode", self.encode_options()),
            ("train", self.train_options("first", None)),
            ("train", self.train_options("next", {"checkpoint": self.runs})),
        ):
            if options:
                build_config(job, options)
        from models import registry

        name = self.model_name()
        not_served = registry.find(name).reason_not_served()
        if self.config.register and not_served:
            raise UserError(
                f"register is {self.config.register}, and the model '{name}' is not "
                f"served: {not_served}; leave out register, or train another model"
            )

    def read_days(self) -> None:
        """Read the records of the days before."""
        try:
            self.days = read_json(join(self.output, DAYS)) or []
        except ValueError as error:
            raise UserError(
                f"{join(self.output, DAYS)} is damaged ({error}); give it back, or remove it"
            ) from error

    def prepare_options(self) -> dict[str, Any]:
        """Return the options of jobs.prepare."""
        return {**self.config.prepare, "output": self.tables, "append": True}

    def tokenize_options(self) -> dict[str, Any]:
        """Return the options of jobs.tokenize; none for a model without semantic IDs."""
        output = self.inputs.get("sids")
        if not output:
            return {}
        options = {**self.config.tokenize, "tables": self.tables, "output": output}
        if not has_manifest(join(output, "sids")):
            return options
        items_hash = read_manifest(join(output, "sids"), "sids").info["items_hash"]
        if items_hash in read_ancestry(join(self.tables, "items")):
            return {**options, "extend": output}
        return {**options, "overwrite": True}

    def encode_options(self) -> dict[str, Any]:
        """Return the options of jobs.encode; none for a model that reads no text."""
        output = self.inputs.get("text")
        if not output:
            return {}
        options = {**self.config.encode, "tables": self.tables, "output": output}
        return {**options, "overwrite": True} if self.text_is_old() else options

    def text_is_old(self) -> bool:
        """Return whether the tables of text were made from other tables than the day's."""
        made = [
            join(self.inputs["text"], name) for name in ("items", "queries", "pairs")
        ]
        inputs = [read_manifest(uri).inputs for uri in made if has_manifest(uri)]
        return any(
            of[name] != read_manifest(join(self.tables, name)).hash
            for of in inputs
            for name in of
            if name != "encoder"
        )

    def train_options(
        self, name: str, running: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the options of jobs.train. A model without gradients begins anew.

        Args:
            name: Name of the run.
            running: Record of the day whose model is continued, or None.
        """
        from models import registry

        options = {**self.config.train, **self.inputs}
        options |= {"storage": self.runs, "name": name}
        if running is None or not registry.find(self.model_name()).trains_by_gradient:
            return options
        return merge_options(
            options, {**self.config.continue_training, "init": running["checkpoint"]}
        )

    def model_name(self) -> str:
        """Return the name of the model, which config files may hold."""
        from models import registry

        options = {**self.config.train, **self.inputs}
        options |= {"storage": self.runs, "name": "any"}
        return registry.find_by_config(build_config("train", options).model).name

    def run_job(self, job: str, options: dict[str, Any]) -> Any:
        """Run a job in this process, printed as the line to repeat it."""
        print()
        return cli.run_job(job, options)

    def save(self, day: dict[str, Any], **values: Any) -> None:
        """Save results of a step in the record of a day, so that it is not repeated."""
        day |= values
        write_file(join(self.output, DAYS), json.dumps(self.days, indent=2).encode())

    def begin(self) -> dict[str, Any]:
        """Return the record of the last day in the tables, named by its date and their version."""
        sequences = read_manifest(join(self.tables, "sequences"), "sequences")
        split = sequences.info["split"]
        if "test_start_ms" not in split:
            raise UserError(
                f"prepare.split is of kind '{split['kind']}', by which no day can be told; give "
                f"prepare: {{split: {{kind: temporal, val_days: 1, test_days: 1}}}}"
            )
        date = datetime.fromtimestamp(split["test_start_ms"] / 1000, UTC).date()
        name = f"{date}-{sequences.hash[:8]}"
        for day in self.days:
            if day["name"] == name:
                return day
        self.days.append({"name": name})
        return self.days[-1]

    def run(self) -> None:
        """Run the jobs that are left for the day."""
        self.read_days()
        self.run_job("prepare", self.prepare_options())
        day = self.begin()
        if "accepted" in day:
            self.explain_idle(day["name"])
            return
        if "audited" not in day:
            self.run_job("audit", {"tables": self.tables})
            self.save(day, audited=True)
        if options := self.tokenize_options():
            self.run_job("tokenize", options)
        if options := self.encode_options():
            self.run_job("encode", options)
        self.check_max_drop()
        running = self.measure_running(day)
        trained = self.run_job("train", self.train_options(day["name"], running))
        if "after" not in day:
            self.save(
                day,
                checkpoint=trained.checkpoint,
                after=self.measure(trained.checkpoint),
            )
        if "floors" not in day:
            self.save(day, floors=self.compare_with_floors(trained.checkpoint))
        self.judge(day, trained.run)

    def explain_idle(self, name: str) -> None:
        """Print which files a new day needs, and which files of the folder it ignored."""
        from pipelines.data.reading.log import load_source
        from pipelines.data.reading.unread import describe_unread

        source, _ = load_source(self.config.prepare["source"])
        print(
            f"\n{name} is done; nothing to do until there are new files like "
            f"'{source.files}'"
        )
        for line in describe_unread(source, self.config.prepare["input"]):
            print(line)

    def compare_with_floors(self, where: str) -> list[dict[str, Any]]:
        """Return the verdict against the best floor of each ranking of the day.

        The ranking that fits the log comes first: all items where users come back to
        items. The list is empty for a family without floors and for a floor.
        """
        from models import registry
        from models.storage import checkpoint
        from pipelines.comparison.floors import judge_result
        from pipelines.comparison.rows import REPEATS
        from pipelines.evaluation.floors import measure_floors

        about = checkpoint.read(where)
        model_class = registry.find(about.name)
        if model_class.is_floor:
            return []
        rankings: list[dict[str, Any]] = [{}]
        if model_class.ranks == "catalogue":
            rankings.append({"unseen": True})
        all_floors = measure_floors(about.name, Inputs(self.tables), "test", rankings)
        verdicts = []
        for options, floors in zip(rankings, all_floors, strict=True):
            if not floors:
                continue
            evaluate = {"checkpoint": where, **self.inputs, **options}
            result = self.run_job("evaluate", evaluate)
            verdicts.append(judge_result(result, floors, about.fit["metric"]))
        if verdicts and verdicts[0]["repeats"] < REPEATS:
            verdicts.reverse()
        return verdicts

    def measure_running(self, day: dict[str, Any]) -> dict[str, Any] | None:
        """Measure the running model on the day.

        Returns:
            The record of its day; None if there is no running model, or it cannot continue with the tables, as after
            `jobs.prepare --overwrite`. A model is then trained anew.
        """
        from models.loaded_model import read_versions
        from models.storage import checkpoint

        running = next(
            (other for other in reversed(self.days) if other.get("accepted")), None
        )
        if running is None or "anew" in day:
            return None
        if "before" in day:
            return running
        where = running["checkpoint"]
        about = checkpoint.read(where)
        try:
            versions = read_versions(about.name, Inputs(**self.inputs))
            checkpoint.check(about, where, versions, extending=True)
            before = self.measure(where)
        except checkpoint.OtherTablesError as error:
            print(
                f"\n{running['name']} cannot go on, so a model is trained anew: {error}"
            )
            self.save(day, anew=str(error))
            return None
        self.save(day, running=running["name"], before=before)
        return running

    def check_max_drop(self) -> None:
        """Raise UserError for a metric of `max_drop` that the model does not have."""
        from models import registry
        from models.loaded_model import load_catalogue

        name = self.model_name()
        catalogue = load_catalogue(name, Inputs(**self.inputs))
        known = registry.find(name).metric_names(catalogue)
        for metric in self.config.max_drop:
            if metric not in known:
                raise UserError(
                    f"max_drop.{metric} is no metric of '{name}'; {did_you_mean(metric, known)}"
                )

    def measure(self, checkpoint: str) -> dict[str, float]:
        """Return the metrics of a checkpoint on the day, which is the test split."""
        options = {"checkpoint": checkpoint, **self.inputs, "split": "test"}
        metrics = self.run_job("evaluate", options).metrics
        return {name: value for name, value in metrics.items() if not isnan(value)}

    def judge(self, day: dict[str, Any], run: tracking.RunRef) -> None:
        """Compare the day's model with the running one, and register it if it is accepted."""
        from models.storage import checkpoint
        from pipelines import tracking

        before, after = day.get("before", {}), day["after"]
        about = checkpoint.read(day["checkpoint"])
        max_drop = self.config.max_drop or {about.fit["metric"]: 0.05}
        undefined = [name for name in max_drop if name not in after]
        dropped = find_drops(before, after, max_drop)
        running = day.get("running", "none")
        logger = tracking.Logger(run)
        on_day = {f"running/{name}": value for name, value in before.items()}
        logger.update(on_day, about.step)
        logger.tag(accepted=str(not dropped).lower(), running=running)
        self.print_comparison(day, about.name, max_drop)
        if undefined:
            print(
                f"note: {', '.join(undefined)} has no value on this day, and is not compared"
            )
        if dropped and dropped == undefined:
            print(
                "not accepted: no metric of max_drop has a value; the running model stays"
            )
        elif dropped:
            print(
                f"not accepted: {', '.join(dropped)} dropped by more than max_drop allows; the running model stays"
            )
        else:
            self.register(day, run, about.fit["metric"])
        self.save(day, accepted=not dropped)
        print(
            f"next: {cli.command_line('jobs.compare', experiment=run.experiment, tracking_uri=run.uri)}"
        )

    def print_comparison(
        self, day: dict[str, Any], model: str, max_drop: dict[str, float]
    ) -> None:
        """Print the metrics of the day's model and of the running model."""
        from models import registry
        from pipelines.comparison.floors import describe_verdict

        before, after = day.get("before", {}), day["after"]
        running = day.get("running", "no running model")
        print(f"\n{day['name']}, beside {running} on the same day")
        for name in dict.fromkeys([*max_drop, *registry.find(model).shown_metrics]):
            if name in after:
                was = f"{before[name]:.4f} to " if name in before else ""
                print(f"  {name:<12}  {was}{after[name]:.4f}")
        for verdict in day.get("floors", []):
            print(f"  {describe_verdict(verdict)}")

    def register(self, day: dict[str, Any], run: tracking.RunRef, metric: str) -> None:
        """Register an accepted model, unless it is below the best model without training."""
        from pipelines.comparison.floors import BELOW
        from pipelines.serving.registered_model import register

        if not self.config.register:
            return
        below = [v for v in day.get("floors", [])[:1] if v["verdict"] == BELOW]
        if below and not self.config.register_below_floor:
            print(
                f"not registered: it is below {below[0]['floor']}, a model without "
                f"training; register_below_floor: true registers it"
            )
            return
        version = register(run, self.config.register, metric)
        print(f"registered: version {version.version} of {self.config.register}")


def find_drops(
    before: dict[str, float], after: dict[str, float], max_drop: dict[str, float]
) -> list[str]:
    """Return the metrics by which a model is not accepted.

    A metric without a value is not compared, unless no metric has a value.

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
    """Run the jobs of the day, under a lock."""
    day = Day(config)
    day.check()
    check_writable(config.output)
    busy = f"{config.output} is being worked on by another jobs.daily; wait for it"
    with hold_lock(join(absolute(config.output), ".daily.lock"), busy):
        day.run()


if __name__ == "__main__":
    cli.main(run, Config)
