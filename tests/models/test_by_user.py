"""Metrics of every user: equal to a loop over values, whatever the batches, and through a file."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from models.metrics.per_user_metrics import MOST, ByUser, stride_of, unpacked


@pytest.mark.parametrize("stride", [1, 3])
def test_means_and_counts_are_those_of_a_loop_over_values(stride: int) -> None:
    generator = torch.Generator().manual_seed(1)
    user = torch.randint(0, 40, (300,), generator=generator)
    values = torch.rand(300, generator=generator, dtype=torch.float64)
    values[torch.rand(300, generator=generator) < 0.2] = torch.nan
    values[user == 6] = torch.nan  # a user without any value
    added = sum(
        (
            ByUser.of(user[at : at + 37], values[at : at + 37], stride)
            for at in range(0, 300, 37)
        ),
        0.0,
    )
    expected = defaultdict(list)
    for one, value in zip(user.tolist(), values.tolist(), strict=True):
        if value == value and one % stride == 0:
            expected[one].append(value)
    rows, means, counts = added.whole()
    assert rows.tolist() == sorted(expected)
    assert counts.tolist() == [len(expected[row]) for row in rows]
    assert means == pytest.approx([np.mean(expected[row]) for row in rows])


def test_the_order_of_batches_changes_nothing_and_other_users_are_told() -> None:
    one, two = (
        ByUser.of(torch.tensor([5, 2]), torch.tensor([0.5, 1.0])),
        ByUser.of(torch.tensor([9]), torch.zeros(1)),
    )
    assert (one + two).packed() == (two + one).packed()
    assert one.packed()["users"] != (one + two).packed()["users"]
    twice = ByUser.of(torch.tensor([5, 2, 2]), torch.tensor([0.5, 1.0, 1.0]))
    assert (
        one.packed()["users"] != twice.packed()["users"]
    )  # a mean of two weighs twice


def test_a_file_holds_means_in_half_precision_and_whole_counts() -> None:
    user = torch.arange(1000).repeat_interleave(3)
    values = torch.rand(
        3000, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    value = ByUser.of(user, values)
    means, counts = unpacked(value.packed())
    assert means == pytest.approx(value.whole()[1], rel=2**-11)
    assert counts.tolist() == [3] * 1000
    empty = ByUser.of(user[:0], values[:0])
    assert [len(each) for each in unpacked(empty.packed())] == [0, 0]


def test_of_many_users_some_are_kept() -> None:
    assert [stride_of(users) for users in (0, 1, MOST, MOST + 1, 38_000_000)] == [
        1,
        1,
        1,
        2,
        380,
    ]
