"""All uses of Ray's private interfaces.

If a version of Ray has changed an interface, jobs run without its function.
`pipelines.version.submission_id` reads a further one, an environment variable, as
`models` does not import Ray.

Ray 2.60 is supported. Ray 2.59 has the shuffle that prepare uses, but rejects an empty
block between two shuffles, which windowed counts produce. All other tests of data and
training pass with it (`make test-ray RAY=2.59.0`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

SHUFFLE_ENV = {
    "env_vars": {
        "RAY_DATA_SHUFFLE_MAP_WORKER": "1",
        "RAY_DATA_SHUFFLE_REDUCE_WORKER": "1",
    }
}
"""Runtime environment with the variables that Ray Data sets for the tasks of its
shuffle.

Ray starts separate processes for each environment. If all tasks have this environment,
they share processes, which saves 5 s of process starts for a small log. With a version
of Ray that sets other variables, only this saving is lost.
"""


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Keep Ray from replacing the handler of SIGTERM while it starts.

    Ray's handler raises SystemExit, which Python drops in some places.
    """
    utils: Any = getattr(getattr(ray, "_private", None), "utils", None)
    original = getattr(utils, "set_sigterm_handler", None)
    if original:
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        if original:
            utils.set_sigterm_handler = original


def has_autoscaler() -> bool:
    """Return whether an autoscaler starts nodes of this cluster.

    Version 1 of the autoscaler reports node types to GCS. On a cluster without an
    autoscaler the types are called `node_ID`, one per node. Version 2 numbers its
    reports. The label `ray.io/node-group` does not help, as KubeRay sets it on all
    pods.
    """
    with suppress(ImportError, AttributeError, ValueError):
        from ray.experimental.internal_kv import _internal_kv_get

        status = json.loads(_internal_kv_get("__autoscaling_status") or "{}")
        report = status.get("autoscaler_report", {})
        types = {*report.get("active_nodes", {}), *report.get("pending_launches", {})}
        if any(not kind.startswith("node_") for kind in types):
            return True
    with suppress(ImportError, AttributeError, ray.exceptions.RayError):
        from ray.autoscaler.v2.sdk import get_cluster_status

        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return int(status.stats.autoscaler_version or 0) > 0
    return False


MISLEADING = ("maximum expected startup concurrency", "infeasible resource requests")
"""Parts of warnings that are not printed.

The first is about processes without a CPU, such as trials that wait for their workers.
The second is about requests for which an autoscaler starts nodes;
`pipelines.cluster.check_room` has rejected all other infeasible requests.
"""


def shorten_raylet_errors() -> None:
    """Patch Ray to print only the first line of each raylet error.

    The warnings in `MISLEADING` are not printed at all. Both agents of a lost node send
    the node's last 20 log lines to the driver, and Ray has no option against it. The
    dashboard has the logs. A second call has no effect.
    """
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    print_lines = getattr(worker, "print_to_stdstream", None)
    if print_lines is None or hasattr(print_lines, "is_patched"):
        return

    def print_first_line(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        if data.get("pid") == "raylet":
            lines = [
                first_line_of_error(text)
                for text in data["lines"]
                if not any(words in text for words in MISLEADING)
            ]
            data = {**data, "lines": lines}
        if data["lines"]:
            print_lines(data, *arguments, **options)

    print_first_line.is_patched = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_first_line


def first_line_of_error(text: str) -> str:
    """Return the first line of an error, without ` Last 20 lines ...` at its end."""
    first = text.strip().partition("\n")[0]
    return first.partition(" Last 20 lines")[0]


@contextmanager
def silence_cpp_log() -> Iterator[None]:
    """Keep log lines of Ray's C++ code off the terminal while the block runs.

    Ray's log files have the lines, and failures are raised in Python. Python's output
    to stderr is still printed. The variable RAY_BACKEND_LOG_LEVEL is no alternative: it
    prints a line about itself in every job.
    """
    sys.stderr.flush()
    original = sys.stderr
    terminal = os.dup(2)
    with open(os.devnull, "w") as nothing, os.fdopen(os.dup(2), "w") as python_stderr:
        os.dup2(nothing.fileno(), 2)
        sys.stderr = python_stderr
        try:
            yield
        finally:
            sys.stderr = original
            os.dup2(terminal, 2)
            os.close(terminal)
