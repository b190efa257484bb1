"""Metrics per user equal a loop over the values, over all batches and after encoding."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from models.metrics.per_user_metrics import (
    PerUserValues,
    decode_values,
)


@pytest.mark.parametrize("stride", [1, 3])
def test_means_and_counts_equal_a_loop_over_the_values(stride):
    generator = torch.Generator().manual_seed(1)
    user = torch.randint(0, 40, (300,), generator=generator)
    values = torch.rand(300, generator=generator, dtype=torch.float64)
    values[torch.rand(300, generator=generator) < 0.2] = torch.nan
    values[user == 6] = torch.nan  # a user without any value

    total: PerUserValues | float = 0.0
    for begin in range(0, 300, 37):
        rows = slice(begin, begin + 37)
        total = total + PerUserValues.from_batch(user[rows], values[rows], stride)
    users, means, counts = total.merge()

    expected = defaultdict(list)
    for number, value in zip(user.tolist(), values.tolist(), strict=True):
        if not math.isnan(value) and number % stride == 0:
            expected[number].append(value)
    assert users.tolist() == sorted(expected)
    assert counts.tolist() == [len(expected[number]) for number in users]
    assert means == pytest.approx([np.mean(expected[number]) for number in users])


def test_the_hash_of_users_is_equal_only_for_equal_users_and_counts():
    values = PerUserValues.from_batch(torch.tensor([5, 2]), torch.tensor([0.5, 1.0]))
    other_user = PerUserValues.from_batch(torch.tensor([9]), torch.zeros(1))
    other_count = PerUserValues.from_batch(
        torch.tensor([5, 2, 2]), torch.tensor([0.5, 1.0, 1.0])
    )
    same_users = PerUserValues.from_batch(torch.tensor([2, 5]), torch.tensor([0.1, 0]))
    assert values.to_text()["users"] == same_users.to_text()["users"]
    assert values.to_text()["users"] != (values + other_user).to_text()["users"]
    # a mean of two values weighs twice
    assert values.to_text()["users"] != other_count.to_text()["users"]
    means, counts = decode_values(other_count.to_text())
    assert (means.tolist(), counts.tolist()) == ([1.0, 0.5], [2, 1])
