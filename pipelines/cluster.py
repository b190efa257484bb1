"""Count the workers that fit on the nodes of a Ray cluster.

    check_room(workers=4, needs={"CPU": 1, "GPU": 1})

Without the check, a job would wait forever for a node that nobody starts.
"""

from __future__ import annotations

from collections.abc import Mapping

import ray

from core.errors import UserError, pluralize
from pipelines.ray_inside import has_autoscaler

ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource for a type of accelerator."""


def count_room(needs: Mapping[str, float]) -> int:
    """Return how many workers the living nodes can run at once if nothing else runs.

    Args:
        needs: Resources of one worker, such as {"CPU": 1}.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    amounts = {kind: amount for kind, amount in needs.items() if amount}
    if not amounts:
        return len(nodes) and 2**31
    return sum(
        min(int(node.get(kind, 0) / amount) for kind, amount in amounts.items())
        for node in nodes
    )


def check_room(workers: int, needs: Mapping[str, float]) -> None:
    """Raise UserError if the workers do not fit and no autoscaler can start nodes."""
    room = count_room(needs)
    if room < workers and not has_autoscaler():
        raise UserError(
            f"{pluralize(workers, 'worker')} with {dict(needs)} for each do not fit: "
            f"the cluster has room for {room}"
        )
