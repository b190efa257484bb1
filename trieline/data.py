"""Tables as frames, and the batches of a model as a dataset of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import polars as pl
import torch
from torch.utils.data import IterableDataset, get_worker_info

from core.files import absolute, join
from core.schemas import Inputs
from core.tables import TableInfo, open_table
from models import registry
from models.dataset.dataset import Dataset as Examples
from models.loaded_model import load_catalogue


@dataclass(frozen=True)
class Tables:
    """Tables in an output folder of `prepare`; each property reads its table."""

    folder: str
    """Path or URI of the folder."""

    def read(self, name: str) -> pl.DataFrame:
        """Return a table as a frame."""
        return pl.DataFrame(open_table(join(self.folder, name), TableInfo).read())

    @property
    def events(self) -> pl.DataFrame:
        """A row per impression or interaction."""
        return self.read("events")

    @property
    def items(self) -> pl.DataFrame:
        """A row per item, in the order of `item_index`."""
        return self.read("items")

    @property
    def sequences(self) -> pl.DataFrame:
        """A row per user, with lists of behaviours and requests."""
        return self.read("sequences")


def tables(folder: str) -> Tables:
    """Return the tables in an output folder of `prepare`."""
    return Tables(absolute(folder))


@dataclass
class Dataset(IterableDataset[Any]):
    """The batches of a split, as a model reads them in training or evaluation."""

    model: Any
    """The model with random weights, whose `forward(batch)` returns its loss."""
    examples: Any
    """Examples of the split, a `Dataset` of `models/dataset`."""
    batch_size: int
    """Requests per batch."""
    seed: int
    """Seed of the order of `train`."""
    epoch: int = 0
    """Number of the epoch; each epoch of `train` has another order."""

    def __iter__(self) -> Iterator[Any]:
        """Yield this epoch's batches; the workers of a data loader take turns."""
        data, size = self.examples, self.batch_size
        batches: Iterator[Any]
        if data.selection.split == "train":
            batches = data.epoch_examples(size, seed=self.seed, epoch=self.epoch)
        else:
            batches = map(data.examples.take, data.evaluation_batches(size))
        if worker := get_worker_info():
            batches = islice(batches, worker.id, None, worker.num_workers)
        yield from map(data.kind.collate, batches)


def dataset(
    model: str | Mapping[str, Any],
    tables: str,
    split: str = "train",
    *,
    sids: str | None = None,
    text: str | None = None,
    batch_size: int = 256,
    seed: int = 42,
) -> Dataset:
    """Return the batches of a split, as a model reads them.

    Args:
        model: Name of a model, or its name and options.
        tables: Output folder of `prepare`.
        split: `train`, `val` or `test`.
        sids: Output folder of `tokenize`, for models that use semantic IDs.
        text: Output folder of `encode`, for models that read text.
        batch_size: Requests per batch.
        seed: Seed of the model's weights and of the order of `train`.
    """
    config = registry.build_model_config(registry.name_class(model))
    catalogue = load_catalogue(config.name, Inputs(tables, sids, text))
    model_class = registry.find(config.name)
    torch.manual_seed(seed)
    built = model_class(model_class.resolve_config(config, catalogue), catalogue)
    return Dataset(built, Examples.load(built, catalogue, split), batch_size, seed)
