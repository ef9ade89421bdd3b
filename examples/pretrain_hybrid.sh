#!/usr/bin/env bash
# Trains a small hybrid of Mamba-2, attention and MLPs with context parallelism on two CPU ranks, on packed documents of a
# seeded generator. The same flags with PRESET=nemotron-h-8b describe Nemotron-H (on GPUs). About a minute.
#
#   bash examples/pretrain_hybrid.sh
#   CP=1 RUN_DIR=runs/hybrid/cp1 bash examples/pretrain_hybrid.sh      # one rank: the same losses
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" WANDB_MODE="${WANDB_MODE:-offline}"

EXAMPLE="${EXAMPLE:-hybrid}" # what is trained: the preset tiny-$EXAMPLE; pretrain_sparse.sh gives another
CP="${CP:-2}" STEPS="${STEPS:-20}" RUN_DIR="${RUN_DIR:-runs/$EXAMPLE/cp$CP}"
read -ra MODEL <<< "$(python -c '
import sys
from megatron_cp.models.presets import PRESETS
from megatron_cp.training.arguments import flags_of
print(*flags_of(PRESETS[sys.argv[1]]))' "${PRESET:-tiny-$EXAMPLE}")"

torchrun --standalone --nproc-per-node "$CP" pretrain_gpt.py "${MODEL[@]}" \
    --context-parallel-size "$CP" \
    --mock-data --seq-length 1024 --reset-position-ids --reset-attention-mask --num-workers 1 \
    --micro-batch-size 1 --global-batch-size 2 --train-iters "$STEPS" --calculate-per-token-loss \
    --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 \
    --eval-iters 2 --log-interval 1 --log-throughput --save "$RUN_DIR" "$@"

python -m megatron_cp report "$RUN_DIR"
echo "picture: $RUN_DIR/report.html"
echo "next: CP=1 RUN_DIR=runs/$EXAMPLE/cp1 bash examples/pretrain_$EXAMPLE.sh, or a published model: docs/convert.md"
