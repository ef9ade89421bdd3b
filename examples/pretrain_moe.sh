#!/usr/bin/env bash
# Trains a small mixture of experts with context and expert parallelism on two CPU ranks: eight experts, two active, on packed
# documents of a seeded generator. The same flags with PRESET=mixtral-8x7b describe Mixtral (on GPUs). About a minute.
#
#   bash examples/pretrain_moe.sh
#   CP=1 EP=1 RUN_DIR=runs/moe/cp1 bash examples/pretrain_moe.sh      # one rank: its own initial experts, so another curve
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" WANDB_MODE="${WANDB_MODE:-offline}"

CP="${CP:-2}" EP="${EP:-2}" STEPS="${STEPS:-20}" RUN_DIR="${RUN_DIR:-runs/moe/cp$CP}"
read -ra MODEL <<< "$(python -c '
import sys
from megatron_cp.models.presets import PRESETS
from megatron_cp.training.arguments import flags_of
print(*flags_of(PRESETS[sys.argv[1]]))' "${PRESET:-tiny-moe}")"

torchrun --standalone --nproc-per-node "$CP" pretrain_gpt.py "${MODEL[@]}" \
    --context-parallel-size "$CP" --expert-model-parallel-size "$EP" --moe-token-dispatcher-type alltoall \
    --moe-z-loss-coeff 1e-3 --moe-router-dtype fp32 \
    --mock-data --seq-length 1024 --reset-position-ids --reset-attention-mask --num-workers 1 \
    --micro-batch-size 1 --global-batch-size 2 --train-iters "$STEPS" --calculate-per-token-loss \
    --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 \
    --eval-iters 2 --log-interval 1 --log-throughput --save "$RUN_DIR" "$@"

python -m megatron_cp report "$RUN_DIR"
echo "picture: $RUN_DIR/report.html"
echo "next: CP=1 EP=1 RUN_DIR=runs/moe/cp1 bash examples/pretrain_moe.sh, or your own chats: examples/finetune_on_chats.sh"
