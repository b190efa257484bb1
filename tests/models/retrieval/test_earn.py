"""EARN's encoder, written out position by position."""

from __future__ import annotations

import pytest
import torch
from small_retrieval import TEACHER, requests
from torch import Tensor

from models.layers.t5 import _bucket
from models.retrieval.backbones.earn import EarnBackbone
from models.tables import UserError
from tests.models.retrieval.test_joint import started, untaught


def layer_by_loops(backbone: EarnBackbone, index: int, states: dict[int, Tensor]) -> dict[int, Tensor]:
    """What a block makes of the states (D,) at some positions, each of which attends to all of them."""
    block, first = backbone.encoder.blocks[index], backbone.encoder.blocks[0].attention
    attention, found = block.attention, {}
    normed = {at: x * (x.square().mean() + 1e-6).rsqrt() * block.norm_of(0).weight for at, x in states.items()}
    for query in states:
        mixed = []
        for head in range(2):
            part = slice(8 * head, 8 * head + 8)
            q = attention.q.weight[part] @ normed[query]
            scores = []
            for key in states:
                bucket = _bucket(torch.tensor(key - query), backbone.sizes, bidirectional=True)
                bias = first.relative_attention_bias.weight[bucket, head]
                scores.append(q @ (attention.k.weight[part] @ normed[key]) + bias)
            weights = torch.stack(scores).softmax(0)
            values = torch.stack([attention.v.weight[part] @ normed[key] for key in states])
            mixed.append(weights @ values)
        x = states[query] + attention.o.weight @ torch.cat(mixed)
        inner = x * (x.square().mean() + 1e-6).rsqrt() * block.norm_of(-1).weight
        found[query] = x + block.feedforward.wo.weight @ (block.feedforward.wi.weight @ inner).relu()
    return found


@pytest.mark.parametrize("layer", [1, 2, 3])
@torch.no_grad()
def test_layers_up_to_k_see_all_and_above_the_registers_alone(layer: int) -> None:
    model, batch = started({"name": "earn", "register_layer": layer}), requests(4)
    backbone = model.backbone
    torch.nn.init.normal_(backbone.encoder.blocks[0].attention.relative_attention_bias.weight)
    history = model.encode(batch)
    assert history.states.shape == (4, 2, 16)
    assert history.lengths.tolist() == [2] * 4
    plain, lengths = model.tokens.history(batch), model.tokens.lengths(batch)
    for row in range(4):
        own = backbone.embedding(plain[row, : lengths[row]])
        prefix, suffix = backbone.extra.weight
        states = dict(enumerate([prefix, *own, suffix]))
        for index in range(3):
            states = layer_by_loops(backbone, index, states)
            if index + 1 == layer:
                states = {0: states[0], len(own) + 1: states[len(own) + 1]}
        expected = torch.stack(list(states.values()))
        expected = expected * (expected.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(
            history.states[row], expected * backbone.encoder.final_layer_norm.weight, rtol=1e-4, atol=1e-5
        )


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="register_layer 0 is below 1"):
        untaught({"name": "earn", "register_layer": 0})
    with pytest.raises(UserError, match="register_layer 4 exceeds the teacher's 3 encoder layers"):
        untaught({"name": "earn", "register_layer": 4, "teacher_model": TEACHER})
