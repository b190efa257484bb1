"""Search tables that several tests read."""

from __future__ import annotations

import pytest

from tests.search_tables import write_search


@pytest.fixture(scope="session")
def search(tmp_path_factory) -> tuple[str, str]:
    """(TABLES, TEXT) of 40 users; the text has the joint form too."""
    return write_search(tmp_path_factory.mktemp("search"), joint=True)
