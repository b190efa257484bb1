"""LAC: lagged action conditioning (Wei et al., 2025), prior work that AttnMVP argues against.

Token t is the pair (a_{t-1}, i_t), as a sum, and predicts a_t: one token per event, no label of its own. The first
token has a learned action. The action before is that of the latest event that is strictly earlier, for a candidate and
among events of one time alike; of several latest ones of one time it is that of the log's last.

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
class LACConfig(ActionsConfig):
    """Sizes of LAC."""


class LAC(ActionsModel):
    """See the module."""

    def __init__(self, config: LACConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.first = nn.Parameter(0.02 * torch.randn(config.width))
        self.transformer = self.blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        rows, _, width = actions.shape
        known = torch.cat([self.first.to(actions.dtype).expand(rows, 1, width), actions], 1)  # (B, T + 1, D)
        x = items + known.gather(1, layout.earlier[..., None].expand(-1, -1, width))  # of the last strictly earlier one
        for block in self.transformer:
            x = block(x, layout)
        return self.norm(x)
