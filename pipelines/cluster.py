"""What a job asks of its cluster, looked at before any work: room for its workers, and places that all nodes reach.

Else a job would wait for ever for a node that nobody will start, or spread its output over the disks of several
machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from models.config import pluralize
from models.storage.tables import UserError
from pipelines.ray_inside import has_autoscaler

SHARED = "TRIELINE_SHARED"
"""Environment variable with the folders, separated by `:`, that are one file system on all nodes, such as /mnt/efs."""

ACCELERATOR = "accelerator_type:"
"""Prefix of the resource by which Ray tells nodes with a type of accelerator."""

UPLOADED = ("runtime_resources", "working_dir_files")
"""Folders below which Ray unpacks what was submitted with a job, to remove it when it needs the room."""


def alive() -> list[dict[str, Any]]:
    """The nodes of this cluster, as Ray lists them."""
    return [node for node in ray.nodes() if node["Alive"]]


def machines(nodes: list[dict[str, Any]]) -> int:
    """How many disks they have: nodes of one host and address share theirs."""
    return len(
        {(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in nodes}
    )


def room(nodes: list[dict[str, Any]], each: Mapping[str, float]) -> int:
    """How many workers that need `each` the nodes hold at once, when nothing else runs."""
    needs = {kind: need for kind, need in each.items() if need}
    if not needs:
        return len(nodes) and 2**31
    return sum(
        min(int(node["Resources"].get(kind, 0) / need) for kind, need in needs.items())
        for node in nodes
    )


def check_room(workers: int, each: Mapping[str, float], remedy: str) -> None:
    """Check that the cluster has room for the workers; print a note if its autoscaler must start nodes first.

    Raises:
        UserError: if the workers do not fit and no autoscaler can start nodes.
    """
    nodes = alive()
    fits = room(nodes, each)
    if fits >= workers:
        return
    needs = {kind: need for kind, need in each.items() if need}
    total = {
        kind: sum(node["Resources"].get(kind, 0) for node in nodes) for kind in needs
    }
    asked = ", ".join(
        describe_resource(kind, need * workers, "s") for kind, need in needs.items()
    )
    one = " and ".join(describe_resource(kind, need) for kind, need in needs.items())
    there = ", ".join(
        describe_resource(kind, amount, "s") for kind, amount in total.items()
    )
    has = f"the cluster has {there} on {pluralize(len(nodes), 'node')}, room for {fits}"
    who = f"{pluralize(workers, 'worker')} need{'s' * (workers == 1)} {asked}, {one} for each on one node"
    if not has_autoscaler():
        raise UserError(
            f"{who}; {has}, and no autoscaler to start more; {remedy}, or start more nodes"
        )
    print(f"note: {who}; {has} now, so this waits for its autoscaler to start more")


def describe_resource(kind: str, amount: float, plural: str = "") -> str:
    """Return an amount of a Ray resource for a message, such as `2 CPUs` or `1.5 GiB memory`."""
    if kind == "memory":
        return f"{amount / 2**30:.3g} GiB memory"
    if kind.startswith(ACCELERATOR):
        return kind.removeprefix(ACCELERATOR)
    return f"{amount:g} {kind}{plural}"


def shared() -> list[Path]:
    """The folders that the environment says are the same on all nodes."""
    return [
        Path(folder).absolute()
        for folder in os.environ.get(SHARED, "").split(":")
        if folder
    ]


def check_places(places: Mapping[str, str | None]) -> None:
    """UserError for a local path, by the option that names it, that other nodes of the cluster do not reach."""
    count = machines(alive())
    for option, place in places.items():
        if not place or "://" in place:
            continue
        path = Path(place).expanduser().absolute()
        if any(path.is_relative_to(folder) for folder in shared()):
            continue
        if set(UPLOADED) <= set(path.parts):
            raise UserError(
                f"--{option} is {place}, which lies in the job's own working folder, and Ray removes that; give a URI "
                f"that all nodes reach, such as s3://BUCKET/{Path(place).name}, or on one machine an absolute path"
            )
        if count > 1:
            raise UserError(
                f"--{option} is {place}, on the disk of one machine, and the cluster has {count}; give a URI such as "
                f"s3://BUCKET/{path.name}, or where all share that folder name it: {SHARED}={path.parent} in the "
                f"env_vars of runtime_env.yaml"
            )
