"""Causal encoders of a user's behaviours: Linear HSTU, HSTU and a transformer.

Shapes: `B` users, `T` positions, `D` width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from models.layers.linear_recurrence import Decay, linear_recurrence
from models.text.pretrained import load_encoder

# importing transformers takes as long as importing PyTorch, in each worker process
if TYPE_CHECKING:
    from transformers import BertModel


class LinearHSTULayer(nn.Module):
    """A layer of Linear HSTU (Eq. 6-10 of QGS), which has no feed-forward block.

    Products of keys and values are summed with a decay, then multiplied by a query and
    a gate.
    """

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.RMSNorm(width)
        self.project = nn.Linear(width, 4 * width, bias=False)  # W_Q, W_K, W_V, W_U
        self.decay = Decay(width)

    def projections(self, h: Tensor) -> tuple[Tensor, ...]:
        """Return Q, K, V and U of Eq. 6, each with the shape of `h`."""
        projected = self.project(self.norm(h))
        in_place = not torch.is_grad_enabled()
        return functional.silu(projected, inplace=in_place).chunk(4, -1)

    def forward(self, h: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the states (B, T, D) of `h` (B, T, D); `times` are ignored."""
        q, k, v, u = self.projections(h)
        c = linear_recurrence(k * v, self.decay())  # (B, T, D): Eq. 7 and 8
        return h + functional.dropout(q * c * u, self.dropout, self.training)


class LayerStack(nn.Module):
    """A stack of causal layers. Padding must be on the right."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the states (B, T, D) of `h` (B, T, D) at `times` (B, T) in ms."""
        for layer in self.layers:
            h = layer(h, times=times)
        return h


class CausalBert(nn.Module):
    """BERT with a causal mask over input embeddings, the user tower of HLLM.

    Args:
        width: Width D of the states.
        num_layers: Number of layers.
        heads: Attention heads of a layer.
        ffn: Inner width of the feed-forward blocks.
        length: Maximum number of positions T.
        dropout: Dropout probability of hidden states and attention weights.
    """

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
        # forward passes embeddings, so word embeddings would be unused weights
        self.bert.embeddings.word_embeddings = None  # type: ignore[assignment]

    def forward(self, h: Tensor, times: Tensor | None = None) -> Tensor:
        """Return the states (B, T, D) of `h` (B, T, D); `times` are ignored."""
        return self.bert(inputs_embeds=h, use_cache=False).last_hidden_state


def pretrained_sizes(path: str) -> dict[str, Any]:
    """Return the sizes of the pretrained BERT at `path`, as options of QGS."""
    config = load_pretrained(path).config
    return {
        "width": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "ffn": config.intermediate_size,
    }


def load_pretrained(path: str) -> BertModel:
    """Load a pretrained BERT.

    Args:
        path: A folder, a name on the model hub, or `minilm`.
    """
    encoder = load_encoder(path)
    if encoder.config.model_type != "bert":
        raise UserError(
            f"the encoder {path} has the model type '{encoder.config.model_type}'"
        )
    return encoder  # type: ignore[no-any-return]


def copy_pretrained(encoder: CausalBert, path: str) -> None:
    """Copy the weights of a pretrained BERT into the encoder.

    Only the first `max_history` position embeddings are copied, and no word embeddings.

    Args:
        encoder: Encoder that is changed in place.
        path: Folder or name of the pretrained BERT, or `minilm`.
    """
    weights = load_pretrained(path).state_dict()
    name = "embeddings.position_embeddings.weight"
    length = encoder.bert.config.max_position_embeddings
    if length > len(weights[name]):
        raise UserError(
            f"max_history {length} exceeds the {len(weights[name])} positions of {path}"
        )
    weights[name] = weights[name][:length]
    encoder.bert.load_state_dict(weights, strict=False)
