"""The simulated log: exact sizes, the same for the same seed, and the causes that it
claims.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from models.storage.tables import UserError
from pipelines.data import simulation
from pipelines.data.retrieval.simulator import FOLLOW, SHARES, simulate_retrieval
from pipelines.data.simulation import Settings, is_simulated, make_world


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def events(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "events-*.parquet")


@pytest.mark.parametrize(
    ("users", "items", "count"),
    [(1500, 400, 15_000), (1, 8, 1), (7, 8, 8), (50, 1000, 50), (3, 20, 5000)],
)
def test_sizes_are_exact_and_times_increase_per_user(
    tmp_path: Path, users: int, items: int, count: int
) -> None:
    simulate_retrieval(str(tmp_path), Settings(users, items, count, seed=3))
    log = events(tmp_path)
    assert len(log) == count
    assert log["user_id"].n_unique() == users
    assert log["timestamp_ms"].is_sorted()
    gaps = log.select(pl.col("timestamp_ms").diff().over("user_id"))[
        "timestamp_ms"
    ].drop_nulls()
    assert (gaps > 0).all()
    catalogue = pl.read_parquet(tmp_path / "items.parquet")
    assert catalogue["item_id"].n_unique() == items
    assert set(log["item_id"]) <= set(catalogue["item_id"])
    assert catalogue.null_count().sum_horizontal().item() == 0


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    tmp_path: Path,
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        simulate_retrieval(str(tmp_path / name), Settings(200, 50, 2000, seed))
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert (
        digests(tmp_path / "a")["events-00000.parquet"]
        != digests(tmp_path / "c")["events-00000.parquet"]
    )


def test_a_new_log_replaces_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "ROWS_PER_FILE", 300)
    simulate_retrieval(str(tmp_path), Settings(100, 50, 1000, 1))
    assert len(list(tmp_path.glob("events-*"))) == 4
    assert is_simulated(str(tmp_path), Settings(100, 50, 1000, 1))
    simulate_retrieval(str(tmp_path), Settings(100, 50, 500, 1))
    assert len(events(tmp_path)) == 500
    assert not is_simulated(str(tmp_path), Settings(100, 50, 1000, 1))
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        simulate_retrieval(str(tmp_path), Settings(100, 50, 500, 1))
    assert len(events(tmp_path)) == 500


@pytest.mark.parametrize(
    "sizes", [(0, 50, 10, 1), (10, 7, 10, 1), (10, 50, 9, 1), (10, 50, 10, -1)]
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="use"):
        Settings(*sizes)


def test_the_history_tells_what_popularity_cannot(tmp_path: Path) -> None:
    world = simulate_retrieval(str(tmp_path), Settings(1500, 400, 15_000, 42))
    log = events(tmp_path).sort("user_id", "timestamp_ms")
    log = log.with_columns(
        item=pl.col("item_id").str.slice(1).cast(pl.Int64),
        last=pl.col("item_id").shift().over("user_id").str.slice(1).cast(pl.Int64),
    )
    pairs = log.drop_nulls("last")
    item, last = pairs["item"].to_numpy(), pairs["last"].to_numpy()
    follows = (world.following[last] == item[:, None]).any(axis=1).mean()
    first = (world.following[last, 0] == item).mean()
    assert FOLLOW < follows < FOLLOW + 0.05
    assert abs(first - FOLLOW * SHARES[0]) < 0.05
    popular = log["item"].value_counts(sort=True).head(10)["item"]
    assert pairs["item"].is_in(popular.implode()).mean() < 0.15
    # Clusters follow in one cycle through all of them.
    cluster, seen = 0, set()
    while cluster not in seen:
        seen.add(cluster)
        cluster = int(world.following_cluster[cluster])
    assert len(seen) == len(world.following_cluster)
    assert (
        world.following_cluster[world.cluster][:, None]
        == world.cluster[world.following]
    ).all()


def test_item_texts_cluster_by_their_cause(tmp_path: Path) -> None:
    world = simulate_retrieval(str(tmp_path), Settings(100, 400, 1000, 42))
    catalogue = pl.read_parquet(tmp_path / "items.parquet")
    texts = (catalogue["title"] + " " + catalogue["description"]).to_list()
    vectors = TfidfVectorizer().fit_transform(texts)
    near = np.asarray((vectors @ vectors.T).todense())
    np.fill_diagonal(near, -1)
    assert (world.cluster[near.argmax(axis=1)] == world.cluster).mean() > 0.95


def test_words_of_clusters_are_their_own() -> None:
    world = make_world(Settings(users=1, items=2000, events=1, seed=0))
    count = len(world.starts) - 1
    texts = simulation.item_texts(
        world, simulation.make_ids("i", 2000), np.random.default_rng(0)
    )
    words = [
        tuple(title.split(",")[0].split()[1:3]) for title in texts["title"].to_pylist()
    ]
    assert (
        len(set(words))
        == count
        == len(set(zip(words, world.cluster.tolist(), strict=True)))
    )
