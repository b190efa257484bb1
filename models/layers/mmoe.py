"""Multi-gate mixture of experts (Ma et al., 2018).

All tasks share the experts; each task has a gate and a tower.

Shapes: `D` width of the input, `E` experts of width `w`, `K` tasks, `h` width of a
tower.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class MMoE(nn.Module):
    """Logits of several tasks from shared experts (Eq. 6 and 7 of MMoE).

    logit_k = tower_k(sum_e softmax(gate_k(x))_e * expert_e(x))

    Args:
        width: Width D of the input.
        tasks: Number of tasks K.
        experts: Number of experts E.
        expert_width: Output width w of an expert.
        tower_width: Inner width h of a task's tower.
        dropout: Dropout probability of the experts' outputs.
    """

    def __init__(
        self,
        width: int,
        tasks: int,
        *,
        experts: int,
        expert_width: int,
        tower_width: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape, self.dropout = (tasks, experts), dropout
        self.experts = nn.Linear(width, experts * expert_width)
        self.gates = nn.Linear(width, tasks * experts)
        # one product for the towers of all tasks: a loop over tasks would cost more
        self.tower = nn.Parameter(torch.empty(tasks, expert_width, tower_width))
        self.tower_bias = nn.Parameter(torch.zeros(tasks, tower_width))
        self.out = nn.Parameter(torch.empty(tasks, tower_width))
        self.bias = nn.Parameter(torch.zeros(tasks))
        for weight, fan_in in ((self.tower, expert_width), (self.out, tower_width)):
            nn.init.uniform_(weight, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (..., K) of inputs `x` (..., D)."""
        num_experts = self.shape[1]
        activated = functional.relu(self.experts(x))
        experts = activated.unflatten(-1, (num_experts, -1))  # (..., E, w)
        experts = functional.dropout(experts, self.dropout, self.training)
        gates = self.gates(x).unflatten(-1, self.shape).softmax(-1)  # (..., K, E)
        mixed = gates @ experts  # (..., K, w)
        towers = torch.einsum("...kw,kwh->...kh", mixed, self.tower) + self.tower_bias
        return (functional.relu(towers) * self.out).sum(-1) + self.bias
