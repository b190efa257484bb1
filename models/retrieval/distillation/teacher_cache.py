r"""A cache of a frozen teacher's outputs, shared by epochs, runs and sweep trials.

    python -m jobs.train --config jobs/configs/retrieval/sid_mlp.yaml ... \
        --model.teacher_cache runs/teacher_cache

The cache is a folder with two outputs by request, without padding and in half
precision:

- `encoder`: states of the history's tokens, for the requests of training and
  validation.
- `decoder`: the decoder's state before each code of the target, for the requests of
  training. The teacher's output layer computes logits from the states. A state has 128
  numbers at the published sizes, fewer than the thousand logits of a vocabulary.

An output is a folder that is named by the hash of all inputs, so one cache serves all
teachers, tokenizers and variants of a student. The vectors of all requests, end to end,
are the file `states`, which all workers map into memory. `index.npz` is written last,
so an unfinished output is computed again.

Shapes: `B` requests, `m` requests of an output, `S` vectors of the request with the
most vectors, `D` width, `L` levels.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.errors import UserError, pluralize
from core.files import LOCK, hold_lock, write_file
from core.ragged import find_sorted, lengths_to_starts, pad_indices
from core.tables import fingerprint
from models.dataset.batch import PAD
from models.dataset.columns import cache_folder
from models.dataset.dataset import Dataset
from models.retrieval.data import HistoryBatch, RequestBatch
from models.retrieval.parts import History, real_positions

INDEX, STATES = "index.npz", "states"
"""Names of the files of an output."""

BATCH_REQUESTS = 256
"""Requests per forward pass of the teacher."""

ComputeStates = Callable[[RequestBatch], tuple[Tensor, Tensor]]
"""Computes the vectors (B, S, D) of a batch, and the number of vectors of each request
(B,)."""


class TeacherOutput(NamedTuple):
    """An output of a teacher that is cached."""

    name: str
    """Name of the output: `encoder` or `decoder`."""
    settings: dict[str, Any]
    """Config and weights hash of the model that computes the output."""
    compute: ComputeStates
    """Computes the output of a batch."""


class CachedStates:
    """Vectors in half precision by request, in memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / INDEX) as index:
            requests, lengths, width = (
                index[name] for name in ("requests", "lengths", "width")
            )
        order = np.argsort(requests)
        self.requests, self.lengths = requests[order], lengths[order]
        self.starts = lengths_to_starts(lengths)[order]
        values = np.memmap(folder / STATES, np.float16, "r")
        self.values = values.reshape(-1, int(width))

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
    """Open a teacher's outputs, and compute outputs that are missing.

    One process computes an output while other ranks and runs with the same cache wait.

    Args:
        folder: Folder of the cache. At a URI, each node has a cache of its own in its
            cache folder instead.
        outputs: The outputs.
        hashes: Hashes of the catalogue's tables.
        datasets: Datasets by split, with `train`.
        device: Device that computes the outputs.

    Returns:
        The outputs by name, and a message per output.
    """
    root = Path(folder)
    if "://" in folder:
        root = cache_folder().with_name("teacher_cache")
    max_history = datasets["train"].selection.max_history
    cached, messages = {}, []
    for name, settings, compute in outputs:
        # validation needs the encoder alone
        splits = ["train", "val"] if name == "encoder" else ["train"]
        settings = {**settings, "max_history": max_history, "splits": splits}
        path = root / f"{name}-{fingerprint(settings, hashes)[:16]}"
        status = "reused"
        busy = f"{path} is being computed by another process"
        with hold_lock(str(path / LOCK), busy, math.inf):
            if not (path / INDEX).exists():
                began = time.monotonic()
                _write_states(path, compute, map(datasets.get, splits), device)
                status = f"computed in {time.monotonic() - began:.0f} s"
        cached[name] = CachedStates(path)
        count, size = len(cached[name].requests), cached[name].values.nbytes / 2**20
        messages.append(
            f"teacher cache: {name} states of {pluralize(count, 'request')}, "
            f"{size:,.1f} MiB in half precision, {status}: {path}"
        )
    return cached, messages


def _write_states(
    path: Path, compute: ComputeStates, datasets: Iterable[Any], device: torch.device
) -> None:
    """Compute and write the vectors of all requests, and last their index.

    Batches have requests of similar lengths.
    """
    requests, counts, width = [], [], 1
    with (path / STATES).open("wb") as file:
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
                file.write(values.numpy().tobytes())
                requests.append(batch.request.numpy())
                counts.append(lengths.cpu().numpy())
    content = io.BytesIO()
    np.savez(
        content,
        requests=np.concatenate(requests),
        lengths=np.concatenate(counts),
        width=width,
    )
    write_file(str(path / INDEX), content.getvalue())
