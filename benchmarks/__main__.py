"""Paired timings, one JSON line per variant and size.

    python -m benchmarks decode [--histories TABLES]  # models of semantic IDs
    python -m benchmarks search_encoder               # encoders of search models
    python -m benchmarks actions                      # models of actions
    python -m benchmarks sequences                    # the sequence step and polars
    python -m benchmarks floors                       # fitting item_knn and ease
    python -m benchmarks.gpu                          # CUDA graphs, with own options

--json FILE also writes the lines to a file. Timings of models need PyTorch alone.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from benchmarks.harness import describe_origin, write_rows
from models.storage.tables import UserError

OPTIONS: dict[str, tuple[str, ...]] = {
    "decode": ("runs", "threads", "histories", "checkpoints", "sids"),
    "search_encoder": ("runs", "threads"),
    "actions": ("runs", "threads"),
    "sequences": ("runs", "sizes", "store_mb"),
    "floors": ("sizes",),
}
"""Options of each benchmark. A benchmark is a function in the module of its name."""


def main() -> None:
    """Parse the command line, and run one benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=OPTIONS)
    parser.add_argument(
        "--json",
        type=argparse.FileType("w"),
        help="also write the JSON lines to this file",
    )
    parser.add_argument("--runs", type=int, help="number of timings per variant")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--histories", help="decode: TABLES whose test histories are used"
    )
    parser.add_argument(
        "--checkpoints", nargs="+", help="decode: models trained on --histories"
    )
    parser.add_argument(
        "--sids", help="decode: the semantic IDs that the checkpoints were trained with"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        help="sequences: numbers of events; floors: of items",
    )
    parser.add_argument(
        "--store_mb", type=int, help="sequences: size of Ray's object store in MiB"
    )
    options = {
        name: value
        for name, value in vars(parser.parse_args()).items()
        if value is not None
    }
    name = options.pop("name")
    file = options.pop("json", None)
    unknown = options.keys() - OPTIONS[name]
    if unknown:
        parser.error(
            f"{name} takes no --{min(unknown)}; it takes {', '.join(OPTIONS[name])}"
        )
    benchmark = getattr(importlib.import_module(f"benchmarks.{name}"), name)
    try:
        write_rows(benchmark(**options), file, describe_origin())
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
