#!/usr/bin/env bash
# Pretrains a small GPT with context parallelism on the Python documents of this machine: corpus, tokenizer, token files,
# training on two CPU ranks, held-out loss, report. No network, no GPU; about five minutes on two cores.
#
#   bash examples/pretrain_on_python_docs.sh              # or: make pretrain
#   CP=1 bash examples/pretrain_on_python_docs.sh         # the same run on one rank: the same curve
#   python tools/loss_compare.py runs/python-docs/cp2 runs/python-docs/cp1
#   RUN=quick bash examples/pretrain_on_python_docs.sh    # seconds instead of minutes, to see that all parts work
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

CP="${CP:-2}"
RUN="${RUN:-full}"
if [[ "$RUN" == quick ]]; then
    MIB=2 VOCAB=512 SEQ=2048 STEPS=8 EVAL_EVERY=8 EVAL_BATCHES=2
else
    MIB=10 VOCAB=512 SEQ=8192 STEPS=90 EVAL_EVERY=30 EVAL_BATCHES=3
fi
OUT="${OUT:-runs/python-docs}"
DATA="$OUT/data-$RUN"
RUN_DIR="${RUN_DIR:-$OUT/cp$CP$([[ $RUN == full ]] || echo "-$RUN")}"

# Every rank gets its share of the cores; more threads than cores make both ranks slower.
CORES="$(python -c 'import os; print(len(os.sched_getaffinity(0)))')"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((CORES > CP ? CORES / CP : 1))}"
export WANDB_MODE="${WANDB_MODE:-offline}"

if [[ ! -f "$DATA/valid_text_document.idx" ]]; then
    mkdir -p "$DATA"
    python tools/python_docs_corpus.py --output "$DATA" --max-mib "$MIB" --max-document-kib 16
    python tools/preprocess_data.py --input "$DATA/train.jsonl" --output-prefix "$DATA/train" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer.json" \
        --train-bpe "$VOCAB" --train-bpe-mib 4 --append-eod --workers "$CORES"
    python tools/preprocess_data.py --input "$DATA/valid.jsonl" --output-prefix "$DATA/valid" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer.json" --append-eod
fi

# A new run begins in a new folder, and nothing is lost; `--load "$RUN_DIR"` goes on in it.
if [[ -e "$RUN_DIR" && " $* " != *" --load"* ]]; then
    if [[ ! -f "$RUN_DIR/run.json" && -n "$(ls -A "$RUN_DIR")" ]]; then
        echo "RUN_DIR=$RUN_DIR exists and holds no run; give another folder, or empty it" >&2
        exit 2
    fi
    OLD="$RUN_DIR-until-$(date +%Y%m%d-%H%M%S)"
    mv "$RUN_DIR" "$OLD"
    echo "the run that was in $RUN_DIR is in $OLD now"
fi
torchrun --standalone --nproc-per-node "$CP" pretrain_gpt.py \
    --context-parallel-size "$CP" \
    --num-layers 2 --hidden-size 384 --ffn-hidden-size 1024 \
    --num-attention-heads 6 --group-query-attention --num-query-groups 2 \
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.04 \
    --train-data-path "$DATA/train_text_document" --valid-data-path "$DATA/valid_text_document" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer.json" \
    --seq-length "$SEQ" --reset-position-ids --reset-attention-mask --num-workers 1 \
    --micro-batch-size 1 --global-batch-size 1 --train-iters "$STEPS" --calculate-per-token-loss \
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters $((STEPS / 10 + 1)) \
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
    --eval-interval "$EVAL_EVERY" --eval-iters "$EVAL_BATCHES" --log-interval 1 --log-throughput \
    --log-validation-ppl-to-tensorboard --log-text-samples 4 \
    --save "$RUN_DIR" --wandb-project megatron_cp --wandb-exp-name "python-docs-cp$CP" \
    "$@"

python -m megatron_cp report "$RUN_DIR"
