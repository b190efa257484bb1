#!/usr/bin/env bash
# Does TIGER reach what is published on amazon14_beauty_llm_sids (H@10 0.0582, N@10 0.0319, with 100 beams)? Students of a
# tenth of the requests: `--fit.train_examples` of commit c13c8484.
#
#   papers/results/beauty.sh LOG OUT [PART...]   LOG: the folder amazon14_beauty_llm_sids; OUT: where tables and runs go;
#                                         PART: small, full; by default both
#
# small: a TIGER of a twentieth of the published size, 20 epochs, and a student:
# an hour on a core of AMD EPYC. full: TIGER at the published size, on the published RQ-VAE codes, 60
# epochs of 4 to 6 minutes on 2 cores with bfloat16 instructions, a student 20 s an epoch. It can be stopped at any
# time; the same command continues from the last 200 steps. Then:
#
#   python -m papers.pages --keep retrieval/beauty --tracking_uri sqlite:///OUT/runs/mlflow.db \
#       --output papers/results/beauty.jsonl
set -euo pipefail
log=$(realpath "$1") out=$(realpath -m "$2")
shift 2
python=$(command -v python)
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
cd "$here"

tables=$out/tables sids=$out/sids

job() { "$python" -m "jobs.$@"; }

row() {  # NAME CONFIG OPTION...
  local name=$1 config=$2
  shift 2
  job train --config "jobs/configs/retrieval/$config.yaml" --tables "$tables" --sids "$sids" --storage "$out/runs" --name "$name" \
    --experiment retrieval/beauty --fit.seed 42 "$@"
  job evaluate --checkpoint "$out/runs/$name" --tables "$tables" --sids "$sids" --split test
}

[ -e "$tables/statistics.json" ] || job prepare --source jobs/configs/sources/amazon14_beauty_llm_sids.yaml --input "$log" --output "$tables"
[ -e "$sids/trie/manifest.json" ] || job tokenize --tables "$tables" --tokenizer published --published "$log/index_rqvae.json.gz" --output "$sids"

small() {
  row tiger_small tiger_small --fit.max_epochs 20 --fit.patience 0 --ray.threads 1
  students=(--model.teacher "$out/runs/tiger_small" --fit.patience 0 --ray.threads 1)
  row sid_mlp_small sid_mlp_small "${students[@]}" --fit.max_epochs 20
}

full() {
  row tiger tiger --fit.max_epochs 60 --fit.eval_every_epochs 3 --fit.patience 6 --fit.precision bf16 \
    --fit.checkpoint_every_steps 200
  job evaluate --checkpoint "$out/runs/tiger" --tables "$tables" --sids "$sids" --split test --beam 100
  students=(--model.teacher "$out/runs/tiger" --fit.lr 0.0005 --fit.batch_size 256)
  row sid_mlp sid_mlp "${students[@]}" --fit.max_epochs 20 --fit.patience 0

  for name in tiger sid_mlp; do
    job evaluate --checkpoint "$out/runs/$name" --tables "$tables" --sids "$sids" --split test --unseen true
  done
}

[ $# -gt 0 ] || set -- small full
for part in "$@"; do "$part"; done
