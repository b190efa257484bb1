"""Timings, one JSON line per variant and size.

    python -m benchmarks decode   # ways to decode semantic IDs, in turn
    python -m benchmarks train --config jobs/configs/retrieval/sasrec.yaml
        --tables TABLES
    python -m benchmarks prepare  # jobs.prepare and polars alone, in turn

Options are the parameters of the functions `decode`, `train` and `prepare`, with values
in YAML. decode and train need no Ray, MLflow or polars.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

import yaml

from benchmarks.harness import describe_origin
from core.errors import UserError


def main() -> None:
    """Run a benchmark, print its lines, and append them to the file of --json."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=("decode", "train", "prepare"))
    parser.add_argument("--json", help="file to which the lines are appended")
    known, words = parser.parse_known_args()
    if len(words) % 2:
        parser.error(f"{words[-1]} needs a value")
    options = {
        name.removeprefix("--"): yaml.safe_load(value)
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    benchmark = getattr(importlib.import_module(f"benchmarks.{known.name}"), known.name)
    try:
        for line in benchmark(**options):
            text = json.dumps({**line, **describe_origin()})
            print(text, flush=True)
            if known.json:
                with open(known.json, "a") as file:
                    file.write(text + "\n")
    except (TypeError, UserError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
