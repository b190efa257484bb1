"""Metrics per user equal a loop over the values, over all batches and after encoding."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from models.metrics.per_user_metrics import (
    PerUserValues,
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
