"""Checks of every model that ranks candidates: the models of search and of actions.

The models read tables. Requests are independent, nothing after a request changes its
scores, training reaches every weight, and a checkpoint restores the model.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.schemas import Inputs, SequencesInfo
from core.tables import open_table
from models import registry
from models.dataset.dataset import Dataset
from models.evaluation import measure_examples
from models.loaded_model import load_catalogue, load_model
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import fit
from models.training_run import TrainingRun
from tests.fixtures import trainings
from tests.fixtures.actions_tables import write_actions
from tests.fixtures.golden import check_golden_model
from tests.fixtures.search_tables import write_search
from tests.fixtures.training_tables import change_sequences
from tests.fixtures.trainings import build_training, first_epoch, train_steps

CASES = {
    case: options
    for case, options in trainings.CASES.items()
    if registry.find(options["name"]).kind.name != "retrieval"
}
"""Options of the models and of their variants."""
GRADIENT = [
    case
    for case, options in CASES.items()
    if registry.find(options["name"]).trains_by_gradient
]
METRICS = {"search": "gauc", "actions": "mean/rig"}

Build = Callable[..., TrainingRun]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Inputs]:
    """Tables of each kind."""
    folder = tmp_path_factory.mktemp("rankers")
    tables, text = write_search(folder / "search")
    actions = write_actions(folder / "actions", viewers=True)
    return {"search": Inputs(tables, text=text), "actions": Inputs(actions)}


@pytest.fixture(scope="module")
def build(inputs) -> Build:
    """A function that builds the training of a case, with weights away from zero."""

    @cache
    def build_case(case: str) -> TrainingRun:
        kind = registry.find(CASES[case]["name"]).kind.name
        fit = FitConfig(batch_size=16, metric=METRICS[kind], seed=1)
        run = build_training(CASES[case], fit, inputs[kind])
        if case not in GRADIENT:
            run.fit_in_one_pass()
        generator = torch.Generator().manual_seed(0)
        for parameter in run.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.add_(0.1 * noise)
        run.model.eval()
        return run

    return build_case


@torch.no_grad()
def score(model: Any, examples: Any, rows: Any) -> Tensor:
    """Return the scores (N, K) of the candidates of some examples."""
    return model.score(examples.collate(np.asarray(rows)))


@pytest.mark.parametrize("case", CASES)
def test_scores_of_an_example_do_not_depend_on_the_batch(case, build):
    run = build(case)
    rows = range(7)
    together = score(run.model, run.val, rows)
    alone = [score(run.model, run.val, [row]) for row in rows]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def change_future(row: dict[str, Any]) -> dict[str, Any]:
    """Change the labels of the validation, and all events after it."""
    row = dict(row)
    if "tasks" in row:
        begin, end = row["train_end"], row["val_end"]
        for name, value in {"tasks": [True] * 3, "actions": [1.0] * 3}.items():
            row[name] = row[name][:begin] + [value] * (len(row[name]) - begin)
        row["item_index"] = row["item_index"][:end] + [0] * (len(row["tasks"]) - end)
        return row
    validation, test = row["requests"][-2:]
    end = validation["history_end"]
    for name in ("item_index", "query_index"):
        row[name] = row[name][:end] + [0] * (len(row[name]) - end)
    for request in (validation, test):
        for name in ("label_click", "label_purchase"):
            request[name] = [not label for label in request[name]]
    test["candidates"] = [0] * len(test["candidates"])
    return row


@pytest.mark.parametrize("case", CASES)
def test_labels_and_later_events_change_no_score(case, build, inputs, tmp_path):
    run = build(case)
    tables = inputs[run.model.kind.name].tables
    other = str(shutil.copytree(tables, tmp_path / "tables"))
    change_sequences(other, change_future)
    sequences = open_table(f"{other}/sequences", SequencesInfo)
    selection = run.model.selection(run.catalogue, "val")
    examples = Dataset(run.model.kind, sequences, selection)
    rows = range(len(run.val))
    assert len(examples) == len(rows)
    scores = score(run.model, run.val, rows)
    assert torch.equal(score(run.model, examples, rows), scores)


@pytest.mark.parametrize("case", GRADIENT)
def test_training_changes_every_weight_and_can_be_repeated(case, build):
    run = build(case)
    model = copy.deepcopy(run.model).train()
    again = copy.deepcopy(model)

    batches = [*islice(first_epoch(run), 2)]
    losses = train_steps(model, batches, 1e-3)

    assert train_steps(again, batches, 1e-3) == losses
    weights = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(weight, repeated) for weight, repeated in weights)
    before = dict(run.model.named_parameters())
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), name
        assert weight.isfinite().all()


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_scores_are_those_of_the_golden_file(case, build):
    run = build(case)
    scores = score(run.model, run.val, range(len(run.val)))
    torch.manual_seed(0)
    model = copy.deepcopy(run.model).train()
    check_golden_model(case, scores, model, next(first_epoch(run)))


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_restores_the_model(case, build, inputs, tmp_path):
    run = build(case)
    name = run.model.name
    checkpoint.save(tmp_path, run.model, run.checkpoint(epoch=1))

    loaded, metadata = load_model(
        tmp_path, load_catalogue(name, inputs[run.model.kind.name])
    )

    assert set(metadata.sha256) == {"model.safetensors"}
    assert {"sequences", "items"} <= metadata.hashes.keys()
    rows = range(len(run.val))
    expected = score(run.model, run.val, rows)
    assert torch.equal(score(loaded, run.val, rows), expected)


@pytest.mark.parametrize("case", ["qgs", "attn_mvp"])
def test_training_lowers_the_loss_and_reports_all_metrics(case, inputs):
    kind = registry.find(CASES[case]["name"]).kind.name
    config = FitConfig(
        lr=0.01,
        warmup_share=0.0,
        batch_size=8,
        max_epochs=4,
        metric=METRICS[kind],
    )
    run = build_training(CASES[case], config, inputs[kind])

    events = list(fit(run.model, run.train, run.validate, run.fit))

    ends = [event for event in events if event.ends_epoch]
    assert ends[-1].loss < ends[0].loss
    assert set(ends[-1].metrics) == set(run.model.metric_names(run.catalogue))
    measured = measure_examples(
        run.model, run.val, batch_size=5, device=torch.device("cpu")
    )
    assert run.model.metric_means(measured.sums) == pytest.approx(
        ends[-1].metrics, rel=1e-6, nan_ok=True
    )
