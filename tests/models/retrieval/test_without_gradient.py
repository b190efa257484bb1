"""Own items, ItemKNN and EASE equal dense references, and count training behaviours
alone.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.build import parse_options
from models.retrieval.data import (
    Catalogue,
    HistoryBatch,
    InteractionBatch,
    RetrievalDataset,
)
from models.retrieval.floors import item_knn
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.tables import UserError
from models.warm_start import load_extended_weights
from tests.fixtures.batches import fill_batch

ITEMS, USERS = 12, 40


def draw_behaviours() -> list[list[int]]:
    """Return the items of each user: some repeat, the last item is of nobody."""
    rng = np.random.default_rng(5)
    return [
        rng.integers(0, ITEMS - 1, rng.integers(1, 9)).tolist() for _ in range(USERS)
    ]


def to_batches(behaviours: list[list[int]]) -> list[InteractionBatch]:
    """Return training batches of unit `behaviour`, of shuffled rows."""
    rows = [(user, item) for user, items in enumerate(behaviours) for item in items]
    order = np.random.default_rng(0).permutation(len(rows))
    columns = torch.tensor(rows)[order]
    return [
        InteractionBatch(user_row=part[:, 0] + 100, target=part[:, 1])
        for part in columns.split(32)
    ]


def to_request(histories: list[list[int]]) -> HistoryBatch:
    width = max(len(history) for history in histories)
    padded = [history + [-1] * (width - len(history)) for history in histories]
    return fill_batch(
        HistoryBatch,
        {},
        history=torch.tensor(padded),
        history_length=torch.tensor([len(history) for history in histories]),
    )


def build_resolved(options: dict[str, Any], catalogue: Catalogue) -> Any:
    model_class, config = parse_options(options)
    return model_class(model_class.resolve_config(config, catalogue), catalogue)


def fit(behaviours: list[list[int]], **config: Any) -> Any:
    model = build_resolved(config, Catalogue(ITEMS))
    model.fit_counts(to_batches(behaviours))
    return model.eval()


def count_matrix(behaviours: list[list[int]]) -> NDArray[np.float64]:
    """Return (U, N) counts."""
    matrix = np.zeros((len(behaviours), ITEMS))
    for user, items in enumerate(behaviours):
        for item in items:
            matrix[user, item] += 1
    return matrix


HISTORIES = [[3, 1, 3, 2, 1, 7], [4], [11], [0, 0, 0, 9, 9, 5], [8, 6, 10, 2]]


def test_own_items_come_by_frequency_then_latest_then_popular() -> None:
    behaviours = draw_behaviours()
    popular = Counter(item for items in behaviours for item in items)

    items, scores = fit(behaviours, name="own_items").recommend(
        to_request(HISTORIES), ITEMS
    )

    for history, ranked in zip(HISTORIES, items.tolist(), strict=True):
        latest = {item: place for place, item in enumerate(history)}
        own = sorted(latest, key=lambda i: (-history.count(i), -latest[i]))
        others = sorted(set(range(ITEMS)) - set(own), key=lambda i: (-popular[i], i))
        assert ranked == own + others
    assert bool((scores.diff(dim=1) <= 0).all())


def test_scores_of_own_items_do_not_depend_on_the_batch() -> None:
    model = fit(draw_behaviours(), name="own_items")
    together = model.recommend(to_request(HISTORIES), 5)[1]
    alone = [model.recommend(to_request([history]), 5)[1] for history in HISTORIES]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0)


def dense_similarities(
    counts: NDArray[np.float64], weights: str, shrinkage: float
) -> NDArray[np.float64]:
    """Return (N, N) similarities, a pair after the other."""
    users, items = counts.shape
    weighted = np.zeros_like(counts)
    mean = counts.sum() / items
    for u in range(users):
        idf = max(0.0, math.log(items / (1 + np.count_nonzero(counts[u]))))
        for i in range(items):
            x = counts[u, i]
            length = 1.2 * (1 - 0.75 + 0.75 * counts[:, i].sum() / mean)
            bm25 = idf * x * 2.2 / (x + length) if x else 0.0
            weighted[u, i] = {"none": x, "tfidf": math.sqrt(x) * idf, "bm25": bm25}[
                weights
            ]
    similarities = np.zeros((items, items))
    for i in range(items):
        for j in range(items):
            product = float(weighted[:, i] @ weighted[:, j])
            norms = np.linalg.norm(weighted[:, i]) * np.linalg.norm(weighted[:, j])
            if i != j and product > 0:
                similarities[i, j] = product / (norms + shrinkage)
    return similarities


@pytest.mark.parametrize("weights", ["none", "tfidf", "bm25"])
@pytest.mark.parametrize(("neighbours", "shrinkage"), [(3, 0.0), (50, 2.5)])
def test_item_knn_equals_a_dense_reference(
    weights: str, neighbours: int, shrinkage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_knn, "PRODUCTS_PER_BLOCK", 30)  # several blocks
    behaviours = draw_behaviours()
    counts = count_matrix(behaviours)
    similarities = dense_similarities(counts, weights, shrinkage)
    kept = np.zeros_like(similarities)
    for i in range(ITEMS):
        best = np.lexsort((np.arange(ITEMS), -similarities[i]))[:neighbours]
        kept[i, best] = similarities[i, best]
    popular = counts.sum(0) / (counts.sum(0).max() + 1) - 1

    model = fit(
        behaviours,
        name="item_knn",
        weights=weights,
        neighbours=neighbours,
        shrinkage=shrinkage,
    )
    items, scores = model.recommend(to_request(HISTORIES), ITEMS)

    for row, history in enumerate(HISTORIES):
        expected = kept[sorted(set(history))].sum(0)
        expected = np.where(expected > 0, expected, popular)
        np.testing.assert_allclose(scores[row], expected[items[row]], atol=1e-5)
        np.testing.assert_allclose(scores[row], -np.sort(-expected), atol=1e-5)


def dense_ease(counts: NDArray[np.float64], l2: float) -> NDArray[np.float64]:
    seen = (counts > 0).astype(float)
    inverse = np.linalg.inv(seen.T @ seen + l2 * np.eye(counts.shape[1]))
    weights = -inverse / np.diag(inverse)
    np.fill_diagonal(weights, 0)
    return weights


@pytest.mark.parametrize("l2", [0.5, 500.0])
def test_ease_equals_a_dense_reference(l2: float) -> None:
    behaviours = draw_behaviours()
    weights = dense_ease(count_matrix(behaviours), l2)

    items, scores = fit(behaviours, name="ease", l2=l2).recommend(
        to_request(HISTORIES), ITEMS
    )

    for row, history in enumerate(HISTORIES):
        known = np.isin(np.arange(ITEMS), history)
        if known[:-1].any():  # the last item has no behaviour: all its weights are 0
            expected = known @ weights
            np.testing.assert_allclose(scores[row], expected[items[row]], atol=1e-6)
            np.testing.assert_allclose(scores[row], -np.sort(-expected), atol=1e-6)


def test_ease_of_a_large_catalogue_is_of_its_frequent_items_and_says_so() -> None:
    behaviours = draw_behaviours()
    counts = count_matrix(behaviours)
    frequent = np.sort(np.argsort(-counts.sum(0), kind="stable")[:6])
    outside = [i for i in range(ITEMS) if i not in frequent]
    popular = sorted(outside, key=lambda i: (-counts[:, i].sum(), i))

    model = fit(behaviours, name="ease", l2=1.0, max_items=6)
    history = [int(frequent[0]), outside[0], int(frequent[3])]
    items, scores = model.recommend(to_request([history]), ITEMS)

    expected = np.isin(frequent, history) @ dense_ease(counts[:, frequent], 1.0)
    assert items[0, :6].tolist() == frequent[np.argsort(-expected)].tolist()
    np.testing.assert_allclose(scores[0, :6], -np.sort(-expected), atol=1e-6)
    assert items[0, 6:].tolist() == popular
    (message,) = model.prepare_training(Catalogue(ITEMS), {})
    assert "6 most frequent of 12 items" in message


def test_ease_ranks_by_popularity_after_a_history_of_none_of_its_items() -> None:
    behaviours = draw_behaviours()
    counts = count_matrix(behaviours).sum(0)
    model = fit(behaviours, name="ease", max_items=6)
    rare = int(np.argsort(-counts, kind="stable")[7])
    items, _ = model.recommend(to_request([[rare]]), ITEMS)
    assert items[0].tolist() == sorted(range(ITEMS), key=lambda i: (-counts[i], i))


@pytest.mark.parametrize("name", ["own_items", "item_knn", "ease"])
def test_training_reads_the_behaviours_of_the_train_split_alone(
    name: str, small: tuple[str, str]
) -> None:
    """Targets of validation and test change nothing; requests without history count."""
    uri = f"{small[0]}/sequences"
    catalogue = Catalogue.load(small[0])
    model = build_resolved({"name": name}, catalogue)
    train = RetrievalDataset.load(uri, "train", unit=model.example_unit)

    model.fit_counts(train.epoch(64, seed=0, epoch=0))

    expected = np.bincount(train.targets, minlength=catalogue.num_items)
    assert model.counts.tolist() == expected.tolist()
    assert train.num_skipped == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "ease", "l2": 0}, "model.l2 is 0, it must be above 0"),
        ({"name": "item_knn", "neighbours": 0}, "model.neighbours is 0"),
        ({"name": "item_knn", "shrinkage": -1}, "model.shrinkage is -1"),
        ({"name": "own_items", "max_history": 0}, "model.max_history is 0"),
    ],
)
def test_impossible_options_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_options(config)


@pytest.mark.parametrize("name", ["own_items", "item_knn", "ease"])
def test_a_model_ranks_old_items_of_an_extended_catalogue_as_before(
    name: str, tmp_path: Path
) -> None:
    before = fit(draw_behaviours(), name=name)
    about = Checkpoint(model=before.config_to_dict(before.config))
    checkpoint.save(tmp_path / "run", before, about)
    after = build_resolved(about.model, Catalogue(ITEMS + 3))

    load_extended_weights(after, tmp_path / "run", about, ITEMS + 3)

    items, _ = before.recommend(to_request(HISTORIES), ITEMS)
    longer, _ = after.recommend(to_request(HISTORIES), ITEMS + 3)
    old = [[i for i in row if i < ITEMS] for row in longer.tolist()]
    assert old == items.tolist()
    assert sorted(longer[0].tolist()) == list(range(ITEMS + 3))


def test_neighbours_equal_those_of_implicit() -> None:
    """Development only: `pip install implicit`. Its neighbours include the item."""
    implicit = pytest.importorskip("implicit.nearest_neighbours")
    sparse = pytest.importorskip("scipy.sparse")
    behaviours = draw_behaviours()
    counts = sparse.csr_matrix(count_matrix(behaviours))
    theirs = implicit.TFIDFRecommender(K=ITEMS)
    theirs.fit(counts, show_progress=False)
    expected = theirs.similarity.toarray()
    np.fill_diagonal(expected, 0)

    model = fit(behaviours, name="item_knn", weights="tfidf", neighbours=ITEMS)

    found = np.zeros((ITEMS, ITEMS))
    neighbours, similarity = model.neighbours.numpy(), model.similarity.numpy()
    for i in range(ITEMS):
        real = neighbours[i] >= 0
        found[i, neighbours[i][real]] = similarity[i][real]
    np.testing.assert_allclose(found, np.nan_to_num(expected), atol=1e-6)
