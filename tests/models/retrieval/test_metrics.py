"""Recall, NDCG and exposure against scikit-learn and counts by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import ndcg_score
from torch import Tensor

from models.evaluation import add_sums
from models.metrics.metric import CUTOFFS, Ranking, RequestMetric, find_metrics
from models.metrics.ranked.accuracy import Recall
from models.retrieval.data import RequestBatch
from models.retrieval.metrics import (
    count_shown,
    exposure,
    means,
    measure_ranking,
    rank_targets,
)
from tests.fixtures.batches import fill_batch


def draw_rankings(count: int, seed: int) -> Tensor:
    """Return rankings (count, 20) of distinct items out of 30."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(30, generator=generator)[:20] for _ in range(count)]
    return torch.stack(rows)


def test_metrics_equal_scikit_learn_and_a_count_of_hits():
    rng = np.random.default_rng(0)
    scores = rng.permuted(np.tile(np.arange(40.0), (60, 1)), axis=1)
    targets = rng.integers(0, 40, 60)
    ranked = np.argsort(-scores, axis=1).copy()
    cutoffs = (1, 3, 10, 40)

    ranking = rank_targets(torch.from_numpy(ranked), torch.from_numpy(targets)[:, None])
    sums = {
        f"{metric.name}@{k}": float(metric.values(ranking, k).sum())
        for metric in find_metrics(RequestMetric)
        for k in cutoffs
    }

    ranks = [
        row.index(target) + 1
        for row, target in zip(ranked.tolist(), targets.tolist(), strict=True)
    ]
    relevance = np.eye(40)[targets]
    for k in cutoffs:
        ndcg = ndcg_score(relevance, scores, k=k)
        assert sums[f"ndcg@{k}"] / 60 == pytest.approx(ndcg, abs=1e-12)
        hits = [rank for rank in ranks if rank <= k]
        assert sums[f"recall@{k}"] == len(hits)
        assert sums[f"mrr@{k}"] == pytest.approx(sum(1 / rank for rank in hits))
        assert sums[f"map@{k}"] == pytest.approx(sums[f"mrr@{k}"])


def test_metrics_of_baskets_equal_counts_by_hand():
    """Recall divides by min(targets, K), NDCG by the DCG of min(targets, K) hits."""
    generator = np.random.default_rng(1)
    ranked = draw_rankings(40, seed=2)
    baskets = [
        generator.permutation(35)[: generator.integers(1, 25)].tolist()
        for _ in range(40)
    ]
    targets = torch.full((40, 25), -1)
    for row, basket in enumerate(baskets):
        targets[row, : len(basket)] = torch.tensor(basket)
    values = {"targets": targets, "target": targets[:, 0], "repeats": torch.ones(40)}
    trained = (torch.arange(35) < 20).long()
    batch = fill_batch(RequestBatch, {}, **values)
    sums = measure_ranking(ranked, batch, trained=trained)

    new = [{item for item in basket if item >= 20} for basket in baskets]
    assert sums["new/examples"] == sum(map(bool, new)) < 40
    for k in CUTOFFS:
        hits = [{*ranked[row, :k].tolist()} & new[row] for row in range(40)]
        shares = [len(h) / min(k, len(n)) for h, n in zip(hits, new, strict=True) if n]
        assert sums[f"new/recall@{k}"] == pytest.approx(sum(shares))
        expected = dict.fromkeys(("recall", "ndcg", "map", "mrr", "recall_limit"), 0.0)
        for items, basket in zip(ranked.tolist(), baskets, strict=True):
            ranks = [rank for rank in range(k) if items[rank] in basket]
            largest = min(k, len(basket))
            ideal = sum(1 / math.log2(rank + 2) for rank in range(largest))
            expected["recall"] += len(ranks) / largest
            expected["ndcg"] += sum(1 / math.log2(r + 2) for r in ranks) / ideal
            expected["mrr"] += 1 / (1 + ranks[0]) if ranks else 0
            precisions = [(n + 1) / (rank + 1) for n, rank in enumerate(ranks)]
            expected["map"] += sum(precisions) / largest
            expected["recall_limit"] += largest / len(basket)
        for name, value in expected.items():
            assert sums[f"{name}@{k}"] == pytest.approx(value)
    assert sums["examples"] == 40


def test_exposure_equals_a_count_of_shown_items_and_pairs():
    """Gini is the mean difference between two items, relative to twice the mean."""
    ranked = draw_rankings(9, seed=2)
    ranked[3, 4:] = -1
    generator = torch.Generator().manual_seed(2)
    train_counts = torch.randint(0, 2, (40,), generator=generator)
    shown = torch.zeros(40, dtype=torch.long)

    for part in ranked.split(4):
        count_shown(shown, part)

    top = [item for item in ranked[:, :10].flatten().tolist() if item >= 0]
    counts = [top.count(item) for item in range(40)]
    assert shown.tolist() == counts
    num_new = sum(int(train_counts[item] == 0) for item in top)
    differences = np.abs(np.subtract.outer(counts, counts))
    assert exposure(shown, train_counts) == pytest.approx(
        {
            "coverage@10": len(set(top)) / 40,
            "new_items@10": num_new / len(top),
            "gini@10": differences.mean() / (2 * len(top) / 40),
            # an item without training behaviours counts as one with one
            "novelty@10": math.log2(40),
        }
    )


def test_a_request_without_a_value_is_left_out_of_the_mean(monkeypatch):
    ranked = draw_rankings(30, seed=4)
    target = torch.arange(30)
    repeats = torch.zeros(30, dtype=torch.bool)

    def measure_even_ranks(self: Recall, ranking: Ranking, k: int) -> Tensor:
        return (ranking.rank < k).double().where(ranking.rank % 2 == 0, math.nan)

    monkeypatch.setattr(Recall, "values", measure_even_ranks)
    parts = []
    for rows in (slice(0, 1), slice(1, 30)):
        users = torch.arange(30)[rows]
        values = {"target": target[rows], "repeats": repeats[rows], "user_row": users}
        batch = fill_batch(RequestBatch, {}, **values)
        parts.append(measure_ranking(ranked[rows], batch, by_user=1))
    total = add_sums(parts)
    by_user = {name: total.pop(name) for name in list(total) if "by_user/" in name}

    rank = rank_targets(ranked, target[:, None]).rank
    even = rank[rank % 2 == 0]
    assert means(total)["recall@10"] == pytest.approx(
        float((even < 10).double().mean())
    )
    users, _, _ = by_user["by_user/recall@10"].merge()
    assert users.tolist() == target[rank % 2 == 0].tolist()
