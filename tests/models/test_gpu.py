"""What graphs on a GPU rest on, as far as a CPU shows it: nothing waits, few shapes,
and equal results.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models import registry
from models.actions.catalogue import ActionsCatalogue
from models.actions.data import ActionsDataset
from models.build import build_model
from models.cpu import fast
from models.dataset.batch import Batch, bucket_size
from models.retrieval.data import HistoryBatch
from models.retrieval.distillation.teacher import TaughtModel, build_teacher
from models.retrieval.recommend import _search_by_graph
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchDataset
from models.storage.tables import join
from models.training import fit as fit_module
from models.training.cuda_graphs import CudaGraphs
from models.training.fit import FitConfig, Meter, fit
from models.training.optimizers import CapturableAdagrad
from tests.fixtures import small_retrieval
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.search_tables import write_search
from tests.models.test_devices import LC_REC, SIZES

GRADIENT = [name for name in registry.MODELS if registry.find(name).trains_by_gradient]
OF = {
    family: [n for n in GRADIENT if registry.find(n).family == family]
    for family in ("retrieval", "search", "actions")
}
SMALL: dict[str, dict[str, Any]] = {
    "search": {
        "max_history": 8,
        "text_width": 6,
        "dnn_width": 12,
        "tower_width": 8,
        "group_output": 10,
        "dropout": 0.0,
    },
    "actions": {
        "width": 16,
        "num_layers": 2,
        "num_heads": 2,
        "ffn": 32,
        "expert_width": 16,
        "tower_width": 8,
    },
}
DEEP = {"width": 24, "num_layers": 2, "num_heads": 2, "ffn": 16}
WAITS = {
    "atspeed_s": "a draft is verified as far as it holds, which is asked after each",
    "atspeed_r": "as atspeed_s",
}
"""Models whose search reads values back, with the reason."""


@pytest.fixture(scope="module")
def search_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_search(tmp_path_factory.mktemp("log"), joint=True)


def retrieval_model(name: str) -> tuple[Any, Any]:
    """The model, with its teacher where it has one, and a batch of its unit."""
    model_class, catalogue = registry.find(name), small_retrieval.build_catalogue()
    options: dict[str, Any] = {"name": name, **SIZES.get(name, {})}
    if name == "tiger":
        options |= small_retrieval.TEACHER
    elif issubclass(model_class, TaughtModel):
        options["teacher_model"] = (
            LC_REC if name.startswith("lc_rec") else small_retrieval.TEACHER
        )
    torch.manual_seed(0)
    model: Any = build_model(options, catalogue)
    if isinstance(model, TaughtModel):
        model.set_teacher(build_teacher(model.config, catalogue))
    batch = small_retrieval.make_requests(8, longest=5)
    if model.example_unit == "user":
        return model, small_retrieval.make_windows(
            batch,
            target=torch.tensor([1, 2, 3]),
            target_row=torch.tensor([0, 1, 2]),
            target_position=torch.tensor([0, 0, 0]),
        )
    return model, batch


def search_model(
    name: str, log: tuple[str, str], **options: Any
) -> tuple[Any, SearchDataset]:
    options = {"name": name, **SMALL["search"], **options}
    if name != "base":
        options = {**DEEP, **options}
    catalogue = SearchCatalogue.load(*log)
    torch.manual_seed(0)
    model = build_model(options, catalogue)
    options = SearchDataset.dataset_options(model.config, catalogue)
    uri = join(log[0], "sequences")
    return model, SearchDataset.load(uri, "train", max_history=8, **options)


logging.getLogger(
    "torch.__trace"
).disabled = True  # a record of every operation, of which pytest would keep all


def traced(run: Any) -> Any:
    """`run()` as one graph: a branch that depends on a value is an error (other values
    that are read back are not, as they may be symbols in a graph: see
    `without_values`)."""
    torch._dynamo.reset()
    return torch.compile(run, backend="eager", fullgraph=True)()


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Moves modules, and gives a batch, to where tensors have shapes alone: a value
    that is read back, or a shape that depends on values, is an error there, and what is
    meant for a CPU is not taken."""
    autocast = torch.autocast
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda device, *of, **how: (
            nullcontext() if device == "meta" else autocast(device, *of, **how)
        ),
    )
    monkeypatch.setattr(
        fast, "check_finite", lambda weights, *of: weights
    )  # once, when they are derived

    def moved(batch: Batch, *modules: Any) -> Batch:
        for module in [
            inner for outer in modules for inner in outer.to("meta").modules()
        ]:
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    setattr(module, name, value.to("meta"))
        return batch.map(lambda value: value.to("meta"))

    return moved


def test_what_reads_a_value_back_is_seen(without_values):
    histories = small_retrieval.make_requests(3)
    values = without_values(histories).target.float()
    for wait in (
        lambda: values.sum().item(),
        lambda: values[values > 0],
        lambda: bool((values > 0).any()),
        lambda: values.repeat_interleave((values > 0).long()),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()


@pytest.mark.long
@pytest.mark.parametrize("name", OF["retrieval"])
@pytest.mark.exhaustive
def test_no_step_and_no_search_of_retrieval_waits(name, without_values):
    bare, batch = retrieval_model(name)
    teacher = getattr(bare, "_teacher", ())
    empty = without_values(batch, bare, *teacher)
    bare.train()(empty)["loss"].backward()
    model, batch = retrieval_model(name)
    model.train()
    assert torch.isfinite(traced(lambda: model(batch)["loss"]))
    if registry.find(name).options_class is None or name in WAITS:
        return
    bare, search = bare.eval(), type(model).recommend.__wrapped__.__wrapped__
    with torch.no_grad():
        for how in [{}] + [{"constrained": False}] * (
            "constrained" in registry.find(name).recommend_options()
        ):
            search(bare, empty, 3, **how)
            search(
                bare,
                replace(
                    empty,
                    allowed=bare.encode_allowed(
                        torch.zeros(30, dtype=torch.bool, device="meta")
                    ),
                ),
                3,
                **how,
            )
    model.eval()
    allowed = model.encode_allowed(torch.arange(30) % 3 > 0)
    items, scores = model.recommend(
        batch, 3, allowed=allowed
    )  # which makes what is kept of the weights
    with torch.no_grad():
        found = traced(lambda: search(model, replace(batch, allowed=allowed), 3))
    assert torch.equal(found[0], items)
    assert torch.allclose(found[1], scores, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in OF["retrieval"] if registry.find(name).options_class]
)
def test_an_empty_history_is_ranked_for_alike_beside_any_other(name):
    model, _ = retrieval_model(name)
    model.eval()
    batch = small_retrieval.make_requests(2, longest=5)
    batch = replace(
        batch,
        history_length=torch.tensor([0, 5]),
        history=torch.tensor([[-1] * 5, [1, 2, 3, 4, 5]]),
    )
    alone = replace(batch.select("B", slice(1)), history=batch.history[:1, :1])
    wide = replace(
        batch, history=torch.nn.functional.pad(batch.history, (0, 7), value=-1)
    )
    items, scores = model.recommend(batch, 3)
    for other in (alone, wide):
        found = model.recommend(other, 3)
        assert torch.equal(found[0][0], items[0])
        assert torch.allclose(found[1][0], scores[0], atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", OF["search"])
@pytest.mark.exhaustive
def test_no_step_of_search_waits(name, search_log, without_values):
    model, examples = search_model(
        name, search_log, **({} if name == "base" else {"num_layers": 1})
    )
    batch = examples.collate(np.arange(9)).pad_to_buckets(examples.max_history)
    assert torch.isfinite(traced(lambda: model.train()(batch)["loss"]))
    empty = without_values(batch, model)
    model.train()(empty)["loss"].backward()


@pytest.fixture(scope="module")
def feed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_actions(tmp_path_factory.mktemp("actions"), viewers=True)


def actions_model(name: str, feed: str, **options: Any) -> tuple[Any, ActionsDataset]:
    options = {"name": name, **SMALL["actions"], **options}
    torch.manual_seed(0)
    catalogue = ActionsCatalogue.load(feed)
    model = build_model(options, catalogue)
    examples = ActionsDataset.load(
        join(feed, "sequences"),
        "train",
        unit=model.example_unit,
        max_history=10,
        **ActionsDataset.dataset_options(model.config, catalogue),
    )
    return model, examples


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in OF["actions"]), ("attn_lfa", False)]
)
@pytest.mark.exhaustive
def test_no_step_and_no_score_of_actions_waits(name, tied, feed, without_values):
    model, examples = actions_model(name, feed, num_layers=1)
    batch = next(examples.epoch(5, seed=1, epoch=0, pad_to_buckets=True))
    batch = replace(batch, has_ties=tied)
    assert torch.isfinite(traced(lambda: model.train()(batch)["loss"]))
    with torch.no_grad():
        assert (
            traced(lambda: model.eval().logits(batch, history=False)).isfinite().all()
        )
    empty = without_values(batch, model)
    model.train()(empty)["loss"].backward()
    with torch.no_grad():
        model.eval().logits(empty, history=False)


def test_a_bucket_is_at_most_half_larger_than_its_content():
    for size in range(1, 200):
        assert size <= bucket_size(size) <= 1.5 * size
        assert bucket_size(bucket_size(size)) == bucket_size(size)


def alike(model: Any, plain: Batch, wide: Batch) -> None:
    """The two batches have the same loss and gradients, up to the rounding of float32."""
    assert wide.signature != plain.signature
    found = []
    for batch in (plain, wide):
        model.zero_grad()
        loss = model.eval()(batch)["loss"]
        loss.backward()
        found.append(
            [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OF["actions"])
def test_nothing_is_learned_from_what_fills_a_batch_of_actions(name, feed):
    model, examples = actions_model(name, feed, dropout=0.0, category_dropout=0.0)
    plain = next(examples.epoch(5, seed=1, epoch=0))
    alike(model, plain, plain.pad_to_buckets(8))


@pytest.mark.parametrize("name", OF["search"])
def test_nothing_is_learned_from_what_fills_a_batch_of_searches(name, search_log):
    model, examples = search_model(name, search_log)
    plain = examples.collate(np.arange(9))
    alike(model, plain, plain.pad_to_buckets(8))


@pytest.mark.parametrize("name", ["tiger", "sasrec"])
def test_nothing_is_learned_from_what_fills_a_batch_of_histories(name):
    model, plain = retrieval_model(name)
    alike(model, plain, plain.pad_to_buckets(8))


@pytest.mark.parametrize("name", ["tiger", "sid_mlp", "sasrec"])
def test_a_search_of_more_requests_and_longer_histories_finds_the_same(name):
    model, _ = retrieval_model(name)
    batch = small_retrieval.make_requests(5, longest=5)
    wide = batch.histories.pad_to_buckets(6, ("B", "T"))
    assert wide.history.shape == (6, 6)
    items, scores = model.eval().recommend(batch, 4)
    more, their = model.recommend(wide, 4)
    assert torch.equal(items, more[:5])
    assert torch.allclose(scores, their[:5], atol=1e-5)


@pytest.mark.parametrize("name", ["popularity", "sasrec", "tiger", "sid_mlp"])
def test_a_replayed_search_finds_what_the_search_finds(name):
    """As on a GPU, but for the graph; a model that only counts has no weights to look
    at.
    """
    model, _ = retrieval_model(name)
    batch = small_retrieval.make_requests(5, longest=5)
    search = type(model.eval()).recommend.__wrapped__.__wrapped__
    sets = [
        model.encode_allowed(torch.arange(30) % step == 0) for step in (2, 3, 30)
    ]  # of one graph
    for allowed in [None, None, None, *sets]:
        items, scores = model.recommend(batch, 4, allowed=allowed)
        given = batch if allowed is None else replace(batch, allowed=allowed)
        with torch.no_grad():
            found = _search_by_graph(
                model,
                "a test",
                given,
                lambda given: search(model, given, 4),
                "highest",
                False,
            )
        assert torch.equal(found[0], items)
        assert torch.allclose(found[1], scores, atol=1e-5)


def test_requests_of_several_threads_get_their_own_answers():
    """A graph's answer lies where the next one will: so does that of this search."""
    model, _ = retrieval_model("sasrec")
    batches = [
        small_retrieval.make_requests(3, longest=5, seed=seed) for seed in range(4)
    ]
    wanted = [model.eval().recommend(batch, 4)[0] for batch in batches]
    kept = [torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4)]

    def search(given: HistoryBatch) -> Any:
        with torch.no_grad():
            found = type(model).recommend.__wrapped__.__wrapped__(model, given, 4)
        return [place.copy_(value) for place, value in zip(kept, found, strict=True)]

    def ask(turn: int) -> bool:
        found = _search_by_graph(
            model, "threads", batches[turn % 4], search, "highest", False
        )[0]
        return torch.equal(found, wanted[turn % 4])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(ask, range(80)))
    finally:
        sys.setswitchinterval(before)


def test_rows_that_fill_a_batch_are_no_examples(feed):
    _, examples = actions_model("attn_lfa", feed)
    found = []
    for pad_to_buckets in (False, True):
        meter = Meter(torch.device("cpu"), 1)
        batches = examples.epoch(5, seed=1, epoch=0, pad_to_buckets=pad_to_buckets)
        for _ in range(3):
            meter.next_batch(batches)
        found.append(meter.examples)
    assert found[0] == found[1] > 0


class Repeated:
    """Batches of two shapes in turn."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def steps(self, epoch: int) -> int:
        return 7

    def __call__(self, epoch: int, skip: int) -> Iterator[Batch]:
        return islice(cycle(self.batches), skip, 7)


def trained(
    model: Any,
    batches: list[Batch],
    stop: int = 0,
    state: Any = None,
    **options: Any,
) -> Any:
    """The weights after two epochs, or the state of the event after `stop` steps."""
    config = FitConfig(
        max_epochs=2,
        metric="none",
        seed=3,
        lr=0.01,
        checkpoint_every_steps=3,
        **options,
    )
    for event in fit(
        model, Repeated(batches), lambda m: ({"none": 0.0}, 1), config, state=state
    ):
        if event.step == stop and event.state:
            return {
                "weights": {n: v.clone() for n, v in model.state_dict().items()},
                "state": event.state,
            }
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_steps_on_the_graphs_own_tensors_are_the_same_steps(optimizer, monkeypatch):
    """As on a GPU, but for the graph: the third batch of a shape and all later ones are
    copied into kept tensors.
    """
    batches = [
        small_retrieval.make_requests(8, longest=5),
        small_retrieval.make_requests(8, seed=2, longest=4),
    ]
    plain = trained(retrieval_model("tiger")[0], batches, optimizer=optimizer)
    made = []
    monkeypatch.setattr(fit_module, "uses_cuda_graphs", lambda *of: True)
    monkeypatch.setattr(
        fit_module, "CudaGraphs", lambda *of: made.append(CudaGraphs(*of)) or made[-1]
    )
    replayed = trained(retrieval_model("tiger")[0], batches, optimizer=optimizer)
    assert [len(graphs._graphs) for graphs in made] == [2]
    stopped = trained(retrieval_model("tiger")[0], batches, stop=9, optimizer=optimizer)
    model = retrieval_model("tiger")[0]
    model.load_state_dict(stopped["weights"])
    resumed = trained(model, batches, state=stopped["state"], optimizer=optimizer)
    for name, value in plain.items():
        assert torch.equal(value, replayed[name]), name
        assert torch.equal(value, resumed[name]), name


def test_adagrad_of_all_parameters_at_once_is_torchs():
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5)]
    ours, theirs = ([p.clone().requires_grad_() for p in start] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.01}
    steppers = [
        (CapturableAdagrad(ours, **options), ours),
        (torch.optim.Adagrad(theirs, **options), theirs),
    ]
    for _ in range(4):
        gradients = [torch.randn_like(p) for p in start]
        for optimizer, parameters in steppers:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
