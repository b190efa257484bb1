"""The audit passes the tables of a log of actions and finds each kind of planted violation, and only that one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from models.tables import read_manifest
from pipelines.data.actions.simulator import FeedSettings, simulate_feed
from pipelines.data.audit.rules import audit
from pipelines.data.log import load_source
from pipelines.data.prepare import prepare
from pipelines.data.settings import read_config
from tests.audited import broken, rewrite

SOURCE = Path(__file__).parents[3] / "jobs" / "configs" / "sources" / "simulated_feed.yaml"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> str:
    """Tables of a small simulated feed, in two parts, with counts of items, authors and users."""
    folder = tmp_path_factory.mktemp("feed")
    simulate_feed(str(folder / "raw"), FeedSettings(60, 40, 900, 3))
    source, defaults = load_source(str(SOURCE))
    actions = defaults["actions"] | {
        "counts": {"keys": ["item", "author", "user"], "counted_labels": ["long_dwell", "like"]}
    }
    config = read_config(defaults, {"partitions": 2, "max_events": 25, "actions": actions})
    prepare(source, str(folder / "raw"), str(folder / "tables"), config, say=lambda line: None)
    return str(folder / "tables")


def test_correct_tables_pass(prepared: str) -> None:
    rules = {rule.name: rule for rule in audit(prepared)}
    assert broken(prepared) == {}
    info = read_manifest(prepared + "/sequences").info
    assert info["truncated_users"] > 0
    assert rules["windows"].rows == rules["tasks"].rows == sum(info["events"].values())
    assert rules["splits"].rows == info["users"] == 60


def candidate(rows: list[dict]) -> tuple[dict, int]:
    """A user and the place of one of his candidates of the test window."""
    row = next(row for row in rows if 2 < row["train_end"] < row["val_end"] < len(row["item_index"]) - 1)
    return row, row["val_end"]


def lists_of(row: dict) -> list[str]:
    return [name for name, value in row.items() if isinstance(value, list)]


def swapped(rows: list[dict], info: dict) -> None:
    """Two events of a user's context have changed places, with all that belongs to them."""
    row, _ = candidate(rows)
    for name in lists_of(row):
        row[name][0], row[name][1] = row[name][1], row[name][0]


def other_item(rows: list[dict], info: dict) -> None:
    row, place = candidate(rows)
    row["item_index"][place] = (row["item_index"][place] + 1) % info["items"]


def other_label(rows: list[dict], info: dict) -> None:
    row, place = candidate(rows)
    row["label_share"][place] = not row["label_share"][place]


def other_task(rows: list[dict], info: dict) -> None:
    row, place = candidate(rows)
    task = info["tasks"].index("contribution")
    row["tasks"][place][task] = 1 - row["tasks"][place][task]


def other_action(rows: list[dict], info: dict) -> None:
    row, place = candidate(rows)
    row["actions"][place][info["actions"].index("dwell")] += 0.01


def other_threshold(rows: list[dict], info: dict) -> None:
    info["definitions"]["tasks"]["long_dwell"]["above"] = 12_000


def test_in_context(rows: list[dict], info: dict) -> None:
    """The first test candidate counts as context."""
    row, _ = candidate(rows)
    row["val_end"] += 1
    info["events"]["val"] += 1
    info["events"]["test"] -= 1


test_in_context.__test__ = False  # type: ignore[attr-defined]


def later_cut(rows: list[dict], info: dict) -> None:
    """The manifest says that validation began an hour later than it did."""
    info["val_start_ms"] += 3_600_000


def count_of_the_future(rows: list[dict], info: dict) -> None:
    """One candidate's count is as if one more like had been known."""
    row, place = candidate(rows)
    row["features"][place][info["features"].index("item_like_7d")] += 0.5


def count_of_another_author(rows: list[dict], info: dict) -> None:
    row, place = candidate(rows)
    row["features"][place][info["features"].index("author_exposures_1d")] += 0.5


def no_delay(rows: list[dict], info: dict) -> None:
    """Counts that end before they may, as if the log took no time to arrive."""
    info["definitions"]["counts"]["delay_minutes"] = 0


def unknown_feature(rows: list[dict], info: dict) -> None:
    info["features"][0] = "item_magic_1d"


def base_rate(rows: list[dict], info: dict) -> None:
    info["base_rates"]["like"] += 0.01


def scale_of_another_log(rows: list[dict], info: dict) -> None:
    info["feature_mean"][0] += 0.1


def not_counted(rows: list[dict], info: dict) -> None:
    info["users_without_context"]["test"] += 1


def shorter_list(rows: list[dict], info: dict) -> None:
    row = rows[-1]
    row["label_like"].pop()


def user_twice(rows: list[dict], info: dict) -> None:
    row = rows[0]
    rows.append(copy.deepcopy(row))
    train, val, length = row["train_end"], row["val_end"], len(row["item_index"])
    info["users"] += 1
    info["interactions"] += length
    for split, low, high in (("train", 0, train), ("val", train, val), ("test", val, length)):
        info["events"][split] += high - low
        info["users_with_candidates"][split] += high > low
        info["users_without_context"][split] += high > low == 0


PLANTED: list[tuple[Callable[[list[dict], dict], None], list[str]]] = [
    (swapped, ["behaviours"]),
    (other_item, ["behaviours", "windows"]),
    (other_label, ["behaviours", "tasks"]),
    (other_task, ["tasks"]),
    (other_action, ["tasks"]),
    (other_threshold, ["tasks", "windows"]),
    (test_in_context, ["splits"]),
    (later_cut, ["splits", "windows"]),
    (count_of_the_future, ["windows"]),
    (count_of_another_author, ["windows"]),
    (no_delay, ["windows"]),
    (unknown_feature, ["windows"]),
    (base_rate, ["counts"]),
    (scale_of_another_log, ["counts"]),
    (not_counted, ["counts"]),
]


@pytest.mark.parametrize(("plant", "expected"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_planted_violation_is_found(
    prepared: str, tmp_path: Path, plant: Callable[[list[dict], dict], None], expected: list[str]
) -> None:
    assert broken(rewrite(prepared, tmp_path, plant)).keys() == set(expected)


def test_a_user_who_comes_twice_is_found(prepared: str, tmp_path: Path) -> None:
    found = broken(rewrite(prepared, tmp_path, user_twice))
    assert "users" in found
    assert "splits" not in found


def test_lists_of_unequal_length_are_found(prepared: str, tmp_path: Path) -> None:
    assert "behaviours" in broken(rewrite(prepared, tmp_path, shorter_list))
