#!/usr/bin/env bash
# Which settings of the quickstart's TIGER are better by validation? One change at a time from tiger_small.yaml on the
# codes of the quickstart, on amazon18_industrial or another log with texts; about 3 minutes a row on a core of AMD EPYC.
#
#   papers/results/settings.sh LOG OUT [ROW...]      LOG: the folder, named as its file in jobs/configs/sources; OUT:
#                                            where tables and runs go; ROW: names below, by default all
#   SEEDS='42 43 44'
#
# The same line again keeps the finished work and continues. Then:
#
#   python -m papers.pages --keep retrieval/settings --tracking_uri sqlite:///OUT/runs/mlflow.db \
#       --output papers/results/settings.jsonl
set -euo pipefail
log=$(realpath "$1") out=$(realpath -m "$2")
shift 2
python=$(command -v python)
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
cd "$here"

tables=$out/$(basename "$log")
SEEDS=${SEEDS:-42 43 44}

job() { "$python" -m "jobs.$@"; }

tokenize() {  # NAME LEVELS CODES OPTION...
  local name=$1 levels=$2 codes=$3
  shift 3
  [ -e "$out/sids/$name/trie/manifest.json" ] || job tokenize --tables "$tables" --output "$out/sids/$name" \
    --tokenizer rqkmeans --tokenizer.levels "$levels" --tokenizer.codebook_size "$codes" "$@"
}

row() {  # NAME CODES OPTION...
  local name=$1 sids=$out/sids/$2
  shift 2
  for seed in $SEEDS; do
    job train --config jobs/configs/retrieval/tiger_small.yaml --tables "$tables" --sids "$sids" --storage "$out/runs" \
      --name "$name-$seed" --experiment retrieval/settings --fit.seed "$seed" --fit.max_epochs 35 \
      --fit.eval_examples 2000 --ray.threads 1 "$@"
    job evaluate --checkpoint "$out/runs/$name-$seed" --tables "$tables" --sids "$sids" --split test
  done
}

tfidf_encoder=(--encoder tfidf)
minilm_encoder=(--encoder minilm --pca 128 --embeddings "$out/minilm" --embed.workers 1)

quickstart() { row quickstart tfidf; }
patience_8() { row patience_8 tfidf --fit.patience 8; }
minilm() { tokenize minilm 2 256 "${minilm_encoder[@]}"; row minilm minilm; }
tfidf_3_levels() { tokenize tfidf_3_levels 3 256 "${tfidf_encoder[@]}"; row tfidf_3_levels tfidf_3_levels; }
history_12() { row history_12 tfidf --model.max_history 12; }
width_128() { row width_128 tfidf --model.d_model 128 --model.d_ff 512 --model.d_kv 32 --fit.lr 0.004; }
no_smoothing() { row no_smoothing tfidf --model.label_smoothing 0; }

[ -e "$tables/statistics.json" ] || job prepare --source "jobs/configs/sources/$(basename "$log").yaml" --input "$log" --output "$tables"
tokenize tfidf 2 256 "${tfidf_encoder[@]}"
[ $# -gt 0 ] || set -- quickstart history_12 no_smoothing width_128 tfidf_3_levels minilm patience_8
for name in "$@"; do "$name"; done
