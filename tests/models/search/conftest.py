"""Search tables, and the catalogue, examples and batch of models of search."""

from __future__ import annotations

import numpy as np
import pytest

from core.schemas import Inputs
from models.dataset.dataset import Dataset
from models.search.catalogue import SearchCatalogue
from models.search.requests import SEARCH, SearchBatch, SearchSelection
from tests.fixtures.search_tables import write_search


@pytest.fixture(scope="session")
def search(tmp_path_factory) -> tuple[str, str]:
    """Folders of the tables of 40 users and of their text."""
    return write_search(tmp_path_factory.mktemp("search"))


@pytest.fixture(scope="session")
def catalogue(search) -> SearchCatalogue:
    return SearchCatalogue.load(Inputs(search[0], text=search[1]))


@pytest.fixture(scope="session")
def examples(catalogue) -> Dataset:
    """Train examples with histories of at most 8 behaviours."""
    selection = SearchSelection(
        "train", "user", 8, text=catalogue.text, reads_history_queries=True
    )
    return Dataset(SEARCH, catalogue.versions["sequences"], selection)


@pytest.fixture
def batch(examples) -> SearchBatch:
    return examples.collate(np.arange(9))
