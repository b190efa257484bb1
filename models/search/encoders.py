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
        """Return Q, K, V, U of Eq. 6, each of the shape of `h`."""
        projected = self.project(self.norm(h))
        in_place = not torch.is_grad_enabled()
        return functional.silu(projected, inplace=in_place).chunk(4, -1)

    def forward(self, h: Tensor) -> Tensor:
        """Return (B, T, D) states of all positions of `h` (B, T, D)."""
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
        """Return (B, T, D) states. Padding is on the right, where no real position reads it; `times` are ignored."""
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
        """Return (B, T, D) states of `h` (B, T, D) at `times` (B, T)."""
        for layer in self.layers:
            h = layer(h, times=times)
        return h


class CausalBert(nn.Module):
    """BERT with a causal mask over embeddings: the user tower of HLLM."""

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
        """Return (B, T, D) states of `h` (B, T, D); `times` are ignored."""
        return self.bert(inputs_embeds=h, use_cache=False).last_hidden_state


def pretrained_sizes(path: str) -> dict[str, Any]:
    """Return the sizes of the pretrained BERT at `path`, as options of QGS."""
    return bert_sizes(load_pretrained(path).config)


def bert_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of a BERT config, as options of QGS."""
    return {
        "width": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "ffn": config.intermediate_size,
    }


def load_pretrained(path: str) -> BertModel:
    """Load the pretrained BERT at `path`: a folder, a name of the model hub, or `minilm`.

    Raises:
        UserError: If there is none, or it is no BERT.
    """
    encoder = load_encoder(path)
    if encoder.config.model_type != "bert":
        raise UserError(
            f"the encoder {path} is a {encoder.config.model_type}, no BERT; give one that is"
        )
    return encoder  # type: ignore[no-any-return]


def copy_pretrained(encoder: CausalBert, path: str) -> None:
    """Copy the layers and the first positions of the pretrained BERT at `path` into the encoder."""
    mine, theirs = encoder.bert, load_pretrained(path)
    own_sizes, sizes = bert_sizes(mine.config), bert_sizes(theirs.config)
    if own_sizes != sizes:
        raise UserError(f"the BERT at {path} has {sizes}, the model {own_sizes}")
    mine.encoder.load_state_dict(theirs.encoder.state_dict())
    length = mine.config.max_position_embeddings
    positions = theirs.embeddings.position_embeddings.weight
    if length > len(positions):
        raise UserError(
            f"max_history {length} exceeds the {len(positions)} positions of {path}; lower max_history"
        )
    with torch.no_grad():
        mine.embeddings.position_embeddings.weight.copy_(positions[:length])
        mine.embeddings.token_type_embeddings.weight.copy_(
            theirs.embeddings.token_type_embeddings.weight
        )
        mine.embeddings.LayerNorm.load_state_dict(
            theirs.embeddings.LayerNorm.state_dict()
        )
