"""Recall and NDCG against scikit-learn and a count by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score

from models.evaluation import add_sums
from models.retrieval.data import RequestBatch
from models.retrieval.metrics import (
    CUTOFFS,
    count_shown,
    exposure,
    hit_rank,
    means,
    measure_ranking,
    metric_sums,
    names,
)
from tests.fixtures.batches import fill_batch


def test_they_are_those_of_scikit_learn_and_of_a_count():
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(40.0), (60, 1)), axis=1)
    target = rng.integers(0, 40, 60)
    ranked = torch.from_numpy(np.argsort(-scores, axis=1).copy())
    sums = metric_sums(ranked, torch.from_numpy(target), (1, 3, 10, 40))
    for k in (1, 3, 10, 40):
        assert sums[f"ndcg@{k}"] / 60 == pytest.approx(
            ndcg_score(np.eye(40)[target], scores, k=k), abs=1e-12
        )
        hits = [t in row[:k] for t, row in zip(target, ranked.tolist(), strict=True)]
        assert sums[f"recall@{k}"] == sum(hits)
        reciprocal = [
            1 / (row.index(t) + 1)
            for t, row in zip(target.tolist(), ranked[:, :k].tolist(), strict=True)
            if t in row
        ]
        assert sums[f"mrr@{k}"] == pytest.approx(sum(reciprocal))


def test_batches_and_workers_add_up():
    generator = torch.Generator().manual_seed(1)
    ranked = torch.stack(
        [torch.randperm(30, generator=generator)[:20] for _ in range(50)]
    )
    target = torch.randint(0, 30, (50,), generator=generator)
    whole = metric_sums(ranked, target)
    parts = [metric_sums(ranked[a : a + 7], target[a : a + 7]) for a in range(0, 50, 7)]
    assert add_sums(parts) == pytest.approx(whole)
    assert whole["examples"] == 50
    assert "examples" not in means(whole)
    assert means(whole)["recall@10"] == pytest.approx(whole["recall@10"] / 50)


def test_requests_that_repeat_an_item_count_apart():
    ranked = torch.arange(max(CUTOFFS)).expand(3, -1)
    batch = fill_batch(
        RequestBatch,
        {},
        target=torch.tensor([0, 2, 1]),
        repeats=torch.tensor([1, 1, 0]),
        user_row=torch.tensor([4, 5, 6]),
    )
    sums = measure_ranking(ranked, batch, by_user=1)
    kept = sums.pop("by_user/first/ndcg@10")
    del sums["by_user/ndcg@10"], sums["by_user/recall@10"]
    found = means(
        add_sums([sums, measure_ranking(ranked, replace(batch, repeats=torch.ones(3)))])
    )
    assert found["first/examples"] == 1  # the third request of the first batch
    assert found["first/ndcg@10"] == pytest.approx(1 / math.log2(3))
    assert found["ndcg@10"] == pytest.approx((1 + 1 / math.log2(3) + 0.5) / 3)
    assert [part.tolist() for part in kept.merge()] == [
        [6],
        [pytest.approx(1 / math.log2(3))],
        [1],
    ]
    assert set(found) == set(names(None))
    alone = means(sums | {"first/examples": 0.0, "first/ndcg@10": 0.0})
    assert math.isnan(alone["first/ndcg@10"])
    assert alone["first/examples"] == 0


def test_exposure_is_that_of_a_count_and_of_all_pairs():
    """Gini by its definition: the mean difference between two items, relative to twice
    the mean.
    """
    generator = torch.Generator().manual_seed(2)
    ranked = torch.stack(
        [torch.randperm(30, generator=generator)[:20] for _ in range(9)]
    )
    ranked[3, 4:] = -1
    shown, trained = (
        torch.zeros(40, dtype=torch.long),
        torch.randint(0, 2, (40,), generator=generator),
    )
    for part in ranked.split(4):
        count_shown(shown, part)
    top = [item for row in ranked.tolist() for item in row[:10] if item >= 0]
    counts = [top.count(item) for item in range(40)]
    assert shown.tolist() == counts
    pairs = sum(abs(a - b) for a in counts for b in counts) / 40**2
    assert exposure(shown, trained) == pytest.approx(
        {
            "coverage@10": len(set(top)) / 40,
            "new_items@10": sum(trained[item] == 0 for item in top).item() / len(top),
            "gini@10": pairs / (2 * len(top) / 40),
        }
    )
    assert exposure(torch.full((5,), 7), torch.ones(5))["gini@10"] == pytest.approx(0)
    assert exposure(torch.tensor([0, 0, 9, 0]), torch.ones(4))[
        "gini@10"
    ] == pytest.approx(3 / 4)


def test_impossible_cutoffs_and_no_examples_are_refused():
    with pytest.raises(ValueError, match="are not within the 3 ranked items"):
        metric_sums(torch.tensor([[1, 2, 3]]), torch.tensor([1]), (4,))
    with pytest.raises(ValueError, match="no examples"):
        means({"examples": 0.0})


def test_a_target_that_is_no_item_hits_nothing():
    """And a place without an item hits none."""
    items, target = (
        torch.tensor([[3, -1, -1], [-1, -1, -1], [2, 1, -1]]),
        torch.tensor([-1, -1, 1]),
    )
    assert hit_rank(items, target).tolist() == [3, 3, 1]
    assert metric_sums(items, target, (3,))["recall@3"] == 1
