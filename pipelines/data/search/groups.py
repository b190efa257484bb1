"""What a source file says of the features of a search log by name: groups, of which HFG-Attention makes tokens,
and which are unknown when results are ranked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from models.config import check_known
from pipelines.data.search.config import SearchConfig
from pipelines.data.sequences.own_features import NUMBER

USUAL = {"pair": "cross", "item": "document", "query": "query"}
"""Of the log's own counts, by what they count (Sec. 3.1 of QGS)."""
AS_OF_QUERY = ("pair_gap", "pair_seen")
"""They are of a pair and count as of the query."""
PLACE = ["position", "page"]
"""Known once a result was shown."""
NO_COUNT = "context"
"""Group of place and time."""


def feature_groups(
    config: SearchConfig, names: list[str], own: dict[str, str]
) -> list[dict[str, Any]]:
    """Groups in order, `name` and `features` each: those that the source file declares, then the usual ones; empty ones
    are left out. `names` are built in, `own` maps columns to their usual group. UserError for a feature that is not
    there."""
    declared = {
        name: group for group, members in config.groups.items() for name in members
    }
    plain = {
        name: name[len(NUMBER) :] for name in own
    }  # both prefixes are of one length
    check_known(
        declared,
        [*names, *plain.values()],
        lambda name, near: (
            f"search.groups has '{name}', which is no feature of the log; the nearest is '{near}'"
        ),
    )
    groups: dict[str, list[str]] = {
        name: [] for name in (*config.groups, *USUAL.values(), NO_COUNT, *own.values())
    }
    for name in names:
        usual = (
            USUAL["query"]
            if name in AS_OF_QUERY
            else USUAL.get(name.split("_")[0], NO_COUNT)
        )
        groups[declared.get(name, usual)].append(name)
    for name, usual in own.items():
        groups[declared.get(plain[name], usual)].append(name)
    return [
        {"name": name, "features": members}
        for name, members in groups.items()
        if members
    ]


def unknown_features(config: SearchConfig, own: Collection[str]) -> list[str]:
    """Those that a result has only once it was shown: its place, and the columns of own features that the source file
    says so of. UserError for one that is not there."""
    plain = [name[len(NUMBER) :] for name in own]
    check_known(
        config.unknown_when_ranking,
        plain,
        lambda name, near: (
            f"search.unknown_when_ranking has '{name}', which is no feature of the log's own; the nearest is '{near}'"
        ),
    )
    return [
        *PLACE,
        *(name for name in own if name[len(NUMBER) :] in config.unknown_when_ranking),
    ]
