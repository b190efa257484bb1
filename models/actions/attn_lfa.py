"""AttnLFA: attention-based late fusion for actions (Sec. 3 of AttnMVP).

A Transformer over items alone; its last states are queries and keys of one attention whose values are actions:
the response to an item resembles the responses to similar items. Strictly causal, as values hold labels. Item
attention may include the own position: the item is known when its action is predicted.

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
class AttnLFAConfig(ActionsConfig):
    """Sizes of AttnLFA."""


class AttnLFA(StatefulModel):
    """See the module. The head reads the item's state beside the pooled actions, which are zero without a past."""

    states_width = 2

    def __init__(self, config: AttnLFAConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.transformer = self.blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)
        self.pool = CausalAttention(config.width, config.num_heads, strict=True)
        self.caches = config.num_layers + 1

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        x = items
        for block in self.transformer:
            x = block(x, layout)
        x = self.norm(x)
        return torch.cat([x, self.pool(x, actions, layout)], 2)
