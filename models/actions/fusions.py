"""The actions models, which differ in how `encode` combines items and actions.

Shapes: see models/actions/base.py.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from core.options import STRICT
from models.actions.base import ActionsConfig, FusionModel
from models.layers.causal_attention import CausalAttention, Layout


class Interleaved(FusionModel):
    """The interleaved transformer, the baseline of AttnMVP (Fig. 3; HSTU's layout).

    The tokens are i_0, a_0, i_1, a_1, ..., twice as many as events. The state of an
    item token attends to its item and to all earlier items and actions, and predicts
    the item's action. An action token attends to its item's token and to strictly
    earlier events, never to other events with the same timestamp. A candidate is a
    single item token.
    """

    name = "interleaved"
    config_class = ActionsConfig
    tokens = 2

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Return the states (B, L, D) of the item tokens."""
        n = actions.shape[1]
        pairs = torch.stack([items[:, :n], actions], 2).flatten(1, 2)  # (B, 2T, D)
        x = self.transform(torch.cat([pairs, items[:, n:]], 1), layout)
        return self.norm(torch.cat([x[:, : 2 * n : 2], x[:, 2 * n :]], 1))


class AttnLFA(FusionModel):
    """Attention-based late fusion for actions (Sec. 3 of AttnMVP).

    A Transformer encodes items alone. Its last states are queries and keys of one more
    attention, whose values are actions, since users respond alike to similar items.
    This attention is strictly causal, because its values hold labels. The attention of
    the Transformer includes the position itself, because the item is known when its
    action is predicted. The head reads the item's state and the pooled actions, which
    are zero without earlier events.
    """

    name = "attn_lfa"
    config_class = ActionsConfig
    states_width = 2

    def build_fusion(self, config: Any) -> None:
        """Add the parameters that `encode` reads."""
        super().build_fusion(config)
        self.pool = CausalAttention(config.width, config.num_heads, strict=True)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Return (B, L, 2 D): item states, then pooled actions."""
        x = self.norm(self.transform(items, layout))
        return torch.cat([x, self.pool(x, actions, layout)], 2)


@dataclass(config=STRICT)
class AttnMVPConfig(ActionsConfig):
    """Options of AttnMVP."""

    action_weight: NonNegativeFloat = 1.0
    """Weight lambda of actions in the mixed values (1 in the paper, which finds [0.5,
    1] stable)."""
    late_fusion: bool = True
    """Whether the last states pool actions once more, as in AttnLFA; false for "AttnMVP
    - LFA" of Table 2."""


class AttnMVP(FusionModel):
    """Attention-based mixed value pooling (Sec. 4 of AttnMVP).

    In every layer Q = K = H and V = H + lambda a, so that an item's state collects the
    actions on similar earlier items: it becomes "preferred dog" or "disfavoured cat".
    Every layer is strictly causal, since the value at t holds the label of t. The
    residual stream keeps the item's own features. H is the normalised input of a block,
    as blocks are pre-norm.
    """

    name = "attn_mvp"
    is_strict = True
    config_class = AttnMVPConfig
    config: AttnMVPConfig

    def __init__(self, config: AttnMVPConfig, catalogue: Any) -> None:
        self.states_width = 2 if config.late_fusion else 1
        super().__init__(config, catalogue)

    def build_fusion(self, config: Any) -> None:
        """Add the parameters that `encode` reads."""
        super().build_fusion(config)
        self.pool = None
        if config.late_fusion:
            self.pool = CausalAttention(config.width, config.num_heads, strict=True)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Return item states (B, L, D), followed by pooled actions with late fusion."""
        added_values = self.config.action_weight * actions
        x = self.norm(self.transform(items, layout, added_values))
        if self.pool is None:
            return x
        return torch.cat([x, self.pool(x, actions, layout)], 2)


class AttnDHN(FusionModel):
    """Attention-based dual-helix network (Sec. 5 and Fig. 8 of AttnMVP, exploratory).

    Each layer updates items by (Q, K, V) = (i, i, i + a), then actions by (a, a,
    i + a), so that there are twice as many blocks as in the other models. Items attend
    to strictly earlier positions. Actions also attend to their own position, so that
    a_t reads its item i_t, and only later items read a_t. Candidates have no actions,
    so the action stream covers the context alone. Each stream adds the residual stream
    of the other one to its values without normalisation, so that the share of the other
    stream grows with depth. Stable training needs half the learning rate of AttnMVP
    (Sec. 5).
    """

    name = "attn_dhn"
    config_class = ActionsConfig
    states_width = 2

    def build_fusion(self, config: Any) -> None:
        """Add the parameters that `encode` reads."""
        self.item_blocks = self.build_blocks(strict=True)
        self.action_blocks = self.build_blocks(strict=False)
        self.norm = nn.LayerNorm(config.width)
        self.action_norm = nn.LayerNorm(config.width)
        self.pool = CausalAttention(config.width, config.num_heads, strict=True)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Return (B, L, 2 D): item states, then pooled action states."""
        x, a = items, actions
        context_layout = layout.context_only()
        for item_block, action_block in zip(
            self.item_blocks, self.action_blocks, strict=True
        ):
            x = item_block(x, layout, a)
            a = action_block(a, context_layout, x[:, : layout.context])
        x = self.norm(x)
        return torch.cat([x, self.pool(x, self.action_norm(a), layout)], 2)


class LAC(FusionModel):
    """Lagged action conditioning (Wei et al., 2025), a baseline of AttnMVP.

    Token t is the sum a_{t-1} + i_t and predicts a_t. There is one token per event, and
    no token holds its own label. The first token has a learned action. The lagged
    action of an event or candidate is the action of the latest strictly earlier event;
    if several events share that time, the last one in the log's order.
    """

    name = "lac"
    config_class = ActionsConfig

    def build_fusion(self, config: Any) -> None:
        """Add the parameters that `encode` reads."""
        self.first = nn.Parameter(0.02 * torch.randn(config.width))
        super().build_fusion(config)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Return the states (B, L, D) of the tokens."""
        rows, _, width = actions.shape
        first = self.first.to(actions.dtype).expand(rows, 1, width)
        lagged = torch.cat([first, actions], 1)  # (B, T + 1, D)
        # n strictly earlier events: entry n holds the action of the last one
        index = layout.earlier[..., None].expand(-1, -1, width)  # (B, L, D)
        x = items + lagged.gather(1, index)
        return self.norm(self.transform(x, layout))


class GenRank(FusionModel):
    """GenRank-style early fusion (Huang et al., 2025), a baseline of AttnMVP.

    A context token is the sum of item and action, a candidate token the sum of item and
    a learned mask action. A context token holds its own label and cannot be learned
    from. Training sequences are therefore cut into context and candidates.
    """

    name = "genrank"
    config_class = ActionsConfig
    example_unit = "split_sequence"
    history_targets = False

    def build_fusion(self, config: Any) -> None:
        """Add the parameters that `encode` reads."""
        self.mask_action = nn.Parameter(0.02 * torch.randn(config.width))
        super().build_fusion(config)

    def encode(self, items: Tensor, actions: Tensor, layout: Layout) -> Tensor:
        """Return the states (B, L, D) of the tokens."""
        num_candidates = items.shape[1] - actions.shape[1]
        mask_action = self.mask_action.to(actions.dtype)
        candidate_actions = mask_action.expand(len(items), num_candidates, -1)
        x = items + torch.cat([actions, candidate_actions], 1)
        return self.norm(self.transform(x, layout))
