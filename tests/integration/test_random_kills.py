"""A short `python -m tests.faults`: random kills on a cluster of three nodes, and a
node that is taken away with notice.
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
def world() -> Iterator[faults.World]:
    with faults.world() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(world: faults.World) -> dict[str, faults.Undisturbed]:
    """Results of an undisturbed prepare, and of a sweep whose two trials need a whole
    node each.
    """
    found = faults.undisturbed(world, ["prepare"])
    began, out, most = time.monotonic(), world.folder / "sweep", 0
    sweep = world.start(
        [*faults.STEPS["sweep"].words(world, out), "--ray.cpus_per_worker", "2"]
    )
    while sweep.poll() is None:
        trials = [
            [w for w in node if "ImplicitFunc" in faults.named(w)]
            for node in world.workers_by_node()
        ]
        most = max(most, sum(bool(node) for node in trials))
        time.sleep(0.3)
    assert sweep.returncode == 0, faults.said(sweep)
    assert most == 2
    return found | {
        "sweep": faults.Undisturbed(
            faults.STEPS["sweep"].result(world, out), time.monotonic() - began
        )
    }


@pytest.mark.parametrize("step", ["prepare", "sweep"])
def test_killed_at_a_random_moment_the_result_is_the_same(
    world: faults.World, undisturbed: dict[str, faults.Undisturbed], step: str
) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    target = draw.choice(["driver", "worker", "node"])
    kill = faults.kill(world, step, target, draw.random(), draw, 0, undisturbed[step])
    assert not kill.wrong, (seed, kill)


def test_a_node_taken_away_with_notice_is_no_failure(
    world: faults.World, undisturbed: dict[str, faults.Undisturbed]
) -> None:
    """The training saves a checkpoint and continues on another node, with no failure
    allowed.
    """
    world.mend()
    words = faults.STEPS["train"].words(world, world.folder / "spot")
    words += [
        "--fit.max_epochs",
        "100000",
        "--ray.cpus_per_worker",
        "2",
        "--ray.max_failures",
        "0",
    ]
    training = world.start(words)
    lines = iter(training.stdout or [])
    said = [next(line for line in lines if line.startswith("epoch"))]
    busy = [
        any("RayTrainWorker" in faults.named(w) for w in node)
        for node in world.workers_by_node()
    ]
    node = world.nodes[busy.index(True, 1) - 1]
    drain = [
        "drain-node",
        "--address",
        world.cluster.address,
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
        env=world.environment,
        check=True,
    )
    while not said[-1].startswith("continuing "):
        said.append(next(lines))
    assert [
        line for line in said if "a node will be preempted: saving a checkpoint" in line
    ]
    training.terminate()
    assert training.wait() == 143
