"""Settings of the features of a search log in a source file. `features.py` computes them.

prepare:
  kind: search
  search: {windows_days: [1, 7, 30], delay_minutes: 60}
"""

from __future__ import annotations

from dataclasses import dataclass, field

from models.config import check_least, check_shares
from pipelines.data.prepare_config import PrepareConfig, refuse
from pipelines.data.reading.durations import WindowSettings
from pipelines.data.reading.log import Log, check_names


@dataclass(frozen=True)
class SearchConfig(WindowSettings):
    """Settings of the features of a search log (Sec. 3.1 of QGS)."""

    windows_days: list[float] = field(default_factory=lambda: [1.0, 7.0, 30.0])
    """Lengths of the windows that counts cover, in days, ascending. A log without clock
    times has none."""
    delay_minutes: float = 60.0
    """Minutes that a log takes to arrive: counts at time t end at t - delay."""
    ctr_prior: float = 0.1
    """Click-through rate without exposures; smoothed: (clicks + prior * strength) /
    (exposures + strength)."""
    ctr_strength: float = 10.0
    """Weight of the prior, in exposures."""
    page_size: int = 10
    """Results per page; the page is position // page_size."""
    max_request_minutes: float = 60.0
    """Longest time from the first to the last result of one request id; longer is an
    error, as ids are re-used."""

    item_features: list[str] = field(default_factory=list)
    """Attributes and numbers of the item files that models read of results and
    behaviours; they hold for all time."""
    unknown_when_ranking: list[str] = field(default_factory=list)
    """Custom features that are unknown when a result is ranked, as its position is:
    read in training alone, as the model's `position` says."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Groups of features for HFG-Attention (Sec. 3.6 of QGS), {group: [feature]}, of
    counts such as pair_ctr_7d and of the log's numbers and categories. Default groups:
    cross, document, query, context by what a feature counts, `own`, `items`, and the
    names of tables with a time of their own."""

    def __post_init__(self) -> None:
        self.check_windows("search")
        check_shares(self, ["ctr_prior"], "search.")
        check_least(self, ["page_size"], 1, "search.")
        check_least(self, ["max_request_minutes"], 0, "search.")
        if self.ctr_strength <= 0:
            raise ValueError(
                f"search.ctr_strength is {self.ctr_strength}; it must be above 0"
            )
        check_names(self.groups, "search.groups")
        named = [name for names in self.groups.values() for name in names]
        for number, name in enumerate(named):
            if name in named[:number]:
                raise ValueError(
                    f"search.groups has '{name}' twice; a feature is of one group"
                )


def bool_labels(source: Log, behaviour: str | None) -> list[str]:
    """Return the log's bool labels; the label that makes a result a behaviour is first."""
    labels = [name for name, kind in source.info["labels"].items() if kind == "bool"]
    return sorted(labels, key=lambda name: name != behaviour)


def check_search(source: Log, config: PrepareConfig) -> None:
    """Raise UserError for settings that a search log cannot have."""
    refuse(
        (
            config.behaviour is None,
            "kind is search, which needs the bool label that makes a result a behaviour; set "
            f"behaviour to one of: {', '.join(bool_labels(source, None)) or 'none'}",
        ),
        (
            config.core > 1,
            f"core is {config.core}, but the catalogue of a search log holds every item that was shown; "
            "use --core 0, and --core_window train to leave out items that the training window did not show",
        ),
        (
            config.ties != "strict",
            f"ties is {config.ties}; a search sees strictly earlier behaviours only: use --ties "
            "strict",
        ),
    )
