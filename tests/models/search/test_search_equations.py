"""Equations of QGS against loops: InfoNCE with both kinds of negatives, Linear HSTU, the
attention of HSTU, and HFG-Attention.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModel

from models.search.encoders import (
    CausalBert,
    HSTULayer,
    LinearHSTULayer,
    copy_pretrained,
    pretrained_sizes,
)
from models.search.qgs import info_nce
from models.search.ranker import HFGAttention
from tests.fixtures.encoders import save_bert
from tests.fixtures.search_models import compute_infonce_by_loop


@pytest.mark.parametrize("negatives", ["position", "batch"])
def test_infonce_equals_a_loop_over_its_terms(negatives):
    generator = torch.Generator().manual_seed(0)
    z, v = torch.randn(2, 5, 7, 4, generator=generator)
    items = torch.randint(
        0, 4, (5, 7), generator=generator
    )  # few, so that they collide
    valid = torch.arange(7) < torch.tensor([7, 5, 1, 0, 3])[:, None]
    expected = compute_infonce_by_loop(z, v, items, valid, 0.3, negatives)

    loss = info_nce(z, v, items, valid, 0.3, negatives)
    with torch.autocast("cpu", torch.bfloat16):
        autocast_loss = info_nce(z, v, items, valid, 0.3, negatives)

    assert float(loss) == pytest.approx(expected, rel=1e-5)
    # bfloat16 is too coarse for similarities divided by a temperature
    assert float(autocast_loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize("negatives", ["position", "batch"])
def test_infonce_without_valid_positions_is_zero_and_has_a_gradient(negatives, length):
    z = torch.randn(2, length, 4, requires_grad=True)
    items = torch.full((2, length), -1)
    loss = info_nce(z, z * 2, items, items >= 0, 0.1, negatives)
    assert float(loss) == 0
    loss.backward()
    assert torch.isfinite(z.grad).all()


def test_a_linear_hstu_layer_equals_its_equations():
    torch.manual_seed(0)
    layer = LinearHSTULayer(6).eval()
    h = torch.randn(2, 9, 6)
    wq, wk, wv, wu = layer.project.weight.chunk(4)
    gamma = layer.decay()
    eps = torch.finfo(torch.float32).eps

    outputs = layer(h)

    for b in range(2):
        c = torch.zeros(6)
        for t in range(9):
            scale = torch.sqrt((h[b, t] ** 2).mean() + eps)
            x = h[b, t] / scale * layer.norm.weight
            q, k, v, u = (functional.silu(w @ x) for w in (wq, wk, wv, wu))
            c = gamma * c + k * v
            assert torch.allclose(outputs[b, t], h[b, t] + q * c * u, atol=1e-5)


def test_hstu_attention_equals_its_equations():
    torch.manual_seed(0)
    layer = HSTULayer(6, 2, 10, relative=True)
    torch.nn.init.normal_(layer.by_distance)
    torch.nn.init.normal_(layer.by_time)
    x, times = torch.randn(1, 5, 6), torch.tensor([[0, 1000, 5000, 5000, 900_000]])

    outputs = layer(x, times=times)

    u, v, q, k = functional.silu(layer.project(layer.norm(x)))[0].chunk(4, -1)
    mixed = torch.zeros(5, 6)
    for t in range(5):
        for s in range(t + 1):
            seconds = (int(times[0, t]) - int(times[0, s])) / 1000
            time_bias = layer.by_time[int(math.log2(1 + seconds))]
            bias = layer.by_distance[t - s + 9] + time_bias
            for head in (slice(0, 3), slice(3, 6)):
                weight = functional.silu(q[t, head] @ k[s, head] + bias) / 10
                mixed[t, head] += weight * v[s, head]
    expected = x[0] + layer.out(layer.mixed_norm(mixed) * u)
    assert torch.allclose(outputs[0], expected, atol=1e-5)


def test_group_attention_equals_its_equations():
    torch.manual_seed(0)
    block = HFGAttention([3, 2], 5)
    groups = [torch.randn(4, 3), torch.randn(4, 2)]
    context = torch.randn(4, 5)
    # (N, groups): whether a candidate has the features of a group
    has_group = torch.tensor(
        [[True, True], [True, False], [True, True], [False, False]]
    )

    outputs = block(groups, has_group, context)

    for n in range(4):
        tokens = []
        for g, layer in enumerate(block.groups):
            if has_group[n, g]:
                tokens.append(functional.relu(layer(groups[g][n])))
        tokens.append(block.context(context[n]))
        mixed = block.attention(torch.stack(tokens)[None])[0].mean(0)
        assert torch.allclose(outputs[n], block.out(mixed), atol=1e-5)


def test_group_attention_stops_the_gradient_of_its_context():
    block = HFGAttention([3], 5)
    context = torch.randn(4, 5, requires_grad=True)
    has_group = torch.ones(4, 1, dtype=torch.bool)
    block([torch.randn(4, 3)], has_group, context).sum().backward()
    assert context.grad is None
    assert block.context.weight.grad is not None


def test_the_user_tower_gets_the_sizes_and_weights_of_a_pretrained_bert(tmp_path):
    folder = save_bert(tmp_path)
    sizes = {"width": 16, "num_layers": 2, "num_heads": 2, "ffn": 32}
    assert pretrained_sizes(folder) == sizes
    tower = CausalBert(*sizes.values(), 10)
    copy_pretrained(tower, folder)
    h = torch.randn(1, 10, 16)

    state = tower.eval()(h)[:, :1]

    # the tower is causal: only the first position has the inputs of a BERT of length 1
    bert = AutoModel.from_pretrained(folder).eval()
    expected = bert(inputs_embeds=h[:, :1]).last_hidden_state
    assert torch.allclose(state, expected, atol=1e-5)
