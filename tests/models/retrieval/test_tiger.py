"""TIGER computes what T5 does, and its decoding is the library's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from models.dataset.encoding import PAD
from models.layers.t5 import _ReluDropout, dropout
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.search.generate import to_transformers
from models.retrieval.tiger import Tiger, TigerConfig
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
catalogue = partial(small_retrieval.build_catalogue, 60, SIZES)
requests = partial(small_retrieval.make_requests, items=60, longest=6)


@pytest.fixture
def tiger() -> Tiger:
    torch.manual_seed(0)
    return Tiger(TigerConfig(**SMALL, n_user_tokens=3), catalogue()).eval()


def train(model: Tiger, steps: int) -> Tiger:
    """A few steps towards `target = first item of the history`, so that scores are far
    from uniform.
    """
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-2)
    for step in range(steps):
        batch = requests(64, seed=step + 10)
        batch = replace(batch, target=batch.history[:, 0])
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def trained() -> Tiger:
    torch.manual_seed(0)
    return train(Tiger(TigerConfig(**SMALL, n_user_tokens=3), catalogue()), 100)


def test_the_input_is_user_codes_and_end(tiger):
    batch = HistoryBatch(
        history=torch.tensor([[5, PAD], [7, 9]]),
        history_length=torch.tensor([1, 2]),
        user=torch.tensor([4, 2]),
    )
    tokens, lengths = tiger.tokens.history(batch), tiger.tokens.lengths(batch)
    codes = catalogue().sids + torch.tensor([1, 9, 17, 25])
    assert tokens[0].tolist() == [28 + 1, *codes[5].tolist(), 31, 0, 0, 0, 0]
    assert tokens[1].tolist() == [28 + 2, *codes[7].tolist(), *codes[9].tolist(), 31]
    assert lengths.tolist() == [6, 10]
    assert tiger.backbone.embedding.weight.shape[0] == 32
    paper = Tiger(
        TigerConfig(), Catalogue.from_codes(catalogue().sids, (256, 256, 256, 256))
    )
    assert paper.backbone.embedding.weight.shape == (1027, 128)


@pytest.mark.parametrize("end_token", [False, True])
def test_loss_and_gradients_are_those_of_transformers(tiger, end_token):
    batch = requests(16)
    tiger.config = replace(tiger.config, end_token=end_token)
    labels = tiger.tokens.items[batch.target]
    if end_token:
        labels = torch.nn.functional.pad(labels, (0, 1), value=tiger.tokens.end)
    library = to_transformers(tiger.backbone, tiger.decoder)
    tokens, lengths = tiger.tokens.history(batch), tiger.tokens.lengths(batch)
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    loss = library(input_ids=tokens, attention_mask=real.long(), labels=labels).loss
    expected = torch.autograd.grad(loss, list(tiger.parameters()))
    ours = tiger(batch)["loss"]
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(ours, list(tiger.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_label_smoothing_spreads_a_share_of_each_target_over_the_vocabulary():
    config = TigerConfig(**SMALL, label_smoothing=0.1)
    model = Tiger(config, catalogue()).eval()
    batch = requests(16)
    targets = model.tokens.items[batch.target]  # (B, L)
    codes = model.tokens.codes(batch.target)
    logits = model.decoder.teacher_forced(model.encode(batch), codes)
    surprise = -torch.stack(list(logits), 1).log_softmax(-1)  # (B, L, V)
    of_target = surprise.gather(-1, targets.unsqueeze(-1)).mean()

    loss = model(batch)["loss"]

    torch.testing.assert_close(loss, 0.9 * of_target + 0.1 * surprise.mean())


@pytest.mark.parametrize(
    ("name", "constrained"),
    [
        ("tiger", True),
        *(
            pytest.param("trained", constrained, marks=pytest.mark.long)
            for constrained in (True, False)
        ),
    ],
)
def test_decoders_agree_with_transformers(request, name, constrained):
    model = request.getfixturevalue(name)
    batch = requests(8)
    items, scores = model.recommend(batch, 10, beam=12, constrained=constrained)
    for decoder in ("hf", "hf_nocache"):
        others, other_scores = model.recommend(
            batch, 10, beam=12, decoder=decoder, constrained=constrained
        )
        torch.testing.assert_close(other_scores, scores, rtol=1e-4, atol=1e-4)
        assert others.tolist() == items.tolist()
    assert (items >= 0).all() or not constrained


def test_transformers_keeps_to_the_beam_where_more_items_are_asked_for(trained):
    """Ours has more: its last step ranks every code after the beam's prefixes."""
    batch = requests(4)
    items, scores = trained.recommend(batch, 9, beam=4)
    others, other_scores = trained.recommend(batch, 9, beam=4, decoder="hf")
    torch.testing.assert_close(other_scores[:, :4], scores[:, :4], rtol=1e-4, atol=1e-4)
    assert others[:, :4].tolist() == items[:, :4].tolist()
    assert (others[:, 4:] == -1).all()


def test_dropout_keeps_its_share_and_its_mean():
    torch.manual_seed(0)
    x = torch.ones(400, 501)
    dropped = dropout(x, 0.1)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.1, abs=0.003)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.003)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.9])


def test_relu_with_dropout_has_the_gradient_of_what_it_kept():
    torch.manual_seed(0)
    x = torch.randn(50, 41, requires_grad=True)
    result = _ReluDropout.apply(x * 1, 0.3)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    kept = result > 0
    assert torch.equal(result, torch.where(kept, x, 0.0))
    assert torch.equal(gradient, kept.float())
    assert kept.sum() / (x > 0).sum() == pytest.approx(0.7, abs=0.05)


def test_a_checkpoint_holds_each_weight_once_and_no_table(tiger):
    state = tiger.state_dict()
    assert set(state) == {name for name, _ in tiger.named_parameters()}
    assert len({value.data_ptr() for value in state.values()}) == len(state)
