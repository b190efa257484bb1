"""Causal attention equals explicit loops and masks."""

from __future__ import annotations

import math

import pytest
import torch

from models.layers.causal_attention import (
    CausalAttention,
    Layout,
    apply_rope,
    compute_rope,
)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_positions_attend_to_earlier_context_only(strict, tied):
    """Each of 2 rows has 5 context positions and 3 candidates."""
    torch.manual_seed(0)
    attention = CausalAttention(8, 2, strict=strict)
    states, values = torch.randn(2, 2, 8, 8).unbind()
    context = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    if tied:
        context = [[0, 1, 1, 1, 4], [0, 1, 2, 3, 3]]
    candidates = [[5, 2, 0], [1, 4, 4]]
    earlier = torch.cat([torch.tensor(context), torch.tensor(candidates)], 1)
    layout = Layout.build(earlier, 5, 4, tied=tied)

    mixed = attention(states, values, layout)

    q = apply_rope(attention.split(attention.q(states)), layout.rope)
    k = apply_rope(attention.split(attention.k(states)), layout.rope)
    v = attention.split(attention.v(values))
    for row in range(2):
        for position in range(8):
            visible = list(range(earlier[row, position]))
            if not strict:
                visible.append(position)
            expected = torch.zeros(2, 4)
            if visible:
                query, keys = q[row, :, position], k[row][:, visible]
                scores = torch.einsum("hd,hjd->hj", query, keys) / 2
                weights = scores.softmax(1)
                expected = torch.einsum("hj,hjd->hd", weights, v[row][:, visible])
            expected = attention.o(expected.flatten())
            torch.testing.assert_close(mixed[row, position], expected)


def test_rope_rotates_each_pair_by_its_angle():
    """Channels j and j + 3 are a complex number."""
    positions = torch.tensor([[0, 3, 7]])
    x = torch.randn(1, 2, 3, 6)

    rotated = apply_rope(x, compute_rope(positions, 6))

    for head in range(2):
        for row, position in enumerate(positions[0].tolist()):
            for j in range(3):
                angle = position * 10_000 ** (-2 * j / 6)
                rotation = complex(math.cos(angle), math.sin(angle))
                pair = complex(x[0, head, row, j], x[0, head, row, j + 3])
                expected = pair * rotation
                real = rotated[0, head, row, j].item()
                imaginary = rotated[0, head, row, j + 3].item()
                assert real == pytest.approx(expected.real, abs=1e-5)
                assert imaginary == pytest.approx(expected.imag, abs=1e-5)
