"""Encoders of a user's behaviours: Linear HSTU, HSTU and a causal transformer. Each is strictly causal.

Shapes: `B` users, `T` positions, `D` width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.hstu import HSTULayer
from models.layers.linear_recurrence import Decay, key_value_recurrence
from models.storage.tables import UserError
from models.text.text_encoder import load_encoder

if TYPE_CHECKING:  # else imported where it is used: it takes as long as PyTorch, in every process of every training
    from transformers import BertModel


class LinearHSTULayer(nn.Module):
    """Eq. 6-10 of QGS: keys times values, summed with a decay, modulated by a query and by a gate; no FFN."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.RMSNorm(width)
        self.project = nn.Linear(width, 4 * width, bias=False)  # W_Q, W_K, W_V, W_U
        self.decay = Decay(width)

    def projections(self, h: Tensor) -> tuple[Tensor, ...]:
        """Q, K, V, U (Eq. 6), each of the shape of `h`."""
        projected = self.project(self.norm(h))
        return functional.silu(projected, inplace=not torch.is_grad_enabled()).chunk(
            4, -1
        )

    def forward(self, h: Tensor) -> Tensor:
        """(B, T, D) from (B, T, D): all positions at once."""
        q, k, v, u = self.projections(h)
        c = key_value_recurrence(k, v, self.decay())  # (B, T, D): Eq. 7 and 8
        return h + functional.dropout(q * c * u, self.dropout, self.training)


class LinearHSTUEncoder(nn.Module):
    """Layers of Linear HSTU."""

    def __init__(self, width: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            LinearHSTULayer(width, dropout) for _ in range(num_layers)
        )

    def forward(self, h: Tensor, times: Tensor | None = None) -> Tensor:
        """(B, T, D) states; padding is on the right, where no real position sees it. Times are not read."""
        for layer in self.layers:
            h = layer(h)
        return h


class HSTUEncoder(nn.Module):
    """Layers of HSTU with a bias by distance and time."""

    def __init__(
        self, width: int, num_layers: int, heads: int, length: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            HSTULayer(width, heads, length, relative=True, dropout=dropout)
            for _ in range(num_layers)
        )

    def forward(self, h: Tensor, times: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            h = layer(h, times=times)
        return h


class CausalBert(nn.Module):
    """BERT with a causal mask, over embeddings instead of words, as user tower of HLLM."""

    def __init__(
        self,
        width: int,
        num_layers: int,
        heads: int,
        ffn: int,
        length: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=1,
            hidden_size=width,
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            intermediate_size=ffn,
            max_position_embeddings=length,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            is_decoder=True,
            use_cache=False,
            pad_token_id=None,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.bert.embeddings.word_embeddings = None  # type: ignore[assignment]  # its input are embeddings

    def forward(self, h: Tensor, times: Tensor | None = None) -> Tensor:
        return self.bert(inputs_embeds=h, use_cache=False).last_hidden_state


def pretrained_sizes(path: str) -> dict[str, Any]:
    """`width`, `num_layers`, `num_heads`, `ffn` of the pretrained BERT at `path`."""
    return sizes_of(load_pretrained(path).config)


def sizes_of(config: Any) -> dict[str, Any]:
    names = {"width": "hidden_size", "num_layers": "num_hidden_layers"}
    names |= {"num_heads": "num_attention_heads", "ffn": "intermediate_size"}
    return {ours: getattr(config, theirs) for ours, theirs in names.items()}


def load_pretrained(path: str) -> BertModel:
    """The pretrained BERT at `path`, a folder, a name of the model hub or `minilm`; UserError where there is none."""
    found = load_encoder(path)
    if found.config.model_type != "bert":
        raise UserError(
            f"the encoder {path} is a {found.config.model_type}, no BERT; give one that is"
        )
    return found  # type: ignore[no-any-return]


def copy_pretrained(encoder: CausalBert, path: str) -> None:
    """Fills the encoder with the layers and the first positions of the pretrained BERT at `path`."""
    source = load_pretrained(path)
    mine, theirs = encoder.bert, source
    if sizes_of(mine.config) != sizes_of(theirs.config):
        raise UserError(
            f"the BERT at {path} has {sizes_of(theirs.config)}, the model {sizes_of(mine.config)}"
        )
    mine.encoder.load_state_dict(theirs.encoder.state_dict())
    length = mine.config.max_position_embeddings
    known = theirs.embeddings.position_embeddings.weight
    if length > len(known):
        raise UserError(
            f"max_history {length} exceeds the {len(known)} positions of {path}; lower max_history"
        )
    with torch.no_grad():
        mine.embeddings.position_embeddings.weight.copy_(known[:length])
        mine.embeddings.token_type_embeddings.weight.copy_(
            theirs.embeddings.token_type_embeddings.weight
        )
        mine.embeddings.LayerNorm.load_state_dict(
            theirs.embeddings.LayerNorm.state_dict()
        )
