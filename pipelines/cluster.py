"""Checks of a cluster before a job starts any work: it has room for the workers, and all nodes reach the paths.

    check_room(workers=4, each={"CPU": 1, "GPU": 1}, remedy="lower --ray.num_workers")
    check_paths({"tables": "s3://bucket/tables", "storage": "/mnt/efs/runs"})

Without them, a job would wait for ever for a node that nobody starts, or spread its
output over the disks of several machines.
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
"""Environment variable with folders that are one file system on all nodes, such as
/mnt/efs, separated by `:`."""

ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource for a type of accelerator."""

UPLOADED = ("runtime_resources", "working_dir_files")
"""Folders below which Ray unpacks the code of a job. Ray removes them when it needs the
space."""


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of this cluster that are alive, as `ray.nodes` describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def count_machines(nodes: list[dict[str, Any]]) -> int:
    """Return the number of machines. Nodes with the same host name and address share a machine and its disk."""
    return len(
        {(node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in nodes}
    )


def count_room(nodes: list[dict[str, Any]], each: Mapping[str, float]) -> int:
    """Return how many workers the nodes hold at once if nothing else runs. Each worker needs the resources `each`."""
    needs = {kind: amount for kind, amount in each.items() if amount}
    if not needs:
        return len(nodes) and 2**31
    room = 0
    for node in nodes:
        resources = node["Resources"]
        room += min(
            int(resources.get(kind, 0) / amount) for kind, amount in needs.items()
        )
    return room


def check_room(workers: int, each: Mapping[str, float], remedy: str) -> None:
    """Check that the cluster has room for the workers; print a note if its autoscaler must start nodes first.

    Raises:
        UserError: if the workers do not fit and no autoscaler can start nodes.
    """
    nodes = alive_nodes()
    room = count_room(nodes, each)
    if room >= workers:
        return
    needs = {kind: amount for kind, amount in each.items() if amount}
    total = {
        kind: sum(node["Resources"].get(kind, 0) for node in nodes) for kind in needs
    }
    for_all = ", ".join(
        describe_resource(kind, amount * workers, "s") for kind, amount in needs.items()
    )
    for_one = " and ".join(
        describe_resource(kind, amount) for kind, amount in needs.items()
    )
    available = ", ".join(
        describe_resource(kind, amount, "s") for kind, amount in total.items()
    )
    on_nodes = f"on {pluralize(len(nodes), 'node')}, room for {room}"
    verb = "needs" if workers == 1 else "need"
    wish = f"{pluralize(workers, 'worker')} {verb} {for_all}, {for_one} for each on one node"
    if not has_autoscaler():
        raise UserError(
            f"{wish}; the cluster has {available} {on_nodes}, and no autoscaler to start more; {remedy}, or start more "
            f"nodes"
        )
    print(
        f"note: {wish}; the cluster has {available} {on_nodes} now, so this waits for its autoscaler to start more"
    )


def describe_resource(kind: str, amount: float, plural: str = "") -> str:
    """Format an amount of a Ray resource: `2 CPUs`, `1.5 GiB memory`."""
    if kind == "memory":
        return f"{amount / 2**30:.3g} GiB memory"
    if kind.startswith(ACCELERATOR):
        return kind.removeprefix(ACCELERATOR)
    return f"{amount:g} {kind}{plural}"


def shared_folders() -> list[Path]:
    """Return the folders that are one file system on all nodes, by the environment variable TRIELINE_SHARED."""
    folders = os.environ.get(SHARED, "").split(":")
    return [Path(folder).absolute() for folder in folders if folder]


def check_paths(paths: Mapping[str, str | None]) -> None:
    """Check that all nodes of the cluster reach the paths of a job, given by option.

    Raises:
        UserError: if a path is on the disk of one machine, or in a folder that Ray
            removes.
    """
    machines = count_machines(alive_nodes())
    shared = shared_folders()
    for option, given in paths.items():
        if not given or "://" in given:
            continue
        path = Path(given).expanduser().absolute()
        if any(path.is_relative_to(folder) for folder in shared):
            continue
        if set(UPLOADED) <= set(path.parts):
            raise UserError(
                f"--{option} is {given}, which lies in the job's own working folder, and Ray removes that; give a URI "
                f"that all nodes reach, such as s3://BUCKET/{Path(given).name}, or on one machine an absolute path"
            )
        if machines > 1:
            raise UserError(
                f"--{option} is {given}, on the disk of one machine, and the cluster has {machines}; give a URI such "
                f"as s3://BUCKET/{path.name}, or where all share that folder name it: {SHARED}={path.parent} in the "
                f"env_vars of runtime_env.yaml"
            )
