#!/usr/bin/env bash
# Fine-tunes a Hugging Face model on conversations with context parallelism, and writes it back in Hugging Face's format: answers
# are learned, prompts are not, conversations are packed whole and never see one another.
#
#   HF=path/to/model CHATS=chats.jsonl bash examples/finetune_on_chats.sh
#
# HF is a folder with config.json, *.safetensors and the tokenizer (of a family of docs/convert.md); a line of CHATS is
# {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}. Of a model for images too,
# LEAVE_OUT='model.visual.*' takes the language model.
set -euo pipefail
HF="$(realpath "${HF:?give HF=<folder of a Hugging Face model>}")"
CHATS="$(realpath "${CHATS:?give CHATS=<file of conversations, .jsonl>}")"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" WANDB_MODE="${WANDB_MODE:-offline}"

CP="${CP:-2}" SEQ="${SEQ:-2048}" STEPS="${STEPS:-20}" BATCH="${BATCH:-2}" LR="${LR:-1e-5}"
FORMAT="${FORMAT:-chat-template}" OUT="${OUT:-runs/chats}"
mkdir -p "$OUT"

# The converter prints the model's flags; they are read from its last line.
python tools/convert_checkpoint.py --from hf --to megatron --load "$HF" --save "$OUT/start" \
    ${LEAVE_OUT:+--leave-out "$LEAVE_OUT"} | tee "$OUT/convert.log"
read -ra MODEL <<< "$(sed -n 's/^flags of pretrain_gpt.py: //p' "$OUT/convert.log")"

torchrun --standalone --nproc-per-node "$CP" pretrain_gpt.py "${MODEL[@]}" --context-parallel-size "$CP" \
    --sft --data-path "$CHATS" --split 100,0,0 --sft-tokenizer-prompt-format "$FORMAT" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$HF" \
    --seq-length "$SEQ" --reset-position-ids --reset-attention-mask --num-workers 1 \
    --micro-batch-size 1 --global-batch-size "$BATCH" --train-iters "$STEPS" --calculate-per-token-loss \
    --lr "$LR" --lr-decay-style cosine --lr-warmup-iters 1 --clip-grad 1.0 \
    --eval-iters 0 --log-interval 1 --save "$OUT/tuned" --save-interval "$STEPS" "$@"

python tools/convert_checkpoint.py --from megatron --to hf --load "$OUT/tuned" --hf-folder "$HF" --save "$OUT/tuned-hf"
python -m megatron_cp report "$OUT/tuned"
echo "the tuned model is in $OUT/tuned-hf"
echo "picture: $OUT/tuned/report.html"
echo "next: STEPS=200 OUT=runs/chats-longer bash examples/finetune_on_chats.sh, with HF and CHATS as here"
