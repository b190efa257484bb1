"""The training loop: resuming equals not stopping, workers together equal one, the
metric alone picks the best.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from models.config import format_duration
from models.dataset.batch import Batch, axes
from models.storage.tables import UserError
from models.training.fit import (
    ASK,
    CONTINUE,
    SAVE,
    STOP,
    Cursor,
    EpochEvent,
    Event,
    FitConfig,
    HeartbeatEvent,
    Pace,
    ProgressUnit,
    StepEvent,
    ValidationStopped,
    describe,
    fit,
    learning_rate,
    prefetch,
    step_seed,
)


@dataclass(frozen=True, kw_only=True)
class Pairs(Batch):
    """Inputs and classes."""

    x: Tensor = axes("B")
    y: Tensor = axes("B")


class Classifier(nn.Module):
    """A small model with dropout, tied weights and a loss."""

    def __init__(self, width: int = 16, dropout: float = 0.5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.hidden = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Pairs) -> dict[str, Tensor]:
        state = self.dropout(torch.relu(self.hidden(self.embedding(batch.x))))
        return {
            "loss": nn.functional.cross_entropy(
                state @ self.embedding.weight.T, batch.y
            )
        }


class Batches:
    """Rows (3 i mod 20 -> 7 i mod 20), shuffled by epoch, this rank's part of every
    global batch.
    """

    def __init__(
        self, size: int = 8, count: int = 5, rank: int = 0, world: int = 1
    ) -> None:
        self.size, self.count, self.rank, self.world = size, count, rank, world
        self.made = 0

    def steps(self, epoch: int) -> int:
        return self.count

    def __call__(self, epoch: int, skip: int) -> Iterator[Pairs]:
        order = torch.randperm(
            self.size * self.count, generator=torch.Generator().manual_seed(epoch)
        )
        for i in range(skip, self.count):
            rows = order[i * self.size : (i + 1) * self.size][self.rank :: self.world]
            self.made += 1
            yield Pairs(x=rows * 3 % 20, y=rows * 7 % 20)


def validate(model: nn.Module) -> tuple[dict[str, float], int]:
    x = torch.arange(20)
    right = model.embedding(x).sum().item()
    return {"ndcg@10": right * 20, "recall@10": 20.0}, 20


def start(seed: int = 0, dropout: float = 0.5) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(dropout=dropout)


def finish(
    model: nn.Module, config: FitConfig, **options: object
) -> list[StepEvent | EpochEvent]:
    return list(fit(model, Batches(), validate, config, **options))


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


CONFIG = FitConfig(
    lr=0.01,
    warmup_steps=3,
    max_epochs=4,
    batch_size=8,
    log_every_steps=2,
    checkpoint_every_steps=3,
    eval_every_steps=4,
)


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_resumed_at_any_save_equals_undisturbed(tmp_path: Path, optimizer: str) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    undisturbed = start()
    whole = finish(undisturbed, config)
    saves = [event for event in whole if event.state]
    assert {type(event) for event in saves} == {
        StepEvent,
        EpochEvent,
    }  # within epochs and at their ends
    for number in range(len(saves) - 1):
        model = start()
        for i, event in enumerate(
            e for e in fit(model, Batches(), validate, config) if e.state
        ):
            if i == number:
                torch.save(
                    {"model": model.state_dict(), "state": event.state},
                    tmp_path / "saved.pt",
                )
                break
        saved = torch.load(tmp_path / "saved.pt", weights_only=True)
        resumed = start(seed=99)
        resumed.load_state_dict(saved["model"])
        torch.rand(number + 1)  # other random numbers were drawn meanwhile
        rest = finish(resumed, config, state=saved["state"])
        for ours, theirs in zip(weights(resumed), weights(undisturbed), strict=True):
            assert torch.equal(ours, theirs)
        last, expected = rest[-1], whole[-1]
        assert isinstance(last, EpochEvent)
        assert isinstance(expected, EpochEvent)
        assert last.metrics == expected.metrics
        assert (
            last.state["cursor"]["best_step"] == expected.state["cursor"]["best_step"]
        )


def stopped_and_resumed(
    config: FitConfig, stop_at: int, in_validation: bool
) -> tuple[Classifier, list[StepEvent | EpochEvent], Event]:
    """Stop a run at its `stop_at`-th step or validation, and finish it from the state
    of its last event.
    """
    asked = iter(range(1, 1000))

    def answer() -> int:
        return STOP if not in_validation and next(asked) == stop_at else CONTINUE

    def stopping(model: nn.Module) -> tuple[dict[str, float], int]:
        if in_validation and next(asked) == stop_at:
            raise ValidationStopped
        return validate(model)

    stopped = start()
    events = list(fit(stopped, Batches(), stopping, config, next_action=answer))
    saved = copy.deepcopy(events[-1].state)
    resumed = start(seed=99)
    resumed.load_state_dict(stopped.state_dict())
    return resumed, finish(resumed, config, state=saved), events[-1]


@pytest.mark.parametrize(
    ("stop_at", "in_validation"),
    [*((step, False) for step in range(1, 21)), *((n, True) for n in range(1, 9))],
)
def test_stopped_at_any_step_or_validation_and_resumed_equals_undisturbed(
    stop_at: int, in_validation: bool
) -> None:
    config = replace(CONFIG, checkpoint_every_steps=0)
    undisturbed = start()
    whole = finish(undisturbed, config)
    resumed, rest, last = stopped_and_resumed(config, stop_at, in_validation)
    assert last.interrupted
    assert not last.stop
    assert in_validation or last.step == stop_at
    for ours, theirs in zip(weights(resumed), weights(undisturbed), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = rest[-1].state["cursor"], whole[-1].state["cursor"]
    for key in ("best", "best_epoch", "best_step", "waiting", "stopped"):
        assert ours[key] == theirs[key]
    assert rest[-1].loss == pytest.approx(whole[-1].loss)
    validated = [event.step for event in whole if event.metrics]
    assert [event.step for event in rest if event.metrics] == [
        step for step in validated if step > last.step or step == last.step
    ]


def test_a_wanted_state_is_saved_within_the_epoch_and_training_goes_on() -> None:
    answers = iter([CONTINUE, SAVE])
    config = FitConfig(max_epochs=1)
    events = list(
        fit(
            start(),
            Batches(),
            validate,
            config,
            next_action=lambda: next(answers, CONTINUE),
        )
    )
    assert [event.step for event in events if event.state] == [2, 5]
    assert not any(event.interrupted for event in events)


def test_resuming_skips_batches_without_making_them() -> None:
    model = start()
    for event in fit(model, Batches(), validate, CONFIG):
        if isinstance(event, StepEvent) and event.state:
            break
    batches = Batches()
    next(iter(fit(model, batches, validate, CONFIG, state=event.state)))
    assert batches.made <= Batches().count - 3


def test_a_finished_run_does_nothing_more() -> None:
    model = start()
    last = finish(model, CONFIG)[-1]
    assert (last.stop, last.stop_reason) == (True, "")
    before = weights(model)
    assert finish(model, CONFIG, state=last.state) == []
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


def test_best_and_stop_follow_the_validation_metric_alone() -> None:
    values = iter([0.1, 0.5, 0.5, 0.4, 0.9, 0.9])
    config = FitConfig(lr=0.1, max_epochs=6, patience=2, warmup_steps=0)
    events = fit(
        start(), Batches(), lambda model: ({"ndcg@10": next(values)}, 1), config
    )
    ends = [event for event in events if isinstance(event, EpochEvent)]
    assert [event.is_best for event in ends] == [
        True,
        True,
        False,
        False,
    ]  # an equal value is not better
    assert [event.stop for event in ends] == [False, False, False, True]
    assert ends[-1].state["cursor"]["best_epoch"] == 2
    why = "stopped: no better val ndcg@10 in 2 validations (fit.patience), best 0.5000 in epoch 2"
    assert [event.stop_reason for event in ends] == ["", "", "", why]
    assert describe(ends[-1], config).splitlines()[-1] == why


def test_a_long_epoch_shows_progress_after_its_first_steps_and_every_30_seconds() -> (
    None
):
    time = iter(range(0, 10_000, 4))  # asked once a step: 4 seconds each
    config = FitConfig(max_epochs=2, log_every_steps=4)
    events = list(
        fit(
            start(),
            Batches(count=20),
            validate,
            config,
            clock=lambda: float(next(time)),
        )
    )
    progress = [event for event in events if isinstance(event, HeartbeatEvent)]
    first, second = progress[:2]
    assert (first.epoch, first.step) == (1, 3)
    assert second.step - first.step == 8  # of 4 seconds
    assert all(not event.state and not event.metrics for event in progress)
    assert first.seconds_left is not None
    assert "step      3" in describe(first, config)
    assert re.search(
        r"20 steps per epoch  at most \d+ s left$", describe(first, config)
    )
    quick = fit(start(), Batches(count=20), validate, config, clock=lambda: 0.0)
    told = [
        (event.step, event.loss)
        for event in events
        if not isinstance(event, HeartbeatEvent)
    ]
    assert told == [
        (event.step, event.loss) for event in quick
    ]  # and it changes nothing


def test_progress_counts_requests_and_the_time_left_of_all_epochs() -> None:
    event = HeartbeatEvent(
        step=46,
        epoch=1,
        loss=8.0,
        examples_per_s=70.0,
        data_wait=0.0,
        steps_in_epoch=592,
        seconds_left=1000.0,
    )
    line = describe(event, FitConfig(), ProgressUnit(33.0, "requests"))
    assert "2,310 requests/s" in line
    assert line.endswith("592 steps per epoch  at most 17 min left")


def test_the_time_left_counts_steps_and_validations_of_all_epochs() -> None:
    config = FitConfig(max_epochs=10, eval_every_epochs=3)
    pace = Pace(config, total_steps=100)
    assert pace.seconds_left(Cursor(step=2, step_in_epoch=2, seconds=4.0)) is None
    pace.eval_seconds = 5.0
    cursor = Cursor(epoch=3, step=35, step_in_epoch=5, seconds=8.0)
    # 65 steps of 2 seconds, validations after epochs 6, 9 and 10
    assert pace.seconds_left(cursor, unread=2.0) == 65 * 2 + 3 * 5


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.4, "7 s"), (99.0, "99 s"), (300, "5 min"), (1e4, "3 h")]
)
def test_durations_are_in_the_unit_that_reads_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_validation_every_n_epochs_and_at_the_end() -> None:
    config = FitConfig(max_epochs=5, eval_every_epochs=2)
    ends = [event for event in finish(start(), config) if isinstance(event, EpochEvent)]
    assert [bool(event.metrics) for event in ends] == [False, True, False, True, True]


def test_validation_every_n_steps_within_epochs() -> None:
    values = iter([0.1, 0.5, 0.4, 0.3, 0.9])
    config = FitConfig(max_epochs=4, eval_every_steps=3, patience=2, log_every_steps=50)
    events = list(
        fit(start(), Batches(), lambda model: ({"ndcg@10": next(values)}, 1), config)
    )
    checked = [
        (event.step, event.is_best, event.stop) for event in events if event.metrics
    ]
    # 5 steps an epoch: after 3 and at its end; the fourth validation is the second
    # without a better value
    assert checked == [
        (3, True, False),
        (5, True, False),
        (6, False, False),
        (9, False, True),
    ]
    last = events[-1]
    assert isinstance(last, StepEvent)
    assert last.state["cursor"]["best_step"] == 5
    assert finish(start(), config, state=last.state) == []


def test_a_metric_or_a_loss_that_is_no_number_is_named() -> None:
    with pytest.raises(
        UserError,
        match=r"fit.metric is ndcg@10, which is not defined on the 4 rows .*another fit\.metric",
    ):
        list(fit(start(), Batches(), lambda model: ({"ndcg@10": math.nan}, 4), CONFIG))
    model = start()
    with torch.no_grad():
        model.hidden.bias[0] = math.nan
    with pytest.raises(UserError, match=r"loss is nan at step 5; lower fit\.lr"):
        finish(model, FitConfig(max_epochs=1))


def test_learning_rate_rises_then_falls() -> None:
    config = FitConfig(lr=1.0, warmup_steps=10_000, warmup_share=0.1)
    rates = [learning_rate(config, step, 1000) for step in range(1000)]
    assert rates.index(max(rates)) == 99  # the warm-up is capped at a tenth of the run
    assert rates[0] == pytest.approx(0.01)
    assert rates[-1] < 1e-4
    assert all(a >= b for a, b in pairwise(rates[99:]))
    assert (
        learning_rate(FitConfig(lr=1.0, warmup_steps=0, schedule="constant"), 999, 1000)
        == 1.0
    )


def test_step_seeds_differ_between_ranks_and_steps() -> None:
    seeds = {
        step_seed(seed, rank, step)
        for seed in range(3)
        for rank in range(8)
        for step in range(50)
    }
    assert len(seeds) == 3 * 8 * 50


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "at least 1"),
        ("lr", 0.0, "above 0"),
        ("warmup_share", 2.0, "between 0 and 1"),
    ],
)
def test_impossible_config(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=rf"fit\.{field} is .*{message}"):
        FitConfig(**{field: value})


EQUAL, UNEQUAL = (5, 5), (5, 3)
"""Batches of each of two workers."""


def trained_by(rank: int, counts: tuple[int, int]) -> dict:
    """What one of two workers sees of a training."""
    model, batches = start(dropout=0.0), Batches(rank=rank, world=2, count=counts[rank])

    def half(
        model: nn.Module,
    ) -> tuple[dict[str, float], int]:  # unequal shares: 5 and 15 of 20 requests
        mine = range(5) if rank == 0 else range(5, 20)
        return {
            "ndcg@10": sum(model.embedding.weight[i].sum().item() for i in mine)
        }, len(mine)

    def one_sided(
        model: nn.Module,
    ) -> tuple[dict[str, Tensor], int]:  # the first rank has nothing to validate
        return ({"histogram": torch.tensor([3.0, 1.0])}, 4) if rank else ({}, 0)

    of = half if counts == EQUAL else one_sided
    means = (
        None
        if counts == EQUAL
        else lambda sums: {
            "ndcg@10": float(sums["histogram"][0] / sums["histogram"].sum())
        }
    )
    events = list(fit(model, batches, of, CONFIG, means=means, rank=rank, world=2))
    curve = [(e.step, e.loss) for e in events if isinstance(e, StepEvent)]
    ends = [
        (e.epoch, e.metrics, e.is_best, e.examples)
        for e in events
        if isinstance(e, EpochEvent)
    ]
    return {"curve": curve, "ends": ends, "model": model.state_dict()}


def stopped_by(rank: int) -> dict:
    """Where one of two workers ends, of which only the second is asked to stop: in a
    step, and in a validation.
    """
    ends = {}
    for in_validation in (False, True):
        model, batches = start(dropout=0.0), Batches(rank=rank, world=2)
        asked = in_validation and rank == 1

        def checked(
            model: nn.Module, stops: bool = asked
        ) -> tuple[dict[str, float], int]:
            if stops:
                raise ValidationStopped
            return validate(model)

        answers = iter(
            [CONTINUE, SAVE, CONTINUE, STOP] if rank == 1 and not asked else []
        )
        events = list(
            fit(
                model,
                batches,
                checked,
                FitConfig(max_epochs=3),
                rank=rank,
                world=2,
                next_action=lambda answers=answers: next(answers, CONTINUE),  # type: ignore[misc]
            )
        )
        saved = [event.step for event in events if event.state]
        ends[in_validation] = (saved, events[-1].interrupted, len(events[-1].metrics))
    return ends


def saved_after_notice(rank: int) -> list[int]:
    """Return the steps at which a rank saves, where the first of two asks for notices
    by a collective.
    """
    model, batches = start(dropout=0.0), Batches(rank=rank, world=2)
    answers = iter([CONTINUE, ASK] if rank == 0 else [])

    def warned() -> bool:
        calls = torch.ones(1)
        torch.distributed.all_reduce(calls)  # hangs unless both ranks are here
        return calls.item() == 2

    events = fit(
        model,
        batches,
        validate,
        FitConfig(max_epochs=1),
        rank=rank,
        world=2,
        next_action=lambda: next(answers, CONTINUE),
        ask_for_notice=warned,
    )
    return [event.step for event in events if event.state]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.save(
        {
            **{counts: trained_by(rank, counts) for counts in (EQUAL, UNEQUAL)},
            "stopped": stopped_by(rank),
            "noticed": saved_after_notice(rank),
        },
        f"{folder}/{rank}.pt",
    )
    torch.distributed.barrier()  # neither rank takes the connection down while the other still uses it
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By worker and batches."""
    folder = tmp_path_factory.mktemp("two")
    mp.start_processes(worker, (str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.long
def test_two_workers_equal_one_with_the_same_batches(two: list[dict]) -> None:
    ours = [each[EQUAL] for each in two]
    assert ours[0]["curve"] == ours[1]["curve"]  # equal reports, equally often
    assert ours[0]["ends"] == ours[1]["ends"]
    model = start(dropout=0.0)
    events = finish(model, CONFIG)
    curve = [(e.step, e.loss) for e in events if isinstance(e, StepEvent)]
    assert [step for step, _ in curve] == [step for step, _ in ours[0]["curve"]]
    assert [loss for _, loss in curve] == pytest.approx(
        [loss for _, loss in ours[0]["curve"]], rel=1e-5
    )
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, ours[0]["model"][name], rtol=1e-4, atol=1e-6)
        assert torch.equal(ours[0]["model"][name], ours[1]["model"][name])
    assert ours[0]["ends"][-1][3] == 20


@pytest.mark.long
def test_unequal_shares_take_equal_steps(two: list[dict]) -> None:
    ours = [each[UNEQUAL] for each in two]
    assert ours[0]["curve"] == ours[1]["curve"]
    assert ours[0]["curve"][-1][0] == 3 * CONFIG.max_epochs
    assert ours[0]["ends"] == ours[1]["ends"]
    assert ours[0]["ends"][0][1] == {"ndcg@10": 0.75}
    assert ours[0]["ends"][0][3] == 4


@pytest.mark.long
def test_all_workers_save_and_stop_where_one_is_asked_to(two: list[dict]) -> None:
    ours, theirs = (each["stopped"] for each in two)
    assert ours == theirs
    # a step's answers are known after the next step; a validation ends at once, without
    # metrics
    assert ours == {False: ([3, 5], True, 0), True: ([5], True, 0)}


@pytest.mark.long
def test_all_workers_ask_for_notices_in_the_same_step(two: list[dict]) -> None:
    ours, theirs = (each["noticed"] for each in two)
    assert ours == theirs
    assert ours[0] == 3  # asked for after step 2, and known after the next one


def test_prefetch_keeps_order_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)

    def batches() -> Iterator[Pairs]:
        for i in range(10):
            yield Pairs(x=torch.tensor([i]), y=torch.tensor([i]))
        raise UserError("lost")

    seen = []
    with pytest.raises(UserError, match="lost"):
        seen.extend(batch.x.item() for batch in prefetch(batches()))
    assert seen == list(range(10))
