"""AttnDHN: attention-based dual-helix network (Sec. 5 and Fig. 8 of AttnMVP), which the paper leaves as exploratory.

Each layer updates items by (Q, K, V) = (i, i, i + a), then actions by (a, a, i + a); twice the blocks of the other
models. Items read strictly earlier values. Actions read their own position too: a_t meets the i_t that caused it,
and only later items read it. Candidates have no action, so the action stream is the context's. The other side is mixed
in as its residual stream is, not normed, so that its share of the values grows with depth. Half the learning rate of
AttnMVP is needed for stable training (Sec. 5).

Shapes: as in models/actions/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.actions.base import ActionsConfig, ActionsModel
from models.actions.batch import ActionsCatalogue
from models.layers.causal_attention import CausalAttention, Layout


@dataclass
class AttnDHNConfig(ActionsConfig):
    """Sizes of AttnDHN."""


class AttnDHN(ActionsModel):
    """See the module."""

    states_width = 2

    def __init__(self, config: AttnDHNConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.item_blocks = self.blocks(strict=True)
        self.action_blocks = self.blocks(strict=False)
        self.norm, self.action_norm = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.pool = CausalAttention(config.width, config.num_heads, strict=True)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        x, a = items, actions
        past = layout.past()
        for item_block, action_block in zip(self.item_blocks, self.action_blocks, strict=True):
            x = item_block(x, layout, a)
            a = action_block(a, past, x[:, : layout.context])
        x = self.norm(x)
        return torch.cat([x, self.pool(x, self.action_norm(a), layout)], 2)
