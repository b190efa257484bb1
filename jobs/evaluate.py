"""Measure a checkpoint on a split, ranking the full catalogue for every request.

    python -m jobs.evaluate --checkpoint runs/sasrec/best --tables TABLES --split test

It prints Recall@K and NDCG@K with the numbers of requests and users, or AUC, GAUC and
log loss of a model that scores candidates. It writes the metrics beside the checkpoint
and to MLflow, as a child run of the training whose params are the options.

Instead of the metrics, --batch_inference FOLDER writes a table: the top K items of all
users, or of all requests of --split, or the scores of all candidates of the split.
--allowed FILE limits the ranked items.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from core.errors import pluralize
from jobs import cli
from pipelines.evaluation.config import EvaluateConfig

if TYPE_CHECKING:
    from pipelines.evaluation.result import Result

Config = EvaluateConfig


def run(config: EvaluateConfig) -> Result | None:
    """Measure a checkpoint, or write its rankings or nearest items.

    Returns:
        The metrics, or None if a file or table is written instead.
    """
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines.evaluation.ranking import measure_checkpoint

    cli.preflight(config)
    if config.batch_inference:
        write_inference(config)
        return None
    if config.nearest:
        write_nearest_items(config)
        return None
    result = measure_checkpoint(config)
    cli.suggest_comparison(result.checkpoint, config.tracking_uri)
    return result


def write_nearest_items(config: EvaluateConfig) -> None:
    """Write the nearest items of each item to a Parquet file, and print its columns."""
    from pipelines.evaluation.nearest import write_nearest

    table = write_nearest(config)
    print(
        f"The nearest items of {pluralize(len(table), 'item')}, at most {config.k} "
        f"each, are in {config.nearest}: item_id, nearest (best first), score."
    )
    num_empty = table["nearest"].to_pylist().count([])
    if num_empty:
        print(f"note: the lists of {pluralize(num_empty, 'item')} are empty")


def write_inference(config: EvaluateConfig) -> None:
    """Write the table of `--batch_inference`, and print its size and columns.

    A note gives the number of rankings with fewer than K items.
    """
    from models import registry
    from pipelines.evaluation.inference import infer_all

    in_ray, k = bool(os.environ.get("RAY_ADDRESS")), config.k
    table, existed = infer_all(config, in_ray)
    status = "written"
    if existed:
        status = "already exist, from the same checkpoint and tables; nothing to do"
    info = table.info
    names = table.columns
    order = "items best first"
    if table.table == "scores":
        candidates = pluralize(info.candidates, "candidate")
        requests = pluralize(table.rows, "request")
        scores = f"Scores of {info.model} on {info.split}"
        print(f"{scores}: {candidates} of {requests} {status}.")
        first_score = next(name for name in names if name.startswith("score_"))
        order = f"candidates best first by {first_score}"
    else:
        unit, on_split = "user", ""
        if config.split:
            unit, on_split = "request", f" on {config.split}"
        rows = pluralize(table.rows, unit)
        print(f"Recommendations of {info.model}{on_split}: top {k} of {rows} {status}.")
        if info.below_k:
            items = "the allowed set" if config.allowed else "the catalogue"
            reason = f"{items} has no more"
            if hasattr(registry.find(info.model).options_class, "beam"):
                reason += ", or the beam search has none; a larger --beam finds more"
            print(f"note: {info.below_k:,} of them have fewer than {k} items, {reason}")
    print(f"  table       {config.batch_inference}: {', '.join(names)}; {order}")


if __name__ == "__main__":
    cli.main(run)
