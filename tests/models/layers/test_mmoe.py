"""MMoE equals a loop over tasks and experts; tasks share only the experts."""

from __future__ import annotations

import pytest
import torch

from models.layers.mmoe import MMoE


def make(**sizes) -> MMoE:
    torch.manual_seed(0)
    return MMoE(
        5, **({"tasks": 3, "experts": 4, "expert_width": 6, "tower_width": 7} | sizes)
    )


@pytest.mark.parametrize("shape", [(5,), (8, 5), (2, 3, 5), (0, 5)])
def test_it_gives_a_logit_per_task_for_inputs_of_any_shape(shape):
    assert make()(torch.randn(shape)).shape == (*shape[:-1], 3)


def test_it_equals_a_loop_over_tasks_and_experts():
    model = make()
    x = torch.randn(5)
    experts = (model.experts.weight @ x + model.experts.bias).relu().view(4, 6)
    gates = (model.gates.weight @ x + model.gates.bias).view(3, 4)
    for task, got in enumerate(model(x)):
        mixed = sum(
            gate * expert
            for gate, expert in zip(gates[task].softmax(0), experts, strict=True)
        )
        tower = (model.tower[task].T @ mixed + model.tower_bias[task]).relu()
        torch.testing.assert_close(got, model.out[task] @ tower + model.bias[task])
