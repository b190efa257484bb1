"""The inference encoder equals the training encoder for all lengths and weights."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.cpu import kernels, t5_packed
from models.cpu.t5_packed import make_buckets
from models.layers.t5 import T5Sizes
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.data import Catalogue
from models.retrieval.parts import SidTokens, padding_mask

SIZES = T5Sizes(
    vocabulary=20,
    d_model=16,
    d_ff=24,
    num_heads=2,
    d_kv=8,
    num_encoder_layers=3,
    num_decoder_layers=1,
    dropout=0.1,
)


def t5(seed: int = 0) -> T5Backbone:
    torch.manual_seed(seed)
    tokens = SidTokens(Catalogue.from_codes(torch.arange(17)[:, None], (17,)), 1)
    model = T5Backbone(tokens, SIZES, 20).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter.data, 0.5, 2.0)
    return model


MODEL = t5()


def padded(
    model: T5Backbone, tokens: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    outside = torch.arange(tokens.shape[1]) >= lengths[:, None]
    padding = torch.zeros(outside.shape).masked_fill(outside, -torch.inf)[:, None, None]
    with torch.enable_grad():  # as in training
        bias = model.encoder.position_bias(tokens.shape[1]) + padding
        return model.encoder(model.embedding(tokens), bias, 0.0).detach()


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(0, 3),
    st.sampled_from([1, 50, 10_000]),
    st.sampled_from([0, 10, 10_000]),
    st.booleans(),
)
@torch.no_grad()
def test_states_are_those_of_the_padded_encoder(
    lengths, more, most_tokens, waste, compiled
):
    lengths = torch.tensor(lengths)
    width = int(lengths.max()) + more
    tokens = torch.randint(
        0, 20, (len(lengths), width), generator=torch.Generator().manual_seed(0)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(t5_packed, "MAX_CHUNK_TOKENS", most_tokens)
        patch.setattr(t5_packed, "MAX_BUCKET_PADDING", waste)
        if not compiled:
            patch.setattr(kernels, "library", lambda: None)
        states, padding = (
            MODEL.packed_encoder()(tokens, lengths),
            padding_mask(lengths, width, torch.float32),
        )
        found = make_buckets(lengths)
    real = torch.arange(width) < lengths[:, None]
    torch.testing.assert_close(
        states[real], padded(MODEL, tokens, lengths)[real], rtol=1e-4, atol=1e-5
    )
    assert states.isfinite().all()
    assert (padding is None) == bool(real.all())
    if padding is not None:
        assert ((padding[:, 0, 0] == 0) == real).all()
    assert sorted(torch.cat(found).tolist()) == list(range(len(lengths)))
    for rows in found:
        inside = lengths[rows]
        assert len(rows) == 1 or len(rows) * inside.max() <= max(
            most_tokens, 2 * inside.max()
        )
        assert inside.max() * len(rows) - inside.sum() <= waste


def test_it_follows_the_weights_and_is_kept_while_they_stay():
    model = t5(1)
    tokens, lengths = torch.randint(0, 20, (3, 9)), torch.tensor([9, 4, 6])
    real = torch.arange(9) < lengths[:, None]
    first = model.packed_encoder()
    assert model.packed_encoder() is first

    def fused_steps():
        model.train()
        optimizer = torch.optim.AdamW(
            model.parameters(), 0.1, fused=True
        )  # its changes are not counted by torch
        model.encoder(
            model.embedding(tokens), model.encoder.position_bias(9), 0.0
        ).square().sum().backward()
        optimizer.step()
        model.eval()

    changes = [
        lambda: model.encoder.blocks[0].attention.k.weight.detach().mul_(2.0),
        lambda: model.load_state_dict(t5(2).state_dict()),
        lambda: setattr(model.embedding.weight, "data", torch.randn(20, 16)),
        fused_steps,
    ]
    for change in changes:
        before = model.packed_encoder()
        change()
        assert model.packed_encoder() is not before
        with torch.no_grad():
            states = model.packed_encoder()(tokens, lengths)
            torch.testing.assert_close(
                states[real], padded(model, tokens, lengths)[real], rtol=1e-4, atol=1e-5
            )


def test_it_is_no_part_of_what_is_saved_or_copied():
    model = t5(1)
    names = set(model.state_dict())
    made = model.packed_encoder()
    assert set(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.packed_encoder() is not made
        assert twin.packed_encoder().encoder is twin.encoder
