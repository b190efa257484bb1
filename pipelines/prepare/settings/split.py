"""Settings of the split of requests into training, validation and test."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.options import STRICT, Fraction, Free


@dataclass(config=STRICT)
class SplitConfig:
    """Settings of the split of requests."""

    by: Literal["auto", "leave_last_out", "temporal"] = "auto"
    """`temporal`: two cut times for all users. `leave_last_out`: each user's last
    request is for test, the one before it for validation. Users with fewer than three
    requests have all in training; a hash breaks ties between equal timestamps. `auto`:
    `temporal` if the log has clock times, else `leave_last_out`."""
    val_fraction: Fraction = 0.1
    """Share of all behaviours, before the k-core, in the validation window of a
    temporal split."""
    test_fraction: Fraction = 0.1
    """Share of all behaviours, before the k-core, in the test window of a temporal
    split."""
    val_start: Free = None
    """Start of the validation window, as ISO 8601 (UTC) or epoch ms; replaces the
    fractions, together with `test_start`."""
    test_start: Free = None
    """Start of the test window."""
    val_days: PositiveFloat | None = None
    """Days of the validation window; replaces the fractions, together with `test_days`.
    The cuts move with the end of the log."""
    test_days: PositiveFloat | None = None
    """Days of the test window, which ends with the last behaviour."""

    def __post_init__(self) -> None:
        for val, test in (("val_start", "test_start"), ("val_days", "test_days")):
            if (getattr(self, val) is None) != (getattr(self, test) is None):
                raise ValueError(f"split has one of {val} and {test}, it needs both")
            if getattr(self, val) is not None and self.by == "leave_last_out":
                raise ValueError(
                    f"split.{val} splits by time, but split.by is {self.by}"
                )
        if self.val_start is not None and self.val_days is not None:
            raise ValueError("split has both val_start and val_days")
        if self.val_start is not None:
            self.val_start = epoch_ms(self.val_start, "split.val_start")
            self.test_start = epoch_ms(self.test_start, "split.test_start")
            if self.val_start >= self.test_start:
                raise ValueError("split.val_start is not before split.test_start")
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"split.val_fraction is {self.val_fraction:g} and split.test_fraction "
                f"{self.test_fraction:g}, which leaves nothing for training"
            )

    def settings(self) -> dict[str, Any]:
        """Return the settings that are set, as plain values."""
        return {
            name: value for name, value in asdict(self).items() if value is not None
        }

    def resolve(self, has_clock_times: bool) -> str:
        """Return `by` for a log with or without clock times."""
        if self.by == "temporal" and not has_clock_times:
            raise UserError(
                f"split.by is {self.by}, but the log has no clock times, only an "
                f"order of events within each user"
            )
        if self.by == "auto":
            return "temporal" if has_clock_times else "leave_last_out"
        return self.by


def epoch_ms(moment: Any, name: str) -> int:
    """Parse a time as epoch ms.

    Args:
        moment: Epoch ms, or ISO 8601, which is in UTC unless it has an offset.
        name: Name of the setting, for the error message.

    Raises:
        ValueError: If the time has another format.
    """
    text = str(moment)
    if text.isdecimal():
        return int(text)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name} is '{moment}'; give a moment such as 2022-05-07 or epoch ms"
        ) from None
    if not parsed.tzinfo:
        parsed = parsed.replace(tzinfo=UTC)
    return round(parsed.timestamp() * 1000)
