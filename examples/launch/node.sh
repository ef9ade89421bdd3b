#!/usr/bin/env bash
# One node of a run: torchrun and the command line. Every node runs the same; SLURM and Kubernetes call it.
#
#   NNODES=2 RDZV_ENDPOINT=first-node:29500 RUN_DIR=/shared/run DATA=/shared/corpus \
#       TOKENIZER=/shared/tokenizer.json examples/launch/node.sh [more flags]
#
# --load and --save are one folder: the first start finds it empty, every other start goes on from it.
set -euo pipefail

: "${NNODES:=1}" "${NPROC_PER_NODE:=8}" "${RDZV_ENDPOINT:=localhost:29500}" "${RDZV_ID:=run}"
: "${RUN_DIR:?give the folder of checkpoints, the same on every node}"
: "${DATA:?give the prefix of the documents, as tools/preprocess_data.py wrote them}"
: "${TOKENIZER:?give the tokenizer.json}"

# A scheduler signals every process of a job. Launcher, loader workers and wandb ignore it; the ranks catch it.
trap "" USR1

# Agents count restarts each for itself: the one whose rank died is ahead of those that only saw it, and with the
# store of the rendezvous their ranks would look for each other under two names, for ever.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" \
    pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
    --position-embedding-type rope --attention-dropout 0.0 --hidden-dropout 0.0 --bf16 \
    --data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
    --reset-attention-mask --reset-position-ids --calculate-per-token-loss \
    --seq-length 131072 --context-parallel-size 8 --micro-batch-size 1 --global-batch-size 8 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --train-iters 10000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 100 --lr-decay-style cosine \
    --save "$RUN_DIR" --load "$RUN_DIR" --save-interval 500 --async-save --save-retain-interval 2000 \
    --exit-signal-handler --exit-signal SIGUSR1 --distributed-timeout-minutes 10 \
    --log-interval 10 --log-throughput --log-straggler --timing-log-level 1 "$@"
