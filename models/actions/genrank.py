"""GenRank-style early fusion (Huang et al., 2025), prior work that AttnMVP argues against.

A context token is item + action, a candidate token item + a learned mask action. A context token holds its own
label, so nothing is learned from it: sequences must be cut into context and candidates for training too.

Shapes: as in models/actions/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.actions.base import ActionsConfig, ActionsModel
from models.actions.batch import ActionsCatalogue
from models.layers.causal_attention import Layout


@dataclass
class GenRankConfig(ActionsConfig):
    """Sizes of GenRank-style early fusion."""


class GenRank(ActionsModel):
    """See the module."""

    history_targets = False

    def __init__(self, config: GenRankConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.mask_action = nn.Parameter(0.02 * torch.randn(config.width))
        self.transformer = self.blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        candidates = items.shape[1] - actions.shape[1]
        masked = self.mask_action.to(actions.dtype).expand(len(items), candidates, -1)
        x = items + torch.cat([actions, masked], 1)
        for block in self.transformer:
            x = block(x, layout)
        return self.norm(x)
