"""Search tables, and the catalogue, examples and batch of models of search."""

from __future__ import annotations

import numpy as np
import pytest

from core.files import join
from models.search.catalogue import SearchCatalogue
from models.search.data import SearchBatch, SearchDataset
from models.search.qgs import QGSConfig
from tests.fixtures.commands import load_split
from tests.fixtures.search_tables import write_search


@pytest.fixture(scope="session")
def search(tmp_path_factory) -> tuple[str, str]:
    """Folders of the tables of 40 users and of their text, with the joint condition."""
    return write_search(tmp_path_factory.mktemp("search"), joint=True)


@pytest.fixture(scope="session")
def catalogue(search) -> SearchCatalogue:
    return SearchCatalogue.load(*search)


@pytest.fixture(scope="session")
def examples(search, catalogue) -> SearchDataset:
    """Train examples with histories of at most 8 behaviours."""
    uri = join(search[0], "sequences")
    options = SearchDataset.dataset_options(QGSConfig(), catalogue)
    return load_split(SearchDataset, uri, "train", max_history=8, **options)


@pytest.fixture
def batch(examples) -> SearchBatch:
    return examples.collate(np.arange(9))
