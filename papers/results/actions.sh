#!/usr/bin/env bash
# The seven models of actions on kuairand_pure, three seeds, one epoch, each measured on test:
#
#   papers/results/actions.sh LOG OUT      LOG: the folder kuairand_pure; OUT: where tables and runs go
#
# The same line again keeps the finished trials and continues. Some 40 minutes on 2 cores. Then:
#
#   python -m papers.pages --keep actions/kuairand --tracking_uri sqlite:///OUT/runs/mlflow.db \
#       --output papers/results/actions.jsonl
set -euo pipefail
log=$(realpath "$1") out=$(realpath -m "$2")
python=$(command -v python)
cd "$(dirname "$0")/../.."

[ -e "$out/tables/statistics.json" ] || "$python" -m jobs.prepare --source jobs/configs/sources/kuairand_pure_actions.yaml \
  --input "$log" --output "$out/tables"
"$python" -m jobs.sweep --grid tuning/grids/actions_models.yaml --tables "$out/tables" --storage "$out/runs" --name models \
  --experiment actions/kuairand --axes.fit.seed '[42, 43, 44]' --concurrency 1 --ray.threads 1
