"""Check that a cluster can run a job, before the job requests resources.

    check_room(workers=4, needs={"CPU": 1, "GPU": 1}, remedy="lower --ray.num_workers")
    check_paths({"tables": "s3://bucket/tables", "storage": "/mnt/efs/runs"})

Without the checks, a job could wait forever for a node that nobody starts, or write its
output to the disks of several machines.
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
"""Environment variable with the folders of file systems that all nodes share, such as
/mnt/efs, separated by `:`."""

ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource for a type of accelerator."""

UPLOADED = {"runtime_resources", "working_dir_files"}
"""Folders on the path to a job's unpacked working directory, which Ray removes when it
needs the space."""


def alive_nodes() -> list[dict[str, Any]]:
    """Return the living nodes of this cluster, as `ray.nodes` describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def count_machines(nodes: list[dict[str, Any]]) -> int:
    """Return the number of machines, each with its own disk.

    Nodes with the same host name and address are on one machine.
    """
    return len(
        {(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in nodes}
    )


def count_room(nodes: list[dict[str, Any]], needs: Mapping[str, float]) -> int:
    """Return how many workers the nodes can run at once if nothing else runs.

    Args:
        nodes: Nodes, as `ray.nodes` describes them.
        needs: Resources of one worker, such as {"CPU": 1}.
    """
    needs = {kind: amount for kind, amount in needs.items() if amount}
    if not needs:
        return len(nodes) and 2**31
    room = 0
    for node in nodes:
        resources = node["Resources"]
        room += min(
            int(resources.get(kind, 0) / amount) for kind, amount in needs.items()
        )
    return room


def check_room(workers: int, needs: Mapping[str, float], remedy: str) -> None:
    """Check that the cluster can run a number of workers at once.

    A note is printed if the autoscaler has to start nodes first.

    Args:
        workers: Number of workers.
        needs: Resources of one worker, such as {"CPU": 1}.
        remedy: Advice for the error message, such as the option to lower.

    Raises:
        UserError: If the workers do not fit and no autoscaler can start nodes.
    """
    nodes = alive_nodes()
    room = count_room(nodes, needs)
    if room >= workers:
        return
    demand = describe_demand(workers, needs)
    totals = {
        kind: sum(node["Resources"].get(kind, 0) for node in nodes)
        for kind, amount in needs.items()
        if amount
    }
    available = ", ".join(
        describe_resource(kind, total, "s") for kind, total in totals.items()
    )
    capacity = f"{available} on {pluralize(len(nodes), 'node')}, room for {room}"
    if not has_autoscaler():
        raise UserError(
            f"{demand}; the cluster has {capacity}, and no autoscaler to start more; "
            f"{remedy}, or start more nodes"
        )
    print(
        f"note: {demand}; the cluster has {capacity} now, so this waits for its "
        "autoscaler to start more"
    )


def describe_demand(workers: int, needs: Mapping[str, float]) -> str:
    """Return a phrase such as `2 workers need 4 CPUs, 2 CPU for each on one node`."""
    amounts = {kind: amount for kind, amount in needs.items() if amount}
    for_all = ", ".join(
        describe_resource(kind, amount * workers, "s")
        for kind, amount in amounts.items()
    )
    for_one = " and ".join(
        describe_resource(kind, amount) for kind, amount in amounts.items()
    )
    verb = "needs" if workers == 1 else "need"
    return (
        f"{pluralize(workers, 'worker')} {verb} {for_all}, {for_one} for each on one "
        "node"
    )


def describe_resource(kind: str, amount: float, plural: str = "") -> str:
    """Format an amount of a Ray resource, such as `2 CPUs` or `1.5 GiB memory`.

    Args:
        kind: Name of the resource.
        amount: Amount; bytes of memory.
        plural: Suffix of a name such as CPU.
    """
    if kind == "memory":
        return f"{amount / 2**30:.3g} GiB memory"
    if kind.startswith(ACCELERATOR):
        return kind.removeprefix(ACCELERATOR)
    return f"{amount:g} {kind}{plural}"


def shared_folders() -> list[Path]:
    """Return the folders that all nodes share, from the variable TRIELINE_SHARED."""
    folders = os.environ.get(SHARED, "").split(":")
    return [Path(folder).absolute() for folder in folders if folder]


def check_paths(paths: Mapping[str, str | None]) -> None:
    """Check that all nodes of the cluster can reach the paths of a job.

    Args:
        paths: Paths and URIs by option; None and empty values are skipped.

    Raises:
        UserError: If a path is on the disk of one machine, or in a folder that Ray
            removes.
    """
    machines = count_machines(alive_nodes())
    shared = shared_folders()
    for option, value in paths.items():
        if not value or "://" in value:
            continue
        path = Path(value).expanduser().absolute()
        if any(path.is_relative_to(folder) for folder in shared):
            continue
        if set(path.parts) >= UPLOADED:
            raise UserError(
                f"--{option} is {value}, which lies in the job's own working folder, "
                "and Ray removes that; give a URI that all nodes reach, such as "
                f"s3://BUCKET/{Path(value).name}, or on one machine an absolute path"
            )
        if machines > 1:
            raise UserError(
                f"--{option} is {value}, on the disk of one machine, and the cluster "
                f"has {machines}; give a URI such as s3://BUCKET/{path.name}, or if "
                f"all nodes share that folder: {SHARED}={path.parent} in the env_vars "
                "of runtime_env.yaml"
            )
