"""What holds for every model that recommends: empty batches, long histories, and scores that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_retrieval import requests_of
from torch import nn

from models import registry
from models.cpu import kernels
from models.retrieval.data import PAD, Catalogue
from models.retrieval.metrics import measure
from models.retrieval.parts import History
from models.retrieval.recommend import latest
from models.retrieval.search.beam import beam_search, unconstrained_beam_search
from models.retrieval.search.export import export_student, load_exported
from models.tables import UserError

LONGEST = 6
TIGER = {"d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 8, "num_encoder_layers": 1, "num_decoder_layers": 1,
         "n_user_tokens": 2, "max_history": LONGEST}  # fmt: skip
STUDENT = {"teacher_model": TIGER, "attention_heads": 2, "attention_width": 16, "ffn_width": 16, "head_width": 12,
           "beam": 8}  # fmt: skip
LC_REC = {"width": 16, "num_layers": 2, "num_heads": 2, "ffn_width": 24, "beam": 8, "max_history": LONGEST}
MODELS: dict[str, dict[str, Any]] = {
    "popularity": {},
    "sasrec": {"dim": 8, "num_layers": 1, "num_heads": 1, "feedforward_dim": 8, "max_history": LONGEST},
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
    "sid_mlp_pp": {**STUDENT, "encoder_layers": 1, "encoder_width": 16, "end_to_end": True},
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "tiger": [{}, {"constrained": False}, {"decoder": "hf"}],
    "lc_rec": [{}, {"constrained": False}],
    "lc_rec_sid_mlp": [{}, {"constrained": False}],
    "sid_mlp": [{}, {"path": "plain"}, {"constrained": False}],
    "sid_mlp_pp": [{}, {"path": "plain"}, {"constrained": False}],
}
requests = partial(requests_of, items=20)
CASES = [(name, options) for name in MODELS for options in OPTIONS.get(name, [{}])]


def model(name: str) -> Any:
    torch.manual_seed(0)
    codes = torch.tensor([[a, b, 0] for a in range(5) for b in range(4)])
    config = registry.config_from_dict({"name": name, **MODELS[name]})
    return registry.build(config, Catalogue.from_codes(codes, (5, 4, 2))).eval()


@pytest.fixture(params=["kernels", "PyTorch"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the compiled kernels and without."""
    if request.param == "PyTorch":
        monkeypatch.setattr(kernels, "ready", lambda *tensors: False)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_empty_batch_is_an_empty_answer(name: str, options: dict[str, Any]) -> None:
    items, scores = model(name).recommend(requests([]), 7, **options)
    assert items.shape == scores.shape == (0, 7)
    assert (items.dtype, scores.dtype) == (torch.long, torch.float32)
    assert measure(model(name), requests([]), **options)["examples"] == 0


@pytest.mark.usefixtures("engine")
def test_an_empty_batch_in_the_parts() -> None:
    tiger, student = model("tiger"), model("sid_mlp")
    source = torch.zeros(0, 3, 16)
    with torch.no_grad():
        for search in (beam_search, unconstrained_beam_search):
            scorer = tiger.decoder.scorer(History(source, torch.zeros(0, dtype=torch.long)))
            assert search(scorer, tiger.trie, 4, 3)[0].shape == (0, 4)
        from models.cpu.fast import fast_search

        assert fast_search(student)(requests([]), 4, 3, True)[0].shape == (0, 4)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_of_a_longer_history_the_latest_items_are_read(name: str, options: dict[str, Any]) -> None:
    made, batch = model(name), requests([LONGEST + 3, 2, LONGEST, LONGEST + 1])
    rows = [row[:size][-LONGEST:] for row, size in zip(batch["history"], batch["history_length"], strict=True)]
    by_hand = {
        **batch,
        "history": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD),
        "history_length": torch.tensor([len(row) for row in rows]),
    }
    cut = latest(batch, LONGEST)
    assert torch.equal(cut["history"], by_hand["history"])
    assert torch.equal(cut["history_length"], by_hand["history_length"])
    (items, scores), (expected, values) = (made.recommend(given, 5, **options) for given in (batch, by_hand))
    assert torch.equal(items, expected)
    torch.testing.assert_close(scores, values)


def spoil_all(made: nn.Module) -> None:
    for value in [*made.parameters(), *made.buffers()]:
        if value.is_floating_point():
            value.detach().fill_(torch.nan)


def spoil_one(made: nn.Module) -> None:
    """The last floating-point weight: of students a head's bias, which the first layers never meet."""
    value = [x for x in [*made.buffers(), *made.parameters()] if x.is_floating_point()][-1]
    value.detach().view(-1)[0] = torch.nan


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("spoil", [spoil_all, spoil_one])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_scores_that_are_not_finite_are_an_error(
    name: str, options: dict[str, Any], spoil: Callable[[nn.Module], None]
) -> None:
    made = model(name)
    made.recommend(requests([3, 2]), 20, **options)  # what is kept of weights is made anew
    spoil(made)
    for ask in (lambda: made.recommend(requests([3, 2]), 20, **options), lambda: measure(made, requests([3, 2]))):
        with pytest.raises(UserError, match=r"not finite.*lower fit\.lr, or use another checkpoint"):
            ask()


def test_a_missing_tail_is_no_error() -> None:
    items, scores = model("sid_mlp").recommend(requests([3]), 30)
    assert (items[0, 20:] == -1).all()
    assert scores[0, 20:].isneginf().all()


@pytest.mark.long
def test_an_exported_student_answers_an_empty_batch(tmp_path: Path) -> None:
    export_student(model("sid_mlp"), tmp_path / "student.pt2", 4)
    empty = requests([])
    items, scores = load_exported(tmp_path / "student.pt2")(empty["history"], empty["history_length"], empty["user"])
    assert items.shape == scores.shape == (0, 4)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_known_items_are_left_out_where_that_is_asked_for(name: str, options: dict[str, Any]) -> None:
    """Of histories shorter and longer than what is read, of padding, and with fewer items than asked for."""
    batch, built = requests([1, 3, LONGEST, 15]), model(name)
    for k in (1, 7, 20):
        items, scores = built.recommend(batch, k, unseen=True, **options)
        every, all_scores = built.recommend(batch, k + 15, **options)
        assert items.shape == scores.shape == (4, k)
        for row, length in enumerate(batch["history_length"].tolist()):
            known = set(batch["history"][row, :length].tolist())
            left = [
                (item, score)
                for item, score in zip(every[row].tolist(), all_scores[row].tolist(), strict=True)
                if item not in known and item >= 0
            ][:k]
            left += [(-1, -math.inf)] * (k - len(left))
            assert items[row].tolist() == [item for item, _ in left]
            assert scores[row].tolist() == [score for _, score in left]
