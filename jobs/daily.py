"""Process a new day of a growing log, from its files to a registered model.

    python -m jobs.daily --config shop_daily.yaml

The steps: append the day's files to the tables, audit them, make semantic IDs or text
embeddings of new items, evaluate the running model on the new day, continue its
training, evaluate the result, compare both models, and register the new one if no
metric drops by more than `max_drop`. An accepted model is the running model of the next
day. The config file holds the options of the jobs (docs/days.md). The same command
continues a stopped run after its last finished step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs import cli
from pipelines.daily import DailyConfig

if TYPE_CHECKING:
    from core.schemas import DayRecord

Config = DailyConfig


def run(config: DailyConfig) -> DayRecord:
    """Process the day, and print the next command."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines.daily import process_day

    cli.preflight(config)
    day = process_day(config)
    cli.suggest_comparison(day.checkpoint)
    return day


if __name__ == "__main__":
    cli.main(run)
