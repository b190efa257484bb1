"""Lines of jobs.benchmark as MLflow runs, so that claims rest on them too: one run per line in `benchmark/NAME`.

    python -m jobs.compare --benchmark decode.jsonl --claims

Params are those of a model of the name BENCHMARK/VARIANT; a line that is there already is not logged again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mlflow.entities import Metric, Param, RunTag

from pipelines import tracking
from pipelines.comparison.runs import KIND

LINE_TAG = "benchmark.line"
"""Tag with the hash of the line."""

ORIGIN = {"command": "command", "hardware": "hardware", "commit": tracking.COMMIT_TAG}
"""What says where a line is from, and its tag."""


def log_lines(uri: str, lines: Sequence[dict[str, Any]]) -> int:
    """Logs the lines that are not there yet and returns how many these are."""
    client = tracking.connect(uri)
    logged = 0
    for benchmark in dict.fromkeys(line["benchmark"] for line in lines):
        found = client.get_experiment_by_name(f"benchmark/{benchmark}")
        home = found.experiment_id if found else client.create_experiment(f"benchmark/{benchmark}", tags=tracking.VIEW)
        known = {run.data.tags.get(LINE_TAG) for run in client.search_runs([home], max_results=5000)}
        for line in (line for line in lines if line["benchmark"] == benchmark):
            origin = {"command": f"python -m models.bench {benchmark}", **line}  # which says nothing of where it ran
            digest = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
            if digest in known:
                continue
            tags = {KIND: "benchmark", LINE_TAG: digest}
            run = client.create_run(home, run_name=line["variant"], tags=tags).info.run_id
            params = {"name": f"{benchmark}/{line['variant']}", **line["params"]}
            figures = {name: value for name, value in line.items() if isinstance(value, int | float)}
            client.log_batch(
                run,
                [Metric(name, float(value), 0, 0) for name, value in figures.items()],
                [Param(f"model.{name}", str(value)) for name, value in params.items()],
                [RunTag(tag, origin[name]) for name, tag in ORIGIN.items() if origin.get(name)],
            )
            client.set_terminated(run)
            logged += 1
    return logged
