"""Settings that the tables of a log record.

This module does not import pyarrow, so that command lines are parsed quickly.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass

from core.options import STRICT, Fraction


@dataclass(config=STRICT, frozen=True)
class SearchCounts:
    """Settings of the counts of a search log, which its tables record."""

    windows_days: list[float] = field(default_factory=lambda: [1.0, 7.0, 30.0])
    """Lengths of the windows that counts cover, in days, ascending; unused for a log
    without clock times."""
    delay_minutes: NonNegativeFloat = 60.0
    """Minutes until a logged event is available: counts at time t end at t - delay."""
    ctr_prior: Fraction = 0.1
    """Click-through rate of a key without exposures. Rates are smoothed: (clicks +
    prior * strength) / (exposures + strength)."""
    ctr_strength: PositiveFloat = 10.0
    """Weight of the prior, in exposures."""


@dataclass(config=STRICT, frozen=True)
class TaskSettings:
    """A binary task, computed from labels."""

    label: str | None = None
    """Label of the task; alternatively give `any`. A bool label is the task itself, a
    number needs `above` or `at_least`."""
    above: FiniteFloat | None = None
    """For a number label: the task is 1 if the label is above this threshold, like
    1(dwell > tau) in Sec. 3 of AttnMVP."""
    at_least: FiniteFloat | None = None
    """For a number label: the task is 1 if the label is at least this threshold."""
    any: list[str] | None = None
    """Bool labels: the task is 1 if one of them is true, like `contribution` in Sec. 3
    of AttnMVP."""


@dataclass(config=STRICT, frozen=True)
class InputSettings:
    """An action as models read it: a number from 0 to 1, computed from a label."""

    label: str
    """Label of the input."""
    range: list[float] | None = None
    """For a number label: the values that become 0 and 1; others are clipped to them.
    By default the range that the label declares."""
    log_unit: Annotated[FiniteFloat, Field(gt=0)] | None = None
    """For a number label with a long tail, such as a time: log(1 + value / log_unit) is
    scaled instead of the value."""


@dataclass(config=STRICT, frozen=True)
class ActionCounts:
    """Settings of the counting statistics that late fusion reads (AttnMVP, Sec. 2).

    Each statistic counts the events of a key within a window.
    """

    keys: list[str] = field(default_factory=lambda: ["item", "user"])
    """Keys to count by: `item`, `user`, or the name of an attribute of items such as
    `author`."""
    counted_labels: list[str] | None = None
    """Tasks to count besides exposures; by default all."""
    windows_days: Annotated[list[float], Field(min_length=1)] = field(
        default_factory=lambda: [1.0, 7.0]
    )
    """Lengths of the windows, in days, ascending."""
    delay_minutes: NonNegativeFloat = 60.0
    """Minutes until a logged event is available: counts at time t end at t - delay.
    Events at the same time never count each other."""
    prior: Fraction = 0.1
    """Rate of a key without exposures. Rates are smoothed: (count + prior * strength) /
    (exposures + strength)."""
    strength: PositiveFloat = 10.0
    """Weight of the prior, in exposures."""
