"""Durations in ms, and the windows of counts, from their settings."""

from __future__ import annotations

from itertools import pairwise

DAY_MS, HOUR_MS, MINUTE_MS = 86_400_000, 3_600_000, 60_000


class WindowSettings:
    """Settings of counts that cover [t - window, t - delay)."""

    windows_days: list[float]
    delay_minutes: float

    def check_windows(self, section: str) -> None:
        """Check that windows ascend and end after they begin.

        Args:
            section: Name of the settings, for messages.

        Raises:
            ValueError: If they do not.
        """
        days = self.windows_days
        if any(a >= b for a, b in pairwise(days)):
            raise ValueError(
                f"{section}.windows_days is {days}; give ascending lengths in days, "
                f"such as [1, 7, 30]"
            )
        if self.delay_minutes < 0:
            raise ValueError(
                f"{section}.delay_minutes is {self.delay_minutes}; it must be 0 or more"
            )
        if days and days[0] * DAY_MS <= self.delay_minutes * MINUTE_MS:
            raise ValueError(
                f"{section}.windows_days begins with {days[0]}, which ends before it "
                f"begins with delay_minutes {self.delay_minutes}; give longer windows "
                f"or a shorter delay"
            )

    @property
    def windows_ms(self) -> list[int]:
        """Lengths of the windows in ms."""
        return [round(days * DAY_MS) for days in self.windows_days]

    @property
    def delay_ms(self) -> int:
        """Length of the delay in ms."""
        return round(self.delay_minutes * MINUTE_MS)
