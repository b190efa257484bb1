#!/usr/bin/env bash
# The models of the retrieval quickstart as it trains them, three seeds each, on its simulated log and on amazon18_industrial:
#
#   papers/results/small.sh OUT [LOG]         OUT: where logs, tables and runs go; LOG: the folder amazon18_industrial, by
#                                             default the simulated log
#   SEEDS='42 43 44'
#
# Some 3 minutes a seed on one core. The line again goes on from what is finished. Then, PART simulated or industrial:
#
#   python -m papers.kept --experiment retrieval/small_PART --tracking_uri sqlite:///OUT/PART/runs/mlflow.db \
#       --output papers/results/small_PART.jsonl
set -euo pipefail
part=simulated codes=32 log=
[ -z "${2:-}" ] || part=industrial codes=256 log=$(realpath "$2")
here=$(realpath -m "$1")/$part
python=$(command -v python)
cd "$(dirname "$0")/../.."

job() { "$python" -m "jobs.$@"; }

source=jobs/configs/sources/simulated.yaml
if [ -n "$log" ]; then
  source=jobs/configs/sources/amazon18_industrial.yaml
elif [ ! -e "$here/raw" ]; then
  log=$here/raw
  job simulate --output "$log" --users 1500 --items 400 --events 15000 --seed 42
fi
[ -e "$here/tables/statistics.json" ] || job prepare --source $source --input "$log" --output "$here/tables"
[ -e "$here/sids/trie" ] || job tokenize --tables "$here/tables" --tokenizer rqkmeans --encoder tfidf \
  --rqkmeans.levels 2 --rqkmeans.codebook_size $codes --output "$here/sids"

row() {  # NAME CONFIG SEED EPOCHS OPTION...
  local name=$1-$3 config=$2 seed=$3 epochs=$4
  shift 4
  job train --config "jobs/configs/$config.yaml" --tables "$here/tables" --sids "$here/sids" --storage "$here/runs" \
    --name "$name" --experiment "retrieval/small_$part" --fit.seed "$seed" --fit.max_epochs "$epochs" --ray.threads 1 "$@"
  job evaluate --checkpoint "$here/runs/$name" --tables "$here/tables" --sids "$here/sids" --split test
}

for seed in ${SEEDS:-42 43 44}; do
  row sasrec sasrec "$seed" 20
  row tiger tiger_small "$seed" 35
  row sid_mlp sid_mlp_small "$seed" 20 --model.teacher "$here/runs/tiger-$seed"
done
