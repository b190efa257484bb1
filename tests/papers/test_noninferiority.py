"""Test the non-inferiority test on published p-values and at its margin."""

from __future__ import annotations

import math

import pytest

from papers.noninferiority import non_inferiority


@pytest.mark.parametrize(
    ("seeds", "teacher", "mean", "deviation", "p"),
    [
        ([0.0333, 0.0332, 0.0331], 0.0323, 0.0332, 0.0001, 0.001),  # Instruments
        ([0.0252, 0.0250, 0.0248], 0.0243, 0.0250, 0.0002, 0.007),  # Scientific
        # Games: values with the printed mean and deviation, on which the printed p
        # rests; the printed seeds would give 0.002.
        ([0.0511, 0.0512, 0.0513], 0.0512, 0.0512, 0.0001, 0.006),
    ],
)
def test_the_p_values_of_table_12_are_reproduced(
    seeds: list[float], teacher: float, mean: float, deviation: float, p: float
) -> None:
    result = non_inferiority(seeds, teacher)

    assert result.mean == pytest.approx(mean, abs=5e-5)
    assert result.deviation == pytest.approx(deviation, abs=5e-5)
    assert result.p == pytest.approx(p, abs=5e-4)
    assert result.difference == pytest.approx(sum(seeds) / 3 - teacher)


def test_a_student_at_the_margin_is_undecided_and_below_it_inferior() -> None:
    at_margin = non_inferiority([0.0989, 0.0990, 0.0991], 0.1)
    assert at_margin.p == pytest.approx(0.5)
    assert non_inferiority([0.0979, 0.0980, 0.0981], 0.1).p > 0.99


def test_a_single_seed_has_no_p_value() -> None:
    result = non_inferiority([0.1], 0.1)
    assert result.mean == 0.1
    assert math.isnan(result.deviation)
    assert math.isnan(result.p)
    with pytest.raises(ValueError, match="there are 0 values"):
        non_inferiority([], 0.1)


def test_equal_seeds_are_certain() -> None:
    assert non_inferiority([0.1, 0.1], 0.1).p == 0
    assert non_inferiority([0.09, 0.09], 0.1).p == 1
