"""What holds for every model that recommends: empty batches, long histories, items that
are left out or alone allowed, and scores that are not finite."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from models.build import build_model
from models.cpu import kernels
from models.cpu.fast import fast_search
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
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "tiger": [{}, {"constrained": False}, {"decoder": "hf"}],
    "lc_rec": [{}, {"constrained": False}],
    "lc_rec_sid_mlp": [{}, {"constrained": False}],
    "sid_mlp": [{}, {"path": "plain"}, {"constrained": False}],
    "sid_mlp_pp": [{}, {"path": "plain"}, {"constrained": False}],
}
requests = partial(make_requests_with_lengths, items=20)
CASES = [
    (name, options, compiled)
    for name in MODELS
    for options in OPTIONS.get(name, [{}])
    for compiled in (
        [True, False] if name in ("tiger", "sid_mlp", "sid_mlp_pp") else [True]
    )
]
"""With options, and where there are compiled kernels with them and without."""


@cache
def model(name: str) -> Any:
    torch.manual_seed(0)
    codes = torch.tensor([[a, b, 0] for a in range(5) for b in range(4)])
    options = {"name": name, **MODELS[name]}
    return build_model(options, Catalogue.from_codes(codes, (5, 4, 2))).eval()


@pytest.fixture(params=CASES, ids=str)
def case(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, Any]]:
    """(a model, options of its `recommend`)."""
    name, options, compiled = request.param
    if not compiled:
        monkeypatch.setattr(kernels, "ready", lambda *tensors: False)
    return model(name), options


def test_an_empty_batch_is_an_empty_answer(case: tuple[Any, dict[str, Any]]) -> None:
    made, options = case
    items, scores = made.recommend(requests([]), 7, **options)
    assert items.shape == scores.shape == (0, 7)
    assert (items.dtype, scores.dtype) == (torch.long, torch.float32)
    assert made.measure(requests([]), **options)["examples"] == 0


def test_the_fast_path_of_an_empty_batch() -> None:
    with torch.no_grad():
        assert fast_search(model("sid_mlp"))(requests([]), 4, 3, True)[0].shape == (
            0,
            4,
        )


def test_of_a_longer_history_the_latest_items_are_read(
    case: tuple[Any, dict[str, Any]],
) -> None:
    (made, options), batch = case, requests([LONGEST + 3, 2, LONGEST, LONGEST + 1])
    rows = [
        row[:size][-LONGEST:]
        for row, size in zip(batch.history, batch.history_length, strict=True)
    ]
    by_hand = replace(
        batch,
        history=nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD),
        history_length=torch.tensor([len(row) for row in rows]),
    )
    cut = truncate_history(batch, LONGEST)
    assert torch.equal(cut.history, by_hand.history)
    assert torch.equal(cut.history_length, by_hand.history_length)
    (items, scores), (expected, values) = (
        made.recommend(given, 5, **options) for given in (batch, by_hand)
    )
    assert torch.equal(items, expected)
    torch.testing.assert_close(scores, values)


def spoil_all(made: nn.Module) -> None:
    for value in [*made.parameters(), *made.buffers()]:
        if value.is_floating_point():
            value.detach().fill_(torch.nan)


def spoil_one(made: nn.Module) -> None:
    """The last floating-point weight: of students a head's bias, which the first layers
    never meet.
    """
    value = [x for x in [*made.buffers(), *made.parameters()] if x.is_floating_point()][
        -1
    ]
    value.detach().view(-1)[0] = torch.nan


@pytest.mark.parametrize("spoil", [spoil_all, spoil_one])
def test_scores_that_are_not_finite_are_an_error(
    case: tuple[Any, dict[str, Any]], spoil: Callable[[nn.Module], None]
) -> None:
    made, options = copy.deepcopy(case[0]), case[1]
    made.recommend(
        requests([3, 2]), 20, **options
    )  # what is kept of weights is made anew
    spoil(made)
    for ask in (
        lambda: made.recommend(requests([3, 2]), 20, **options),
        lambda: made.measure(requests([3, 2])),
    ):
        with pytest.raises(
            UserError, match=r"not finite.*lower fit\.lr, or use another checkpoint"
        ):
            ask()


def test_a_missing_tail_is_no_error() -> None:
    items, scores = model("sid_mlp").recommend(requests([3]), 30)
    assert (items[0, 20:] == -1).all()
    assert scores[0, 20:].isneginf().all()


def test_known_items_are_left_out_where_that_is_asked_for(
    case: tuple[Any, dict[str, Any]],
) -> None:
    """Of histories shorter and longer than what is read, of padding, and with fewer
    items than asked for.
    """
    (built, options), batch = case, requests([1, 3, LONGEST, 15])
    for k in (1, 7, 20):
        items, scores = built.recommend(batch, k, unseen=True, **options)
        every, all_scores = built.recommend(batch, k + 15, **options)
        assert items.shape == scores.shape == (4, k)
        for row, length in enumerate(batch.history_length.tolist()):
            known = set(batch.history[row, :length].tolist())
            left = [
                (item, score)
                for item, score in zip(
                    every[row].tolist(), all_scores[row].tolist(), strict=True
                )
                if item not in known and item >= 0
            ][:k]
            left += [(-1, -math.inf)] * (k - len(left))
            assert items[row].tolist() == [item for item, _ in left]
            assert scores[row].tolist() == [score for _, score in left]


@pytest.mark.parametrize("some", [[7], [1, 2, 9, 15, 19], list(range(20))], ids=str)
def test_allowed_items_are_ranked_as_among_all(
    case: tuple[Any, dict[str, Any]], some: list[int]
) -> None:
    """Of a search that is as wide as the catalogue: the same items without the others;
    one set serves several calls.
    """
    (built, options), batch = case, requests([1, 3, LONGEST, 15])
    wide = {**options, "beam": 400} if "beam" in built.recommend_options() else options
    every, all_scores = built.recommend(batch, 20, **wide)
    allowed = built.encode_allowed(
        torch.zeros(20, dtype=torch.bool).index_fill(0, torch.tensor(some), True)
    )
    for k, unseen in ((1, False), (6, True), (20, False), (20, True)):
        items, scores = built.recommend(
            batch, k, allowed=allowed, unseen=unseen, **wide
        )
        for row, length in enumerate(batch.history_length.tolist()):
            known = batch.history[row, :length].tolist() if unseen else []
            left = [
                (item, score)
                for item, score in zip(
                    every[row].tolist(), all_scores[row].tolist(), strict=True
                )
                if item in some and item not in known
            ][:k]
            left += [(-1, -math.inf)] * (k - len(left))
            assert items[row].tolist() == [item for item, _ in left]
            assert scores[row].tolist() == pytest.approx(
                [score for _, score in left], abs=1e-5
            )
    assert torch.equal(built.recommend(batch, 20, **wide)[0], every)
