"""What CUDA graphs require, as far as a CPU shows it: batches have few shapes, and padded
or replayed batches give equal results. That no step waits for a value is tested in
`test_devices.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.schemas import Inputs
from models import registry
from models.actions.catalogue import ActionsCatalogue
from models.dataset.batch import Batch, bucket_size
from models.dataset.dataset import Dataset
from models.loaded_model import build_model
from models.retrieval.data import HistoryBatch
from models.retrieval.distillation.teacher import TaughtModel, build_teacher
from models.retrieval.recommend import _search_by_graph
from models.search.catalogue import SearchCatalogue
from models.training import loop
from models.training.cuda_graphs import CudaGraphs
from models.training.fit_config import FitConfig
from models.training.loop import fit
from models.training.optimizers import CapturableAdagrad
from tests.fixtures import small_retrieval
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.search_tables import write_search
from tests.fixtures.trainings import CASES

RANKERS = [
    name
    for name in registry.MODELS
    if registry.find(name).trains_by_gradient
    and registry.find(name).kind.name != "retrieval"
]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """The catalogue of each kind of log."""
    folder = tmp_path_factory.mktemp("logs")
    tables, text = write_search(folder / "search")
    feed = write_actions(folder / "actions", viewers=True)
    return {
        "search": SearchCatalogue.load(Inputs(tables, text=text)),
        "actions": ActionsCatalogue.load(Inputs(feed)),
    }


def build_retrieval_model(name: str) -> tuple[Any, Any]:
    """Build a model, with its teacher where it has one, and a batch of its unit."""
    catalogue = small_retrieval.build_catalogue()
    torch.manual_seed(0)
    model: Any = build_model(CASES[name], catalogue)
    if isinstance(model, TaughtModel):
        model.set_teacher(build_teacher(model.config, catalogue))
    batch = small_retrieval.make_requests(8, longest=5)
    if model.example_unit == "user":
        return model, small_retrieval.make_windows(batch)
    return model, batch


def build_ranker(name: str, logs: Any) -> tuple[Any, Dataset]:
    """Build a small ranker and its train examples."""
    catalogue = logs[registry.find(name).kind.name]
    torch.manual_seed(0)
    model = build_model(CASES[name], catalogue)
    return model, Dataset.load(model, catalogue, "train", max_history=8)


def get_search_step(model: Any) -> Callable[..., Any]:
    """Return `recommend` of a model without its two decorators."""
    return type(model).recommend.__wrapped__.__wrapped__


def test_a_bucket_is_at_most_half_larger_than_its_content():
    for size in range(1, 200):
        assert size <= bucket_size(size) <= 1.5 * size
        assert bucket_size(bucket_size(size)) == bucket_size(size)


@pytest.mark.parametrize("name", [*RANKERS, "tiger", "sasrec", "sid_sasrec"])
def test_padding_of_a_batch_changes_no_loss_or_gradient(name, logs):
    """Up to the rounding of float32."""
    if name in RANKERS:
        model, examples = build_ranker(name, logs)
        batch = examples.collate(np.arange(9))
    else:
        model, batch = build_retrieval_model(name)
    padded = batch.pad_to_buckets(8)
    assert padded.signature != batch.signature
    results = []
    for inputs in (batch, padded):
        model.zero_grad()
        loss = model.eval()(inputs)["loss"]
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([loss, *gradients])
    for value, padded_value in zip(*results, strict=True):
        torch.testing.assert_close(value, padded_value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["popularity", "sid_sasrec", "tiger", "sid_mlp"])
def test_a_replayed_search_equals_the_search(name):
    """The code path of a GPU without the graph; a model of counts has no weights."""
    model, _ = build_retrieval_model(name)
    batch = small_retrieval.make_requests(5, longest=5)
    search = get_search_step(model.eval())
    # sets of one shape, which one graph serves
    allowed_sets = [
        model.encode_allowed(torch.arange(30) % step == 0) for step in (2, 3, 30)
    ]

    for allowed in [None, None, None, *allowed_sets]:
        items, scores = model.recommend(batch, 4, allowed=allowed)
        inputs = batch if allowed is None else replace(batch, allowed=allowed)
        with torch.no_grad():
            graph_items, graph_scores = _search_by_graph(
                model,
                "a test",
                inputs,
                lambda inputs: search(model, inputs, 4),
                "highest",
            )
        assert torch.equal(graph_items, items)
        assert torch.allclose(graph_scores, scores, atol=1e-5)


def test_concurrent_requests_get_their_own_answers():
    """The search writes every answer to the same tensors, as a graph does."""
    model, _ = build_retrieval_model("sasrec")
    batches = [
        small_retrieval.make_requests(3, longest=5, seed=seed) for seed in range(4)
    ]
    expected = [model.eval().recommend(batch, 4)[0] for batch in batches]
    outputs = [torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4)]

    def search(inputs: HistoryBatch) -> Any:
        with torch.no_grad():
            values = get_search_step(model)(model, inputs, 4)
        return [
            output.copy_(value) for output, value in zip(outputs, values, strict=True)
        ]

    def is_answered(turn: int) -> bool:
        items, _ = _search_by_graph(
            model, "threads", batches[turn % 4], search, "highest"
        )
        return torch.equal(items, expected[turn % 4])

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(is_answered, range(80)))
    finally:
        sys.setswitchinterval(switch_interval)


def test_padding_rows_are_not_counted_as_examples(logs):
    _, examples = build_ranker("attn_lfa", logs)
    counts = []
    for pad_to_buckets in (False, True):
        batches = examples.epoch(5, seed=1, epoch=0, pad_to_buckets=pad_to_buckets)
        counts.append(sum(next(batches).num_rows for _ in range(3)))
    assert counts[0] == counts[1] > 0


class CycledBatches:
    """An epoch of seven steps that cycles through the batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def num_steps(self, batch_size: int) -> int:
        return 7

    def epoch(self, *sizes: int, skip: int, **options: Any) -> Iterator[Batch]:
        return islice(cycle(self.batches), skip, 7)


def copy_weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_two_epochs(
    model: Any,
    batches: list[Batch],
    stop: int = 0,
    state: Any = None,
    **options: Any,
) -> Any:
    """Return the weights after two epochs, or the weights and the saved state after
    `stop` steps.
    """
    config = FitConfig(
        max_epochs=2,
        metric="none",
        seed=3,
        lr=0.01,
        checkpoint_every_steps=3,
        **options,
    )
    events = fit(
        model,
        CycledBatches(batches),
        lambda model: ({"none": 0.0}, 1),
        config,
        state=state,
    )
    for event in events:
        if event.step == stop and event.state:
            return {"weights": copy_weights(model), "state": event.state}
    return copy_weights(model)


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_steps_on_tensors_of_a_graph_equal_steps_on_the_batches(optimizer, monkeypatch):
    """The code path of a GPU without the graph: the third batch of a shape and all later
    ones are copied into static tensors.
    """
    batches = [
        small_retrieval.make_requests(8, longest=5),
        small_retrieval.make_requests(8, seed=2, longest=4),
    ]
    expected = train_two_epochs(
        build_retrieval_model("tiger")[0], batches, optimizer=optimizer
    )
    all_graphs = []

    def build_graphs(*args: Any) -> CudaGraphs:
        all_graphs.append(CudaGraphs(*args))
        return all_graphs[-1]

    monkeypatch.setattr(loop, "uses_cuda_graphs", lambda *args: True)
    monkeypatch.setattr(loop, "CudaGraphs", build_graphs)
    replayed = train_two_epochs(
        build_retrieval_model("tiger")[0], batches, optimizer=optimizer
    )
    assert [len(graphs._graphs) for graphs in all_graphs] == [2]
    stopped = train_two_epochs(
        build_retrieval_model("tiger")[0], batches, stop=9, optimizer=optimizer
    )
    model = build_retrieval_model("tiger")[0]
    model.load_state_dict(stopped["weights"])
    resumed = train_two_epochs(
        model, batches, state=stopped["state"], optimizer=optimizer
    )

    for name, value in expected.items():
        assert torch.equal(value, replayed[name]), name
        assert torch.equal(value, resumed[name]), name


def test_capturable_adagrad_equals_adagrad_of_pytorch():
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5)]
    weights = [value.clone().requires_grad_() for value in start]
    expected_weights = [value.clone().requires_grad_() for value in start]
    options = {"lr": 0.1, "weight_decay": 0.01}
    capturable = CapturableAdagrad(weights, **options)
    reference = torch.optim.Adagrad(expected_weights, **options)

    for _ in range(4):
        gradients = [torch.randn_like(value) for value in start]
        for optimizer, parameters in (
            (capturable, weights),
            (reference, expected_weights),
        ):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()

    for weight, expected_weight in zip(weights, expected_weights, strict=True):
        assert torch.allclose(weight, expected_weight, atol=1e-6)
