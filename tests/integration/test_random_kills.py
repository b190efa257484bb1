"""Test random kills on a cluster of three nodes, and the preemption of a node.

The kills are a short run of `python -m tests.faults`.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import faults

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def deployment() -> Iterator[faults.Deployment]:
    """Start a cluster of three nodes and an MLflow server."""
    with faults.open_deployment() as deployment:
        yield deployment


def find_nodes_that_run(deployment: faults.Deployment, word: str) -> list[bool]:
    """Return per node whether a worker's command line has the word, the head first."""
    return [
        any(word in faults.read_command_line(worker) for worker in workers)
        for workers in deployment.list_workers_by_node()
    ]


@pytest.fixture(scope="module")
def references(deployment: faults.Deployment) -> dict[str, faults.Reference]:
    """Return results of an undisturbed prepare and sweep.

    The sweep's two trials need a whole node each.
    """
    references = faults.run_references(deployment, ["prepare"])
    start_time = time.monotonic()
    out = deployment.folder / "sweep"
    max_trial_nodes = 0
    sweep = deployment.start(
        [*faults.STEPS["sweep"].command(deployment, out), "--ray.cpus_per_worker", "2"]
    )
    while sweep.poll() is None:
        num_trial_nodes = sum(find_nodes_that_run(deployment, "ImplicitFunc"))
        max_trial_nodes = max(max_trial_nodes, num_trial_nodes)
        time.sleep(0.3)
    assert sweep.returncode == 0, faults.read_output(sweep)
    assert max_trial_nodes == 2
    result = faults.STEPS["sweep"].read_result(deployment, out)
    sweep_reference = faults.Reference(result, time.monotonic() - start_time)
    return references | {"sweep": sweep_reference}


@pytest.mark.parametrize("step", ["prepare", "sweep"])
def test_a_command_killed_at_a_random_moment_has_the_undisturbed_result(
    deployment: faults.Deployment, references: dict[str, faults.Reference], step: str
) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    target = draw.choice(["driver", "worker", "node"])

    kill = faults.run_with_kill(
        deployment, step, target, draw.random(), draw, 0, references[step]
    )

    assert not kill.problem, (seed, kill)


def test_a_training_on_a_preempted_node_continues_on_another_node(
    deployment: faults.Deployment, references: dict[str, faults.Reference]
) -> None:
    """It saves a checkpoint first, and the preemption counts as no failure."""
    deployment.replace_lost_nodes()
    command = faults.STEPS["train"].command(deployment, deployment.folder / "spot")
    command += [
        "--fit.max_epochs",
        "100000",
        "--ray.cpus_per_worker",
        "2",
        "--ray.max_failures",
        "0",
    ]
    training = deployment.start(command)
    output = iter(training.stdout or [])
    lines = [next(line for line in output if line.startswith("epoch"))]
    runs_training = find_nodes_that_run(deployment, "RayTrainWorker")
    node = deployment.nodes[
        runs_training.index(True, 1) - 1
    ]  # the head is not in `nodes`
    drain = [
        "drain-node",
        "--address",
        deployment.cluster.address,
        "--node-id",
        node.node_id,
        "--reason-message",
        "spot",
    ]
    drain += [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--deadline-remaining-seconds",
        "10",
    ]
    subprocess.run(
        [Path(sys.executable).with_name("ray"), *drain],
        env=deployment.environment,
        check=True,
    )
    while not lines[-1].startswith("continuing "):
        lines.append(next(output))

    notice = "a node will be preempted: saving a checkpoint"
    assert any(notice in line for line in lines)
    training.terminate()
    assert training.wait() == 143
