"""The inference encoder equals the training encoder for all lengths and weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.t5 import T5Sizes
from models.retrieval.data import Catalogue
from models.retrieval.retriever import SidTokens, padding_mask
from models.retrieval.tiger.encoder import T5Backbone

SIZES = T5Sizes(
    d_model=16,
    d_ff=24,
    num_heads=2,
    d_kv=8,
    num_encoder_layers=3,
    num_decoder_layers=1,
    dropout=0.1,
)


def build_backbone(seed: int = 0) -> T5Backbone:
    """Return an encoder with random weights, also of its norms."""
    torch.manual_seed(seed)
    tokens = SidTokens(Catalogue.from_codes(torch.arange(17)[:, None], (17,)), 1)
    model = T5Backbone(tokens, SIZES, 20).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter.data, 0.5, 2.0)
    return model


MODEL = build_backbone()


def encode_padded(
    model: T5Backbone, tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Return the states (B, S, D) of the encoder that training uses.

    Args:
        model: The backbone.
        tokens: (B, S) tokens.
        lengths: (B,) number of real tokens, the first ones of each row.
    """
    width = tokens.shape[1]
    is_padding = torch.arange(width) >= lengths[:, None]
    mask = torch.zeros(is_padding.shape).masked_fill(is_padding, -torch.inf)
    with torch.enable_grad():
        bias = model.encoder.position_bias(width) + mask[:, None, None]
        return model.encoder(model.embedding(tokens), bias, 0.0).detach()


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(0, 3),
    st.sampled_from([1, 50, 10_000]),
)
@torch.no_grad()
def test_states_equal_those_of_the_padded_encoder(lengths, extra_padding, max_tokens):
    lengths = torch.tensor(lengths)
    width = int(lengths.max()) + extra_padding
    is_real = torch.arange(width) < lengths[:, None]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 20, (len(lengths), width), generator=generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.retrieval.tiger.encoder.MAX_CHUNK_TOKENS", max_tokens)
        states = MODEL.packed_encoder()(tokens, lengths)

    expected = encode_padded(MODEL, tokens, lengths)
    torch.testing.assert_close(states[is_real], expected[is_real], rtol=1e-4, atol=1e-5)
    assert states.isfinite().all()
    padding = padding_mask(lengths, width, torch.float32)
    assert (padding is None) == bool(is_real.all())
    if padding is not None:
        assert ((padding[:, 0, 0] == 0) == is_real).all()


def step_optimizer(model: T5Backbone, tokens: torch.Tensor) -> None:
    """Take a step of fused AdamW, whose changes PyTorch's version counters miss."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    bias = model.encoder.position_bias(tokens.shape[1])
    states = model.encoder(model.embedding(tokens), bias, 0.0)
    states.square().sum().backward()
    optimizer.step()
    model.eval()


def test_the_packed_encoder_is_cached_until_the_weights_change():
    model = build_backbone(1)
    tokens, lengths = torch.randint(0, 20, (3, 9)), torch.tensor([9, 4, 6])
    is_real = torch.arange(9) < lengths[:, None]
    encoder = model.packed_encoder()
    assert model.packed_encoder() is encoder

    changes = [
        lambda: model.encoder.blocks[0].attention.k.weight.detach().mul_(2.0),
        lambda: model.load_state_dict(build_backbone(2).state_dict()),
        lambda: setattr(model.embedding.weight, "data", torch.randn(20, 16)),
        lambda: step_optimizer(model, tokens),
    ]
    for change in changes:
        before = model.packed_encoder()
        change()
        assert model.packed_encoder() is not before
        with torch.no_grad():
            states = model.packed_encoder()(tokens, lengths)
            expected = encode_padded(model, tokens, lengths)
        torch.testing.assert_close(
            states[is_real], expected[is_real], rtol=1e-4, atol=1e-5
        )
