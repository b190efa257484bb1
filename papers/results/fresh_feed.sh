#!/usr/bin/env bash
# Interleaved, AttnLFA and AttnMVP on a simulated feed whose items are new (jobs.simulate --kind actions --shown_days 7), five
# seeds, each measured on test:
#
#   papers/results/fresh_feed.sh OUT      OUT: where the log, tables and runs go
#
# Only a user's own actions tell whether it likes dogs or cats: the normalised entropy of like is 1 without them and 0.469
# at best. The same line again keeps the finished trials and continues. At its end the
# runs are kept in papers/results/fresh_feed.jsonl.
set -euo pipefail
out=$(realpath -m "$1")
python=$(command -v python)
cd "$(dirname "$0")/../.."
mkdir -p "$out"

[ -e "$out/raw/simulation.json" ] || "$python" -m jobs.simulate --kind actions --shown_days 7 --users 1500 --items 6000 \
  --events 60000 --output "$out/raw"
[ -e "$out/tables/statistics.json" ] || "$python" -m jobs.prepare --source jobs/configs/sources/simulated_feed.yaml \
  --input "$out/raw" --output "$out/tables"
"$python" -m jobs.audit --tables "$out/tables"
"$python" -m jobs.sweep --grid tuning/grids/fresh_feed.yaml --tables "$out/tables" --storage "$out/runs" --name fresh_feed \
  --experiment actions/fresh_feed --concurrency 1 --ray.threads 1
"$python" -m papers.pages --keep actions/fresh_feed --tracking_uri "sqlite:///$out/runs/mlflow.db" \
  --output papers/results/fresh_feed.jsonl
