#!/usr/bin/env bash
# The models without training of retrieval, and SASRec (also with sums over SIDs as item vectors), sid_sasrec, its blend
# with sequential_rules, and the quickstart's TIGER and SID-MLP, three seeds, each measured on test over all items and
# without the items of the user's history:
#
#   papers/results/small.sh LOG OUT [MODEL...]      LOG: the folder, named as its file in jobs/configs/sources; OUT: where
#                                            tables and runs go; MODEL: popularity own_items item_knn ease
#                                            sequential_rules sasrec sasrec_sids sid_sasrec blend tiger sid_mlp; by default all
#   SEEDS='42 43 44' LEVELS=2 CODES=256     as the quickstart: a code for at least 8 items, 3 levels above 16,384 items
#   EPOCHS=40                                sid_sasrec on the simulated log, as in the quickstart; elsewhere those of its config
#
# A log without texts of items, such as yoochoose, gets vectors of its items from pairs of neighbours in its training window:
# positive pointwise mutual information, singular vectors.
#
# The same line again keeps the finished work and continues. Its end writes papers/results/small_LOG.jsonl.
set -euo pipefail
log=$(realpath "$1") out=$(realpath -m "$2")
shift 2
python=$(command -v python)
cd "$(dirname "$0")/../.."
mkdir -p "$out"

name=$(basename "$log")
tables=$out/tables sids=$out/sids
SEEDS=${SEEDS:-42 43 44}

job() { "$python" -m "jobs.$@"; }

row() {  # NAME CONFIG OPTION...
  local row=$1 config=$2
  shift 2
  job train --config "jobs/configs/retrieval/$config.yaml" --tables "$tables" --sids "$sids" --storage "$out/runs" --name "$row" \
    --experiment "retrieval/$name" "$@"
  job evaluate --checkpoint "$out/runs/$row" --tables "$tables" --sids "$sids" --split test
  job evaluate --checkpoint "$out/runs/$row" --tables "$tables" --sids "$sids" --split test --unseen true
}

trained() {  # MODEL
  for seed in $SEEDS; do
    fit=(--fit.seed "$seed" --fit.eval_examples 2000 --ray.threads 1)
    case $1 in
      sasrec) row "sasrec-$seed" sasrec "${fit[@]}" --model.item_vectors ids ;;
      sasrec_sids) row "sasrec_sids-$seed" sasrec "${fit[@]}" --model.item_vectors ids_and_sids ;;
      sid_sasrec) row "sid_sasrec-$seed" sid_sasrec "${fit[@]}" ${EPOCHS:+--fit.max_epochs "$EPOCHS"} ;;
      blend) row "blend-$seed" blend --fit.seed "$seed" --model.first "$out/runs/sid_sasrec-$seed" \
        --model.second "$out/runs/sequential_rules" ;;
      tiger) row "tiger-$seed" tiger_small "${fit[@]}" --fit.max_epochs 35 ;;
      sid_mlp) row "sid_mlp-$seed" sid_mlp_small "${fit[@]}" --model.teacher "$out/runs/tiger-$seed" ;;
    esac
  done
}

[ -e "$tables/statistics.json" ] || job prepare --source "jobs/configs/sources/$name.yaml" --input "$log" --output "$tables"
vectors=(--encoder tfidf)
if [ "$name" = yoochoose ]; then
  vectors=(--embeddings "$out/vectors.npy" --id "$out/ids.txt")
  [ -e "$out/vectors.npy" ] || "$python" - "$tables" "$out" <<'END'
import sys

import numpy as np
import polars as pl
import scipy.sparse as sp
from scipy.sparse.linalg import svds

import trieline
from core.schemas import SequencesInfo
from core.tables import open_table

tables, out = sys.argv[1:]
end = open_table(f"{tables}/sequences", SequencesInfo).info.split.val_start_ms
users = trieline.tables(tables).sequences.select("user_id", "item_index", "timestamp_ms")
rows = users.explode("item_index", "timestamp_ms").filter(pl.col("timestamp_ms") < end)
items = trieline.tables(tables).items["item_id"].to_list()
counts = sp.csr_matrix((len(items), len(items)))
for step in range(1, 6):
    pairs = rows.with_columns(next=pl.col("item_index").shift(-step).over("user_id")).drop_nulls("next")
    ends = pairs["item_index"].to_numpy(), pairs["next"].to_numpy()
    counts += sp.csr_matrix((np.ones(len(pairs)), ends), counts.shape)
counts = sp.coo_matrix(counts + counts.T)
popularity = np.maximum(np.asarray(counts.sum(1)).ravel(), 1)
ratio = counts.data * counts.sum() / popularity[counts.row] / popularity[counts.col]
counts.data = np.maximum(np.log(ratio), 0)
left, values, _ = svds(counts.tocsr(), k=64, v0=np.ones(len(items)))
np.save(f"{out}/vectors.npy", (left * np.sqrt(values)).astype(np.float32))
open(f"{out}/ids.txt", "w").write("\n".join(items))
END
fi
[ -e "$sids/trie/manifest.json" ] || job tokenize --tables "$tables" --output "$sids" --tokenizer rqkmeans \
  --tokenizer.levels "${LEVELS:-2}" --tokenizer.codebook_size "${CODES:-256}" "${vectors[@]}"
untrained="popularity own_items item_knn ease sequential_rules"
[ $# -gt 0 ] || set -- $untrained sasrec sasrec_sids sid_sasrec blend tiger sid_mlp
for model in "$@"; do
  if [[ " $untrained " = *" $model "* ]]; then row "$model" "$model"; else trained "$model"; fi
done
"$python" -m papers.pages --keep "retrieval/$name" --tracking_uri "sqlite:///$out/runs/mlflow.db" \
  --output "papers/results/small_$name.jsonl"
