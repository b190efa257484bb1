"""The training loop: resumed training equals uninterrupted training, several workers
equal one worker, and the validation metric alone selects the best checkpoint.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from core.errors import UserError
from models.dataset.batch import Batch, axes
from models.training.fit_config import FitConfig
from models.training.loop import (
    Report,
    ValidationStopped,
    describe,
    fit,
    learning_rate,
    prefetch,
    step_seed,
)


@dataclass(frozen=True, kw_only=True)
class Pairs(Batch):
    """A batch of input tokens and their classes."""

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
        hidden = torch.relu(self.hidden(self.embedding(batch.x)))
        logits = self.dropout(hidden) @ self.embedding.weight.T
        loss = nn.functional.cross_entropy(logits, batch.y)
        return {"loss": loss, "hidden_mean": hidden.mean().detach()}


class Batches:
    """Batches of the rows 3 i mod 20 -> 7 i mod 20, shuffled anew in every epoch; each
    rank gets its part of every global batch.
    """

    def __init__(
        self, size: int = 8, count: int = 5, rank: int = 0, world: int = 1
    ) -> None:
        self.size = size
        self.count = count
        self.rank = rank
        self.world = world
        self.num_built = 0

    def steps(self, epoch: int) -> int:
        return self.count

    def __call__(self, epoch: int, skip: int) -> Iterator[Pairs]:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(self.size * self.count, generator=generator)
        for i in range(skip, self.count):
            global_batch = order[i * self.size : (i + 1) * self.size]
            rows = global_batch[self.rank :: self.world]
            self.num_built += 1
            yield Pairs(x=rows * 3 % 20, y=rows * 7 % 20)


def validate(model: nn.Module) -> tuple[dict[str, float], int]:
    """Return metric sums that change with the weights, and the number of examples."""
    total = model.embedding(torch.arange(20)).sum().item()
    return {"ndcg@10": total * 20, "recall@10": 20.0}, 20


def build_classifier(seed: int = 0, dropout: float = 0.5) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(dropout=dropout)


def run_fit(model: nn.Module, config: FitConfig, **options: object) -> list[Report]:
    """Train to the end and return all events."""
    return list(fit(model, Batches(), validate, config, **options))


def copy_weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    for weight, other_weight in zip(
        copy_weights(model), copy_weights(other), strict=True
    ):
        assert torch.equal(weight, other_weight)


def get_loss_curve(events: list[Report]) -> list[tuple[int, float]]:
    """Return (step, loss) of every reported step."""
    return [
        (event.step, event.points["train/loss"])
        for event in events
        if "train/loss" in event.points
    ]


def get_curves(events: list[Report]) -> dict[tuple[str, int], float]:
    """Return the points of all curves but durations, by name and step."""
    curves = {}
    for event in events:
        for name, value in event.points.items():
            if not name.endswith(("seconds", "_per_s", "data_wait")):
                assert (name, event.step) not in curves
                curves[name, event.step] = value
    return curves


CONFIG = FitConfig(
    lr=0.01,
    warmup_steps=3,
    max_epochs=4,
    batch_size=8,
    log_every_steps=2,
    checkpoint_every_steps=3,
)


def stop_and_resume(
    config: FitConfig, stop_at: int, in_validation: bool
) -> tuple[Classifier, list[Report], list[Report]]:
    """Stop a run at its `stop_at`-th step or validation, and finish it from the state
    of its last event.

    Returns:
        The resumed model, the events until the stop, and the events after it.
    """
    calls = iter(range(1, 1000))

    def should_stop() -> bool:
        return not in_validation and next(calls) == stop_at

    def validate_or_stop(model: nn.Module) -> tuple[dict[str, float], int]:
        if in_validation and next(calls) == stop_at:
            raise ValidationStopped
        return validate(model)

    stopped = build_classifier()
    events = list(
        fit(stopped, Batches(), validate_or_stop, config, should_stop=should_stop)
    )
    saved = copy.deepcopy(events[-1].state)
    resumed = build_classifier(seed=99)
    resumed.load_state_dict(stopped.state_dict())
    return resumed, events, run_fit(resumed, config, state=saved)


@pytest.mark.parametrize(
    ("stop_at", "in_validation"),
    [*((step, False) for step in range(1, 21)), *((n, True) for n in range(1, 5))],
)
def test_training_stopped_at_any_step_or_validation_and_resumed_equals_uninterrupted_training(
    stop_at: int, in_validation: bool
) -> None:
    optimizer = "adagrad" if stop_at % 2 else "adamw"
    config = replace(CONFIG, checkpoint_every_steps=0, optimizer=optimizer)
    uninterrupted = build_classifier()
    all_events = run_fit(uninterrupted, config)

    resumed, events, rest = stop_and_resume(config, stop_at, in_validation)

    last = events[-1]
    assert last.interrupted
    assert not last.stop
    assert in_validation or last.step == stop_at
    assert_equal_weights(resumed, uninterrupted)
    position = rest[-1].state["position"]
    expected_position = all_events[-1].state["position"]
    for key in ("best", "best_epoch", "best_step", "waiting", "stopped"):
        assert position[key] == expected_position[key]
    assert rest[-1].loss == pytest.approx(all_events[-1].loss)
    curves, expected_curves = get_curves(events + rest), get_curves(all_events)
    assert curves.keys() == expected_curves.keys()
    for (name, step), value in curves.items():
        if name not in ("train/loss", "train/hidden_mean"):  # means since the stop
            assert value == pytest.approx(expected_curves[name, step])
    validated = [event.step for event in all_events if event.metrics]
    assert [event.step for event in rest if event.metrics] == [
        step for step in validated if step >= last.step
    ]


def test_a_state_is_saved_at_a_point_of_the_curves_and_training_continues() -> None:
    answers = iter([False, True])
    config = FitConfig(max_epochs=1, log_every_steps=2)

    events = run_fit(
        build_classifier(), config, should_save=lambda: next(answers, False)
    )

    assert [event.step for event in events if event.state] == [4, 5]
    assert not any(event.interrupted for event in events)
    undisturbed = run_fit(build_classifier(), config)
    assert get_curves(events) == pytest.approx(get_curves(undisturbed))


def test_states_are_saved_every_n_steps_and_at_the_end_of_an_epoch() -> None:
    config = FitConfig(max_epochs=1, checkpoint_every_steps=2)
    events = run_fit(build_classifier(), config)
    assert [event.step for event in events if event.state] == [2, 4, 5]


def test_best_epoch_and_early_stop_follow_the_validation_metric_alone() -> None:
    values = iter([0.1, 0.5, 0.5, 0.4, 0.9, 0.9])
    config = FitConfig(lr=0.1, max_epochs=6, patience=2, warmup_steps=0)

    events = fit(
        build_classifier(),
        Batches(),
        lambda model: ({"ndcg@10": next(values)}, 1),
        config,
    )
    ends = [event for event in events if event.ends_epoch]

    # an equal value is not better
    assert [event.is_best for event in ends] == [True, True, False, False]
    assert [event.stop for event in ends] == [False, False, False, True]
    assert ends[-1].state["position"]["best_epoch"] == 2
    assert [bool(event.stop_reason) for event in ends] == [False, False, False, True]
    assert "fit.patience" in describe(ends[-1], config).splitlines()[-1]


def test_the_time_left_counts_steps_and_validations_of_all_epochs() -> None:
    def validate_slowly(model: nn.Module) -> tuple[dict[str, float], int]:
        time.sleep(0.05)
        return validate(model)

    config = FitConfig(max_epochs=10, eval_every_epochs=3, log_every_steps=1)
    events = list(fit(build_classifier(), Batches(), validate_slowly, config))

    assert [event.seconds_left for event in events[:2]] == [None, None]
    left = [event.seconds_left for event in events if event.ends_epoch]
    # validations after epochs 6, 9 and 10, then after 9 and 10, then after 10
    for epoch, validations in ((3, 3), (6, 2), (9, 1)):
        assert left[epoch - 1] >= 0.05 * validations


def test_validation_every_n_epochs_and_at_the_end() -> None:
    config = FitConfig(max_epochs=5, eval_every_epochs=2)
    events = run_fit(build_classifier(), config)
    ends = [event for event in events if event.ends_epoch]
    assert [bool(event.metrics) for event in ends] == [False, True, False, True, True]


def test_an_undefined_validation_metric_stops_with_its_name() -> None:
    def validate_to_nan(model: nn.Module) -> tuple[dict[str, float], int]:
        return {"ndcg@10": math.nan}, 4

    with pytest.raises(
        UserError,
        match=r"fit.metric is ndcg@10, which is not defined on the 4 rows",
    ):
        list(fit(build_classifier(), Batches(), validate_to_nan, CONFIG))


def test_a_loss_of_nan_stops_with_its_step() -> None:
    model = build_classifier()
    with torch.no_grad():
        model.hidden.bias[0] = math.nan

    with pytest.raises(UserError, match=r"loss is nan at step 5"):
        run_fit(model, FitConfig(max_epochs=1))


def test_learning_rate_rises_then_falls() -> None:
    config = FitConfig(lr=1.0, warmup_steps=10_000, warmup_share=0.1)

    rates = [learning_rate(config, step, 1000) for step in range(1000)]

    assert rates.index(max(rates)) == 99  # the warm-up is capped at a tenth of the run
    assert rates[0] == pytest.approx(0.01)
    assert rates[-1] < 1e-4
    assert all(a >= b for a, b in pairwise(rates[99:]))
    constant = replace(config, warmup_steps=0, schedule="constant")
    assert learning_rate(constant, 999, 1000) == 1.0


def test_step_seeds_differ_between_ranks_and_steps() -> None:
    seeds = {
        step_seed(seed, rank, step)
        for seed in range(3)
        for rank in range(8)
        for step in range(50)
    }
    assert len(seeds) == 3 * 8 * 50


EQUAL, UNEQUAL = (5, 5), (5, 3)
"""Number of batches of each of two workers."""


def mean_of_histogram(sums: dict[str, Tensor]) -> dict[str, float]:
    histogram = sums["histogram"]
    return {"ndcg@10": float(histogram[0] / histogram.sum())}


def train_rank(rank: int, counts: tuple[int, int]) -> dict:
    """Return the loss curve, epoch ends and weights that one of two ranks reports."""
    model = build_classifier(dropout=0.0)
    batches = Batches(rank=rank, world=2, count=counts[rank])

    def validate_unequal_shares(model: nn.Module) -> tuple[dict[str, float], int]:
        """Validate 5 or 15 of 20 requests."""
        requests = range(5) if rank == 0 else range(5, 20)
        sums = [model.embedding.weight[i].sum().item() for i in requests]
        return {"ndcg@10": sum(sums)}, len(requests)

    def validate_second_rank(model: nn.Module) -> tuple[dict[str, Tensor], int]:
        """Validate on the second rank alone."""
        if rank == 0:
            return {}, 0
        return {"histogram": torch.tensor([3.0, 1.0])}, 4

    if counts == EQUAL:
        validate_rank, means = validate_unequal_shares, None
    else:
        validate_rank, means = validate_second_rank, mean_of_histogram
    events = list(
        fit(model, batches, validate_rank, CONFIG, means=means, rank=rank, world=2)
    )
    ends = [
        (event.epoch, event.metrics, event.is_best, event.points["val/examples"])
        for event in events
        if event.ends_epoch
    ]
    return {"curve": get_loss_curve(events), "ends": ends, "model": model.state_dict()}


def save_on_request(rank: int) -> list[int]:
    """Return the steps at which a rank saves, where the second of two asks for it, once
    at a point of the curves.
    """
    answers = iter([False, rank == 1])
    events = fit(
        build_classifier(dropout=0.0),
        Batches(rank=rank, world=2),
        validate,
        FitConfig(max_epochs=1, log_every_steps=1),
        rank=rank,
        world=2,
        should_save=lambda: next(answers, False),
    )
    return [event.step for event in events if event.state]


def run_rank(rank: int, folder: str) -> None:
    """Train as one of two ranks and save what it reports to `folder`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2
    )
    results = {
        EQUAL: train_rank(rank, EQUAL),
        UNEQUAL: train_rank(rank, UNEQUAL),
        "saved": save_on_request(rank),
    }
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.barrier()  # neither rank closes the connection while the other still uses it
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def rank_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Results of two ranks of one training."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(run_rank, (str(folder),), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.long
def test_two_workers_equal_one_with_the_same_batches(rank_results: list[dict]) -> None:
    first, second = (results[EQUAL] for results in rank_results)
    model = build_classifier(dropout=0.0)
    curve = get_loss_curve(run_fit(model, CONFIG))

    assert first["curve"] == second["curve"]  # equal reports, equally often
    assert first["ends"] == second["ends"]
    assert [step for step, _ in curve] == [step for step, _ in first["curve"]]
    assert [loss for _, loss in curve] == pytest.approx(
        [loss for _, loss in first["curve"]], rel=1e-5
    )
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, first["model"][name], rtol=1e-4, atol=1e-6)
        assert torch.equal(first["model"][name], second["model"][name])
    assert first["ends"][-1][3] == 20


@pytest.mark.long
def test_ranks_with_unequal_numbers_of_batches_take_equal_steps(
    rank_results: list[dict],
) -> None:
    first, second = (results[UNEQUAL] for results in rank_results)

    assert first["curve"] == second["curve"]
    assert first["curve"][-1][0] == 3 * CONFIG.max_epochs
    assert first["ends"] == second["ends"]
    assert first["ends"][0][1] == {"ndcg@10": 0.75}
    assert first["ends"][0][3] == 4


@pytest.mark.long
def test_all_ranks_save_where_one_asks_for_it(rank_results: list[dict]) -> None:
    for results in rank_results:
        assert results["saved"] == [2, 5]


def test_prefetch_keeps_order_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)

    def batches() -> Iterator[Pairs]:
        for i in range(10):
            yield Pairs(x=torch.tensor([i]), y=torch.tensor([i]))
        raise UserError("lost")

    values = []
    with pytest.raises(UserError, match="lost"):
        values.extend(batch.x.item() for batch in prefetch(batches()))
    assert values == list(range(10))
