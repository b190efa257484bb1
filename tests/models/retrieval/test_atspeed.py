"""AtSpeed: the target verifies a tree in one pass, and the losses of its drafts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from models.retrieval.atspeed.atspeed import (
    TOP_CODES,
    AtSpeed,
    relaxed_loss,
    score_tree,
    strict_loss,
)
from models.retrieval.atspeed.speculative import SpeculativeResult, Tree
from models.retrieval.retriever import Retriever
from models.retrieval.tiger.decoder import T5Decoder
from tests.fixtures.small_retrieval import (
    FIRST,
    SIZES,
    build_catalogue,
    build_taught,
    build_tiger,
    make_requests,
    select_row,
)

SMALL = {"draft_d_ff": 24, "draft_heads": 2, "beam": 6, "draft_beam": 9}
TEACHER_SIZES = {"draft_layers": 2, "draft_d_ff": 32}
"""Sizes of a draft that can have the weights of the teacher's decoder."""


def build_teacher(seed: int) -> Retriever:
    """Return a TIGER whose log-probabilities are far from uniform."""
    tiger = build_tiger(seed)
    torch.nn.init.normal_(tiger.backbone.embedding.weight, std=3.0)
    return tiger


def build_student(name: str = "atspeed_s", **options: Any) -> AtSpeed:
    """Return an AtSpeed of `build_teacher(1)` with a random draft."""
    return build_taught(name, teacher=build_teacher(1), **{**SMALL, **options})


def draw_tree(
    rows: int, generator: torch.Generator, widths: tuple[int, ...] = (4, 5, 7)
) -> Tree:
    """Return random drafted beams of `rows` requests, `widths` beams per level."""
    tree: Tree = []
    num_parents = 1
    for level, width in enumerate(widths):
        shape = (rows, width)
        parents = torch.randint(0, num_parents, shape, generator=generator)
        codes = torch.randint(0, SIZES[level], shape, generator=generator)
        tree.append((parents, codes))
        num_parents = width
    return tree


def list_prefixes(tree: Tree, row: int) -> list[list[list[int]]]:
    """Return the prefixes of one request of a tree, for each length from 0 on."""
    levels: list[list[list[int]]] = [[[]]]
    for parents, codes in tree:
        steps = zip(parents[row].tolist(), codes[row].tolist(), strict=True)
        levels.append([[*levels[-1][parent], code] for parent, code in steps])
    return levels


def test_one_pass_over_a_tree_equals_teacher_forcing_of_every_prefix():
    tiger = build_teacher(0)
    decoder = T5Decoder(tiger.backbone).eval()
    history = tiger.encode(make_requests(5))
    rows = torch.tensor([3, 0, 4, 1])
    tree = draw_tree(4, torch.Generator().manual_seed(2))

    log_probs = score_tree(decoder, history.rows(rows), tree, 0)

    assert [level.shape[1] for level in log_probs] == [1, 4, 5, 7]
    for index, row in enumerate(rows.tolist()):
        row_history = select_row(history, row)
        for level, prefixes in enumerate(list_prefixes(tree, index)):
            first = FIRST[level]
            for beam, prefix in enumerate(prefixes):
                codes = torch.tensor([[*prefix, *[0] * (4 - len(prefix))]])
                logits = decoder.teacher_forced(row_history, codes)[level][0]
                expected = logits.log_softmax(-1)[first : first + SIZES[level]]
                torch.testing.assert_close(
                    log_probs[level][index, beam], expected, rtol=1e-4, atol=1e-5
                )


def test_a_draft_with_the_teachers_weights_needs_one_pass():
    model = build_student(**TEACHER_SIZES, draft_beam=1000)
    model.decoder.load_state_dict(build_teacher(1).decoder.state_dict())
    batch = make_requests(9)

    whole, stepwise, undrafted = (
        SpeculativeResult(*model.speculate(batch, 5, draft_steps=steps))
        for steps in (4, 1, 0)
    )

    assert whole.passes.tolist() == [1] * 9
    assert whole.accepted.tolist() == whole.drafted.tolist() == [3] * 9
    assert stepwise.passes.tolist() == [2] * 9
    assert undrafted.passes.tolist() == [4] * 9


def test_relaxed_search_samples_items_and_gives_the_teachers_scores():
    model, batch = build_student("atspeed_r"), make_requests(8)
    all_items, all_scores = build_teacher(1).recommend(batch, 30, beam=1000)

    items, scores = model.recommend(batch, 5)
    same_seed, _ = model.recommend(batch, 5)
    other_seed, _ = model.recommend(batch, 5, seed=3)

    assert torch.equal(items, same_seed)
    assert not torch.equal(items, other_seed)
    for row in range(8):
        pairs = zip(all_items[row].tolist(), all_scores[row].tolist(), strict=True)
        teacher_scores = dict(pairs)
        row_items, row_scores = items[row].tolist(), scores[row].tolist()
        expected = [teacher_scores[item] for item in row_items]
        assert len(set(row_items)) == 5
        assert row_scores == pytest.approx(expected, abs=1e-4)
        assert row_scores == sorted(row_scores, reverse=True)


def softmax(values: list[float]) -> list[float]:
    """Return probabilities, without PyTorch."""
    total = sum(math.exp(x) for x in values)
    return [math.exp(x) / total for x in values]


def compute_strict_loss(q: list[float], p: list[float]) -> float:
    """Return AtSpeed's strict loss of a draft `q` and a target `p`.

    Codes other than the draft's `TOP_CODES` most likely ones count as one code.
    """
    top = sorted(range(len(q)), key=lambda code: -q[code])[:TOP_CODES]
    kth_probability = sorted(p, reverse=True)[min(TOP_CODES, len(p)) - 1]
    loss = 0.0
    for code in top:
        loss += q[code] * math.log(q[code] / p[code])
        loss -= kth_probability * q[code] * math.log(q[code])
    if len(q) > TOP_CODES:
        rest_q = 1 - sum(q[code] for code in top)
        rest_p = 1 - sum(p[code] for code in top)
        loss += rest_q * math.log(rest_q / rest_p)
    return loss


@pytest.mark.parametrize("codes", [5, 40])
def test_the_losses_equal_their_equations(codes):
    torch.manual_seed(0)
    draft, target = torch.randn(3, codes) * 2, torch.randn(3, codes) * 2
    expected_strict, expected_relaxed = 0.0, 0.0
    for draft_logits, target_logits in zip(
        draft.tolist(), target.tolist(), strict=True
    ):
        q, p = softmax(draft_logits), softmax(target_logits)
        expected_strict += compute_strict_loss(q, p) / 3
        for draft_share, target_share in zip(q, p, strict=True):
            expected_relaxed += abs(draft_share - target_share) / 2 / 3

    strict, relaxed = strict_loss(draft, target), relaxed_loss(draft, target)

    assert strict.item() == pytest.approx(expected_strict, rel=1e-4)
    assert relaxed.item() == pytest.approx(expected_relaxed, rel=1e-4)
    assert relaxed_loss(draft, draft + 3).item() == pytest.approx(0, abs=1e-6)


def test_acceptance_and_passes_are_means_over_requests():
    model, batch = build_student(), make_requests(6)
    result = SpeculativeResult(*model.speculate(batch, 20))

    first = model.measure(batch.select("B", slice(2)))
    second = model.measure(batch.select("B", slice(2, 6)))
    means = model.metric_means({key: first[key] + second[key] for key in first})

    assert set(means) == set(model.metric_names(build_catalogue()))
    passes = float(result.passes.double().mean())
    acceptance = float(result.accepted.sum() / result.drafted.sum())
    assert means["target_passes"] == pytest.approx(passes)
    assert means["acceptance"] == pytest.approx(acceptance)
    undrafted = model.metric_means(model.measure(batch, draft_steps=0))
    assert (undrafted["acceptance"], undrafted["target_passes"]) == (0.0, 4.0)
