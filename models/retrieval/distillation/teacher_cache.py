"""A frozen teacher's outputs for each request, kept as a table: made once, read by every epoch, run and sweep trial.

    python -m jobs.train --config jobs/configs/sid_mlp.yaml ... --model.teacher_cache runs/teacher_cache

Two tables of vectors by request, unpadded, at half precision, in Parquet: `encoder` has
the states of the history's tokens, for the requests of training and validation;
`decoder` has the decoder's state before each code of the target, for those of training,
from which its output layer gives the teacher's logits over any part of the vocabulary
(128 numbers a code at the published sizes, where a vocabulary has a thousand). Each
stands in a folder named after all that it depends on, so one folder serves all
teachers, tokenizers and variants of the student. Its `manifest.json` is written last,
so a half-written table is made anew. Each worker makes its share of the rows; in
training all workers of a node read them from memory-mapped columns, so the rows need
not fit in memory.

Shapes: `B` requests, `S` vectors of the longest, `D` width, `L` levels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from models.config import pluralize
from models.dataset.columns import Columns, open_columns
from models.retrieval.data import (
    PAD,
    Catalogue,
    HistoryBatch,
    RequestBatch,
    RetrievalDataset,
)
from models.retrieval.parts import History, real_positions
from models.storage.locks import LOCK, hold_lock
from models.storage.tables import (
    Manifest,
    Part,
    UserError,
    commit,
    fingerprint,
    has_manifest,
    join,
    read_manifest,
    write_part,
)

SCHEMA = pa.schema(
    [
        pa.field("request", pa.int64(), nullable=False),  # `request_number`
        pa.field(
            "states", pa.list_(pa.field("element", pa.float16())), nullable=False
        ),  # vectors, one after the other
    ]
)

LAYOUT: dict[str, Any] = {
    "use_dictionary": False,
    "write_statistics": False,  # of half precision they are slow to make, and nobody asks for them
    "column_encoding": {"request": "PLAIN", "states.list.element": "BYTE_STREAM_SPLIT"},
}
"""Options of the Parquet writer."""

BATCH = 256
"""Requests that the teacher reads at once."""

PART_BYTES = 64 * 2**20
"""A part of the table is written when it holds this much."""

Outputs = Callable[[RequestBatch], tuple[Tensor, Tensor]]
"""Vectors (B, S, D) of a batch, and how many of each row are real (B,)."""


@dataclass(frozen=True)
class Query:
    """Key of a cached table: a teacher's outputs for the requests of some splits."""

    name: str
    """Of the table: `encoder` or `decoder`."""
    weights: str
    """SHA-256 of the weights file of the model that makes them."""
    config: dict[str, Any]
    """What they depend on beside weights and tables: `width` D, and the sizes of the
    model."""
    outputs: Outputs
    """Makes them."""
    splits: Sequence[str]
    """`train` and `val`, or one of them."""


class States:
    """Vectors of half precision by request, in a memory-mapped file."""

    def __init__(
        self,
        requests: NDArray[np.int64],
        lengths: NDArray[np.int64],
        values: NDArray[np.float16],
    ) -> None:
        """`values` (sum of lengths, D) has the vectors of `requests` one after the other."""
        order = np.argsort(requests)
        self.requests, self.lengths = requests[order], lengths[order]
        self.starts = (np.cumsum(lengths) - lengths)[order]
        self.values = values

    def pad_states(self, batch: HistoryBatch) -> History | None:
        """Return the batch's states as float32 vectors (B, S, D), zero at padding.

        Return None if a request is not in the cache.
        """
        if not isinstance(batch, RequestBatch) or bool((batch.target == PAD).any()):
            return None
        numbers = batch.request.cpu().numpy()
        index = np.searchsorted(self.requests, numbers)
        if (index == len(self.requests)).any() or (
            self.requests[index] != numbers
        ).any():
            return None
        device = batch.request.device
        lengths = self.lengths[index]
        position = np.arange(int(lengths.max()))
        inside = position < lengths[:, None]
        rows = np.where(
            inside, self.starts[index][:, None] + position, self.starts[index][:, None]
        )
        states = torch.from_numpy(self.values[rows]).to(device).float()
        if not inside.all():
            states.masked_fill_(torch.from_numpy(~inside).to(device).unsqueeze(-1), 0.0)
        return History(states, torch.from_numpy(lengths).to(device))


@torch.no_grad()
def precompute(
    model: Any,
    config: Any,
    catalogue: Catalogue,
    examples: Mapping[str, RetrievalDataset],
) -> list[str]:
    """Gives a student the tables of its `teacher_cache`, for this rank's `examples` of each split; a line about each.

    Tables that are not there yet are made: every rank calls this, makes its rows, and
    waits for the others. A run that starts meanwhile with the same folder waits too.
    Raises UserError for a table that is damaged or without some of the requests.
    """
    if not config.teacher_cache:
        return []
    model.eval()  # without dropout
    device = next(model.parameters()).device
    rank, world = examples["train"].rank, examples["train"].world
    known, lines = {}, []
    for query in model.teacher_queries():
        parts = [examples[split] for split in query.splits]
        inputs = {**catalogue.hashes, "weights": query.weights}
        settings = {
            **query.config,
            "max_history": parts[0].max_history,
            "splits": list(query.splits),
        }
        if parts[0].fold is not None:
            settings["fold"] = parts[0].fold
        uri = join(
            config.teacher_cache, f"{query.name}-{fingerprint(settings, inputs)[:16]}"
        )
        with _held(uri) if rank == 0 else nullcontext() as there:
            there = _agree(there, world)
            if not there:
                began = time.monotonic()
                ranks = _all(_write(uri, query.outputs, parts, device), world)
                if rank == 0:
                    timings = {"seconds": round(time.monotonic() - began, 3)}
                    written = [part for of_rank in ranks for part in of_rank]
                    commit(
                        uri,
                        query.name,
                        SCHEMA,
                        written,
                        config=settings,
                        inputs=inputs,
                        timings=timings,
                    )
                _agree(None, world)
        known[query.name], manifest = _open(uri, query, parts)
        size = sum(part.bytes for part in manifest.files) / 2**20
        what = "found" if there else f"made in {manifest.timings['seconds']:.0f} s"
        count = pluralize(manifest.rows, "request")
        lines.append(
            f"teacher cache: {query.name} states of {count}, {size:,.1f} MiB at half precision, {what}: {uri}"
        )
    model.set_teacher_outputs(known)
    return lines


def _write(
    uri: str,
    outputs: Outputs,
    parts: list[RetrievalDataset],
    device: torch.device | str,
) -> list[Part]:
    """Writes the rows of this rank's requests."""
    made: list[Part] = []
    tables: list[pa.Table] = []
    for examples in parts:
        rows = examples.sort_for_evaluation(examples.rows())
        mine = rows[examples.rank :: examples.world]
        for rows in examples.cut_batches(mine, BATCH):
            batch = examples.collate(rows)
            states, lengths = outputs(batch.to(device))
            inside = real_positions(lengths, states.shape[1])
            values = states[inside].half().cpu()  # (tokens, D), row after row
            if not bool(values.isfinite().all()):
                raise UserError(
                    f"the teacher's states go up to {float(states.abs().max()):.3g}, half precision to 65504; leave "
                    f"model.teacher_cache out"
                )
            ends = np.append(0, np.cumsum(lengths.cpu().numpy() * states.shape[2]))
            lists = pa.ListArray.from_arrays(
                ends.astype(np.int32), pa.array(values.flatten().numpy())
            )
            tables.append(
                pa.Table.from_arrays(
                    [pa.array(batch.request.numpy()), lists], schema=SCHEMA
                )
            )
            if sum(table.nbytes for table in tables) > PART_BYTES:
                made.append(write_part(uri, pa.concat_tables(tables), **LAYOUT))
                tables = []
    if tables:
        made.append(write_part(uri, pa.concat_tables(tables), **LAYOUT))
    return made


def _decode_states(table: pa.Table, width: int) -> Columns:
    """Decode one part: request (R,), length (R,) in vectors, and the vectors (S, D) end to end."""
    lists = table["states"].combine_chunks()
    values = lists.flatten().to_numpy().reshape(-1, width)
    length = pc.list_value_length(lists).to_numpy() // width
    return {"request": table["request"].to_numpy(), "length": length, "states": values}


def _open(
    uri: str, query: Query, parts: list[RetrievalDataset]
) -> tuple[States, Manifest]:
    """Open the rows of the examples' requests."""
    wanted = np.concatenate([part.request_numbers for part in parts])
    width = int(query.config["width"])
    try:
        manifest = read_manifest(uri, query.name)
        columns = open_columns(
            uri,
            "teacher_states",
            None,
            lambda table: _decode_states(table, width),
            manifest=manifest,
            settings=width,
        )
        made = columns.get("request", np.zeros(0, np.int64))
        missing = len(np.setdiff1d(wanted, made))
        if missing:
            raise UserError(f"it lacks {missing:,} of {len(wanted):,} requests")
    except UserError as error:
        raise UserError(
            f"the teacher cache {uri} cannot be used ({error}); remove the folder {uri}, and the next training makes it"
        ) from error
    states = States(columns["request"], columns["length"], columns["states"])
    return states, manifest


@contextmanager
def _held(uri: str) -> Iterator[bool]:
    """Yield whether the table exists.

    If it does not, hold its lock, so that other runs wait until it is made.
    """
    if has_manifest(uri):
        yield True
        return
    remedy = "give model.teacher_cache a folder that you may write"
    with hold_lock(
        join(uri, LOCK), f"{uri} is being made by another process", math.inf, remedy
    ):
        yield has_manifest(uri)


def _agree(value: Any, world: int) -> Any:
    """Broadcast rank 0's value to all ranks."""
    if world == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _all(value: Any, world: int) -> list[Any]:
    """The values of all ranks."""
    if world == 1:
        return [value]
    values = [None] * world
    dist.all_gather_object(values, value)
    return values
