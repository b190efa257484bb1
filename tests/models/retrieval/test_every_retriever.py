"""Checks of every retrieval model.

Search is compared with its definition, rows are independent, training reaches all
trained weights, and a checkpoint restores the model.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from core.errors import UserError
from models import registry
from models.cpu import kernels
from models.dataset.batch import PAD
from models.loaded_model import build_model, load_model
from models.retrieval.data import InteractionBatch, RequestBatch
from models.retrieval.distillation.teacher import TaughtModel, build_teacher
from models.retrieval.retriever import History
from models.retrieval.tiger.decoder import T5Decoder
from models.training import checkpoint
from tests.fixtures import trainings
from tests.fixtures.golden import check_golden_model
from tests.fixtures.small_retrieval import (
    ITEMS,
    SIZES,
    build_catalogue,
    make_requests,
    make_requests_with_lengths,
    make_windows,
)
from tests.fixtures.trainings import train_steps

ABLATIONS = Path(__file__).parents[3] / "jobs/configs/retrieval/ablations"
ALL = {
    case: options
    for case, options in trainings.CASES.items()
    if registry.find(options["name"]).kind.name == "retrieval"
}
"""Options of the models and of their variants."""
for path in sorted(ABLATIONS.glob("sid_mlp/*.yaml")) + sorted(
    ABLATIONS.glob("one_layer/*.yaml")
):
    model = path.parent.name
    changes = yaml.safe_load(path.read_text())["model"]
    ALL[f"{model} {path.stem}"] = {**ALL[model], **changes}
SASREC = ("sasrec", "sasrec sids", "sid_sasrec", "sid_sasrec path")
WITHOUT_DECODER = (
    "popularity",
    "own_items",
    "item_knn",
    "sequential_rules",
    "ease",
    *SASREC,
)
CASES = [case for case in ALL if case not in WITHOUT_DECODER]
"""The models with a backbone and a decoder of semantic IDs, and their variants."""
LONGEST = 6
"""Number of behaviours that the models read."""


def build(case: str) -> Any:
    """Return a model with its teacher, if it needs one.

    Its log-probabilities are far from uniform.
    """
    torch.manual_seed(1)
    model: Any = build_model(ALL[case], build_catalogue())
    if not model.trains_by_gradient:
        batch = make_requests(60, seed=3)
        rows = batch.user_row // 4
        pairs = InteractionBatch(user_row=rows, target=batch.target)
        train = [batch if model.example_unit == "request" else pairs]
        if model.stops_early:
            model.fit_in_one_pass(train, [make_requests(20, seed=4)])
        else:
            model.fit_in_one_pass(train)
        return model.eval()
    if isinstance(model, TaughtModel):
        teacher_model = build_teacher(model.config, build_catalogue())
        model.set_teacher(teacher_model.requires_grad_(False).eval())
    module = model if case in SASREC else model.decoder
    if case == "lc_rec":
        module = model.backbone
    std = 0.3 if case == "lc_rec" else 0.5
    for key, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dim() == 2 and "readout" not in key:
            torch.nn.init.normal_(parameter.data, std=std)
    return model.eval()


@cache
def build_case(case: str) -> Any:
    """Return the model of a case, shared by the tests that do not change it."""
    return build(case)


def option_names(case: str) -> set[str]:
    """Return the names of the options of a case's `recommend`."""
    return {field.name for field in fields(build_case(case).options_class)}


def beam_options(case: str, beam: int) -> dict[str, int]:
    """Return the options of a search with `beam` beams, none without a search."""
    return {"beam": beam} if "beam" in option_names(case) else {}


def score_options(case: str) -> list[dict[str, str]]:
    """Return the choices of what log-probabilities are normalised over."""
    if "scores" in option_names(case):
        return [{"scores": "codebook"}, {"scores": "children"}]
    return [{}]


def level_log_probs(decoder: Any, history: History, codes: Tensor) -> list[Tensor]:
    """Return the log-probabilities (B, C_l) of each level, given the codes before.

    TIGER's decoder normalises over its vocabulary, all others over the codebook.

    Args:
        decoder: A decoder.
        history: States of B histories.
        codes: (B, L) codes.
    """
    over_vocabulary = isinstance(decoder, T5Decoder) and not decoder.codebooks
    all_logits = decoder.teacher_forced(history, codes)
    levels = []
    for level, logits in enumerate(all_logits, start=decoder.first_level):
        first_token, _ = decoder.span(level)
        first = decoder.tokens.first[level] - first_token
        codebook = slice(first, first + SIZES[level])
        if over_vocabulary:
            levels.append(logits.log_softmax(-1)[:, codebook])
        else:
            levels.append(logits[:, codebook].log_softmax(-1))
    return levels


def normalise_over_children(levels: list[Tensor], codes: Tensor) -> list[Tensor]:
    """Return log-probabilities that are normalised over the catalogue's children.

    The first level stays normalised over its codebook.

    Args:
        levels: (N, C_l) log-probabilities of each level after the codes of item n.
        codes: (N, L) codes of the items.
    """
    normalised = levels[:1]
    for level, log_probs in enumerate(levels[1:], start=1):
        prefixes = codes[:, :level]
        same_prefix = (prefixes[:, None] == prefixes[None]).all(-1)  # (N, N)
        counts = torch.zeros(ITEMS, SIZES[level])
        counts.index_add_(1, codes[:, level], same_prefix.float())
        children = log_probs.masked_fill(counts == 0, -torch.inf)
        normalised.append(children.log_softmax(-1))
    return normalised


def repeat_row(batch: RequestBatch, row: int, count: int = 1) -> RequestBatch:
    """Return a batch that holds one request of `batch`, `count` times."""
    return batch.map(lambda value: value[row : row + 1].expand(count, *value.shape[1:]))


def score_catalogue(
    case: str, batch: RequestBatch, options: dict[str, str]
) -> list[list[Tensor]]:
    """Return the log-probabilities (N, C_l) after the codes of each item, by request.

    Args:
        case: The case of the model.
        batch: Requests.
        options: An element of `score_options(case)`.
    """
    model, codes = build_case(case), build_catalogue().sids
    decoder = model.reused if "atspeed" in case else model.decoder
    by_request = []
    for row in range(batch.num_rows):
        history = model.encode(repeat_row(batch, row, ITEMS))
        levels = level_log_probs(decoder, history, codes)
        if decoder.first_level:
            teacher_levels = level_log_probs(model.reused, history, codes)
            levels = teacher_levels[: decoder.first_level] + levels
        if options.get("scores") == "children":
            levels = normalise_over_children(levels, codes)
        by_request.append(levels)
    return by_request


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_beam_as_wide_as_the_catalogue_scores_every_item(case):
    """Compare with the sum of the log-probabilities of the item's codes."""
    model, batch, codes = build_case(case), make_requests(3), build_catalogue().sids
    for options in score_options(case):
        by_request = score_catalogue(case, batch, options)

        items, scores = model.recommend(batch, ITEMS + 2, beam=1000, **options)

        assert items[:, ITEMS:].tolist() == [[-1, -1]] * 3
        assert scores[:, ITEMS:].isneginf().all()
        for row, levels in enumerate(by_request):
            total = torch.zeros(ITEMS)
            for level, log_probs in enumerate(levels):
                total += log_probs.gather(1, codes[:, level, None])[:, 0]
            ranked, row_scores = items[row, :ITEMS], scores[row, :ITEMS]
            assert sorted(ranked.tolist()) == list(range(ITEMS))
            torch.testing.assert_close(row_scores, total[ranked], rtol=1e-4, atol=1e-4)
            assert (row_scores.diff() <= 0).all()


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_compiled_kernels_and_the_fast_path_change_no_ranking(case, monkeypatch):
    model, batch = build_case(case), make_requests(3)
    for options in score_options(case):
        options = {**options, **beam_options(case, 1000)}
        items, scores = model.recommend(batch, ITEMS + 2, **options)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "ready", lambda *tensors: False)
            plain_items, plain_scores = model.recommend(batch, ITEMS + 2, **options)
        torch.testing.assert_close(plain_scores, scores, rtol=1e-4, atol=1e-5)
        assert plain_items.tolist() == items.tolist()


ALLOWED = [
    [4],
    [0, 3, 11, 17, 18, 22, 29],
    list(range(0, ITEMS, 2)),
    list(range(ITEMS)),
]
"""Sets of allowed items."""


@pytest.mark.parametrize("case", ALL)
def test_recommendations_depend_on_the_latest_history_alone(case):
    """Other requests, padding, targets and older behaviours change nothing."""
    model, options = build_case(case), beam_options(case, 8)
    batch = make_requests_with_lengths([LONGEST + 3, 2, LONGEST, LONGEST + 1, 1, 0])
    items, scores = model.recommend(batch, 6, **options)
    assert all(len(set(row)) == 6 for row in items.tolist())

    wider = replace(batch, history=functional.pad(batch.history, (0, 1), value=PAD))
    variants = [(wider, slice(6))]
    for row, length in enumerate(batch.history_length.tolist()):
        request = repeat_row(batch, row)
        latest = request.history[:, : max(1, length)][:, -LONGEST:]
        length = torch.tensor([min(length, LONGEST)])
        if case == "popularity":
            latest, length = request.history, request.history_length
        alone = replace(request, history=latest, history_length=length)
        variants.append((alone, slice(row, row + 1)))

    for variant, rows in variants:
        other_target = replace(variant, target=(variant.target + 1) % ITEMS)
        variant_items, variant_scores = model.recommend(other_target, 6, **options)
        assert variant_items.tolist() == items[rows].tolist()
        torch.testing.assert_close(variant_scores, scores[rows], rtol=1e-4, atol=1e-4)

    empty = make_requests_with_lengths([])
    assert model.recommend(empty, 7)[0].shape == (0, 7)
    assert model.measure(empty)["examples"] == 0


def filter_ranking(
    items: Tensor, scores: Tensor, k: int, candidates: set[int]
) -> tuple[list[int], list[float]]:
    """Return the k best items of a ranking (n,) among candidates, and their scores.

    Items are -1 and scores -inf where there are fewer than k.
    """
    ranking = zip(items.tolist(), scores.tolist(), strict=True)
    best = [pair for pair in ranking if pair[0] in candidates][:k]
    best += [(-1, -math.inf)] * (k - len(best))
    best_items, best_scores = zip(*best, strict=True)
    return list(best_items), list(best_scores)


@pytest.mark.parametrize("case", ALL)
def test_allowed_and_unseen_items_are_ranked_as_among_all(case):
    """A search as wide as the catalogue drops the other items and changes no score.

    Histories are shorter and longer than a model reads.
    """
    model, options = build_case(case), beam_options(case, 1000)
    batch = make_requests_with_lengths([1, 3, LONGEST, 15])
    all_items, all_scores = model.recommend(batch, ITEMS, **options)

    for allowed in ALLOWED:
        mask = torch.isin(torch.arange(ITEMS), torch.tensor(allowed))
        encoded = model.encode_allowed(mask)
        for k, unseen in ((1, False), (6, True), (ITEMS, True)):
            items, scores = model.recommend(
                batch, k, allowed=encoded, unseen=unseen, **options
            )
            for row, length in enumerate(batch.history_length.tolist()):
                seen = batch.history[row, :length].tolist() if unseen else []
                expected_items, expected_scores = filter_ranking(
                    all_items[row], all_scores[row], k, set(allowed) - set(seen)
                )
                assert items[row].tolist() == expected_items
                assert scores[row].tolist() == pytest.approx(expected_scores, abs=1e-4)


@pytest.mark.parametrize("spoils_all", [True, False])
@pytest.mark.parametrize("case", ALL)
def test_scores_that_are_not_finite_are_rejected(case, spoils_all):
    """All weights are NaN, or the last one, of a head that the first layers do not read."""
    model, batch = copy.deepcopy(build_case(case)), make_requests(2)
    options = beam_options(case, 1000)
    # tables that were cached before must be computed again from the new weights
    model.recommend(batch, ITEMS, **options)
    values = [*model.buffers(), *model.parameters()]
    values = [value for value in values if value.is_floating_point()]
    for value in values if spoils_all else values[-1:]:
        value.detach().fill_(torch.nan)

    for call in (model.recommend, model.measure):
        arguments = (ITEMS,) if call == model.recommend else ()
        with pytest.raises(UserError, match="not finite"):
            call(batch, *arguments, **options)


def make_training_batch(model: Any, count: int) -> Any:
    """Return requests, as windows of one request each for a model of windows."""
    batch = make_requests(count)
    if model.example_unit != "user":
        return batch
    return make_windows(batch)


@pytest.mark.parametrize("case", ALL)
def test_losses_gradients_and_scores_are_those_of_the_golden_file(case):
    model = copy.deepcopy(build_case(case))
    _, scores = model.recommend(make_requests(6), 8, **beam_options(case, 12))
    check_golden_model(case, scores, model, make_training_batch(model, 16))


@pytest.mark.parametrize("case", [*SASREC, *CASES])
def test_training_changes_every_trained_weight_and_can_be_repeated(case):
    model = copy.deepcopy(build_case(case)).train()
    again = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    batches = [make_training_batch(model, 16)] * 6
    losses = train_steps(model, batches, 1e-2)

    assert losses[-1] < losses[0]
    assert train_steps(again, batches[:2], 1e-2) == losses[:2]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    changed = {
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {
        name
        for name, parameter in parameters.items()
        if parameter.grad is not None and parameter.grad.any()
    }
    if isinstance(model, TaughtModel) and hasattr(model, "_teacher"):
        # the backbone and the teacher's decoder are frozen
        frozen = [p for p in parameters.values() if not p.requires_grad]
        assert all(p.grad is None for p in frozen)


@pytest.mark.parametrize("case", ALL)
def test_a_checkpoint_restores_the_model(case, tmp_path):
    model, options = build_case(case), beam_options(case, 12)
    items, scores = model.recommend(make_requests(6), 8, **options)
    about = checkpoint.Checkpoint(model=asdict(model.config))
    checkpoint.save(tmp_path, model, about)

    loaded, _ = load_model(tmp_path, build_catalogue())

    loaded_items, loaded_scores = loaded.recommend(make_requests(6), 8, **options)
    assert loaded_items.tolist() == items.tolist()
    torch.testing.assert_close(loaded_scores, scores)
    assert not any(name.startswith("_teacher") for name in model.state_dict())
