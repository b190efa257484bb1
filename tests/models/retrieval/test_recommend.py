"""Checks of every model that recommends.

They cover empty batches, long histories, unseen and allowed items, and scores that are
not finite.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.build import build_model
from models.cpu import kernels
from models.dataset.encoding import PAD
from models.retrieval.data import Catalogue
from models.retrieval.recommend import truncate_history
from models.storage.tables import UserError
from tests.fixtures.small_retrieval import make_requests_with_lengths

LONGEST = 6
TIGER = {
    "d_model": 16,
    "d_ff": 24,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "n_user_tokens": 2,
    "max_history": LONGEST,
}
STUDENT = {
    "teacher_model": TIGER,
    "attention_heads": 2,
    "attention_width": 16,
    "ffn_width": 16,
    "head_width": 12,
    "beam": 8,
}
LC_REC = {
    "width": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_width": 24,
    "beam": 8,
    "max_history": LONGEST,
}
MODELS: dict[str, dict[str, Any]] = {
    "popularity": {},
    "own_items": {"max_history": LONGEST},
    "item_knn": {"max_history": LONGEST},
    "ease": {"max_history": LONGEST},
    "sasrec": {
        "dim": 8,
        "num_layers": 1,
        "num_heads": 1,
        "feedforward_dim": 8,
        "max_history": LONGEST,
    },
    "tiger": {**TIGER, "beam": 8},
    "lc_rec": LC_REC,
    "lc_rec_sid_mlp": {
        "teacher_model": {"name": "lc_rec", **LC_REC},
        "attention_heads": 2,
        "width": 16,
        "ffn_width": 16,
        "head_width": 12,
        "beam": 8,
    },
    "sid_mlp": STUDENT,
    "sid_mlp_pp": {
        **STUDENT,
        "encoder_layers": 1,
        "encoder_width": 16,
        "end_to_end": True,
    },
}
"""Small options of each model."""
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "tiger": [{}, {"constrained": False}],
    "lc_rec": [{}, {"constrained": False}],
    "lc_rec_sid_mlp": [{}, {"constrained": False}],
    "sid_mlp": [{}, {"constrained": False}],
    "sid_mlp_pp": [{}, {"constrained": False}],
}
"""Options of `recommend` to check besides the defaults."""
COMPILED = ("tiger", "sid_mlp", "sid_mlp_pp")
"""Models that search with compiled kernels."""
ITEMS = 20
make_requests = partial(make_requests_with_lengths, items=ITEMS)

Options = dict[str, Any]
Case = tuple[Any, Options]
"""A model and options of its `recommend`."""


def list_cases() -> list[tuple[str, Options, bool]]:
    """Return model, options, and whether kernels are compiled, of each case."""
    cases = []
    for name in MODELS:
        for options in OPTIONS.get(name, [{}]):
            cases.append((name, options, True))
            if name in COMPILED:
                cases.append((name, options, False))
    return cases


@cache
def build(name: str) -> Any:
    """Return a model of 20 items."""
    torch.manual_seed(0)
    codes = torch.cartesian_prod(torch.arange(5), torch.arange(4), torch.tensor([0]))
    options = {"name": name, **MODELS[name]}
    return build_model(options, Catalogue.from_codes(codes, (5, 4, 2))).eval()


@pytest.fixture(params=list_cases(), ids=str)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A model and options of its `recommend`."""
    name, options, compiled = request.param
    if not compiled:
        monkeypatch.setattr(kernels, "ready", lambda *tensors: False)
    return build(name), options


def test_an_empty_batch_gives_an_empty_ranking(case: Case) -> None:
    model, options = case
    items, scores = model.recommend(make_requests([]), 7, **options)
    assert items.shape == scores.shape == (0, 7)
    assert (items.dtype, scores.dtype) == (torch.long, torch.float32)
    assert model.measure(make_requests([]), **options)["examples"] == 0


def test_only_the_latest_items_of_a_long_history_are_read(case: Case) -> None:
    model, options = case
    batch = make_requests([LONGEST + 3, 2, LONGEST, LONGEST + 1])
    rows = []
    for history, length in zip(batch.history, batch.history_length, strict=True):
        rows.append(history[:length][-LONGEST:])
    latest = replace(
        batch,
        history=nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD),
        history_length=torch.tensor([len(row) for row in rows]),
    )

    truncated = truncate_history(batch, LONGEST)
    items, scores = model.recommend(batch, 5, **options)

    assert torch.equal(truncated.history, latest.history)
    assert torch.equal(truncated.history_length, latest.history_length)
    expected_items, expected_scores = model.recommend(latest, 5, **options)
    assert torch.equal(items, expected_items)
    torch.testing.assert_close(scores, expected_scores)


def set_all_to_nan(model: nn.Module) -> None:
    """Set all weights of a model to NaN."""
    for value in [*model.parameters(), *model.buffers()]:
        if value.is_floating_point():
            value.detach().fill_(torch.nan)


def set_one_to_nan(model: nn.Module) -> None:
    """Set one number of a model's last weight to NaN.

    Students have the bias of a head there, which the first layers do not read.
    """
    values = [*model.buffers(), *model.parameters()]
    last = [value for value in values if value.is_floating_point()][-1]
    last.detach().view(-1)[0] = torch.nan


@pytest.mark.parametrize("spoil", [set_all_to_nan, set_one_to_nan])
def test_scores_that_are_not_finite_are_rejected(
    case: Case, spoil: Callable[[nn.Module], None]
) -> None:
    model, options = copy.deepcopy(case[0]), case[1]
    batch = make_requests([3, 2])
    # tables that were cached before must be computed again from the new weights
    model.recommend(batch, ITEMS, **options)
    spoil(model)

    message = r"not finite.*lower fit\.lr, or use another checkpoint"
    with pytest.raises(UserError, match=message):
        model.recommend(batch, ITEMS, **options)
    with pytest.raises(UserError, match=message):
        model.measure(batch)


def test_more_items_than_the_catalogue_has_leave_an_empty_tail() -> None:
    items, scores = build("sid_mlp").recommend(make_requests([3]), ITEMS + 10)
    assert (items[0, ITEMS:] == -1).all()
    assert scores[0, ITEMS:].isneginf().all()


def filter_ranking(
    items: Tensor, scores: Tensor, k: int, candidates: set[int]
) -> tuple[list[int], list[float]]:
    """Return the k best items of a ranking (n,) among candidates, and their scores.

    Items are -1 and scores -inf where there are fewer than k.
    """
    best_items, best_scores = [], []
    for item, score in zip(items.tolist(), scores.tolist(), strict=True):
        if item in candidates and len(best_items) < k:
            best_items.append(item)
            best_scores.append(score)
    missing = k - len(best_items)
    return best_items + [-1] * missing, best_scores + [-math.inf] * missing


def test_unseen_drops_the_items_of_the_history(case: Case) -> None:
    """Histories are shorter and longer than a model reads."""
    model, options = case
    batch = make_requests([1, 3, LONGEST, 15])
    for k in (1, 7, 20):
        all_items, all_scores = model.recommend(batch, k + 15, **options)
        items, scores = model.recommend(batch, k, unseen=True, **options)
        assert items.shape == scores.shape == (4, k)
        for row, length in enumerate(batch.history_length.tolist()):
            unseen = set(range(ITEMS)) - set(batch.history[row, :length].tolist())
            expected_items, expected_scores = filter_ranking(
                all_items[row], all_scores[row], k, unseen
            )
            assert items[row].tolist() == expected_items
            assert scores[row].tolist() == expected_scores


@pytest.mark.parametrize("allowed", [[7], [1, 2, 9, 15, 19], list(range(20))], ids=str)
def test_allowed_items_are_ranked_as_among_all(case: Case, allowed: list[int]) -> None:
    """A search as wide as the catalogue drops the other items and changes no score.

    One set serves several calls.
    """
    model, options = case
    batch = make_requests([1, 3, LONGEST, 15])
    if "beam" in model.recommend_options():
        options = {**options, "beam": 400}
    all_items, all_scores = model.recommend(batch, ITEMS, **options)
    mask = torch.zeros(ITEMS, dtype=torch.bool)
    mask[allowed] = True
    encoded = model.encode_allowed(mask)

    for k, unseen in ((1, False), (6, True), (20, False), (20, True)):
        items, scores = model.recommend(
            batch, k, allowed=encoded, unseen=unseen, **options
        )
        for row, length in enumerate(batch.history_length.tolist()):
            candidates = set(allowed)
            if unseen:
                candidates -= set(batch.history[row, :length].tolist())
            expected_items, expected_scores = filter_ranking(
                all_items[row], all_scores[row], k, candidates
            )
            assert items[row].tolist() == expected_items
            assert scores[row].tolist() == pytest.approx(expected_scores, abs=1e-5)

    assert torch.equal(model.recommend(batch, ITEMS, **options)[0], all_items)
