"""Rotary positions against a loop over channel pairs, and what they are for."""

from __future__ import annotations

import math

import pytest
import torch

from models.layers.rotary import rotary, rotate


def test_every_pair_turns_by_its_angle():
    position = torch.tensor([[0, 3, 7]])
    x = torch.randn(1, 2, 3, 6)
    got = rotate(x, rotary(position, 6))
    for head in range(2):
        for row, p in enumerate(position[0].tolist()):
            for j in range(3):
                angle = p * 10_000 ** (-2 * j / 6)
                pair = complex(x[0, head, row, j], x[0, head, row, j + 3]) * complex(math.cos(angle), math.sin(angle))
                assert got[0, head, row, j].item() == pytest.approx(pair.real, abs=1e-5)
                assert got[0, head, row, j + 3].item() == pytest.approx(pair.imag, abs=1e-5)


def test_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8)

    def product(a: int, b: int) -> float:
        left, right = (rotate(x, rotary(torch.tensor([[p]]), 8)) for x, p in ((q, a), (k, b)))
        return (left * right).sum().item()

    assert product(5, 2) == pytest.approx(product(105, 102), abs=1e-4)
    assert abs(product(5, 2) - product(5, 4)) > 1e-4


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="5 has an odd number"):
        rotary(torch.zeros(1, 1), 5)
