"""jobs.prepare refuses a mapping or a setting in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from core.errors import UserError
from tests.fixtures.commands import merge, prepare_log

LOGS = yaml.safe_load((Path(__file__).parent / "cases/refused.yaml").read_text())
MISTAKES = Path(__file__).parents[3] / "../shared/cases/d5/shop/mistakes"


@pytest.mark.parametrize(
    ("kind", "changes", "fragment"),
    [(kind, *refused) for kind, log in LOGS.items() for refused in log["refused"]],
    ids=str,
)
def test_a_change_of_the_mapping_is_refused(tmp_path, kind, changes, fragment):
    for name, content in LOGS[kind]["files"].items():
        (tmp_path / name).write_text(content)

    mapping = merge(LOGS[kind]["mapping"], changes)

    with pytest.raises(UserError) as caught:
        prepare_log(mapping, tmp_path, tmp_path / "tables")

    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", LOGS)
def test_the_unchanged_logs_are_prepared(tmp_path, kind):
    for name, content in LOGS[kind]["files"].items():
        (tmp_path / name).write_text(content)

    assert prepare_log(LOGS[kind]["mapping"], tmp_path, tmp_path / "tables")["users"]


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("cat_wrongkey", "'labels'"),
        ("cat_beh", "bool label"),
        ("cat_items", "min_matched"),
        ("cat_pad", "min_matched"),
        ("cat_wrongcol", "'user'"),
        ("cat_ms", "before 1980"),
        ("cat_nofile", "logs-*.csv"),
        ("tab", "line 3"),
    ],
)
def test_a_newcomers_mistake_is_named(tmp_path, name, fragment):
    mapping = (MISTAKES / f"{name}.yaml").read_text()
    mapping = mapping.replace("split: {kind:", "split: {by:")  # an earlier word

    with pytest.raises(UserError) as caught:
        prepare_log(mapping, MISTAKES / "cat", tmp_path / "tables")
    assert fragment in str(caught.value)
