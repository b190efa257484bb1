"""MLflow: one run per training, in the experiment `KIND/DATASET`, at an explicit URI.

    run = tracking.open_run(
        uri, "retrieval/x", "sasrec", storage, config=config, hashes=hashes
    )
    logger = tracking.Logger(run)

The driver opens the run of a training and sends its id and URI to rank 0, the only
process that logs metrics. A continued training continues its run, and a killed training
logs no point twice.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# before the first import of mlflow
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# the jobs print the addresses of their runs
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

if TYPE_CHECKING:
    from pipelines.tracking.runs import *  # noqa: F403
    from pipelines.tracking.store import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import `store` or `runs` on first use of one of its names.

    Importing MLflow takes seconds.
    """
    for module in ("store", "runs"):  # the latter imports MLflow
        found = vars(import_module(f"{__name__}.{module}"))
        if name in found:
            return found[name]
    raise AttributeError(name)
