"""Settings of a search log's features in a source file; `features.py` computes them.

prepare:
  kind: search
  search: {windows_days: [1, 7, 30], delay_minutes: 60}
"""

from __future__ import annotations

from dataclasses import field

from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT
from core.schemas import SearchCounts
from pipelines.prepare.reading.durations import WindowSettings
from pipelines.prepare.reading.log import check_names


@dataclass(config=STRICT, frozen=True)
class SearchConfig(SearchCounts, WindowSettings):
    """Settings of the features of a search log (Sec. 3.1 of QGS)."""

    page_size: PositiveInt = 10
    """Results per page; the page is position // page_size."""
    max_request_minutes: NonNegativeFloat = 60.0
    """Maximum time from the first to the last result of one request id; more is an
    error, as it means that ids are reused."""

    item_features: list[str] = field(default_factory=list)
    """Attributes and numbers of the item files that models read for results and
    behaviours; their values hold at all times."""
    unknown_when_ranking: list[str] = field(default_factory=list)
    """Custom features that, like the position, are unknown when a result is ranked.
    They are read in training only, according to the model's `position`."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Groups of features for HFG-Attention (Sec. 3.6 of QGS), {group: [feature]}.
    Features are counts such as pair_ctr_7d, and the log's numbers and categories. The
    default groups are cross, document, query and context, by what a feature counts,
    `own`, `items`, and the names of tables with a time of their own."""

    def __post_init__(self) -> None:
        self.check_windows("search")
        check_names(self.groups, "search.groups")
        group_of: dict[str, str] = {}
        for group, names in self.groups.items():
            for name in names:
                if name in group_of:
                    raise ValueError(
                        f"search.groups has '{name}' in '{group_of[name]}' and again "
                        f"in '{group}'"
                    )
                group_of[name] = group
