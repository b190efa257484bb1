"""Test how the quickstart shares its time between trainings by measured speeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import cli, train
from jobs.time_budget import (
    BUDGET_S,
    EVAL_EXAMPLES,
    MIN_TEST_USERS,
    Probe,
    Schedule,
    SplitSizes,
    make_schedule,
    plan_trainings,
    probe,
)


def build_probe(
    step_s: float = 0.1,
    steps: int = 100,
    request_s: float = 0.0,
    val_requests: int = 100,
) -> Probe:
    """Build a measurement; an epoch takes `step_s * steps` without validation."""
    return Probe(
        setup_s=1.0,
        step_s=step_s,
        steps_per_epoch=steps,
        examples=1000,
        request_s=request_s,
        val_requests=val_requests,
    )


def test_a_small_log_gets_its_maximal_number_of_epochs() -> None:
    plans = plan_trainings([build_probe(), build_probe()], [30, 20], seconds=1000)
    assert [(plan.epochs, plan.examples) for plan in plans] == [(30, 0), (20, 0)]
    assert plans[0].seconds == pytest.approx(300)


def test_time_left_by_a_fast_model_goes_to_the_others() -> None:
    fast, slow = build_probe(step_s=0.01), build_probe()
    plans = plan_trainings([slow, fast], [100, 10], seconds=110)
    assert [plan.epochs for plan in plans] == [10, 10]


def test_if_no_epoch_fits_a_share_of_the_requests_is_trained_on() -> None:
    (plan,) = plan_trainings([build_probe()], [30], seconds=3.5)
    assert (plan.epochs, plan.examples, plan.share) == (1, 350, 0.35)
    assert plan.seconds == pytest.approx(3.5)
    assert plan.describe() == "1 epoch of 35% of the training requests"
    assert plan.options(100) == {"fit": {"max_epochs": 1, "train_examples": 350}}


def test_validations_count_as_time_and_are_limited_in_size() -> None:
    slow_to_rank = build_probe(request_s=0.005, val_requests=100_000)
    assert slow_to_rank.epoch_s == pytest.approx(10 + EVAL_EXAMPLES * 0.005)
    (plan,) = plan_trainings([slow_to_rank], [30], seconds=100)
    assert plan.epochs == 5
    options = plan.options(slow_to_rank.val_requests)
    assert options["fit"]["eval_examples"] == EVAL_EXAMPLES


def test_a_large_test_split_is_evaluated_on_fewer_users_within_the_budget() -> None:
    sizes = SplitSizes(users=2449, train=1_122_612, test=138_937)
    probes = {
        "sasrec": build_probe(0.4, 592, 0.0004, 139_953),
        "tiger": build_probe(0.025, 8539, 0.0006, 139_953),
    }

    schedule, lines = make_schedule(probes, [30, 35], sizes, others=4, elapsed_s=120)
    assert 1 < schedule.evaluation["user_stride"] <= sizes.users // MIN_TEST_USERS
    assert lines[0].startswith("the quickstart takes about 10 min on this machine")
    assert set(schedule.training) == {"sasrec", "tiger"}
    assert any("of the training requests" in line for line in lines)


def test_a_small_test_split_is_evaluated_whole() -> None:
    sizes = SplitSizes(users=1500, train=12_000, test=1_500)
    schedule, lines = make_schedule(
        {"sasrec": build_probe()}, [30], sizes, others=1, elapsed_s=20
    )
    assert schedule.evaluation == {}
    assert schedule.training["sasrec"]["fit"]["max_epochs"] == 30
    assert not any("test" in line for line in lines)


def test_tables_that_take_too_long_leave_trainings_half_of_the_budget() -> None:
    sizes = SplitSizes(users=1500, train=12_000, test=1_500)
    schedule, _ = make_schedule(
        {"slow": build_probe()}, [1000], sizes, others=0, elapsed_s=10 * BUDGET_S
    )
    assert schedule.training["slow"]["fit"]["max_epochs"] == int(BUDGET_S / 2 / 10)


def test_a_schedule_is_read_again_only_for_the_same_tables(
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "schedule.json")
    schedule = Schedule({"sasrec": {"fit": {"max_epochs": 3}}}, {"user_stride": 2})
    assert Schedule.read(file, "hash") is None
    schedule.write(file, "hash")
    assert Schedule.read(file, "hash") == schedule
    assert Schedule.read(file, "other") is None


@pytest.mark.long
def test_a_probe_measures_steps_of_a_model_and_of_its_student(
    small: tuple[str, str], tmp_path: Path
) -> None:
    words = ["--tables", small[0], "--sids", small[1]]
    words += ["--storage", str(tmp_path), "--name", "none", "--config"]
    teacher_words = [*words, "jobs/configs/tiger_small.yaml"]
    student_words = [*words, "jobs/configs/sid_mlp_small.yaml"]
    student_words += ["--model.teacher", f"{tmp_path}/teacher"]

    teacher = probe(cli.config_from_words(train, teacher_words), f"{tmp_path}/teacher")
    student = probe(cli.config_from_words(train, student_words))

    for measured in (teacher, student):
        assert measured.examples == 450
        assert measured.val_requests == 60
        assert measured.step_s > 0
        assert measured.request_s > 0
    assert not (tmp_path / "none").exists()
