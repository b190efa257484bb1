#!/usr/bin/env bash
# Where do students lose what their teachers have, and what do our deviations from the published SID-MLP change?
# Small models on amazon18_industrial and amazon14_beauty_llm_sids, one thread each.
#
#   results/questions.sh DATA OUT      DATA: the folder of both logs' folders; OUT: where tables and runs go
#
# The line again goes on from what is finished. Then:
#
#   python -m jobs.compare --experiment retrieval/questions --tracking_uri sqlite:///OUT/runs/mlflow.db \
#       --export results/questions.jsonl
set -euo pipefail
data=$(realpath "$1") out=$(realpath -m "$2")
python=$(command -v python)
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"
cd "$here"

job() { "$python" -m "jobs.$@"; }

prepare() {  # LOG
  [ -e "$out/$1/statistics.json" ] || job prepare --source "jobs/configs/sources/$1.yaml" --input "$data/$1" --output "$out/$1"
}

tokenize() {  # NAME OPTION...
  local name=$1
  shift
  [ -e "$out/sids/$name/trie" ] || job tokenize --output "$out/sids/$name" "$@"
}

row() {  # NAME SEED CONFIG LOG SIDS OPTION...
  local name=$1-$2 seed=$2 config=$3 tables=$out/$4 sids=$out/sids/$5
  shift 5
  job train --config "jobs/configs/$config.yaml" --tables "$tables" --sids "$sids" --storage "$out/runs" \
    --name "$name" --experiment retrieval/questions --fit.seed "$seed" --fit.patience 0 --ray.threads 1 "$@"
  job evaluate --checkpoint "$out/runs/$name" --tables "$tables" --sids "$sids" --split test
}

pair() {  # CODES SEED OPTION...    a teacher and its student
  local codes=$1 seed=$2
  shift 2
  row "tiger-$codes" "$seed" tiger_small amazon18_industrial "$codes" --fit.max_epochs 40 "$@"
  student "$codes" "$codes" "$seed"
}

student() {  # NAME TEACHER SEED OPTION...
  local name=$1 teacher=$2 seed=$3
  shift 3
  row "sid_mlp-$name" "$seed" sid_mlp_small amazon18_industrial "$teacher" --model.teacher "$out/runs/tiger-$teacher-$seed" \
    --model.teacher_cache "$out/cache" --fit.max_epochs 20 "$@"
}

log=$data/amazon18_industrial
prepare amazon18_industrial
tokenize rqkmeans --tables "$out/amazon18_industrial" --tokenizer rqkmeans --encoder minilm --pca 128 --embed.workers 1
tokenize published --tables "$out/amazon18_industrial" --tokenizer published --published "$log/published_sids.csv.gz"

# 1. Equal teachers, three seeds for each tokenizer.
for seed in 42 43 44; do
  for codes in rqkmeans published; do pair "$codes" "$seed"; done
done
