"""Own items, ItemKNN, rules and EASE equal slow references and count behaviours.

Behaviours of validation and test are not counted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models import registry
from models.retrieval.baselines import item_knn, sequential_rules
from models.retrieval.data import (
    Catalogue,
    HistoryBatch,
    InteractionBatch,
    RequestBatch,
)
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from models.warm_start import load_extended_weights
from tests.fixtures.batches import fill_batch

ITEMS, USERS = 12, 40


GENERATOR = np.random.default_rng(5)
BEHAVIOURS: list[list[int]] = [
    GENERATOR.integers(0, ITEMS - 1, GENERATOR.integers(1, 9)).tolist()
    for _ in range(USERS)
]
"""Items of each user; some repeat, and no user has the last item."""


def to_batches() -> list[InteractionBatch]:
    """Return training batches of shuffled behaviours."""
    rows = [(user, item) for user, items in enumerate(BEHAVIOURS) for item in items]
    order = np.random.default_rng(0).permutation(len(rows))
    return [
        InteractionBatch(user_row=part[:, 0] + 100, target=part[:, 1])
        for part in torch.tensor(rows)[order].split(32)
    ]


def to_requests(histories: list[list[int]]) -> HistoryBatch:
    """Return one request per history."""
    width = max(len(history) for history in histories)
    padded = [history + [-1] * (width - len(history)) for history in histories]
    return fill_batch(
        HistoryBatch,
        {},
        history=torch.tensor(padded),
        history_length=torch.tensor([len(history) for history in histories]),
    )


def build_resolved(options: dict[str, Any], catalogue: Catalogue) -> Any:
    """Return a model with the resolved config of its options."""
    config = registry.build_model_config(options)
    model_class = registry.find(config.name)
    return model_class(model_class.resolve_config(config, catalogue), catalogue)


ONE_CHOICE = {
    "item_knn": {"weights": "tfidf", "history_decay": 1},
    "ease": {"l2": 500, "history_decay": 1},
}
"""Options of which validation would choose, by model."""


def fit_model(**options: Any) -> Any:
    """Return a model that is fitted to the behaviours."""
    model = build_resolved(
        ONE_CHOICE.get(options["name"], {}) | options, Catalogue(ITEMS)
    )
    val = [[]] if model.stops_early else []  # one choice needs no validation
    model.fit_in_one_pass(to_batches(), *val)
    return model.eval()


COUNTS: NDArray[np.float64] = np.zeros((USERS, ITEMS))
"""How often each user has each item."""
for user, items in enumerate(BEHAVIOURS):
    np.add.at(COUNTS[user], items, 1)


HISTORIES = [[3, 1, 3, 2, 1, 7], [4], [11], [0, 0, 0, 9, 9, 5], [8, 6, 10, 2]]


def check_ranking(
    model: Any, score: Callable[[list[int]], NDArray[np.float64]]
) -> None:
    """Check the items and scores of each history against its scores (N,) of a reference.

    A history of the last item, which has no behaviour, may have no scores.
    """
    items, scores = model.recommend(to_requests(HISTORIES), ITEMS)
    for row, history in enumerate(HISTORIES):
        expected = score(history)
        if expected.any():
            np.testing.assert_allclose(scores[row], expected[items[row]], atol=1e-5)
            np.testing.assert_allclose(scores[row], -np.sort(-expected), atol=1e-5)
        else:
            assert history == [ITEMS - 1]


def test_own_items_ranks_by_frequency_then_recency_then_popularity():
    popularity = Counter(itertools.chain.from_iterable(BEHAVIOURS))

    items, scores = fit_model(name="own_items").recommend(to_requests(HISTORIES), ITEMS)

    for history, ranked in zip(HISTORIES, items.tolist(), strict=True):
        latest = {item: position for position, item in enumerate(history)}
        in_history = sorted(latest, key=lambda i: (-history.count(i), -latest[i]))
        others = set(range(ITEMS)) - set(in_history)
        by_popularity = sorted(others, key=lambda i: (-popularity[i], i))
        assert ranked == in_history + by_popularity
    assert bool((scores.diff(dim=1) <= 0).all())


def dense_similarities(weights: str, shrinkage: float) -> NDArray[np.float64]:
    """Return the similarities (N, N) of items, pair by pair.

    Args:
        weights: Weight of a count: `none`, `tfidf` or `bm25`.
        shrinkage: Addition to the denominator of the cosine.
    """
    weighted = np.zeros_like(COUNTS)
    mean = COUNTS.sum() / ITEMS
    for u in range(USERS):
        idf = max(0.0, math.log(ITEMS / (1 + np.count_nonzero(COUNTS[u]))))
        for i in range(ITEMS):
            x = COUNTS[u, i]
            length = 1.2 * (1 - 0.75 + 0.75 * COUNTS[:, i].sum() / mean)
            choices = {
                "none": x,
                "tfidf": math.sqrt(x) * idf,
                "bm25": idf * x * 2.2 / (x + length) if x else 0.0,
            }
            weighted[u, i] = choices[weights]
    similarities = np.zeros((ITEMS, ITEMS))
    for i in range(ITEMS):
        for j in range(ITEMS):
            product = float(weighted[:, i] @ weighted[:, j])
            norms = np.linalg.norm(weighted[:, i]) * np.linalg.norm(weighted[:, j])
            if i != j and product > 0:
                similarities[i, j] = product / (norms + shrinkage)
    return similarities


@pytest.mark.parametrize("weights", ["none", "tfidf", "bm25"])
@pytest.mark.parametrize(
    ("neighbours", "shrinkage", "decay"), [(3, 0.0, 1.0), (50, 2.5, 0.7)]
)
def test_item_knn_equals_a_dense_reference(
    weights, neighbours, shrinkage, decay, monkeypatch
):
    monkeypatch.setattr(item_knn, "PRODUCTS_PER_BLOCK", 30)  # several blocks
    similarities = dense_similarities(weights, shrinkage)
    nearest = np.zeros_like(similarities)
    for i in range(ITEMS):
        best = np.lexsort((np.arange(ITEMS), -similarities[i]))[:neighbours]
        nearest[i, best] = similarities[i, best]
    popular = COUNTS.sum(0) / (COUNTS.sum(0).max() + 1) - 1

    model = fit_model(
        name="item_knn",
        weights=weights,
        neighbours=neighbours,
        shrinkage=shrinkage,
        history_decay=decay,
    )

    def score(history: list[int]) -> NDArray[np.float64]:
        scores = decayed_history(history, decay) @ nearest
        return np.where(scores > 0, scores, popular)

    check_ranking(model, score)


def to_request_batch() -> RequestBatch:
    """Return a request for each behaviour that has a history."""
    pairs = [
        (items[:end], items[end])
        for items in BEHAVIOURS
        for end in range(1, len(items))
    ]
    histories = to_requests([history for history, _ in pairs])
    return fill_batch(
        RequestBatch,
        {},
        history=histories.history,
        history_length=histories.history_length,
        target=torch.tensor([target for _, target in pairs]),
        repeats=torch.zeros(len(pairs), dtype=torch.long),
    )


def score_by_rules(history: list[int], options: dict[str, Any]) -> NDArray[np.float64]:
    """Return the scores (N,) of a history by the equations, pair by pair."""
    longest, counts = options["max_history"], np.zeros((ITEMS, ITEMS))
    popularity = np.ones(ITEMS)
    for items in BEHAVIOURS:
        for end in range(1, len(items)):
            popularity[items[end]] += 1
            for distance in range(1, min(end, longest) + 1):
                before, target = items[end - distance], items[end]
                counts[before, target] += distance ** -options["distance_power"]
                if options["both_directions"]:
                    counts[target, before] += distance ** -options["distance_power"]
    scores = np.zeros(ITEMS)
    for steps, item in enumerate(history[::-1][:longest]):
        value = counts[item] / popularity[item] ** options["source_power"]
        value /= popularity ** options["target_power"]
        best = np.lexsort((np.arange(ITEMS), -value))[: options["neighbours"]]
        scores[best] += options["decay"] ** steps * value[best]
    return np.where(scores > 0, scores, (popularity - 1) / popularity.max() - 1)


@pytest.mark.parametrize("neighbours", [3, 50])
@pytest.mark.parametrize("both_directions", [False, True])
def test_sequential_rules_equal_the_equations(neighbours, both_directions, monkeypatch):
    monkeypatch.setattr(sequential_rules, "PAIRS_PER_BLOCK", 30)  # several blocks
    values = {
        "distance_power": 0.5,
        "source_power": 0.3,
        "target_power": 0.7,
        "decay": 0.6,
        "both_directions": both_directions,
    }
    sizes = {"neighbours": neighbours, "max_history": 4}
    lists = {name: [value] for name, value in values.items()}
    model = build_resolved(
        {"name": "sequential_rules", **lists, **sizes}, Catalogue(ITEMS)
    )

    model.fit_in_one_pass([to_request_batch()], [])

    check_ranking(model, lambda history: score_by_rules(history, values | sizes))


def test_sequential_rules_choose_the_options_with_the_best_validation_ndcg():
    batch = to_request_batch()
    halves = batch.select("B", slice(0, 60)), batch.select("B", slice(60, None))
    lists = {"decay": [0.2, 0.9], "both_directions": [False, True]}
    ndcg = {}
    for decay, both in itertools.product(*lists.values()):
        one = build_resolved(
            {"name": "sequential_rules", "decay": [decay], "both_directions": [both]},
            Catalogue(ITEMS),
        )
        one.fit_in_one_pass([halves[0]], [halves[1]])
        ndcg[decay, both] = one.measure(halves[1])["ndcg@10"]

    model = build_resolved({"name": "sequential_rules", **lists}, Catalogue(ITEMS))
    model.fit_in_one_pass([halves[0]], [halves[1]])

    chosen = max(ndcg, key=lambda values: ndcg[values])
    assert float(model.decay) == pytest.approx(chosen[0])
    assert f"both_directions {chosen[1]}" in model.choice
    assert len(set(ndcg.values())) > 1


def decayed_history(history: list[int], decay: float) -> NDArray[np.float64]:
    """Return decay^steps (N,) of the history's items, steps from the last of each."""
    values = np.zeros(ITEMS)
    for steps, item in reversed(list(enumerate(history[::-1]))):
        values[item] = decay**steps
    return values


def dense_ease(counts: NDArray[np.float64], l2: float) -> NDArray[np.float64]:
    """Return the weights (N, N) of EASE by an inverse of the Gram matrix."""
    has_item = (counts > 0).astype(float)
    inverse = np.linalg.inv(has_item.T @ has_item + l2 * np.eye(counts.shape[1]))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return weights


@pytest.mark.parametrize(("l2", "decay"), [(0.5, 1.0), (500.0, 1.0), (2.0, 0.7)])
def test_ease_equals_a_dense_reference(l2, decay):
    weights = dense_ease(COUNTS, l2)

    model = fit_model(name="ease", l2=l2, history_decay=decay)

    check_ranking(model, lambda history: decayed_history(history, decay) @ weights)


def test_ease_of_a_large_catalogue_covers_its_frequent_items_and_reports_it():
    frequent = np.sort(np.argsort(-COUNTS.sum(0), kind="stable")[:6])
    outside = [i for i in range(ITEMS) if i not in frequent]
    popular = sorted(outside, key=lambda i: (-COUNTS[:, i].sum(), i))

    model = fit_model(name="ease", l2=1.0, max_items=6)
    history = [int(frequent[0]), outside[0], int(frequent[3])]
    items, scores = model.recommend(to_requests([history]), ITEMS)

    expected = np.isin(frequent, history) @ dense_ease(COUNTS[:, frequent], 1.0)
    assert items[0, :6].tolist() == frequent[np.argsort(-expected)].tolist()
    np.testing.assert_allclose(scores[0, :6], -np.sort(-expected), atol=1e-6)
    assert items[0, 6:].tolist() == popular
    (message,) = model.prepare_training(Catalogue(ITEMS))
    assert "6 most frequent of 12 items" in message


@pytest.mark.parametrize("name", ["own_items", "item_knn", "ease"])
def test_a_model_ranks_old_items_of_an_extended_catalogue_as_before(name, tmp_path):
    before = fit_model(name=name)
    about = Checkpoint(model=asdict(before.config))
    checkpoint.save(tmp_path / "run", before, about)
    after = build_resolved(about.model, Catalogue(ITEMS + 3))

    load_extended_weights(after, tmp_path / "run", about, ITEMS + 3)

    items, _ = before.recommend(to_requests(HISTORIES), ITEMS)
    longer, _ = after.recommend(to_requests(HISTORIES), ITEMS + 3)
    for row, old_row in zip(longer.tolist(), items.tolist(), strict=True):
        assert [item for item in row if item < ITEMS] == old_row
    assert sorted(longer[0].tolist()) == list(range(ITEMS + 3))
