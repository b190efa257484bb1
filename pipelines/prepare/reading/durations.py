"""Durations in ms, and settings of the time windows of counts."""

from __future__ import annotations

from itertools import pairwise

DAY_MS, HOUR_MS, MINUTE_MS = 86_400_000, 3_600_000, 60_000


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

    @property
    def windows_ms(self) -> list[int]:
        """Lengths of the windows in ms."""
        return [round(days * DAY_MS) for days in self.windows_days]

    @property
    def delay_ms(self) -> int:
        """Length of the delay in ms."""
        return round(self.delay_minutes * MINUTE_MS)
