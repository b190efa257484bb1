#!/usr/bin/env bash
# Every row of Tables 3, 4 and 11 of SID-MLP on amazon18_industrial, at a size that 2 cores train in an hour and a half:
#
#   papers/results/industrial.sh LOG OUT [SEED]      LOG: the folder amazon18_industrial; OUT: where tables and runs go
#
# One small TIGER teaches its students, one small LLaMA of random weights those of LC-Rec. All search the same trie with
# 20 beams. The same line again keeps the finished work and continues. Then:
#
#   python -m papers.pages --keep retrieval/industrial --tracking_uri sqlite:///OUT/runs/mlflow.db \
#       --output papers/results/industrial.jsonl
set -euo pipefail
log=$(realpath "$1") out=$(realpath -m "$2") seed=${3:-42}
python=$(command -v python)
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
cd "$here"

job() { "$python" -m "jobs.$@"; }

[ -e "$out/tables/statistics.json" ] || job prepare --source jobs/configs/sources/amazon18_industrial.yaml --input "$log" --output "$out/tables"
[ -e "$out/sids/trie" ] || job tokenize --tables "$out/tables" --tokenizer rqkmeans --encoder minilm --pca 128 --output "$out/sids"

row() {  # NAME CONFIG OPTION...
  local name=$1-$seed config=$2
  shift 2
  job train --config "jobs/configs/retrieval/$config.yaml" --tables "$out/tables" --sids "$out/sids" --storage "$out/runs" \
    --name "$name" --experiment retrieval/industrial --fit.seed "$seed" --fit.patience 10 "$@"
  job evaluate --checkpoint "$out/runs/$name" --tables "$out/tables" --sids "$out/sids" --split test
}

students=(--model.teacher "$out/runs/tiger-$seed" --fit.lr 0.001 --fit.batch_size 128 --fit.max_epochs 20 --model.beam 20)

row popularity popularity
row sasrec sasrec --model.item_vectors ids
row tiger tiger_small --fit.max_epochs 60
row sid_mlp sid_mlp_small --model.teacher "$out/runs/tiger-$seed" --fit.max_epochs 20
row gdn gdn "${students[@]}" --model.num_layers 2 --model.heads 2 --model.head_width 32 --model.ffn_width 256
row mamba2 mamba2 "${students[@]}" --model.num_layers 2 --model.width 64 --model.head_width 32 --model.state 32
row one_layer one_layer "${students[@]}"
row earn earn "${students[@]}"
row nezha nezha "${students[@]}"
row atspeed_s atspeed_s "${students[@]}" --model.draft_beam 40 --fit.max_epochs 10
row atspeed_r atspeed_r "${students[@]}" --model.draft_beam 40 --fit.max_epochs 10
row sid_mlp_pp_encoder sid_mlp_pp_encoder --model.teacher "$out/runs/tiger-$seed" --model.encoder_layers 2 \
  --model.encoder_width 256 --fit.max_epochs 40 --fit.patience 0 --fit.batch_size 128
row sid_mlp_pp sid_mlp_pp --model.encoder "$out/runs/sid_mlp_pp_encoder-$seed" --fit.lr 0.001 \
  --fit.batch_size 128 --fit.max_epochs 20 --model.beam 20 --model.attention_heads 4 --model.attention_width 128 \
  --model.ffn_width 256 --model.head_width 256

row lc_rec lc_rec --model.tasks '[next]' --model.max_words 300 --model.max_history 10 --model.num_layers 3 \
  --model.width 96 --model.ffn_width 256 --fit.lr 0.003 --fit.max_epochs 12
row lc_rec_sid_mlp lc_rec_sid_mlp --model.teacher "$out/runs/lc_rec-$seed" --fit.lr 0.001 \
  --fit.batch_size 128 --fit.max_epochs 20 --model.width 96 --model.ffn_width 256 --model.head_width 256
row lc_rec_nezha lc_rec_nezha --model.teacher "$out/runs/lc_rec-$seed" --fit.lr 0.0003 --fit.max_epochs 12
