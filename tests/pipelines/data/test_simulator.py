"""The simulated log has exact sizes, depends on its seed alone, and its items follow
from a user's last item and from their cluster.
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


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def read_events(folder: Path) -> pl.DataFrame:
    """Return the events of all files of a log."""
    return pl.read_parquet(folder / "events-*.parquet")


@pytest.mark.parametrize(
    ("users", "items", "count"),
    [(1500, 400, 15_000), (1, 8, 1), (7, 8, 8), (50, 1000, 50), (3, 20, 5000)],
)
def test_sizes_are_exact_and_times_increase_per_user(
    tmp_path: Path, users: int, items: int, count: int
) -> None:
    simulate_retrieval(str(tmp_path), Settings(users, items, count, seed=3))

    log = read_events(tmp_path)
    assert len(log) == count
    assert log["user_id"].n_unique() == users
    assert log["timestamp_ms"].is_sorted()
    gaps = log.select(gap=pl.col("timestamp_ms").diff().over("user_id"))
    assert (gaps["gap"].drop_nulls() > 0).all()
    catalogue = pl.read_parquet(tmp_path / "items.parquet")
    assert catalogue["item_id"].n_unique() == items
    assert set(log["item_id"]) <= set(catalogue["item_id"])
    assert catalogue.null_count().sum_horizontal().item() == 0


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(
    tmp_path: Path,
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        simulate_retrieval(str(tmp_path / name), Settings(200, 50, 2000, seed))

    hashes, other_hashes = hash_files(tmp_path / "a"), hash_files(tmp_path / "c")
    assert hash_files(tmp_path / "b") == hashes
    assert other_hashes["events-00000.parquet"] != hashes["events-00000.parquet"]


def test_a_new_log_replaces_all_files_of_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "ROWS_PER_FILE", 300)
    first, second = Settings(100, 50, 1000, 1), Settings(100, 50, 500, 1)
    simulate_retrieval(str(tmp_path), first)
    assert len(list(tmp_path.glob("events-*"))) == 4
    assert is_simulated(str(tmp_path), first)

    simulate_retrieval(str(tmp_path), second)

    assert len(read_events(tmp_path)) == 500
    assert not is_simulated(str(tmp_path), first)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    simulate_retrieval(str(tmp_path), Settings(100, 50, 500, 1))
    (tmp_path / "thesis.txt").write_text("mine")

    with pytest.raises(UserError, match=r"thesis\.txt"):
        simulate_retrieval(str(tmp_path), Settings(100, 50, 500, 1))

    assert len(read_events(tmp_path)) == 500


@pytest.mark.parametrize(
    "sizes", [(0, 50, 10, 1), (10, 7, 10, 1), (10, 50, 9, 1), (10, 50, 10, -1)]
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="use"):
        Settings(*sizes)


def test_items_follow_from_the_last_item_and_not_from_popularity(
    tmp_path: Path,
) -> None:
    world = simulate_retrieval(str(tmp_path), Settings(1500, 400, 15_000, 42))

    log = read_events(tmp_path).sort("user_id", "timestamp_ms")
    log = log.with_columns(
        item=pl.col("item_id").str.slice(1).cast(pl.Int64),
        last=pl.col("item_id").shift().over("user_id").str.slice(1).cast(pl.Int64),
    )
    pairs = log.drop_nulls("last")
    item, last = pairs["item"].to_numpy(), pairs["last"].to_numpy()
    share_following = (world.following[last] == item[:, None]).any(axis=1).mean()
    assert FOLLOW < share_following < FOLLOW + 0.05
    share_first = (world.following[last, 0] == item).mean()
    assert abs(share_first - FOLLOW * SHARES[0]) < 0.05
    popular = log["item"].value_counts(sort=True).head(10)["item"]
    assert pairs["item"].is_in(popular.implode()).mean() < 0.15


def test_clusters_follow_each_other_in_one_cycle() -> None:
    world = make_world(Settings(users=1500, items=400, events=15_000, seed=42))

    cluster = 0
    visited: set[int] = set()
    while cluster not in visited:
        visited.add(cluster)
        cluster = int(world.following_cluster[cluster])
    assert len(visited) == len(world.following_cluster)
    next_cluster = world.following_cluster[world.cluster]  # of each item
    assert (world.cluster[world.following] == next_cluster[:, None]).all()


def test_the_nearest_text_is_of_the_same_cluster(tmp_path: Path) -> None:
    world = simulate_retrieval(str(tmp_path), Settings(100, 400, 1000, 42))

    catalogue = pl.read_parquet(tmp_path / "items.parquet")
    texts = (catalogue["title"] + " " + catalogue["description"]).to_list()
    vectors = TfidfVectorizer().fit_transform(texts)
    similarity = np.asarray((vectors @ vectors.T).todense())
    np.fill_diagonal(similarity, -1)
    nearest = similarity.argmax(axis=1)
    assert (world.cluster[nearest] == world.cluster).mean() > 0.95


def test_each_cluster_has_words_that_no_other_has() -> None:
    world = make_world(Settings(users=1, items=2000, events=1, seed=0))
    ids = simulation.make_ids("i", 2000)

    texts = simulation.item_texts(world, ids, np.random.default_rng(0))

    titles = [title.split(",")[0].split() for title in texts["title"].to_pylist()]
    words = [tuple(title[1:3]) for title in titles]
    num_clusters = len(world.starts) - 1
    words_and_clusters = set(zip(words, world.cluster.tolist(), strict=True))
    assert len(set(words)) == len(words_and_clusters) == num_clusters
