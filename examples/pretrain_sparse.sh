#!/usr/bin/env bash
# Trains a small model of sparse attention with context parallelism on two CPU ranks, on packed documents of a seeded
# generator. The same flags with PRESET=deepseek-v3.2 describe DeepSeek-V3.2 (on GPUs). A minute or two.
#
#   bash examples/pretrain_sparse.sh
#   CP=1 RUN_DIR=runs/sparse/cp1 bash examples/pretrain_sparse.sh      # one rank: the same losses
set -euo pipefail
EXAMPLE=sparse exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_hybrid.sh" "$@"
