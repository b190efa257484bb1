"""Run all commands on a log within minutes, from tables to a comparison of models.

    python -m jobs.quickstart                   # next items: baselines, SASRec, SID-MLP
    python -m jobs.quickstart --kind search     # searches: baselines, Base and QGS
    python -m jobs.quickstart --kind actions    # a feed: baselines, AttnLFA, AttnMVP
    python -m jobs.quickstart --data FOLDER     # a real log
    python -m jobs.quickstart --seed 43         # another seed, added to the comparison

Baselines are models without training. `jobs/configs/quickstart.yaml` has the models.
Without `--data` the log is simulated, and the results are labelled as simulated. The
source file of a real log is `--source`, or `FOLDER_KIND.yaml` or `FOLDER.yaml` in
`jobs/configs/sources`, or a guess from the log (`jobs.prepare --suggest`), which is
written to `OUTPUT/FOLDER/source.yaml` for you to correct. If the guess is ambiguous,
such as between two columns of users, the quickstart stops. The command of each step is
printed before it runs, so that you can repeat it.
"""

from __future__ import annotations

from pathlib import Path

from jobs import cli
from pipelines.quickstart import QuickstartConfig, run_quickstart

Config = QuickstartConfig


def run(config: QuickstartConfig) -> Path:
    """Run the flow of a kind of log, and return the page of the comparison."""
    cli.say_loading("torch", "ray", "mlflow")
    cli.preflight(config)
    return run_quickstart(config)


if __name__ == "__main__":
    cli.main(run)
