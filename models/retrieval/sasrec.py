"""SASRec (Kang and McAuley, 2018): self-attention over a user's items.

The score of an item is the inner product of its embedding and the last state. Training
is softmax cross-entropy over the full catalogue, in one causal pass for all requests of
a user. Unlike in the paper, blocks are pre-norm with one more norm at the end, and the
feed-forward has GELU instead of ReLU.

Shapes: `B` users, `T` positions, `D` width, `N` items, `M` targets, `H` heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor, nn
from torch.nn import functional

from core.options import STRICT, Dropout, NamedConfig
from models.dataset.batch import PAD
from models.retrieval.data import Catalogue, HistoryBatch, WindowBatch
from models.retrieval.model import RetrievalModel
from models.retrieval.node_vectors import NodeVectors
from models.retrieval.recommend import best_allowed, recommender
from models.training.distributed import global_mean


@dataclass(config=STRICT)
class SASRecConfig(NamedConfig):
    """Sizes of SASRec: RecBole's defaults for sparse data, with 50 positions."""

    dim: PositiveInt = 64
    """Width of item embeddings and states (RecBole's default; the paper has 50)."""
    num_layers: PositiveInt = 2
    """Self-attention blocks (Sec. 4.4 of SASRec)."""
    num_heads: PositiveInt = 2
    """Attention heads (RecBole's default; the paper found 1 about as good)."""
    feedforward_dim: PositiveInt = 256
    """Inner width of the feed-forward blocks (RecBole's default)."""
    dropout: Dropout = 0.5
    """Dropout on embeddings, attention and blocks (Sec. 4.4 of SASRec for sparse
    data)."""
    max_history: PositiveInt = 50
    """Number of latest behaviours read (Sec. 4.4 of SASRec for Amazon data)."""
    item_vectors: Literal["ids", "ids_and_sids"] | None = None
    """What an item's vector is: one of its own, or with semantic IDs the sum of its own
    and those of all prefixes of its codes (not in the paper). By default the sum, if
    there are semantic IDs."""

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim {self.dim} is not a multiple of num_heads {self.num_heads}"
            )


class Block(nn.Module):
    """A pre-norm block of causal self-attention and a feed-forward layer."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.feedforward_norm = nn.LayerNorm(config.dim)
        self.feedforward = nn.Sequential(
            nn.Linear(config.dim, config.feedforward_dim),
            nn.GELU(),
            nn.Linear(config.feedforward_dim, config.dim),
        )

    def forward(
        self, x: Tensor, dropout_p: float, position: Tensor | None = None
    ) -> Tensor:
        """Return the block's output for states `x` (B, T, D).

        Args:
            x: (B, T, D) states.
            dropout_p: Dropout probability.
            position: (B, 1, 1) only position whose output is needed; None for all.

        Returns:
            (B, T, D), or (B, 1, D) for one position.
        """
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D / H)
        visible = None
        if position is not None:
            visible = torch.arange(x.shape[1], device=x.device) <= position[:, None]
            q = q.take_along_dim(position[:, None], 2)
            x = x.take_along_dim(position, 1)
        # padding is on the right, so the causal mask hides it from real positions
        mixed = functional.scaled_dot_product_attention(
            q, k, v, visible, dropout_p, is_causal=position is None
        )
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        x = x + functional.dropout(attended, dropout_p)
        inner = self.feedforward(self.feedforward_norm(x))
        return x + functional.dropout(inner, dropout_p)


class SASRec(RetrievalModel):
    """Self-attention over item embeddings, which are also the output weights."""

    name = "sasrec"
    config_class: ClassVar[type] = SASRecConfig
    example_unit = "user"
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": False}

    def __init__(self, config: SASRecConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        self.item: nn.Embedding | NodeVectors
        if config.item_vectors == "ids_and_sids":
            self.item = NodeVectors(catalogue, config.dim)
        else:
            self.item = nn.Embedding(catalogue.num_items, config.dim)
        self.position = nn.Embedding(config.max_history, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Embedding) and module.padding_idx == 0:
                nn.init.zeros_(module.weight.data[0])
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    @classmethod
    def inputs_of(cls, config: SASRecConfig) -> Mapping[str, bool]:
        """Return the folder of semantic IDs unless items have vectors of their own."""
        if config.item_vectors == "ids":
            return {}
        return {"sids": config.item_vectors is not None}

    @classmethod
    def resolve_config(cls, config: SASRecConfig, catalogue: Catalogue) -> SASRecConfig:
        """Return the config with `item_vectors` filled in.

        They are `ids_and_sids` if the catalogue has semantic IDs, otherwise `ids`.
        """
        if config.item_vectors:
            return config
        has_sids = catalogue.sids is not None
        return replace(config, item_vectors="ids_and_sids" if has_sids else "ids")

    def states(
        self, history: Tensor, dropout_p: float = 0.0, position: Tensor | None = None
    ) -> Tensor:
        """Return the state (B, T, D) after each behaviour of `history` (B, T).

        With a `position` (B, 1, 1), only the state (B, 1, D) there is computed.
        """
        length = history.shape[1]
        x = self.item(history.clamp(min=0)) + self.position.weight[:length]
        x = functional.dropout(x, dropout_p)
        *blocks, last_block = self.blocks
        for block in blocks:
            x = block(x, dropout_p)
        return self.norm(last_block(x, dropout_p, position))

    def forward(self, batch: WindowBatch) -> dict[str, Tensor]:
        """Return the mean cross-entropy over the M targets of the windows."""
        dropout_p = self.config.dropout if self.training else 0.0
        states = self.states(batch.history, dropout_p)
        last = batch.target_row * states.shape[1] + batch.target_position
        # (M, D): the last state before each request
        states = functional.embedding(last, states.flatten(0, 1))
        mean = self.loss(states, batch.target)
        return {"loss": global_mean(mean, (batch.target != PAD).sum())}

    def loss(self, states: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross-entropy of `target` (M,) after `states` (M, D)."""
        logits = states @ self.item.weight.T
        return functional.cross_entropy(logits, target, ignore_index=PAD)

    def last_states(self, batch: HistoryBatch) -> Tensor:
        """Return the state (B, D) after each history, 0 after an empty one."""
        length = batch.history_length[:, None]
        last = (length - 1).clamp(min=0).unsqueeze(2)
        states = self.states(batch.history, position=last)
        return states.squeeze(1).masked_fill(length == 0, 0.0)

    def item_vectors(self) -> Tensor:
        """Return the item embeddings, (N, D)."""
        return self.item.weight

    @recommender
    def recommend(self, batch: HistoryBatch, k: int) -> tuple[Tensor, Tensor]:
        """Return items and scores, (B, k) both, of a batch of unit `request`.

        Items of the history are ranked too, as in the papers, unless `unseen` is true.
        If k exceeds the catalogue, the tail is item -1 with score -inf.
        """
        return best_allowed(self.last_states(batch) @ self.item.weight.T, k, batch)
