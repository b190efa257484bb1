"""Options of `jobs.simulate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT, Folder, Fraction, Seed


@dataclass(config=STRICT, frozen=True)
class Settings:
    """Size, seed and causes of a simulated log."""

    users: PositiveInt = 1500
    """Number of users, each with at least one event or search."""
    items: Annotated[int, Field(ge=8)] = 400
    """Number of items in the catalogue; rare items may have no event."""
    events: PositiveInt = 15_000
    """Exact number of events or searches."""
    seed: Seed = 42
    """Seed; the same settings give the same log, byte for byte."""
    files: PositiveInt = 1
    """Minimum number of files with equally many events, in the order of time; a large
    log has more files."""
    taste: Literal["user", "class"] = "user"
    """Search: the makers that a user likes: some makers (`user`), or all makers of one
    of two classes (`class`)."""
    disliked_click: Fraction = 0.25
    """Search: probability of a click, given a look, on a result of the intent whose
    maker the user does not like; for a liked maker it is 0.85."""
    shown_days: NonNegativeFloat = 0.0
    """Feed: days for which an item is shown, so that later items are new; 0: the whole
    log."""

    def __post_init__(self) -> None:
        if self.events < self.users:
            raise ValueError(f"events is {self.events}, less than users {self.users}")


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SimulateOptions(Settings):
    """Options of jobs.simulate: where to write the log, its size, seed and causes."""

    output: Folder
    """Folder for the log: new, empty, or with an earlier simulated log, which is
    replaced."""
    kind: str = "retrieval"
    """`retrieval`: one item per event. `search`: searches with a query, ten results,
    clicks, purchases and dwell. `actions`: impressions of a feed with
    likes, comments, shares, follows, hides and dwell of dog and cat users."""
