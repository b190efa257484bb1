"""Command-line entry points, one per verb: `python -m jobs.NAME --help`."""

import sys
from importlib.util import find_spec
from pathlib import Path

NEEDED = (
    "jsonargparse", "filelock", "matplotlib", "mlflow", "numpy", "obstore", "polars", "psutil", "pyarrow", "pydantic",
    "ray", "safetensors", "scipy", "sklearn", "torch", "transformers", "yaml",
)  # fmt: skip
"""The dependencies of pyproject.toml, by the names that they are imported by."""

VENV = Path(__file__).parents[1] / ".venv"
"""What `make setup` makes; it holds a file `.unfinished` until all is installed."""

if sys.argv[0] == "-m":  # while Python looks for the command that it is to run
    missing = [name for name in NEEDED if find_spec(name) is None]
    activated = Path(sys.prefix).resolve() == VENV.resolve()
    unfinished = (VENV / ".unfinished").exists() or (activated and missing)
    if missing or (activated and unfinished):
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        why = f"{sys.executable} has no package {missing[0]}{others}, which this command needs; " if missing else ""
        if unfinished:
            why += f"{VENV} is unfinished, as its setup was broken off or is at work; "
            remedy = "`make setup`, which goes on with it," + ("" if activated else " and `source .venv/bin/activate`,")
        else:
            remedy = "`source .venv/bin/activate` (or `make setup` first, which makes .venv),"
        sys.exit(f"error: {why}run {remedy} then the same line again")
