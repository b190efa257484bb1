"""Custom features of a log of actions, from the mapping file to tables and batches."""

from __future__ import annotations

import numpy as np
import pytest

from core.tables import read_manifest
from models.actions.requests import ACTIONS
from tests.fixtures.audited_tables import copy_with_change, find_violations
from tests.fixtures.commands import load_split, read_rows
from tests.fixtures.custom_features_log import (
    FEED,
    FEED_PREPARE,
    prepare_tables,
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory, raw) -> str:
    """Path of the tables of the feed."""
    folder = tmp_path_factory.mktemp("tables")
    return prepare_tables(folder, raw, FEED, prepare_settings=FEED_PREPARE)


def test_the_manifest_describes_the_custom_features(tables):
    info = read_manifest(f"{tables}/sequences").info

    numbers = [number["name"] for number in info["custom"]["numbers"]]
    assert numbers == ["num_bm25", "num_price"]
    categories = [category["name"] for category in info["custom"]["categories"]]
    assert categories == ["cat_state"]
    assert info["viewers"] == {"city": ["Lima", "Oslo", "Rome"]}
    assert find_violations(tables) == {}


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (
            lambda rows, info: rows[0]["num_price"].__setitem__(0, 1.0),
            {"behaviours", "features"},
        ),
        (
            lambda rows, info: info["custom"]["numbers"][1].update(std=9.0),
            {"features"},
        ),
    ],
)
def test_the_audit_finds_values_that_were_not_known_in_training(
    tables, tmp_path, change, rules
):
    assert set(find_violations(copy_with_change(tables, tmp_path, change))) == rules


def test_batches_have_the_features_of_context_and_candidates_as_in_the_tables(tables):
    rows = read_rows(tables, "sequences")
    examples = load_split(ACTIONS, f"{tables}/sequences", "test", max_history=16)

    batch = examples.collate(np.arange(len(examples)))

    for index, user in enumerate(batch.user_row.tolist()):
        row, begin = rows[user], rows[user]["val_end"]
        for prefix, events in (
            ("", slice(begin - 16, begin)),
            ("candidate_", slice(begin, None)),
        ):
            valid = getattr(batch, f"{prefix}valid")[index]
            custom = getattr(batch, f"{prefix}custom")[index][valid]
            for column, name in enumerate(("num_bm25", "num_price")):
                expected = np.array(row[name][events], np.float32)
                np.testing.assert_array_equal(custom[:, column], expected)
