"""EARN's encoder, NEZHA's input and head, their loss, and learning rates by part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.layers.t5 import _bucket
from models.retrieval.students.earn import EarnBackbone
from tests.fixtures.small_retrieval import (
    SIZES,
    build_catalogue,
    build_taught,
    make_requests,
)


def normalise_rms(x: Tensor) -> Tensor:
    """Return x (..., D) divided by its root mean square."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def compute_layer(
    backbone: EarnBackbone, index: int, states: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return the output of an encoder layer, head by head and pair by pair.

    Args:
        backbone: The encoder.
        index: Number of the layer.
        states: State (D,) by position. Each position attends to all others.
    """
    block = backbone.encoder.blocks[index]
    attention = block.attention
    first_attention = backbone.encoder.blocks[0].attention
    bias_table = first_attention.relative_attention_bias.weight
    norm_weight = block.get_norm(0).weight
    normed = {
        position: normalise_rms(state) * norm_weight
        for position, state in states.items()
    }
    outputs = {}
    for query_position, state in states.items():
        heads = []
        for head, part in enumerate((slice(0, 8), slice(8, 16))):
            query = attention.q.weight[part] @ normed[query_position]
            scores, values = [], []
            for key_position, key_state in normed.items():
                distance = torch.tensor(key_position - query_position)
                bucket = _bucket(distance, bidirectional=True)
                key = attention.k.weight[part] @ key_state
                scores.append(query @ key + bias_table[bucket, head])
                values.append(attention.v.weight[part] @ key_state)
            weights = torch.stack(scores).softmax(0)
            heads.append(weights @ torch.stack(values))
        x = state + attention.o.weight @ torch.cat(heads)
        inner = block.feedforward.wi.weight @ (
            normalise_rms(x) * block.get_norm(-1).weight
        )
        outputs[query_position] = x + block.feedforward.wo.weight @ inner.relu()
    return outputs


@pytest.mark.parametrize("layer", [1, 2, 3])
@torch.no_grad()
def test_layers_after_the_register_layer_read_the_registers_alone(layer):
    model, batch = build_taught("earn", register_layer=layer), make_requests(4)
    backbone = model.backbone
    first_attention = backbone.encoder.blocks[0].attention
    torch.nn.init.normal_(first_attention.relative_attention_bias.weight)
    tokens, lengths = model.tokens.history(batch), model.tokens.lengths(batch)

    history = model.encode(batch)

    assert history.states.shape == (4, 2, 16)
    assert history.lengths.tolist() == [2] * 4
    prefix, suffix = backbone.extra.weight
    for row, length in enumerate(lengths.tolist()):
        embedded = backbone.embedding(tokens[row, :length])
        states = dict(enumerate([prefix, *embedded, suffix]))
        for index in range(3):
            states = compute_layer(backbone, index, states)
            if index + 1 == layer:
                states = {0: states[0], length + 1: states[length + 1]}
        registers = torch.stack(list(states.values()))
        expected = normalise_rms(registers) * backbone.encoder.final_layer_norm.weight
        torch.testing.assert_close(history.states[row], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_states_of_nezha_are_those_of_the_end_token_and_the_placeholders():
    """Compare with T5's encoder over one request without padding.

    The end token is the root, and the placeholders follow it.
    """
    model, batch = build_taught("nezha"), make_requests(4)
    backbone = model.backbone
    tokens, lengths = model.tokens.history(batch), model.tokens.lengths(batch)

    history = model.encode(batch)

    assert history.states.shape == (4, 5, 16)
    assert history.lengths.tolist() == [5] * 4
    for row, length in enumerate(lengths.tolist()):
        row_tokens = tokens[row, :length]
        assert row_tokens[-1] == model.tokens.end
        embedded = torch.cat([backbone.embedding(row_tokens), backbone.extra.weight])
        position_bias = backbone.encoder.position_bias(len(embedded))
        states = backbone.encoder(embedded.unsqueeze(0), position_bias, 0.0)[0]
        torch.testing.assert_close(
            history.states[row], states[length - 1 :], rtol=1e-4, atol=1e-5
        )


def step_gru(cell: torch.nn.GRUCell, x: Tensor, state: Tensor) -> Tensor:
    """Return the next state of a GRU by its equations."""
    reset_x, update_x, new_x = (cell.weight_ih @ x + cell.bias_ih).chunk(3)
    reset_h, update_h, new_h = (cell.weight_hh @ state + cell.bias_hh).chunk(3)
    update = (update_x + update_h).sigmoid()
    candidate = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
    return (1 - update) * candidate + update * state


@torch.no_grad()
def test_codes_of_nezha_are_read_from_a_root_that_a_gru_updates():
    model, batch = build_taught("nezha"), make_requests(6)
    codes = build_catalogue().sids[batch.target]
    history = model.encode(batch)
    embedding = model.backbone.embedding.weight

    logits = model.decoder.teacher_forced(history, codes)

    for row in range(6):
        root, *placeholders = history.states[row]
        for level, placeholder in enumerate(placeholders):
            head = model.decoder.heads[level]
            expected = head.weight @ (root + placeholder) + head.bias
            assert expected.shape == (SIZES[level],)
            torch.testing.assert_close(
                logits[level][row], expected, rtol=1e-4, atol=1e-5
            )
            token = model.tokens.first[level] + codes[row, level]
            root = step_gru(model.decoder.transition, embedding[token], root)
