"""A day of a growing log: its files join the tables, yesterday's model is measured on it, and training goes on.

    python -m jobs.daily --config shop_daily.yaml

The file has the options of the jobs that run, as docs/days.md shows: append, audit, semantic IDs or texts of new items,
the evaluation of the running model on the new day before anything is trained on it, training from its weights,
evaluation, comparison, and registration where no metric falls by more than is set. The day's model is the running one
from then on if it is accepted. A step that is done is not done again, so a run that was stopped goes on.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jobs import cli
from models.config import hint
from models.storage.inputs import Inputs
from models.storage.locks import hold_lock
from models.storage.tables import UserError, has_manifest, join, read_manifest
from models.storage.uri import absolute, check_writable, read_json, write_file

if TYPE_CHECKING:
    from pipelines import tracking

DAYS = "days.json"
"""In the output folder: what was found on each day."""


@dataclass
class Config:
    """Options."""

    output: str
    """Folder for all: tables, sids or text, runs, and `days.json`."""
    prepare: dict[str, Any]
    """Options of jobs.prepare; the split has to be by time, such as `split: {val_days: 1, test_days: 1}`."""
    train: dict[str, Any]
    """Options of jobs.train, the first day's."""
    go_on: dict[str, Any] = field(default_factory=dict)
    """Those that win from the second day on, such as `fit: {replay_fraction: 0.2, max_epochs: 3}`."""
    tokenize: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.tokenize, for models of semantic IDs."""
    encode: dict[str, Any] = field(default_factory=dict)
    """Options of jobs.encode, for models that read text."""
    fall: dict[str, float] = field(default_factory=dict)
    """By metric of which larger is better: the share by which it may be below that of the running model on the new day;
    by default 0.05 of `fit.metric`."""
    register: str | None = None
    """Name of the model in MLflow's registry that accepted ones become versions of; by default none is registered."""

    register_below_floor: bool = False
    """Register a model that is below the best model without training on the day, too."""

    def __post_init__(self) -> None:
        for metric, share in self.fall.items():
            if not 0 <= share <= 1:
                raise ValueError(
                    f"fall.{metric} is {share}, it must be from 0 to 1, such as 0.05"
                )


def words(options: dict[str, Any], prefix: str = "--") -> Iterator[str]:
    """The options as a command line gives them."""
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from words(value, f"{prefix}{name}.")
        else:
            for each in value if isinstance(value, list) else [value]:
                yield from (
                    f"{prefix}{name}",
                    str(each).lower() if isinstance(each, bool) else str(each),
                )


def merged(options: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Nested options, of which later ones win."""
    both = {
        name: merged(options[name], value)
        for name, value in later.items()
        if isinstance(value, dict) and isinstance(options.get(name), dict)
    }
    return options | later | both


def lowest(value: float, share: float) -> float:
    """What a metric may fall to from a value, of either sign."""
    return value - share * abs(value)


def parsed(job: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """(module of a job, what it makes of the options); UserError for what is wrong with them."""
    module = importlib.import_module(f"jobs.{job}")
    return module, cli.options_for(module, [*words(options)])


def read_ancestry(uri: str) -> list[str]:
    """Return the hashes of a table and of the versions that the table extends."""
    manifest = read_manifest(uri)
    return [*manifest.extends, manifest.hash]


class Day:
    """What is done with the log as it stands."""

    def __init__(self, config: Config) -> None:
        self.config, self.output = config, absolute(config.output)
        self.tables, self.runs = join(self.output, "tables"), join(self.output, "runs")
        read = {"sids": config.tokenize, "text": config.encode}
        self.read = {"tables": self.tables} | {
            name: join(self.output, name) for name, asked in read.items() if asked
        }
        self.days: list[dict[str, Any]] = []

    def check(self) -> None:
        """UserError for what is wrong with the options of a job, before any work."""
        for job, options in (
            ("prepare", self.preparing()),
            ("tokenize", self.making("sids")),
            ("encode", self.making("text")),
            ("train", self.training("first", None)),
            ("train", self.training("next", {"checkpoint": self.runs})),
        ):
            if options:
                parsed(job, options)
        from models import registry

        name = self.model_name()
        not_served = registry.find(name).reason_not_served()
        if self.config.register and not_served:
            raise UserError(
                f"register is {self.config.register}, and the model '{name}' is not "
                f"served: {not_served}; leave out register, or train another model"
            )

    def read_days(self) -> None:
        """Reads what was found before."""
        try:
            self.days = read_json(join(self.output, DAYS)) or []
        except ValueError as error:
            raise UserError(
                f"{join(self.output, DAYS)} is damaged ({error}); give it back, or remove it"
            ) from error

    def preparing(self) -> dict[str, Any]:
        return {**self.config.prepare, "output": self.tables, "append": True}

    def making(self, what: str) -> dict[str, Any]:
        """Options for semantic IDs or texts; none where the model reads none."""
        if what not in self.read:
            return {}
        asked, place = (
            self.config.tokenize if what == "sids" else self.config.encode,
            self.read[what],
        )
        options = {**asked, "tables": self.tables, "output": place}
        if what == "text":
            return options | ({"overwrite": True} if self.text_is_old() else {})
        if not has_manifest(join(place, "sids")):
            return options
        made_of = read_manifest(join(place, "sids"), "sids").info["items_hash"]
        goes_on = made_of in read_ancestry(join(self.tables, "items"))
        return options | ({"extend": place} if goes_on else {"overwrite": True})

    def text_is_old(self) -> bool:
        """Return whether the tables of text were made from other tables than those of the day."""
        made = [join(self.read["text"], name) for name in ("items", "queries", "pairs")]
        inputs = [read_manifest(uri).inputs for uri in made if has_manifest(uri)]
        return any(
            of[name] != read_manifest(join(self.tables, name)).hash
            for of in inputs
            for name in of
            if name != "encoder"
        )

    def training(self, name: str, running: dict[str, Any] | None) -> dict[str, Any]:
        """Return the options of jobs.train. A model without gradients begins anew."""
        from models import registry

        options = {**self.config.train, **self.read, "storage": self.runs, "name": name}

        if running is None or not registry.find(self.model_name()).trains_by_gradient:
            return options
        return merged(options, {**self.config.go_on, "init": running["checkpoint"]})

    def model_name(self) -> str:
        """Return the name of the model, which files of options may hold."""
        options = {**self.config.train, **self.read, "storage": self.runs, "name": "x"}
        return str(parsed("train", options)[1].model["name"])

    def do(self, job: str, options: dict[str, Any]) -> Any:
        """Runs a job in this process, printed as the line to repeat it."""
        print(f"\n$ python -m jobs.{job} {shlex.join(words(options))}", flush=True)
        module, given = parsed(job, options)
        return module.run(given)

    def note(self, day: dict[str, Any], **found: Any) -> None:
        """Keeps what a step has found, so that it is not done again."""
        day |= found
        write_file(join(self.output, DAYS), json.dumps(self.days, indent=2).encode())

    def begin(self) -> dict[str, Any]:
        """The record of the day that the tables end with, named by its date and their version."""
        sequences = read_manifest(join(self.tables, "sequences"), "sequences")
        split = sequences.info["split"]
        if "test_start_ms" not in split:
            raise UserError(
                f"prepare.split is of kind '{split['kind']}', by which no day can be told; give "
                f"prepare: {{split: {{kind: temporal, val_days: 1, test_days: 1}}}}"
            )
        date = datetime.fromtimestamp(split["test_start_ms"] / 1000, UTC).date()
        name = f"{date}-{sequences.hash[:8]}"
        found = next((day for day in self.days if day["name"] == name), None)
        if found is None:
            self.days.append(found := {"name": name})
        return found

    def run(self) -> None:
        """Does what is left to do of the day."""
        self.read_days()
        self.do("prepare", self.preparing())
        day = self.begin()
        if "accepted" in day:
            self.explain_idle(day["name"])
            return
        if "audited" not in day:
            self.do("audit", {"tables": self.tables})
            self.note(day, audited=True)
        for what, job in (("sids", "tokenize"), ("text", "encode")):
            if options := self.making(what):
                self.do(job, options)
        self.check_fall()
        running = self.measure_running(day)
        trained = self.do("train", self.training(day["name"], running))
        if "after" not in day:
            self.note(
                day,
                checkpoint=trained.checkpoint,
                after=self.measured(trained.checkpoint),
            )
        if "floors" not in day:
            self.note(day, floors=self.compare_with_floors(trained.checkpoint))
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
            result = self.do("evaluate", {"checkpoint": where, **self.read, **options})
            verdicts.append(judge_result(result, floors, about.fit["metric"]))
        if verdicts and verdicts[0]["repeats"] < REPEATS:
            verdicts.reverse()
        return verdicts

    def measure_running(self, day: dict[str, Any]) -> dict[str, Any] | None:
        """Measure the running model on the day.

        Returns:
            The record of its day; None without a running model, and where it cannot go on with the tables, as after
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
            versions = read_versions(about.name, Inputs(**self.read))
            checkpoint.check(about, where, versions, extending=True)
            before = self.measured(where)
        except checkpoint.OtherTablesError as error:
            print(
                f"\n{running['name']} cannot go on, so a model is trained anew: {error}"
            )
            self.note(day, anew=str(error))
            return None
        self.note(day, running=running["name"], before=before)
        return running

    def check_fall(self) -> None:
        """UserError for a metric of `fall` that the model does not have, before it is trained."""
        from models import registry
        from models.loaded_model import load_catalogue

        name = self.model_name()
        catalogue = load_catalogue(name, Inputs(**self.read))
        known = registry.find(name).metric_names(catalogue)
        for metric in self.config.fall:
            if metric not in known:
                raise UserError(
                    f"fall.{metric} is no metric of '{name}'; {hint(metric, known)}"
                )

    def measured(self, where: str) -> dict[str, float]:
        """Metrics of a checkpoint on the day, which is the test split."""
        found = self.do("evaluate", {"checkpoint": where, **self.read, "split": "test"})
        return {
            name: value for name, value in found.metrics.items() if value == value
        }  # NaN is no JSON

    def judge(self, day: dict[str, Any], run: tracking.RunRef) -> None:
        """Compares with the running model, and registers the day's where it may take its place."""
        from models import registry
        from models.storage import checkpoint
        from pipelines import tracking
        from pipelines.comparison.floors import BELOW, describe_verdict
        from pipelines.serving.registered_model import register

        before, after = day.get("before", {}), day["after"]
        about = checkpoint.read(day["checkpoint"])
        fall = self.config.fall or {about.fit["metric"]: 0.05}
        undefined = [name for name in fall if name not in after]
        low = [
            name
            for name, share in fall.items()
            if name in before
            and name in after
            and after[name] < lowest(before[name], share)
        ]
        if before and len(undefined) == len(fall):
            low = undefined
        logger = tracking.Logger(run)
        logger.update(
            {f"running/{name}": value for name, value in before.items()}, about.step
        )
        logger.tag(accepted=str(not low).lower(), running=day.get("running", "none"))
        print(
            f"\n{day['name']}, beside {day.get('running', 'no running model')} on the same day"
        )
        shown = registry.find(about.name).shown_metrics
        for name in dict.fromkeys([*fall, *shown]):
            if name in after:
                was = f"{before[name]:.4f} to " if name in before else ""
                print(f"  {name:<12}  {was}{after[name]:.4f}")
        for verdict in day.get("floors", []):
            print(f"  {describe_verdict(verdict)}")
        below = [v for v in day.get("floors", [])[:1] if v["verdict"] == BELOW]
        if undefined:
            print(
                f"note: {', '.join(undefined)} has no value on this day, and is not compared"
            )
        if low and low == undefined:
            print(
                "not accepted: no metric of fall has a value; the running model stays"
            )
        elif low:
            print(
                f"not accepted: {', '.join(low)} fell by more than fall allows; the running model stays"
            )
        elif below and self.config.register and not self.config.register_below_floor:
            print(
                f"not registered: it is below {below[0]['floor']}, a model without "
                f"training; register_below_floor: true registers it"
            )
        elif self.config.register:
            version = register(run, self.config.register, about.fit["metric"])
            print(f"registered: version {version.version} of {self.config.register}")
        self.note(day, accepted=not low)
        print(
            f"next: {cli.line('jobs.compare', experiment=run.experiment, tracking_uri=run.uri)}"
        )


def run(config: Config) -> None:
    """The day, which no other process may do meanwhile."""
    day = Day(config)
    day.check()
    check_writable(config.output)
    busy = f"{config.output} is being worked on by another jobs.daily; wait for it"
    with hold_lock(join(absolute(config.output), ".daily.lock"), busy):
        day.run()


if __name__ == "__main__":
    cli.main(run, Config)
