"""What a source file says of the features of a search log. `pipelines/data/windows.py` makes them.

prepare:
  kind: search
  search: {windows_days: [1, 7, 30], delay_minutes: 60}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

DAY_MS, HOUR_MS, MINUTE_MS = 86_400_000, 3_600_000, 60_000


@dataclass(frozen=True)
class SearchConfig:
    """The features of a search log (Sec. 3.1 of QGS)."""

    windows_days: list[float] = field(default_factory=lambda: [1.0, 7.0, 30.0])
    """Lengths of the windows that counts cover, in days, ascending. A log without clock times has none."""
    delay_minutes: float = 60.0
    """What a log takes to arrive: counts at time t end at t - delay."""
    ctr_prior: float = 0.1
    """Click-through rate of what was never shown; smoothed: (clicks + prior * strength) / (exposures + strength)."""
    ctr_strength: float = 10.0
    """Exposures that the prior weighs as much as."""
    page_size: int = 10
    """Results per page; the page is position // page_size."""
    max_request_minutes: float = 60.0
    """Longest time from the first to the last result of one request id; longer is an error, as ids are re-used."""

    def __post_init__(self) -> None:
        days = self.windows_days
        if any(a >= b for a, b in pairwise(days)):
            raise ValueError(f"search.windows_days is {days}; give ascending lengths in days, such as [1, 7, 30]")
        if self.delay_minutes < 0:
            raise ValueError(f"search.delay_minutes is {self.delay_minutes}; it must be 0 or more")
        if days and days[0] * DAY_MS <= self.delay_minutes * MINUTE_MS:
            raise ValueError(
                f"search.windows_days begins with {days[0]}, which ends before it begins with delay_minutes "
                f"{self.delay_minutes}; give longer windows or a shorter delay"
            )
        if not 0 <= self.ctr_prior <= 1:
            raise ValueError(f"search.ctr_prior is {self.ctr_prior}; it is a rate between 0 and 1")
        if self.ctr_strength <= 0:
            raise ValueError(f"search.ctr_strength is {self.ctr_strength}; it must be above 0")
        if self.page_size < 1:
            raise ValueError(f"search.page_size is {self.page_size}; a page has at least 1 result")
        if not self.max_request_minutes >= 0:
            raise ValueError(f"search.max_request_minutes is {self.max_request_minutes}; it must be 0 or more")

    @property
    def windows_ms(self) -> list[int]:
        """Lengths of the windows."""
        return [round(days * DAY_MS) for days in self.windows_days]

    @property
    def delay_ms(self) -> int:
        """Length of the delay."""
        return round(self.delay_minutes * MINUTE_MS)
