"""Causal encoders of a user's behaviours: Linear HSTU, HSTU and a transformer.

Shapes: `B` users, `T` positions, `D` width, `H` heads of width `d`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.errors import UserError
from models.text.pretrained import load_encoder

# importing transformers takes as long as importing PyTorch, in each worker process
if TYPE_CHECKING:
    from transformers import BertModel


class HSTULayer(nn.Module):
    """An HSTU layer (Zhai et al., 2024, Eq. 1-3), optionally with a feed-forward block.

        U, V, Q, K = SiLU(W1 norm(x))
        out = x + W2(norm(SiLU(Q K^T + bias) V / n) * U)

    Attention weights are SiLU instead of softmax. As in the authors' code, scores are
    not scaled by the head width, projections and biases are initialised from N(0,
    0.02), and the epsilon of the norms is small compared with values divided by n.

    Args:
        width: Width D of the states.
        heads: Number of attention heads.
        length: Maximum number of positions, n of the paper. The constant keeps outputs
            independent of the amount of padding.
        causal: Whether to hide later positions.
        relative: Whether to add a learned bias by distance, and by time difference if
            `forward` gets times.
        ffn: Inner width of an additional feed-forward block, which HSTU does not have;
            0 for none.
        dropout: Dropout probability of the residual branches.
    """

    EPS = 1e-6
    """Epsilon of the layer norms."""
    STD = 0.02
    """Standard deviation of the initial projections and biases."""

    TIME_BUCKETS = 64
    """Number of buckets of log2(1 + seconds) between two positions."""

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        causal: bool = True,
        relative: bool = False,
        ffn: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.length = length
        self.causal = causal
        self.dropout = dropout
        self.norm = nn.LayerNorm(width, eps=self.EPS)
        self.project = nn.Linear(width, 4 * width, bias=False)
        self.mixed_norm = nn.LayerNorm(width, eps=self.EPS)
        self.out = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.out.weight)
        self.by_distance = None
        self.by_time = None
        if relative:
            self.by_distance = nn.Parameter(torch.zeros(2 * length - 1))
            self.by_time = nn.Parameter(torch.zeros(self.TIME_BUCKETS))
        self.ffn = None
        if ffn:
            self.ffn = nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, ffn),
                nn.ReLU(),
                nn.Linear(ffn, width),
            )
        for weight in (self.project.weight, self.by_distance, self.by_time):
            if weight is not None:
                nn.init.normal_(weight, std=self.STD)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, times: Tensor | None = None
    ) -> Tensor:
        """Return the states (B, T, D) after the layer.

        Args:
            x: (B, T, D) states.
            mask: (B, T) bool, true where a position may be attended to; None for all.
            times: (B, T) int64 timestamps in ms for the bias by time difference.
        """
        u, v, q, k = functional.silu(self.project(self.norm(x))).chunk(4, -1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)
        )  # (B, H, T, d)
        if mask is None:
            v = v / self.length
        else:
            v = v * (mask[:, None, :, None] / self.length)
        scores = q @ k.transpose(2, 3)  # (B, H, T, T)
        if self.by_distance is not None and self.by_time is not None:
            index = torch.arange(x.shape[1], device=x.device)
            distance = index[:, None] - index + self.length - 1
            bias = functional.embedding(distance, self.by_distance[:, None])
            scores = scores + bias.squeeze(-1)
            if times is not None:
                seconds = (times[:, :, None] - times[:, None]).abs().double() / 1000
                bucket = torch.log2(1 + seconds).long().clamp(max=self.TIME_BUCKETS - 1)
                bias = functional.embedding(bucket, self.by_time[:, None])
                scores = scores + bias.squeeze(-1)[:, None]
        weights = functional.silu(scores)
        if self.causal:
            weights = weights.tril()
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        out = self.out(self.mixed_norm(mixed) * u)
        x = x + functional.dropout(out, self.dropout, self.training)
        if self.ffn is None:
            return x
        return x + functional.dropout(self.ffn(x), self.dropout, self.training)


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


def linear_recurrence(x: Tensor, decay: Tensor) -> Tensor:
    """Return h_t = decay * h_{t-1} + x_t with h_0 = 0 (Eq. 8 of QGS).

    Sums are float32 for every dtype of `x`. Differentiable in both arguments.

    Args:
        x: (B, T, D) inputs.
        decay: (D,) decays in (0, 1).

    Returns:
        (B, T, D) in the dtype of `x`.
    """
    return Recurrence.apply(x, decay.float())


class Recurrence(torch.autograd.Function):
    """The parallel recurrence. Its gradient is the same recurrence run backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, decay: Tensor) -> Tensor:
        """Return h (B, T, D) in the dtype of `x` (B, T, D), for decays (D,)."""
        h = scan(x, decay)
        ctx.save_for_backward(h, decay)
        return h.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of `x` (B, T, D) and of the decays (D,)."""
        h, decay = ctx.saved_tensors
        # dL/dx_t = g_t = dL/dh_t + decay * g_{t+1};  dL/d decay = sum_t g_t * h_{t-1}
        g = scan(gradients[0], decay, reverse=True)
        decay_gradient = None
        if ctx.needs_input_grad[1]:
            decay_gradient = (g[:, 1:] * h[:, :-1]).sum((0, 1))
        return g.to(gradients[0].dtype), decay_gradient


def scan(x: Tensor, decay: Tensor, reverse: bool = False) -> Tensor:
    """Run the recurrence over `x` in chunks.

    The positions are split into about sqrt(T) chunks. All chunks run their recurrence
    side by side, the last states are passed from chunk to chunk, and each position adds
    what its chunk inherits. This takes 2 sqrt(T) vector operations at a cost linear in
    T. Only the powers 0..sqrt(T) of the decay appear, never as divisors, so nothing
    overflows; powers that underflow are contributions that are zero in float32.

    Args:
        x: (B, T, D) inputs.
        decay: (D,) decays.
        reverse: Whether to run from the last position to the first.

    Returns:
        (B, T, D) float32.
    """
    batch, length, width = x.shape
    size = max(1, math.isqrt(max(0, length - 1)) + 1)  # K, positions of a chunk
    count = math.ceil(length / size)  # N, chunks
    padded = x.new_zeros(batch, count * size, width, dtype=torch.float32)
    padded[:, :length] = x
    h = padded.view(batch, count, size, width)  # (B, N, K, D)
    if reverse:
        positions, chunks = range(size - 2, -1, -1), range(count - 2, -1, -1)
        previous, last = 1, 0  # offset to the previous state, last position of a chunk
    else:
        positions, chunks = range(1, size), range(1, count)
        previous, last = -1, size - 1
    # run each chunk from a zero state
    for i in positions:
        h[:, :, i].addcmul_(h[:, :, i + previous], decay)
    # pass the states at the ends of chunks on
    chunk_decay = decay**size
    for n in chunks:
        h[:, n, last].addcmul_(h[:, n + previous, last], chunk_decay)
    # add the inherited state to the other positions of each chunk
    if count > 1 and size > 1:
        exponent = torch.arange(1, size, device=x.device, dtype=torch.float32)
        power = decay ** exponent[:, None]  # (K - 1, D)
        if reverse:
            h[:, :-1, 1:].addcmul_(h[:, 1:, :1], power.flip(0))
        else:
            h[:, 1:, :-1].addcmul_(h[:, :-1, -1:], power)
    return padded[:, :length]


class Decay(nn.Module):
    """Learnable decays (D,) in (0, 1).

    Initial memories 1 / (1 - decay) are log-spaced from 2 to `longest` positions.
    """

    def __init__(self, width: int, longest: float = 200.0) -> None:
        super().__init__()
        memory = torch.logspace(
            math.log10(2), math.log10(longest), width, dtype=torch.float64
        )
        # sigmoid(logit) = 1 - 1 / memory
        self.logit = nn.Parameter(torch.log(memory - 1).float())

    def forward(self) -> Tensor:
        """Return the decays (D,) in float32."""
        return torch.sigmoid(self.logit.float())


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
