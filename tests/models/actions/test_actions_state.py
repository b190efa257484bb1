"""States of users: appended to event by event or page by page, they score as one pass over the history does."""

from __future__ import annotations

import pytest
import torch

from models.actions.base import ActionsModel
from tests.models.actions.test_actions_models import make

KEPT = ("attn_mvp", "attn_mvp_no_lfa", "attn_lfa")
LONGEST = 7


def part(batch: dict, begin: int, end: int) -> dict[str, torch.Tensor]:
    """Events `begin` to `end` of every user's context, and all candidates."""
    return {
        key: value if key.startswith("candidate") else value[:, begin:end]
        for key, value in batch.items()
    }


def latest(model: ActionsModel, batch: dict, count: torch.Tensor) -> torch.Tensor:
    """Logits of the pass over the `count` (B,) latest events of every user."""
    place = (
        batch["valid"].sum(1)[:, None]
        - count[:, None]
        + torch.arange(max(1, int(count.max())))
    )
    rows, kept = (
        torch.arange(len(count))[:, None],
        place < batch["valid"].sum(1)[:, None],
    )
    place = place.clamp(max=batch["item"].shape[1] - 1)
    some = {
        key: value if key.startswith("candidate") else value[rows, place]
        for key, value in batch.items()
    }
    with torch.no_grad():
        return model.score(some | {"valid": kept})


@pytest.mark.parametrize("steps", [[1] * 7, [7], [2, 0, 4, 1]])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", KEPT)
def test_a_state_scores_as_one_pass(name, tied, steps, catalogue, batch):
    model = make(name, catalogue, max_history=LONGEST, negative_rate=0.2)
    if tied:
        batch["time"] = batch["time"] // 30 * 30
    state, begin = model.new_state(4), 0
    for size in steps:
        model.append(state, part(batch, begin, begin + size))
        begin += size
        expected = latest(
            model,
            batch | {"valid": batch["valid"] & (torch.arange(7) < begin)},
            state.count,
        )
        torch.testing.assert_close(
            model.score_state(state, batch), expected, rtol=1e-5, atol=1e-5
        )
    assert state.count.tolist() == [7, 3, 1, 0]


@pytest.mark.parametrize("name", KEPT)
def test_a_state_slides_past_the_longest_history(name, catalogue, batch):
    model = make(name, catalogue, max_history=4)
    state = model.new_state(4)
    for end, count in enumerate((1, 2, 3, 4, 3, 4, 3), 1):
        model.append(state, part(batch, end - 1, end))
        assert int(state.count[0]) == count
        seen = batch | {"valid": batch["valid"] & (torch.arange(7) < end)}
        torch.testing.assert_close(
            model.score_state(state, batch),
            latest(model, seen, state.count),
            rtol=1e-5,
            atol=1e-5,
        )
    assert state.count.tolist() == [3, 3, 1, 0]


def test_what_cannot_be_kept_is_refused(catalogue, batch):
    assert make("lac", catalogue).caches is None
    model = make("attn_mvp", catalogue, max_history=4)
    with pytest.raises(ValueError, match="7 events at once exceed max_history 4"):
        model.append(model.new_state(4), batch)
    state = model.append(model.new_state(4), part(batch, 3, 5))
    with pytest.raises(ValueError, match="an event is before one that is kept"):
        model.append(state, part(batch, 2, 3))
