"""The training loop: resumed training equals uninterrupted training, several workers
train together, and the validation metric alone selects the best checkpoint.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
    fit,
    learning_rate,
    prefetch,
)


@dataclass(frozen=True, kw_only=True)
class Pairs(Batch):
    """A batch of input tokens and their classes."""

    x: Tensor = axes("B")
    y: Tensor = axes("B")


class Classifier(nn.Module):
    """A small model with dropout, tied weights and a loss."""

    lr_multipliers = dict

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.hidden = nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: Pairs) -> dict[str, Tensor]:
        hidden = torch.relu(self.hidden(self.embedding(batch.x)))
        logits = self.dropout(hidden) @ self.embedding.weight.T
        loss = nn.functional.cross_entropy(logits, batch.y)
        return {"loss": loss, "hidden_mean": hidden.mean().detach()}


@dataclass
class Batches:
    """Batches of the rows 3 i mod 20 -> 7 i mod 20, shuffled anew in every epoch; each
    rank gets its part of every global batch.
    """

    size: int = 8
    count: int = 5
    rank: int = 0
    world: int = 1

    def num_steps(self, batch_size: int) -> int:
        return self.count

    def epoch(
        self, *sizes: int, epoch: int = 0, skip: int = 0, **options: object
    ) -> Iterator[Pairs]:
        generator = torch.Generator().manual_seed(epoch)
        order = torch.randperm(self.size * self.count, generator=generator)
        for i in range(skip, self.count):
            global_batch = order[i * self.size : (i + 1) * self.size]
            rows = global_batch[self.rank :: self.world]
            yield Pairs(x=rows * 3 % 20, y=rows * 7 % 20)


def validate(model: nn.Module) -> tuple[dict[str, float], int]:
    """Return a metric that changes with the weights, and the number of examples."""
    return {"ndcg@10": model.embedding(torch.arange(20)).sum().item()}, 20


def build_classifier(seed: int = 0, dropout: float = 0.5) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(dropout)


def run_fit(model: nn.Module, config: FitConfig, **options: object) -> list[Report]:
    """Train to the end and return all events."""
    return list(fit(model, Batches(), validate, config, **options))


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


@pytest.mark.parametrize(
    ("stop_at", "in_validation"),
    [*((step, False) for step in range(1, 21)), *((n, True) for n in range(1, 5))],
)
def test_training_stopped_at_any_step_or_validation_and_resumed_equals_uninterrupted_training(
    stop_at, in_validation
):
    calls = iter(range(1, 1000))

    def should_stop() -> bool:
        return not in_validation and next(calls) == stop_at

    def validate_or_stop(model: nn.Module) -> tuple[dict[str, float], int]:
        if in_validation and next(calls) == stop_at:
            raise ValidationStopped
        return validate(model)

    optimizer = "adagrad" if stop_at % 2 else "adamw"
    config = replace(CONFIG, checkpoint_every_steps=0, optimizer=optimizer)
    uninterrupted, stopped = build_classifier(), build_classifier()
    all_events = run_fit(uninterrupted, config)
    events = list(
        fit(stopped, Batches(), validate_or_stop, config, should_stop=should_stop)
    )
    last = events[-1]
    saved = copy.deepcopy(last.state)
    resumed = build_classifier(seed=99)
    resumed.load_state_dict(stopped.state_dict())
    rest = run_fit(resumed, config, state=saved)

    assert last.interrupted
    assert in_validation or last.step == stop_at
    for name, weight in resumed.state_dict().items():
        assert torch.equal(weight, uninterrupted.state_dict()[name])
    assert rest[-1].state["position"] == all_events[-1].state["position"]
    curves, expected_curves = get_curves(events + rest), get_curves(all_events)
    assert curves.keys() == expected_curves.keys()
    for (name, step), value in curves.items():
        if name not in ("train/loss", "train/hidden_mean"):  # means since the stop
            assert value == pytest.approx(expected_curves[name, step])


def test_states_are_saved_every_n_steps_on_request_and_at_the_end_of_an_epoch():
    answers = iter([False, True])
    config = FitConfig(max_epochs=2, log_every_steps=2)

    events = run_fit(
        build_classifier(), config, should_save=lambda: next(answers, False)
    )

    undisturbed = run_fit(build_classifier(), config)
    assert [event.step for event in undisturbed if event.state] == [5, 10]
    assert [event.step for event in events if event.state] == [4, 5, 10]
    assert get_curves(events) == pytest.approx(get_curves(undisturbed))
    planned = replace(config, checkpoint_every_steps=3, eval_every_epochs=2)
    events = run_fit(build_classifier(), planned)
    assert [event.step for event in events if event.state] == [3, 5, 6, 9, 10]
    assert [event.step for event in events if event.metrics] == [10]


def test_best_epoch_and_early_stop_follow_the_validation_metric_alone():
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
    assert ends[-1].state["position"]["best"] == {"value": 0.5, "epoch": 2, "step": 10}


def test_a_loss_of_nan_stops_the_training():
    model = build_classifier()
    nn.init.constant_(model.hidden.bias, math.nan)
    with pytest.raises(UserError, match="nan at step 5"):
        run_fit(model, FitConfig(max_epochs=1))


def test_learning_rate_rises_then_falls():
    config = FitConfig(lr=1.0, warmup_steps=10_000, warmup_share=0.1)

    rates = [learning_rate(config, step, 1000) for step in range(1000)]

    assert rates.index(1.0) == 99  # the warm-up is capped at a tenth of the run
    assert rates[:100] == sorted(rates[:100])
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert rates[-1] < 1e-4


def run_rank(rank: int, folder: str) -> None:
    """Train as one of two ranks and save its reports to `folder`.

    The second rank alone asks for a state, at its second point of the curves.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=2
    )
    answers = iter([False, rank == 1])
    model = build_classifier(dropout=0.0)
    events = list(
        fit(
            model,
            Batches(rank=rank, world=2),
            validate,
            replace(CONFIG, log_every_steps=1, checkpoint_every_steps=0),
            rank=rank,
            world=2,
            should_save=lambda: next(answers, False),
        )
    )
    saved = [event.step for event in events if event.state]
    results = get_curves(events), saved, model.state_dict()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.barrier()  # neither closes the connection while the other uses it
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_ranks_train_and_save_together(tmp_path):
    mp.start_processes(run_rank, (str(tmp_path),), nprocs=2, start_method="forkserver")
    first, second = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    curves, saved, weights = first
    assert (curves, saved) == second[:2]
    assert saved == [2, 5, 10, 15, 20]
    for name, weight in second[2].items():
        assert torch.equal(weight, weights[name])


def test_prefetch_keeps_order_and_errors(monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)

    def batches() -> Iterator[Pairs]:
        yield from Batches(count=10).epoch()
        raise UserError("lost")

    prefetched = prefetch(batches())
    for batch in Batches(count=10).epoch():
        assert torch.equal(next(prefetched).x, batch.x)
    with pytest.raises(UserError, match="lost"):
        next(prefetched)
