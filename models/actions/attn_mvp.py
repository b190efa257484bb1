"""AttnMVP: attention-based mixed value pooling (Sec. 4 of AttnMVP), with and without the late fusion of AttnLFA.

In every layer Q = K = H and V = H + lambda a: items gather what was done with similar items before, and become
"preferred dog" or "disfavoured cat". Strictly causal in every layer, since the value at t holds the label of t; what
an item knows of itself stays in the residual stream. H is the block's normed input, as blocks are pre-norm.

Shapes: as in models/actions/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.actions.base import ActionsConfig
from models.actions.batch import ActionsCatalogue
from models.actions.state import StatefulModel
from models.layers.causal_attention import CausalAttention, Layout


@dataclass
class AttnMVPConfig(ActionsConfig):
    """Settings of AttnMVP."""

    action_weight: float = 1.0
    """lambda, the share of actions in the mixed values (1 in the paper; stable in [0.5, 1])."""
    late_fusion: bool = True
    """Whether actions are pooled once more by the last states, as in AttnLFA; false: AttnMVP - LFA of Table 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.action_weight >= 0:
            raise ValueError(f"action_weight {self.action_weight} is below 0; give lambda >= 0, such as 1")


class AttnMVP(StatefulModel):
    """See the module."""

    config: AttnMVPConfig

    def __init__(self, config: AttnMVPConfig, catalogue: ActionsCatalogue) -> None:
        self.states_width = 2 if config.late_fusion else 1
        super().__init__(config, catalogue)
        self.transformer = self.blocks(strict=True)
        self.norm = nn.LayerNorm(config.width)
        self.pool = CausalAttention(config.width, config.num_heads, strict=True) if config.late_fusion else None
        self.caches = config.num_layers + config.late_fusion

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        x, added_values = items, self.config.action_weight * actions
        for block in self.transformer:
            x = block(x, layout, added_values)
        x = self.norm(x)
        return x if self.pool is None else torch.cat([x, self.pool(x, actions, layout)], 2)
