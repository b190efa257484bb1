"""`python -m tests.faults` in short: a cluster of three nodes, a sweep on several of them, and kills at random."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests import faults

pytestmark = pytest.mark.long

STEPS = ["prepare", "sweep"]


@pytest.fixture(scope="module")
def world() -> Iterator[faults.World]:
    with faults.world() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(world: faults.World) -> dict[str, faults.Undisturbed]:
    return faults.undisturbed(world, STEPS)


def test_a_sweep_runs_on_several_nodes_with_the_same_results(
    world: faults.World, undisturbed: dict[str, faults.Undisturbed]
) -> None:
    """Trials that need a whole node each give the weights and the runs in MLflow of trials side by side on one."""
    out = world.folder / "spread"
    sweep = world.start([*faults.STEPS["sweep"].words(world, out), "--ray.cpus_per_worker", "2"])
    most = 0
    while sweep.poll() is None:
        trials = [[w for w in node if "ImplicitFunc" in faults.named(w)] for node in world.workers_by_node()]
        most = max(most, sum(bool(node) for node in trials))
    assert sweep.returncode == 0, faults.said(sweep)
    assert most == 2
    assert faults.STEPS["sweep"].result(world, out) == undisturbed["sweep"].result


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_random_moment_the_result_is_the_same(
    world: faults.World, undisturbed: dict[str, faults.Undisturbed], step: str
) -> None:
    seed = random.randrange(1 << 30)
    draw = random.Random(seed)
    target = draw.choice(["driver", "worker", "node"])
    kill = faults.kill(world, step, target, draw.random(), draw, 0, undisturbed[step])
    assert not kill.wrong, (seed, kill)
