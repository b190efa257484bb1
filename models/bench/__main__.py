"""The benchmarks on a machine that has PyTorch alone; `jobs.benchmark` is the same elsewhere.

python -m models.bench decode [--json FILE] [--runs 5] [--threads 2] [--histories TABLES]
"""

from __future__ import annotations

import argparse

from models.bench import BENCHMARKS
from models.bench.harness import write_rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models.bench", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", help="file for the JSON lines, which are printed too")
    parser.add_argument("--runs", type=int, default=5, help="timings of each variant")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--histories", help="decode: tables whose test histories are taken, else random ones")
    parser.add_argument("--checkpoints", nargs="+", default=(), help="decode: trained models, on these tables")
    parser.add_argument("--sids", help="decode: the semantic IDs that the checkpoints were trained with")
    options = parser.parse_args()
    named = ("histories", "checkpoints", "sids") if options.name == "decode" else ()
    chosen = {name: getattr(options, name) for name in named}
    write_rows(BENCHMARKS[options.name](runs=options.runs, threads=options.threads, **chosen), options.json)


if __name__ == "__main__":
    main()
