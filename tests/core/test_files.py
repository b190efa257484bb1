"""Test URIs with a query, and files that cannot be written."""

from __future__ import annotations

import pytest

from core.files import join, write_file


def test_paths_are_joined_before_the_query_of_a_uri():
    assert join("s3://b/a?region=eu", "b", "c.json") == "s3://b/a/b/c.json?region=eu"
    assert join("runs/a?b", "c") == "runs/a?b/c"


def test_a_file_that_cannot_be_written_leaves_no_temporary_file(tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(f"{tmp_path}/page", b"")
    assert not [*tmp_path.glob("*.tmp")]
