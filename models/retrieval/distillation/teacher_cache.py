r"""A cache of a frozen teacher's outputs, shared by epochs, runs and sweep trials.

    python -m jobs.train --config jobs/configs/retrieval/sid_mlp.yaml ... \
        --model.teacher_cache runs/teacher_cache

The cache is a folder with two Parquet tables of vectors by request, without padding and
in half precision:

- `encoder`: states of the history's tokens, for the requests of training and
  validation.
- `decoder`: the decoder's state before each code of the target, for the requests of
  training. The teacher's output layer computes logits from the states. A state has 128
  numbers at the published sizes, fewer than the thousand logits of a vocabulary.

The folder of a table is named by the hash of all inputs, so one cache serves all
teachers, tokenizers and variants of a student. `manifest.json` is written last, so an
unfinished table is computed again. In training, all workers of a node read
memory-mapped columns, so the rows need not fit in memory.

Shapes: `B` requests, `S` vectors of the request with the most vectors, `D` width, `L`
levels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from core.errors import UserError, pluralize
from core.files import LOCK, hold_lock, join
from core.ragged import find_sorted, lengths_to_offsets, pad_indices
from core.tables import (
    Part,
    TableInfo,
    commit,
    fingerprint,
    has_manifest,
    open_table,
    write_part,
)
from models.dataset.batch import PAD
from models.dataset.columns import Columns, open_columns
from models.dataset.dataset import Dataset
from models.retrieval.data import HistoryBatch, RequestBatch
from models.retrieval.parts import History, real_positions

SCHEMA = pa.schema(
    [
        # request: `request_number`; states: the request's vectors, end to end
        pa.field("request", pa.int64(), nullable=False),
        pa.field("states", pa.list_(pa.field("element", pa.float16())), nullable=False),
    ]
)
"""Columns of a table of the cache."""

LAYOUT: dict[str, Any] = {
    "use_dictionary": False,
    "write_statistics": False,  # slow in half precision, and never read
    "column_encoding": {"request": "PLAIN", "states.list.element": "BYTE_STREAM_SPLIT"},
}
"""Options of the Parquet writer."""

BATCH_REQUESTS = 256
"""Requests per forward pass of the teacher."""

PART_BYTES = 64 * 2**20
"""Size from which a part of the table is written."""


@dataclass
class StatesInfo(TableInfo):
    """Info of a table of the cache."""

    width: int
    """Width D of the vectors."""


ComputeStates = Callable[[RequestBatch], tuple[Tensor, Tensor]]
"""Computes the vectors (B, S, D) of a batch, and the number of vectors of each request
(B,)."""


class TeacherOutput(NamedTuple):
    """An output of a teacher that is cached as one table."""

    name: str
    """Name of the table: `encoder` or `decoder`."""
    settings: dict[str, Any]
    """Config and weights hash of the model that computes the output."""
    compute: ComputeStates
    """Computes the output of a batch."""


class CachedStates:
    """Vectors in half precision by request, in memory-mapped arrays."""

    def __init__(
        self,
        requests: NDArray[np.int64],
        lengths: NDArray[np.int64],
        values: NDArray[np.float16],
    ) -> None:
        """Index the vectors by request.

        Args:
            requests: (m,) `request_number` of each request.
            lengths: (m,) number of vectors of each request.
            values: (sum of lengths, D) vectors of all requests, end to end.
        """
        order = np.argsort(requests)
        self.requests, self.lengths = requests[order], lengths[order]
        self.starts = (np.cumsum(lengths) - lengths)[order]
        self.values = values

    def pad_states(self, batch: HistoryBatch) -> History | None:
        """Return the batch's vectors (B, S, D) as float32, zero at padding.

        Returns:
            The vectors and their number per request, or None if a request is not in
            the cache.
        """
        if not isinstance(batch, RequestBatch) or bool((batch.target == PAD).any()):
            return None
        numbers = batch.request.cpu().numpy()
        index, is_cached = find_sorted(self.requests, numbers)
        if not is_cached.all():
            return None
        device = batch.request.device
        lengths = self.lengths[index]
        rows, inside = pad_indices(self.starts[index], lengths, min_width=0)  # (B, S)
        states = torch.from_numpy(self.values[rows]).to(device).float()
        if not inside.all():
            is_padding = torch.from_numpy(~inside).to(device).unsqueeze(-1)
            states.masked_fill_(is_padding, 0.0)
        return History(states, torch.from_numpy(lengths).to(device))


@torch.no_grad()
def open_teacher_cache(
    folder: str,
    outputs: Sequence[TeacherOutput],
    hashes: dict[str, str],
    datasets: Mapping[str, Dataset],
    device: torch.device,
) -> tuple[dict[str, CachedStates], list[str]]:
    """Open the tables of a teacher's outputs, and compute tables that are missing.

    Rank 0 computes them while the other ranks and concurrent runs with the same cache
    wait.

    Args:
        folder: Folder of the cache.
        outputs: The outputs, one per table.
        hashes: Hashes of the catalogue's tables.
        datasets: This rank's datasets by split, with `train`.
        device: Device that computes the outputs.

    Returns:
        The tables by name, and a message per table.
    """
    train = datasets["train"]
    tables, messages = {}, []
    for name, settings, compute in outputs:
        # validation needs the encoder alone
        splits = ["train", "val"] if name == "encoder" else ["train"]
        max_history = train.selection.max_history
        settings = {**settings, "max_history": max_history, "splits": splits}
        uri = join(folder, f"{name}-{fingerprint(settings, hashes)[:16]}")
        status = "reused"
        if train.rank == 0 and not has_manifest(uri):
            busy = f"{uri} is being computed by another process"
            with hold_lock(join(uri, LOCK), busy, math.inf):
                if not has_manifest(uri):
                    began = time.monotonic()
                    requests = [datasets[split] for split in splits]
                    parts, width = _write_parts(uri, compute, requests, device)
                    commit(
                        uri,
                        name,
                        SCHEMA,
                        parts,
                        config=settings,
                        inputs=hashes,
                        info=StatesInfo(width),
                    )
                    status = f"computed in {time.monotonic() - began:.0f} s"
        if train.world > 1:
            dist.barrier()
        table = open_table(uri, StatesInfo)
        width = table.info.width

        def decode(part: pa.Table, width: int = width) -> Columns:
            lists = part["states"].combine_chunks()
            return {
                "requests": part["request"].to_numpy(),
                "lengths": pc.list_value_length(lists).to_numpy() // width,
                "values": lists.flatten().to_numpy().reshape(-1, width),
            }

        columns = open_columns(table, "teacher_cache", None, decode, width)
        tables[name] = CachedStates(**columns)
        size = sum(part.bytes for part in table.files) / 2**20
        messages.append(
            f"teacher cache: {name} states of {pluralize(table.rows, 'request')}, "
            f"{size:,.1f} MiB in half precision, {status}: {uri}"
        )
    return tables, messages


def _write_parts(
    uri: str,
    compute: ComputeStates,
    datasets: Sequence[Dataset],
    device: torch.device,
) -> tuple[list[Part], int]:
    """Compute and write the rows of all requests, and return the width of the vectors.

    Batches have requests of similar lengths.
    """
    parts: list[Part] = []
    tables: list[pa.Table] = []
    width = 1
    for dataset in datasets:
        rows = dataset.examples.sort_order()
        for batch_rows in dataset.cut_batches(rows, BATCH_REQUESTS):
            batch = dataset.collate(batch_rows)
            states, lengths = compute(batch.to(device))
            width = states.shape[2]
            is_real = real_positions(lengths, states.shape[1])
            values = states[is_real].half().cpu()  # (sum of lengths, D)
            if not bool(values.isfinite().all()):
                largest = float(states.abs().max())
                raise UserError(
                    f"the teacher's states reach {largest:.3g}, more than half "
                    "precision holds (65504)"
                )
            offsets = lengths_to_offsets(lengths.cpu().numpy() * width)
            lists = pa.ListArray.from_arrays(
                offsets.astype(np.int32), pa.array(values.flatten().numpy())
            )
            columns = [pa.array(batch.request.numpy()), lists]
            tables.append(pa.Table.from_arrays(columns, schema=SCHEMA))
            if sum(table.nbytes for table in tables) > PART_BYTES:
                parts.append(write_part(uri, pa.concat_tables(tables), **LAYOUT))
                tables = []
    if tables:
        parts.append(write_part(uri, pa.concat_tables(tables), **LAYOUT))
    return parts, width
