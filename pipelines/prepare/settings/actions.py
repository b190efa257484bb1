"""Settings of a log of actions in a source file: tasks, inputs of models, counts.

    prepare:
      kind: actions
      actions:
        tasks:
          long_dwell: {label: dwell_ms, above: 10000}          # 1(dwell > tau)
          contribution: {any: [like, comment, share, follow]}
        inputs:
          dwell: {label: dwell_ms, range: [0, 60000], log_unit: 1000}
        counts: {keys: [item, author, user], windows_days: [1, 7]}

A bool label that no entry names becomes a task and an input. A missing label means that
the action was not taken: 0.

Shapes: E events, K tasks, A actions that models read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from core.options import STRICT, check_known
from core.settings import ActionCounts, InputSettings, TaskSettings
from core.splits import DAY_MS, MINUTE_MS
from pipelines.prepare.settings.names import check_names, check_range

if TYPE_CHECKING:  # the modules are imported when a log is read
    import numpy as np
    import polars as pl

    from core.schemas import LogInfo

USER, ITEM = "user", "item"


class WindowSettings:
    """Settings of counts at time t over the windows [t - window, t - delay)."""

    windows_days: list[float]
    delay_minutes: float

    def check_windows(self, section: str) -> None:
        """Check that windows ascend and are longer than the delay.

        Args:
            section: Name of the settings, for messages.

        Raises:
            ValueError: If a window or the delay is invalid.
        """
        days = self.windows_days
        if any(shorter >= longer for shorter, longer in pairwise(days)):
            raise ValueError(
                f"{section}.windows_days is {days}; use ascending lengths in days, "
                f"such as [1, 7, 30]"
            )
        if days and days[0] * DAY_MS <= self.delay_minutes * MINUTE_MS:
            raise ValueError(
                f"{section}.windows_days begins with {days[0]}, which is not longer "
                f"than delay_minutes {self.delay_minutes}"
            )

    def name_features(self, key: str, measures: Iterable[str]) -> list[str]:
        """Return the names of the measures of a kind of key, window by window."""
        measures = list(measures)
        days = [f"{length:g}d" for length in self.windows_days]
        return [f"{key}_{name}_{window}" for window in days for name in measures]

    @property
    def windows_ms(self) -> list[int]:
        """Lengths of the windows in ms."""
        return [round(days * DAY_MS) for days in self.windows_days]

    @property
    def delay_ms(self) -> int:
        """Length of the delay in ms."""
        return round(self.delay_minutes * MINUTE_MS)


@dataclass(config=STRICT, frozen=True)
class Task(TaskSettings):
    """A binary task of a source file."""

    def __post_init__(self) -> None:
        if (self.label is None) == (self.any is None):
            raise ValueError(
                "a task needs either 'label' or 'any'; give exactly one of them"
            )
        if self.above is not None and self.at_least is not None:
            raise ValueError("a task has both 'above' and 'at_least'")
        if self.any is not None and self.threshold is not None:
            raise ValueError("'any' takes bool labels, which have no threshold")

    @property
    def threshold(self) -> float | None:
        """The threshold of a number label, or None."""
        return self.at_least if self.above is None else self.above

    @property
    def labels(self) -> list[str]:
        """Labels that the task is computed from."""
        return [self.label] if self.label is not None else list(self.any or ())

    def check(self, name: str, labels: dict[str, str]) -> None:
        """Check that the log has the task's labels, with types that fit.

        Args:
            name: Name of the task, for messages.
            labels: Type of each label of the log.

        Raises:
            ValueError: If a label does not exist, a bool label has a threshold, or a
                number label has none.
        """
        for label in self.labels:
            is_bool = label_type(label, labels, f"tasks.{name}") == "bool"
            if is_bool != (self.threshold is None):
                fault = "bool, which has no threshold"
                if not is_bool:
                    fault = "a number, so give 'above' or 'at_least'"
                raise ValueError(f"tasks.{name}: label '{label}' is {fault}")

    @property
    def holds(self) -> pl.Expr:
        """Whether the task holds for an event; a missing label counts as false."""
        import polars as pl

        values = pl.col([f"label_{label}" for label in self.labels])
        # in float32 like the labels, so a label of 3.3 is at least 3.3
        if self.above is not None:
            values = values > pl.lit(self.above, pl.Float32)
        elif self.at_least is not None:
            values = values >= pl.lit(self.at_least, pl.Float32)
        return pl.any_horizontal(values.fill_null(False))


@dataclass(config=STRICT, frozen=True)
class Input(InputSettings):
    """An input of models of a source file."""

    def __post_init__(self) -> None:
        if self.range is not None:
            check_range(self.range)

    def resolve(
        self, name: str, labels: dict[str, str], ranges: dict[str, list[float]]
    ) -> Input:
        """Check the input against the log's labels, and return it with its range.

        Args:
            name: Name of the input, for messages.
            labels: Type of each label of the log.
            ranges: Range of each number label that declares one.

        Raises:
            ValueError: If the label does not exist, is a bool with a range or a
                `log_unit`, or is a number without a range.
        """
        kind = label_type(self.label, labels, f"inputs.{name}")
        if kind == "bool":
            if self.range is not None or self.log_unit is not None:
                raise ValueError(f"inputs.{name}: label '{self.label}' is bool")
            return self
        bounds = self.range or ranges.get(self.label)
        if bounds is None:
            raise ValueError(
                f"inputs.{name}: label '{self.label}' is a number; give its 'range', "
                f"such as [0, 5]"
            )
        return Input(self.label, [float(bound) for bound in bounds], self.log_unit)

    def values(self, events: pl.DataFrame) -> np.ndarray:
        """Return the input (E,) float32 of each event, from 0 to 1.

        A missing label becomes 0.
        """
        import numpy as np

        label = events[f"label_{self.label}"]
        if self.range is None:
            return label.fill_null(False).to_numpy().astype(np.float32)
        low, high = self.range
        value = label.fill_null(low).to_numpy().astype(np.float64)
        unit = self.log_unit or 1.0
        distance = (value.clip(low, high) - low) / unit
        length = (high - low) / unit
        if self.log_unit:
            return (np.log1p(distance) / np.log1p(length)).astype(np.float32)
        return (distance / length).astype(np.float32)


@dataclass(config=STRICT, frozen=True)
class Counts(ActionCounts, WindowSettings):
    """Settings of windowed counts of actions, the section `counts` of a source file."""

    def __post_init__(self) -> None:
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise ValueError(f"counts.keys is {self.keys}, not different keys")
        self.check_windows("counts")


@dataclass(config=STRICT, frozen=True)
class ActionsConfig:
    """Tasks, inputs and counts of a log of actions."""

    tasks: dict[str, Task] = field(default_factory=dict)
    """Tasks by name, in order: {name: {label, above | at_least}} or {name: {any:
    [labels]}}. Each bool label that is not the `label` of a task is added as a task."""
    inputs: dict[str, Input] = field(default_factory=dict)
    """Inputs of models, by name: {name: {label, range, log_unit}}. Each bool label that
    no input reads is added as 0 or 1."""
    counts: Counts = field(default_factory=Counts)
    """Kinds of key, windows and smoothing of the counted features."""

    def resolve(self, info: LogInfo, attributes: list[str]) -> ActionsConfig:
        """Return the configuration with all defaults filled in from the log.

        Args:
            info: Labels of the log.
            attributes: Attributes of the log's items.

        Raises:
            ValueError: If the log does not have a label, key or task.
        """
        tasks = dict(self.tasks)
        for name, task in tasks.items():
            task.check(name, info.labels)
        inputs = {
            name: value.resolve(name, info.labels, info.ranges)
            for name, value in self.inputs.items()
        }
        task_labels = {task.label for task in tasks.values()}
        input_labels = {value.label for value in inputs.values()}
        for label in info.bool_labels:
            if label not in task_labels:
                tasks.setdefault(label, Task(label))
            if label not in input_labels:
                inputs.setdefault(label, Input(label))
        for noun, names in (("task", list(tasks)), ("input", list(inputs))):
            if not names:
                raise ValueError(
                    f"the log has no bool label and actions.{noun}s is empty; define "
                    f"at least one {noun}"
                )
            check_names(names, f"{noun}s")
        check_known(self.counts.keys, (USER, ITEM, *attributes), "actions.counts.keys")
        labels = self.counts.counted_labels
        if labels is None:
            labels = list(tasks)
        check_known(labels, tasks, "actions.counts.counted_labels")
        counts = replace(self.counts, counted_labels=labels)
        return ActionsConfig(tasks, inputs, counts)

    @property
    def counted_labels(self) -> list[str]:
        """Tasks that are counted besides exposures."""
        return self.counts.counted_labels or []

    def key_features(self, key: str) -> list[str]:
        """Return the names of the features of one kind of key."""
        rates = [f"{label}_rate" for label in self.counted_labels]
        measures = ["exposures", *self.counted_labels, *rates]
        return self.counts.name_features(key, measures)

    @property
    def features(self) -> list[str]:
        """Names of all features, by kind of key."""
        return list(chain.from_iterable(map(self.key_features, self.counts.keys)))


def label_type(label: str, labels: dict[str, str], key: str) -> str:
    """Return the type of a label.

    Args:
        label: Name of the label.
        labels: Type of each label of the log.
        key: Setting that names the label, for the message.
    """
    check_known([label], labels, f"actions.{key}")
    return labels[label]
