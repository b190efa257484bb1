"""Metrics per user equal a loop over values, for all batches and through a file."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from models.metrics.per_user_metrics import (
    MAX_TRACKED_USERS,
    PerUserValues,
    decode_values,
    sampling_stride,
)


@pytest.mark.parametrize("stride", [1, 3])
def test_means_and_counts_are_those_of_a_loop_over_values(stride: int) -> None:
    generator = torch.Generator().manual_seed(1)
    user = torch.randint(0, 40, (300,), generator=generator)
    values = torch.rand(300, generator=generator, dtype=torch.float64)
    values[torch.rand(300, generator=generator) < 0.2] = torch.nan
    values[user == 6] = torch.nan  # a user without any value
    added = sum(
        (
            PerUserValues.from_batch(user[at : at + 37], values[at : at + 37], stride)
            for at in range(0, 300, 37)
        ),
        0.0,
    )
    expected = defaultdict(list)
    for one, value in zip(user.tolist(), values.tolist(), strict=True):
        if value == value and one % stride == 0:
            expected[one].append(value)
    rows, means, counts = added.merge()
    assert rows.tolist() == sorted(expected)
    assert counts.tolist() == [len(expected[row]) for row in rows]
    assert means == pytest.approx([np.mean(expected[row]) for row in rows])


def test_the_order_of_batches_changes_nothing_and_other_users_are_told() -> None:
    one, two = (
        PerUserValues.from_batch(torch.tensor([5, 2]), torch.tensor([0.5, 1.0])),
        PerUserValues.from_batch(torch.tensor([9]), torch.zeros(1)),
    )
    assert (one + two).to_text() == (two + one).to_text()
    assert one.to_text()["users"] != (one + two).to_text()["users"]
    twice = PerUserValues.from_batch(
        torch.tensor([5, 2, 2]), torch.tensor([0.5, 1.0, 1.0])
    )
    assert (
        one.to_text()["users"] != twice.to_text()["users"]
    )  # a mean of two weighs twice


def test_a_file_holds_means_in_half_precision_and_whole_counts() -> None:
    user = torch.arange(1000).repeat_interleave(3)
    values = torch.rand(
        3000, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    value = PerUserValues.from_batch(user, values)
    means, counts = decode_values(value.to_text())
    assert means == pytest.approx(value.merge()[1], rel=2**-11)
    assert counts.tolist() == [3] * 1000
    empty = PerUserValues.from_batch(user[:0], values[:0])
    assert [len(each) for each in decode_values(empty.to_text())] == [0, 0]


def test_of_many_users_some_are_kept() -> None:
    assert [
        sampling_stride(users)
        for users in (0, 1, MAX_TRACKED_USERS, MAX_TRACKED_USERS + 1, 38_000_000)
    ] == [
        1,
        1,
        1,
        2,
        380,
    ]
