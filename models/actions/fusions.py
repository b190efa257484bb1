"""How actions meet items: the models of the family, each its `encode`; AttnMVP with late fusion or without.

Shapes: as in models/actions/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.actions.base import ActionsConfig, FusionModel
from models.actions.catalogue import ActionsCatalogue
from models.config import check_least
from models.layers.causal_attention import CausalAttention, Layout


@dataclass
class InterleavedConfig(ActionsConfig):
    """Sizes of the interleaved baseline."""


class Interleaved(FusionModel):
    """The interleaved transformer, the baseline (Fig. 3 of AttnMVP; HSTU's layout): tokens i_0, a_0, i_1, a_1, ...

    There are twice as many tokens as events. The state of an item token, which has seen
    all earlier items and actions and its own item, predicts the item's action. An
    action token attends to its item's token and to strictly earlier events, never to
    other events with the same timestamp. A candidate is a single item token.
    """

    name = "interleaved"
    config_class = InterleavedConfig
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


@dataclass
class AttnLFAConfig(ActionsConfig):
    """Sizes of AttnLFA."""


class AttnLFA(FusionModel):
    """Attention-based late fusion for actions (Sec. 3 of AttnMVP).

    A Transformer over items alone; its last states are queries and keys of one
    attention whose values are actions: the response to an item resembles the responses
    to similar items. Strictly causal, as values hold labels. Item attention may include
    the own position: the item is known when its action is predicted. The head reads the
    item's state beside the pooled actions, which are zero without a past.
    """

    name = "attn_lfa"
    config_class = AttnLFAConfig
    states_width = 2

    def __init__(self, config: AttnLFAConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.transformer = self.blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)
        self.pool = CausalAttention(config.width, config.num_heads, strict=True)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        x = items
        for block in self.transformer:
            x = block(x, layout)
        x = self.norm(x)
        return torch.cat([x, self.pool(x, actions, layout)], 2)


@dataclass
class AttnMVPConfig(ActionsConfig):
    """Settings of AttnMVP."""

    action_weight: float = 1.0
    """lambda, the share of actions in the mixed values (1 in the paper; stable in [0.5,
    1])."""
    late_fusion: bool = True
    """Whether actions are pooled once more by the last states, as in AttnLFA; false:
    AttnMVP - LFA of Table 2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, ("action_weight",), 0)


class AttnMVP(FusionModel):
    """Attention-based mixed value pooling (Sec. 4 of AttnMVP), with and without the late fusion of AttnLFA.

    In every layer Q = K = H and V = H + lambda a: items gather what was done with
    similar items before, and become "preferred dog" or "disfavoured cat". Strictly
    causal in every layer, since the value at t holds the label of t; what an item knows
    of itself stays in the residual stream. H is the block's normed input, as blocks are
    pre-norm.
    """

    name = "attn_mvp"
    config_class = AttnMVPConfig
    config: AttnMVPConfig

    def __init__(self, config: AttnMVPConfig, catalogue: ActionsCatalogue) -> None:
        self.states_width = 2 if config.late_fusion else 1
        super().__init__(config, catalogue)
        self.transformer = self.blocks(strict=True)
        self.norm = nn.LayerNorm(config.width)
        self.pool = (
            CausalAttention(config.width, config.num_heads, strict=True)
            if config.late_fusion
            else None
        )

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        x, added_values = items, self.config.action_weight * actions
        for block in self.transformer:
            x = block(x, layout, added_values)
        x = self.norm(x)
        return (
            x if self.pool is None else torch.cat([x, self.pool(x, actions, layout)], 2)
        )


@dataclass
class AttnDHNConfig(ActionsConfig):
    """Sizes of AttnDHN."""


class AttnDHN(FusionModel):
    """Attention-based dual-helix network (Sec. 5 and Fig. 8 of AttnMVP), which the paper leaves as exploratory.

    Each layer updates items by (Q, K, V) = (i, i, i + a), then actions by (a, a, i +
    a); twice the blocks of the other models. Items read strictly earlier values.
    Actions read their own position too: a_t meets the i_t that caused it, and only
    later items read it. Candidates have no action, so the action stream is the
    context's. The other side is mixed in as its residual stream is, not normed, so that
    its share of the values grows with depth. Half the learning rate of AttnMVP is
    needed for stable training (Sec. 5).
    """

    name = "attn_dhn"
    config_class = AttnDHNConfig
    states_width = 2

    def __init__(self, config: AttnDHNConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.item_blocks = self.blocks(strict=True)
        self.action_blocks = self.blocks(strict=False)
        self.norm, self.action_norm = (
            nn.LayerNorm(config.width),
            nn.LayerNorm(config.width),
        )
        self.pool = CausalAttention(config.width, config.num_heads, strict=True)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        x, a = items, actions
        past = layout.past()
        for item_block, action_block in zip(
            self.item_blocks, self.action_blocks, strict=True
        ):
            x = item_block(x, layout, a)
            a = action_block(a, past, x[:, : layout.context])
        x = self.norm(x)
        return torch.cat([x, self.pool(x, self.action_norm(a), layout)], 2)


@dataclass
class LACConfig(ActionsConfig):
    """Sizes of LAC."""


class LAC(FusionModel):
    """Lagged action conditioning (Wei et al., 2025), prior work that AttnMVP argues against.

    Token t is the pair (a_{t-1}, i_t), as a sum, and predicts a_t: one token per event,
    no label of its own. The first token has a learned action. The action before is that
    of the latest event that is strictly earlier, for a candidate and among events of
    one time alike; of several latest ones of one time it is that of the log's last.
    """

    name = "lac"
    config_class = LACConfig

    def __init__(self, config: LACConfig, catalogue: ActionsCatalogue) -> None:
        super().__init__(config, catalogue)
        self.first = nn.Parameter(0.02 * torch.randn(config.width))
        self.transformer = self.blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        rows, _, width = actions.shape
        known = torch.cat(
            [self.first.to(actions.dtype).expand(rows, 1, width), actions], 1
        )  # (B, T + 1, D)
        x = items + known.gather(
            1, layout.earlier[..., None].expand(-1, -1, width)
        )  # of the last strictly earlier one
        for block in self.transformer:
            x = block(x, layout)
        return self.norm(x)


@dataclass
class GenRankConfig(ActionsConfig):
    """Sizes of GenRank-style early fusion."""


class GenRank(FusionModel):
    """GenRank-style early fusion (Huang et al., 2025), prior work that AttnMVP argues against.

    A context token is item + action, a candidate token item + a learned mask action. A
    context token holds its own label, so nothing is learned from it: sequences must be
    cut into context and candidates for training too.
    """

    name = "genrank"
    config_class = GenRankConfig
    example_unit = "split_sequence"
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
