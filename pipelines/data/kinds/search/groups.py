"""Groups of a search log's features: what HFG-Attention makes a token of, and permutation importance exchanges."""

from __future__ import annotations

from typing import Any

from models.config import check_known
from pipelines.data.kinds.search.config import SearchConfig
from pipelines.data.own_features import NUMBER

USUAL = {"pair": "cross", "item": "document", "query": "query"}
"""Of the log's own counts, by what they count (Sec. 3.1 of QGS)."""
AS_OF_QUERY = ("pair_gap", "pair_seen")
"""They are of a pair and count as of the query."""
NO_COUNT = "context"
"""Group of place and time."""


def feature_groups(config: SearchConfig, names: list[str], own: dict[str, str]) -> list[dict[str, Any]]:
    """Groups in order, `name` and `features` each: those that the source file declares, then the usual ones; empty ones
    are left out. `names` are built in, `own` maps columns to their usual group. UserError for a feature that is not
    there."""
    declared = {name: group for group, members in config.groups.items() for name in members}
    plain = {name: name[len(NUMBER) :] for name in own}  # both prefixes are of one length
    check_known(
        declared,
        [*names, *plain.values()],
        lambda name, near: f"search.groups has '{name}', which is no feature of the log; the nearest is '{near}'",
    )
    groups: dict[str, list[str]] = {name: [] for name in (*config.groups, *USUAL.values(), NO_COUNT, *own.values())}
    for name in names:
        usual = USUAL["query"] if name in AS_OF_QUERY else USUAL.get(name.split("_")[0], NO_COUNT)
        groups[declared.get(name, usual)].append(name)
    for name, usual in own.items():
        groups[declared.get(plain[name], usual)].append(name)
    return [{"name": name, "features": members} for name, members in groups.items() if members]
