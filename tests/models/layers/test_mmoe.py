"""MMoE equals a loop over tasks and experts."""

from __future__ import annotations

import torch

from models.layers.mmoe import MMoE


def test_logits_equal_a_loop_over_tasks_and_experts():
    torch.manual_seed(0)
    model = MMoE(5, tasks=3, experts=4, expert_width=6, tower_width=7)
    x = torch.randn(5)
    experts = (model.experts.weight @ x + model.experts.bias).relu().view(4, 6)
    gates = (model.gates.weight @ x + model.gates.bias).view(3, 4)

    logits = model(x)

    for task in range(3):
        mixed = torch.zeros(6)
        for weight, expert in zip(gates[task].softmax(0), experts, strict=True):
            mixed = mixed + weight * expert
        tower = (model.tower[task].T @ mixed + model.tower_bias[task]).relu()
        expected = model.out[task] @ tower + model.bias[task]
        torch.testing.assert_close(logits[task], expected)
