"""MLflow: one run per training, in the experiment `family/dataset`, at an explicit URI.

    run = tracking.open_run(uri, "retrieval/x", "sasrec", storage, config=config, hashes=hashes)
    logger = tracking.Logger(run)

The driver opens the run of a training and hands its id and URI to rank 0, which alone
logs to it; a continued training continues its run. A run has each point once, however
often the training is killed: a key that is written down before a run is opened finds
the runs of openings that were cut short, and a logger first reads what the run has.
"""

import os

# before the first import of mlflow
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# jobs say where their runs are
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from pipelines.tracking.curves import (
    CURVES,
    Curves,
    curves_to_bytes,
    log_curves,
    read_curves,
)
from pipelines.tracking.logger import Logger, system_metrics
from pipelines.tracking.names import (
    BEST_TAG,
    CODE_TAG,
    COMMIT_TAG,
    EVALUATION,
    FOLDER_TAG,
    INCOMPLETE_TAG,
    KEY_TAG,
    KIND_TAG,
    PARENT_TAG,
    POINT_TAG,
    SIMULATED_TAG,
    SMOKE_TAG,
    SUBMISSION_TAG,
    TRIAL_TAG,
    WEIGHTS_TAG,
    metric_name,
    settings_of,
    shown_name,
    unknown,
)
from pipelines.tracking.runs import (
    BATCH,
    RunRef,
    delete,
    discard,
    end_dead,
    end_stopped,
    end_trials,
    hardware,
    lock_of,
    log_json,
    log_text,
    log_yaml,
    open_child,
    open_run,
    opening,
    reopen,
)
from pipelines.tracking.store import (
    check_nodes,
    connect,
    mark_reachable,
    named_store,
    resolve_uri,
    sqlite_file,
    sqlite_uri,
    viewer,
    warn_if_slow,
)

__all__ = [
    "BATCH",
    "BEST_TAG",
    "CODE_TAG",
    "COMMIT_TAG",
    "CURVES",
    "EVALUATION",
    "FOLDER_TAG",
    "INCOMPLETE_TAG",
    "KEY_TAG",
    "KIND_TAG",
    "PARENT_TAG",
    "POINT_TAG",
    "SIMULATED_TAG",
    "SMOKE_TAG",
    "SUBMISSION_TAG",
    "TRIAL_TAG",
    "WEIGHTS_TAG",
    "Curves",
    "Logger",
    "RunRef",
    "check_nodes",
    "connect",
    "curves_to_bytes",
    "delete",
    "discard",
    "end_dead",
    "end_stopped",
    "end_trials",
    "hardware",
    "lock_of",
    "log_curves",
    "log_json",
    "log_text",
    "log_yaml",
    "mark_reachable",
    "metric_name",
    "named_store",
    "open_child",
    "open_run",
    "opening",
    "read_curves",
    "reopen",
    "resolve_uri",
    "settings_of",
    "shown_name",
    "sqlite_file",
    "sqlite_uri",
    "system_metrics",
    "unknown",
    "viewer",
    "warn_if_slow",
]
