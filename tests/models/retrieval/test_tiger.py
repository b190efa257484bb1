"""TIGER computes what T5 does, and its decoding is the library's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.generate import generate, to_transformers
from models.dataset.batch import PAD
from models.layers.t5 import _ReluDropout, dropout
from models.retrieval.data import HistoryBatch
from models.retrieval.tiger.tiger import Tiger, TigerConfig
from tests.fixtures import small_retrieval

SMALL = {
    "d_model": 32,
    "d_ff": 64,
    "num_heads": 2,
    "d_kv": 16,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
SIZES = (8, 8, 8, 3)
build_catalogue = partial(small_retrieval.build_catalogue, 60, SIZES)
make_requests = partial(small_retrieval.make_requests, items=60, longest=6)


def build_tiger() -> Tiger:
    """Return a TIGER with random weights."""
    torch.manual_seed(0)
    return Tiger(TigerConfig(**SMALL, n_user_tokens=3), build_catalogue()).eval()


@pytest.fixture
def tiger() -> Tiger:
    """A TIGER with random weights."""
    return build_tiger()


def test_the_input_is_user_codes_and_end(tiger):
    batch = HistoryBatch(
        history=torch.tensor([[5, PAD], [7, 9]]),
        history_length=torch.tensor([1, 2]),
        user=torch.tensor([4, 2]),
    )
    item_tokens = build_catalogue().sids + torch.tensor([1, 9, 17, 25])
    first_user, end = 28, 31

    tokens, lengths = tiger.tokens.history(batch), tiger.tokens.lengths(batch)

    item_5, item_7, item_9 = item_tokens[[5, 7, 9]].tolist()
    assert tokens[0].tolist() == [first_user + 1, *item_5, end, 0, 0, 0, 0]
    assert tokens[1].tolist() == [first_user + 2, *item_7, *item_9, end]
    assert lengths.tolist() == [6, 10]


def test_loss_and_gradients_equal_those_of_transformers(tiger):
    parameters = list(tiger.parameters())
    batch = make_requests(16)
    labels = tiger.tokens.items[batch.target]
    tokens, lengths = tiger.tokens.history(batch), tiger.tokens.lengths(batch)
    is_real = torch.arange(tokens.shape[1]) < lengths[:, None]
    library = to_transformers(tiger)
    expected = library(
        input_ids=tokens, attention_mask=is_real.long(), labels=labels
    ).loss
    expected_gradients = torch.autograd.grad(expected, parameters)

    loss = tiger(batch)["loss"]
    gradients = torch.autograd.grad(loss, parameters)

    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_decoding_equals_generate_of_transformers(tiger):
    # scores far from uniform
    torch.nn.init.normal_(tiger.backbone.embedding.weight, std=2.0)
    batch = make_requests(8)

    items, scores = tiger.recommend(batch, 10, beam=12)

    library = to_transformers(tiger)
    for use_cache in (True, False):
        library_items, library_scores = generate(
            tiger, library, batch, 10, 12, use_cache
        )
        torch.testing.assert_close(library_scores, scores, rtol=1e-4, atol=1e-4)
        assert library_items.tolist() == items.tolist()


def test_dropout_zeroes_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    dropped = dropout(torch.ones(400, 501), 0.1)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.003)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.9])


def test_relu_with_dropout_has_the_gradient_of_its_positive_outputs():
    torch.manual_seed(0)
    x = torch.randn(50, 41, requires_grad=True)

    result = _ReluDropout.apply(x * 1, 0.3)
    (gradient,) = torch.autograd.grad(result.sum(), x)

    is_positive = result > 0
    assert torch.equal(result, torch.where(is_positive, x, 0.0))
    assert torch.equal(gradient, is_positive.float())
    assert is_positive.sum() / (x > 0).sum() == pytest.approx(0.7, abs=0.05)
