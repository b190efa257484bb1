"""Flat arrays of a table, decoded once per node and memory-mapped by its processes.

    columns = open_columns(sequences, "retrieval", ["item_index"], decode)
    columns["item"]    # (E,) int32, all behaviours end to end

The arrays are files in a folder that is named by the hash of the table's content. The
operating system's page cache shares them between processes and drops pages under memory
pressure, so tables larger than memory can be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from filelock import FileLock
from numpy.typing import NDArray

from core.tables import Table, read_parquet

CACHE_VARIABLE = "TRIELINE_CACHE"
"""Environment variable that names the cache folder."""

MAX_UNUSED_S = 7 * 24 * 3600
"""Seconds after its last use after which a cache entry is removed."""

ENTRY = re.compile(r"[a-z_]+-[0-9a-f]{32}(\.|$)")
"""Names of entries, their locks and unfinished entries."""

FORMAT_VERSION = 2
"""Version of the format and names of arrays; part of the name of a cache entry."""

Columns = dict[str, NDArray[Any]]
"""Arrays by name. Arrays from `open_columns` are read-only."""

Decoder = Callable[[pa.Table], Columns]
"""Turn one part of a table into flat arrays by name. The arrays of all parts are
concatenated along their first axis."""


def cache_folder() -> Path:
    """Return the folder `columns` of `$TRIELINE_CACHE` or of `~/.cache/trieline`."""
    configured = os.environ.get(CACHE_VARIABLE)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured or Path(user_cache) / "trieline") / "columns"


def open_columns(
    table: Table[Any],
    layout: str,
    parquet_columns: list[str] | None,
    decode: Decoder,
    settings: Any = None,
) -> Columns:
    """Memory-map the decoded columns of a table.

    The first process of a node that opens the table decodes it.

    Args:
        table: The table.
        layout: Name of the decoder, such as `retrieval`.
        parquet_columns: The columns that `decode` reads; None for all.
        decode: Decodes one part of the table.
        settings: JSON value on which the decoded arrays depend, in addition to the
            content of the table.
    """
    uris = table.part_uris()
    hashes = [part.sha256 for part in table.files]
    key = [FORMAT_VERSION, layout, hashes, parquet_columns, settings]
    digest = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:32]
    entry = cache_folder() / f"{layout}-{digest}"
    # only this user may read histories, and write what the compiled kernels lie beside
    entry.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry.parent.mkdir(mode=0o700, exist_ok=True)
    if not (entry / "columns.json").exists():
        with FileLock(f"{entry}.lock"):
            if not (entry / "columns.json").exists():
                parts = _decode_parts(uris, parquet_columns, decode)
                _write_entry(entry, parts)
                _remove_unused(entry.parent)
                # Arrow would keep the freed memory of the parts.
                pa.default_memory_pool().release_unused()
    os.utime(entry / "columns.json")
    return _map_entry(entry)


def _decode_parts(
    uris: list[str],
    parquet_columns: list[str] | None,
    decode: Decoder,
) -> Iterator[Columns]:
    """Yield the arrays of each part of a table."""
    for uri in uris:
        yield decode(read_parquet(uri, parquet_columns))


class _ColumnFile:
    """An array file that grows by parts, with the widest dtype of the parts."""

    def __init__(self, path: Path, first_part: NDArray) -> None:
        self.path = path
        self.dtype = first_part.dtype
        self.row_shape = first_part.shape[1:]
        self.rows = 0
        self.file = path.open("wb")

    def append(self, values: NDArray) -> None:
        """Write the rows of one part."""
        dtype = np.promote_types(self.dtype, values.dtype)
        if dtype != self.dtype:
            self._widen(dtype)
        _write_array(self.file, values.astype(self.dtype, copy=False))
        self.rows += len(values)

    def _widen(self, dtype: np.dtype) -> None:
        """Rewrite the file with a wider dtype."""
        self.file.close()
        old = _map_array(self.path, self.dtype, (self.rows, *self.row_shape))
        wide_path = self.path.with_suffix(".wide")
        self.file = wide_path.open("wb")
        block_rows = 1 << 20
        for first in range(0, self.rows, block_rows):
            _write_array(self.file, old[first : first + block_rows].astype(dtype))
        self.file.flush()
        wide_path.rename(self.path)
        self.dtype = dtype

    def close(self) -> dict[str, Any]:
        """Close the file and return its dtype and shape as JSON."""
        self.file.close()
        return {"dtype": self.dtype.str, "shape": [self.rows, *self.row_shape]}


def _write_array(file: BinaryIO, values: NDArray) -> None:
    """Write the bytes of an array."""
    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def _write_entry(entry: Path, parts: Iterable[Columns]) -> None:
    """Write the arrays of all parts to a folder that is renamed when it is complete."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    files: dict[str, _ColumnFile] = {}
    try:
        for columns in parts:
            for name, values in columns.items():
                if name not in files:
                    files[name] = _ColumnFile(unfinished / name, values)
                files[name].append(values)
            del columns, values  # before the next part is decoded
        shapes = {name: file.close() for name, file in files.items()}
        (unfinished / "columns.json").write_text(json.dumps(shapes))
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _map_entry(entry: Path) -> Columns:
    """Memory-map the arrays of an entry."""
    shapes = json.loads((entry / "columns.json").read_text())
    return {
        name: _map_array(entry / name, np.dtype(array["dtype"]), tuple(array["shape"]))
        for name, array in shapes.items()
    }


def _map_array(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> NDArray:
    """Memory-map one array."""
    if 0 in shape:  # an empty file cannot be mapped
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=shape))


def _remove_unused(folder: Path) -> None:
    """Remove entries, also unfinished ones, that were not used for `MAX_UNUSED_S`."""
    oldest_used = time.time() - MAX_UNUSED_S
    for entry in folder.iterdir():
        if not ENTRY.match(entry.name):
            continue
        marker = entry / "columns.json"
        try:
            used = (marker if marker.exists() else entry).stat().st_mtime
        except FileNotFoundError:
            continue
        if used >= oldest_used:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
