"""The interleaved transformer, the baseline (Fig. 3 of AttnMVP; HSTU's layout): tokens i_0, a_0, i_1, a_1, ...

Twice as many tokens as events. What comes next after an item's token is its action, so that token's state, which
has seen all earlier items and actions and its own item, predicts it. An action's token reads its own item's beside
what is strictly earlier, and so nothing of events of its time. Candidates are item tokens alone.

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
class InterleavedConfig(ActionsConfig):
    """Sizes of the interleaved baseline."""


class Interleaved(ActionsModel):
    """See the module."""

    tokens = 2

    def __init__(self, config: InterleavedConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.transformer = self.blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        n = actions.shape[1]
        pairs = torch.stack([items[:, :n], actions], 2).flatten(1, 2)  # (B, 2T, D)
        x = torch.cat([pairs, items[:, n:]], 1)
        for block in self.transformer:
            x = block(x, layout)
        return self.norm(torch.cat([x[:, : 2 * n : 2], x[:, 2 * n :]], 1))
