"""The benchmarks on a machine that has PyTorch alone; `jobs.benchmark` is the same elsewhere.

python -m models.bench decode [--json FILE] [--runs 5] [--threads 2] [--histories TABLES]
"""

from __future__ import annotations

import argparse

from models.bench.harness import write_rows
from models.bench.table import BENCHMARKS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", help="file for the JSON lines, which are printed too")
    parser.add_argument("--runs", type=int, default=5, help="timings of each variant")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--histories", help="tables: decode takes their test histories, shares reads them")
    parser.add_argument("--checkpoints", nargs="+", default=(), help="decode: trained models, on these tables")
    parser.add_argument("--sids", help="decode: the semantic IDs that the checkpoints were trained with")
    options = parser.parse_args()
    named = {"decode": ("histories", "checkpoints", "sids"), "shares": ("histories",)}.get(options.name, ())
    chosen = {name: getattr(options, name) for name in named}
    write_rows(BENCHMARKS[options.name](runs=options.runs, threads=options.threads, **chosen), options.json)


if __name__ == "__main__":
    main()
