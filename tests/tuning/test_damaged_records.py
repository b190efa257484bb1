"""Test that a damaged record of a run is refused with the file and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models.storage.tables import UserError
from pipelines.training.record import read_record

RUN = {"uri": "sqlite:///store.db", "experiment": "retrieval/small", "run_id": "f" * 32}
DAMAGED = [
    "{",
    "",
    "[1, 2",
    "3",
    "null",
    '["a", "b"]',
    '"text"',
    '{"status": "finished"}',
    "\x00\x00",
]


@pytest.mark.parametrize(
    "text",
    [
        *DAMAGED,
        json.dumps({"tracking": RUN}),
        json.dumps({"status": 1, "tracking": RUN}),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(
        UserError,
        match=r"^\S+/run\.json is damaged \(.+\)",
    ):
        read_record(str(tmp_path))


def test_a_complete_record_is_read(tmp_path: Path) -> None:
    record = {"status": "running", "tracking": RUN}
    (tmp_path / "run.json").write_text(json.dumps(record))

    assert read_record(str(tmp_path)) == record
