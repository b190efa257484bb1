#!/usr/bin/env bash
# Where do students lose what their teachers have, and what does each deviation from the published SID-MLP change? Small
# models on amazon18_industrial, 40 epochs a teacher (about 6 minutes on a core of AMD EPYC) and 20 a student (1 to 2).
#
#   papers/results/questions.sh LOG OUT [PART...]   LOG: the folder amazon18_industrial; OUT: where tables and runs go;
#                                            PART: teachers, students, selection, recipe, targets;
#                                            by default all
#   SEEDS='42 43 44'                         of teachers and selection
#
# Students of half and a tenth of the requests: `--fit.train_examples` of commit c13c8484.
# The same line again keeps the finished work and continues. Then:
#
#   python -m papers.pages --keep retrieval/questions --tracking_uri sqlite:///OUT/runs/mlflow.db \
#       --output papers/results/questions.jsonl
set -euo pipefail
log=$(realpath "$1") out=$(realpath -m "$2")
shift 2
python=$(command -v python)
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
cd "$here"

tables=$out/amazon18_industrial
SEEDS=${SEEDS:-42 43 44}

job() { "$python" -m "jobs.$@"; }

tokenize() {  # NAME OPTION...
  local name=$1
  shift
  [ -e "$out/sids/$name/trie/manifest.json" ] || job tokenize --tables "$tables" --output "$out/sids/$name" "$@"
}

row() {  # NAME SEED CONFIG CODES OPTION...
  local name=$1-$2 seed=$2 config=$3 sids=$out/sids/$4
  shift 4
  job train --config "jobs/configs/retrieval/$config.yaml" --tables "$tables" --sids "$sids" --storage "$out/runs" --name "$name" \
    --experiment retrieval/questions --fit.seed "$seed" --fit.patience 0 --ray.threads 1 "$@"
  job evaluate --checkpoint "$out/runs/$name" --tables "$tables" --sids "$sids" --split test
}

teacher() {  # NAME SEED CODES OPTION...
  local name=$1 seed=$2 codes=$3
  shift 3
  row "tiger-$name" "$seed" tiger_small "$codes" --fit.max_epochs 40 "$@"
}

student() {  # NAME SEED CODES TEACHER OPTION...
  local name=$1 seed=$2 codes=$3 teacher=$4
  shift 4
  row "sid_mlp-$name" "$seed" sid_mlp_small "$codes" --model.teacher "$out/runs/tiger-$teacher-$seed" \
    --fit.max_epochs 20 "$@"
}

teachers() {  # equal teachers, three seeds for each tokenizer, and a student of each
  for seed in $SEEDS; do
    for codes in rqkmeans published; do
      teacher "$codes" "$seed" "$codes"
      student "$codes" "$seed" "$codes" "$codes"
    done
  done
}

students() {  # more students of the first teachers: what a student's seed changes
  for seed in 43 44; do
    for codes in rqkmeans published; do
      row "sid_mlp-$codes-42" "$seed" sid_mlp_small "$codes" --model.teacher "$out/runs/tiger-$codes-42" \
        --fit.max_epochs 20
    done
  done
}

selection() {  # the best student by requests that repeat no item of their history
  for seed in $SEEDS; do
    student first "$seed" rqkmeans rqkmeans --fit.metric first/ndcg@10
  done
}

recipe() {  # deviations of students and of search, one at a time, beside tiger-rqkmeans-42 and sid_mlp-rqkmeans-42
  student attention_dropout 42 rqkmeans rqkmeans --model.attention_dropout 0.1
  student last_epoch 42 rqkmeans rqkmeans --fit.eval_every_epochs 20
}

targets() {  # deviations of teachers, likewise
  tokenize train_items --tokenizer rqkmeans --encoder minilm --pca 128 --embeddings "$out/sids/rqkmeans/embeddings" \
    --tokenizer.train_items true
  teacher train_items 42 train_items
  student train_items 42 train_items train_items
}

[ -e "$tables/statistics.json" ] || job prepare --source jobs/configs/sources/amazon18_industrial.yaml --input "$log" --output "$tables"
tokenize rqkmeans --tokenizer rqkmeans --encoder minilm --pca 128 --embed.workers 1
tokenize published --tokenizer published --published "$log/published_sids.csv.gz"
[ $# -gt 0 ] || set -- teachers students selection recipe targets
for part in "$@"; do "$part"; done
