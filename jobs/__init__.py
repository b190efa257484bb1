"""Command-line entry points, one per verb: `python -m jobs.NAME --help`."""

import sys
from importlib.util import find_spec

NEEDED = (
    "jsonargparse", "matplotlib", "mlflow", "numpy", "polars", "psutil", "pyarrow", "ray", "safetensors", "scipy",
    "sklearn", "torch", "transformers", "yaml",
)  # fmt: skip
"""The dependencies of pyproject.toml, by the names that they are imported by."""

# "-m" while Python looks for the command that it is to run
if sys.argv[0] == "-m" and (missing := [name for name in NEEDED if find_spec(name) is None]):
    others = f" and {len(missing) - 1} more" if missing[1:] else ""
    sys.exit(
        f"error: {sys.executable} has no package {missing[0]}{others}, which this command needs; run "
        f"`source .venv/bin/activate` (or `make setup` first, which makes .venv), then the same line again"
    )
