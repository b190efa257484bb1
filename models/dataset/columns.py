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
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from numpy.typing import NDArray

from core.splits import SPLITS
from core.tables import Table, read_parquet

CACHE_VARIABLE = "TRIELINE_CACHE"
"""Environment variable that names the cache folder."""

MAX_UNUSED_S = 7 * 24 * 3600
"""Seconds after its last use after which a cache entry is removed."""

ENTRY = re.compile(r"[a-z_]+-[0-9a-f]{32}(\.|$)")
"""Names of entries, their locks and unfinished entries."""

FORMAT_VERSION = 4
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
    hashes = [part.sha256 for part in table.files]
    key = [FORMAT_VERSION, layout, hashes, parquet_columns, settings]
    digest = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:32]
    entry = cache_folder() / f"{layout}-{digest}"
    # only this user may read histories, and write what the compiled kernels lie beside
    entry.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    entry.parent.mkdir(mode=0o700, exist_ok=True)
    if not entry.exists():
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                _write_entry(entry, table.part_uris(), parquet_columns, decode)
                _remove_unused(entry.parent)
    os.utime(entry)
    files = entry.glob("*.npy")
    return {file.stem: np.asarray(np.load(file, mmap_mode="r")) for file in files}


def _write_entry(
    entry: Path, uris: list[str], parquet_columns: list[str] | None, decode: Decoder
) -> None:
    """Write the arrays of all parts to a folder that is renamed when it is complete."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", dir=entry.parent))
    try:
        files: dict[str, list[Path]] = defaultdict(list)
        for uri in uris:
            for name, values in decode(read_parquet(uri, parquet_columns)).items():
                files[name].append(unfinished / f"{name}.{len(files[name])}.npy")
                np.save(files[name][-1], values)
        # Arrow would keep the freed memory of the parts
        pa.default_memory_pool().release_unused()
        for name, paths in files.items():
            parts = [np.load(path, mmap_mode="r") for path in paths]
            joined = np.lib.format.open_memmap(
                unfinished / f"{name}.npy",
                "w+",
                np.result_type(*parts),
                (sum(map(len, parts)), *parts[0].shape[1:]),
            )
            np.concatenate(parts, out=joined)
            for path in paths:
                path.unlink()
        unfinished.rename(entry)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _remove_unused(folder: Path) -> None:
    """Remove entries, also unfinished ones, that were not used for `MAX_UNUSED_S`."""
    oldest_used = time.time() - MAX_UNUSED_S
    for entry in folder.iterdir():
        if not ENTRY.match(entry.name):
            continue
        try:
            used = entry.stat().st_mtime
        except FileNotFoundError:
            continue
        if used >= oldest_used:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def request_columns(*names: str) -> list[str]:
    """Return the Parquet paths of the requests' fields `names`."""
    return [f"requests.list.element.{name}" for name in names]


def decode_splits(splits: pa.Array) -> NDArray[np.int8]:
    """Return the index (m,) of each split name in `SPLITS`, or -1 for other names."""
    index = pc.index_in(splits, pa.array(SPLITS, splits.type))
    return pc.fill_null(index, -1).to_numpy(zero_copy_only=False).astype(np.int8)
