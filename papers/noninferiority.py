"""Test non-inferiority by the one-sided t-test of SID-MLP (App. C.4, Table 12).

`x_i` is the student's metric for seed i, `b` the teacher's fixed value, `eps` a share
of b:

    H0: E[x - b] <= -eps
    t = (mean(x) - b + eps) / (s / sqrt(n)),  n - 1 degrees of freedom

A p below 0.05 means that the student does not lose more than the margin. `papers.pages`
shows it for every student whose teacher is in the same experiment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t

MARGIN = 0.01
"""Accepted loss relative to the teacher (App. C.4)."""

SIGNIFICANCE = 0.05
"""P-value below which a student counts as non-inferior (App. C.4)."""


@dataclass(frozen=True)
class NonInferiority:
    """Result of the test."""

    mean: float
    """Mean of the student over its seeds."""
    deviation: float
    """Sample standard deviation over the seeds; NaN for one seed."""
    teacher: float
    """The teacher's value."""
    p: float
    """P-value: probability of such values for a student that loses exactly the margin;
    NaN for one seed."""

    @property
    def difference(self) -> float:
        """Difference of student and teacher."""
        return self.mean - self.teacher


def non_inferiority(
    student: Sequence[float], teacher: float, margin: float = MARGIN
) -> NonInferiority:
    """Test a student's values, one per seed, against the teacher's.

    Args:
        student: Values of the student.
        teacher: Value of the teacher.
        margin: Accepted loss relative to the teacher.

    Raises:
        ValueError: If there are no values.
    """
    if not student:
        raise ValueError(
            "there are 0 values of the student, the test needs at least 2; evaluate it "
            "on test first"
        )
    mean = statistics.fmean(student)
    if len(student) == 1:
        return NonInferiority(mean, math.nan, teacher, math.nan)
    deviation = statistics.stdev(student)
    excess = mean - teacher + margin * teacher
    if deviation == 0:  # equal values: t is infinite
        return NonInferiority(mean, 0.0, teacher, 0.0 if excess > 0 else 1.0)
    statistic = excess / (deviation / math.sqrt(len(student)))
    return NonInferiority(
        mean, deviation, teacher, float(student_t.sf(statistic, len(student) - 1))
    )
