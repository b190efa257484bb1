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

# before the first import of mlflow
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# the jobs print the addresses of their runs
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from pipelines.tracking.logger import Logger, log_system_metrics
from pipelines.tracking.names import (
    BEST_TAG,
    CODE_TAG,
    COMMIT_TAG,
    COMPLETE_TAG,
    EVALUATION,
    FOLDER_TAG,
    FORMAT_TAG,
    KIND_TAG,
    PARENT_TAG,
    POINT_TAG,
    RANKS_BY_TAG,
    SIMULATED_TAG,
    SMOKE_TAG,
    SUBMISSION_TAG,
    WEIGHTS_TAG,
    describe_unknown,
    from_mlflow_name,
    settings_key,
    to_mlflow_name,
)
from pipelines.tracking.runs import (
    delete,
    describe_hardware,
    end_dead_runs,
    end_run,
    lock_path,
    log_text,
    log_yaml,
    open_child,
    open_run,
    reopen,
)
from pipelines.tracking.store import (
    check_nodes,
    check_store,
    connect,
    find_store,
    resolve_uri,
    sqlite_file,
    sqlite_uri,
    view_command,
)

__all__ = [
    "BEST_TAG",
    "CODE_TAG",
    "COMMIT_TAG",
    "COMPLETE_TAG",
    "EVALUATION",
    "FOLDER_TAG",
    "FORMAT_TAG",
    "KIND_TAG",
    "PARENT_TAG",
    "POINT_TAG",
    "RANKS_BY_TAG",
    "SIMULATED_TAG",
    "SMOKE_TAG",
    "SUBMISSION_TAG",
    "WEIGHTS_TAG",
    "Logger",
    "check_nodes",
    "check_store",
    "connect",
    "delete",
    "describe_hardware",
    "describe_unknown",
    "end_dead_runs",
    "end_run",
    "find_store",
    "from_mlflow_name",
    "lock_path",
    "log_system_metrics",
    "log_text",
    "log_yaml",
    "open_child",
    "open_run",
    "reopen",
    "resolve_uri",
    "settings_key",
    "sqlite_file",
    "sqlite_uri",
    "to_mlflow_name",
    "view_command",
]
