"""The small log with own features, and its tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.custom_features_log import make, make_text, write_log


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    write_log(folder)
    return folder


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory, raw: Path) -> str:
    return make(tmp_path_factory.mktemp("own"), raw)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory, tables: str) -> str:
    return make_text(tmp_path_factory.mktemp("own"), tables)
