"""All seven models of actions: they are causal, rank candidates independently, ignore
padding and train every weight; and the properties of each fusion.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models import loaded_model
from models.actions.base import FusionModel
from models.actions.requests import ActionsBatch
from tests.fixtures.trainings import CASES

VARIANTS = [
    name
    for name, options in CASES.items()
    if options.get("width") == 16 and "ffn" in options and "item_ids" not in options
]
"""Models of actions that are trained by gradient, and a variant."""


def build_model(name: str, catalogue, **changes) -> FusionModel:
    """Build a small model in evaluation mode."""
    torch.manual_seed(0)
    model: Any = loaded_model.build_model(CASES[name] | changes, catalogue).eval()
    with torch.no_grad():  # away from zeros, so that a leak would show
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def predict(model: FusionModel, batch: ActionsBatch) -> tuple[Tensor, Tensor]:
    """Return logits of context events (B, T, K), with T = 0 for a model without them,
    and of candidates (B, C, K).
    """
    with torch.no_grad():
        logits = model.logits(batch, history=model.history_targets)
    num_context = logits.shape[1] - batch.candidate_item.shape[1]
    return logits[:, :num_context], logits[:, num_context:]


def find_changes(
    model: FusionModel, batch: ActionsBatch, other: ActionsBatch
) -> tuple[Tensor, Tensor]:
    """Return masks of the context events (B, T) and candidates (B, C) whose predictions
    differ between two batches.
    """
    context, candidates = predict(model, batch)
    other_context, other_candidates = predict(model, other)
    return (
        (other_context - context).abs().amax(2) > 1e-5,
        (other_candidates - candidates).abs().amax(2) > 1e-5,
    )


def edit(batch: ActionsBatch, name: str, index: tuple, value: float) -> ActionsBatch:
    """Return a copy of a batch with one value changed."""
    copy = batch.map(Tensor.clone)
    getattr(copy, name)[index] = value
    return copy


@pytest.mark.parametrize("name", VARIANTS)
def test_a_candidate_and_labels_change_no_other_prediction(name, catalogue, batch):
    model = build_model(name, catalogue)
    labels = {"label": 1 - batch.label, "candidate_label": 1 - batch.candidate_label}
    assert not any(map(torch.any, find_changes(model, batch, replace(batch, **labels))))
    for c in range(3):
        for field in ("item", "time", "feature", "viewer"):
            index, value = ((0, c, 0), 2) if field == "viewer" else ((0, c), 21)
            edited = edit(batch, f"candidate_{field}", index, value)

            context_changes, candidate_changes = find_changes(model, batch, edited)

            assert not context_changes.any()
            assert not candidate_changes[1:].any()
            assert candidate_changes[0].tolist() == [index == c for index in range(3)]


TIES = {
    "none": [0, 1, 2, 3, 4, 5, 6],
    "some": [0, 1, 1, 3, 4, 4, 4],
    "a page": [0, 0, 0, 0, 0, 5, 5],
}
"""Times of the seven context events of one user."""


def cut_before(row: ActionsBatch, index: int, num_earlier: int) -> ActionsBatch:
    """Return one user's row with context event `index` as its only candidate, after a
    context of the first `num_earlier` events.
    """
    changes = {
        name: value[:, : max(num_earlier, 1)]
        for name, value in row.tensors().items()
        if "T" in row.tensor_axes()[name]
    }
    changes["valid"] = changes["valid"] & torch.tensor(num_earlier > 0)
    for name in ("item", "time", "feature", "viewer", "label", "valid"):
        changes[f"candidate_{name}"] = getattr(row, name)[:, index : index + 1]
    return replace(row, **changes)


@pytest.mark.parametrize("times", TIES)
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "genrank"])
def test_one_pass_predicts_every_event_as_if_alone_after_the_strictly_earlier_events(
    name, times, catalogue, batch
):
    """The reference is a slow loop over the events, each a candidate after its context."""
    model = build_model(name, catalogue)
    row = replace(batch.select("B", slice(1)), time=torch.tensor([TIES[times]]))

    in_context, _ = predict(model, row)

    for index, time in enumerate(TIES[times]):
        num_earlier = sum(other < time for other in TIES[times])
        _, alone = predict(model, cut_before(row, index, num_earlier))
        torch.testing.assert_close(
            alone[0, 0], in_context[0, index], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_an_action_changes_no_prediction_of_the_same_time(name, catalogue, batch):
    model = build_model(name, catalogue)
    batch.time[0] = torch.tensor([0, 10, 10, 10, 40, 50, 50])
    batch.candidate_time[0] = torch.tensor([10, 50, 60])
    for t in range(7):
        edited = edit(batch, "action", (0, t), 3.0)
        context_changes, candidate_changes = find_changes(model, batch, edited)
        # (T + C): whether the event with the changed action is strictly earlier
        is_later = batch.count_earlier()[0] > t

        # the context of genrank has its labels as inputs, and is not trained on
        if name != "genrank":
            num_context = context_changes.shape[1]
            assert not (context_changes[0] & ~is_later[:num_context]).any()
        assert not (candidate_changes[0] & ~is_later[7:]).any()
        if name not in ("lac", "genrank"):
            changes = torch.cat([context_changes[0], candidate_changes[0]])
            assert changes.tolist() == is_later.tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_covers_events_without_their_label_as_input(name, catalogue, batch):
    """Events that another row trains on are not covered either."""
    model = build_model(name, catalogue)
    batch.learn[0, 0] = False
    logits = torch.cat(predict(model, batch), 1)
    num_events = logits.shape[1]
    label = batch.join("label")[:, -num_events:]
    is_learned = torch.cat([batch.learn, batch.candidate_valid], 1)[:, -num_events:]
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, label, reduction="none"
    ).sum(2)
    assert int(is_learned.sum()) == (9 if name == "genrank" else 9 + 10)

    outputs = model(batch)

    torch.testing.assert_close(outputs["loss"], expected[is_learned].mean())
    assert float(outputs["padding"]) == pytest.approx(1 - (11 + 9) / (4 * 10))


def test_ids_are_dropped_at_random_in_training_only(catalogue):
    model = build_model("attn_mvp", catalogue, id_dropout=0.5).train()
    inputs: list[Tensor] = []
    model.items.project.register_forward_pre_hook(
        lambda _, args: inputs.append(args[0])
    )
    item = torch.full((2000,), 5)

    model.items(item)
    model.eval().items(item)

    # the first columns of the input are the ID's embedding
    train_ids, eval_ids = (part[:, :16] for part in inputs)
    dropped_share = (train_ids == 0).all(1).double().mean()
    assert 0.45 < dropped_share < 0.55
    assert (eval_ids != 0).any(1).all()
