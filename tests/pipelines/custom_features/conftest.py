"""The small search log with custom features, its tables and random text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.custom_features_log import (
    prepare_tables,
    write_log,
    write_random_text,
)


@pytest.fixture(scope="session")
def raw(tmp_path_factory) -> Path:
    """Folder of the log."""
    folder = tmp_path_factory.mktemp("raw")
    write_log(folder)
    return folder


@pytest.fixture(scope="session")
def tables(tmp_path_factory, raw) -> str:
    """Path of the tables of the log."""
    return prepare_tables(tmp_path_factory.mktemp("tables"), raw)


@pytest.fixture(scope="session")
def text(tmp_path_factory, tables) -> str:
    """Path of random text vectors of the items and queries."""
    return write_random_text(tmp_path_factory.mktemp("text"), tables)
