"""The served command line: Megatron-LM's argument names, types, defaults and meanings.

As a table.

A shell script written for Megatron-LM's `pretrain_gpt.py` runs unchanged as far as its flags
stand here; a flag of Megatron-LM that does not is refused by name (`known_flags.py`). A row reads

    names  kind  default | help

with `on` for a switch, `off:dest` for one that sets `dest` to False, `words` and `ints` for any number
of values, `kind:dest` where the attribute has another name, and `-` for no default. The defaults of
--distributed-backend, --transformer-impl and --wandb-project differ from Megatron-LM's, whose own need
a GPU, a package or a key.

Source: the parser of Megatron-LM core_v0.19.0 (names, types and defaults are its interface).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

_ROW = re.compile(r"(?P<names>--\S+) (?P<kind>\S+) (?P<default>\S+) \| (?P<help>.+)")


def add_served_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of the table, in its groups."""
    group = parser.add_argument_group("")
    for line in filter(None, map(str.strip, TABLE.splitlines())):
        if line.startswith("["):
            group = parser.add_argument_group(line.strip("[]"))
            continue
        row = _ROW.fullmatch(line)
        assert row is not None, line
        group.add_argument(*row["names"].split("/"), help=row["help"], **_options(row))


def _options(row: re.Match[str]) -> dict[str, Any]:
    """The keywords of `add_argument` for one row."""
    kind, _, detail = row["kind"].partition(":")
    if kind in ("on", "off"):
        action = "store_true" if kind == "on" else "store_false"
        return {"action": action, "dest": detail} if detail else {"action": action}
    if kind == "words":
        return {"nargs": "*", "default": None}
    if kind == "ints":
        return {"nargs": "+", "type": int, "default": [int(row["default"])]}
    convert = _CONVERTERS[kind]
    default = None if row["default"] == "-" else convert(row["default"])
    extra: dict[str, Any] = {}
    if detail:
        choices, _, dest = detail.partition(":") if "one-of" in kind else ("", "", detail)
        extra = {"choices": [convert(word) for word in choices.split(",")]} if choices else {}
        extra.update({"dest": dest} if dest else {})
    return {"type": convert, "default": default, **extra}


def _window(text: str) -> tuple[int, int]:
    """The pair of `--window-size 127,0` (left, right); -1 is an open side."""
    left, _, right = text.strip("()").partition(",")
    return int(left), int(right)


def _layers(text: str) -> int | list[int]:
    """The value of `--window-attn-skip-freq`.

    N, or a list such as `[1,1,0]` or `([1]*3+[0])*2`.
    """
    return int(text) if text.isdigit() else _list_expression(text.replace(" ", ""))


def _list_expression(text: str) -> list[int]:
    """The list that a sum of `[..]*n` terms describes, without evaluating Python; ValueError."""
    result: list[int] = []
    for term in _terms(text):
        body, star, times = term.rpartition("*") if term[-1:].isdigit() else (term, "", "1")
        if not star:
            body = term
        if body.startswith("(") and body.endswith(")"):
            part = _list_expression(body[1:-1])
        elif body.startswith("[") and body.endswith("]"):
            part = [int(item) for item in body[1:-1].split(",") if item]
        else:
            raise ValueError(text)
        result += part * int(times)
    return result


def _terms(text: str) -> list[str]:
    """The summands of `text` that stand outside every bracket."""
    terms: list[str] = []
    depth = start = 0
    for place, char in enumerate(text + "+"):
        depth += (char in "([") - (char in ")]")
        if char == "+" and depth == 0:
            terms.append(text[start:place])
            start = place + 1
    return terms


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "one-of": str,
    "one-of-int": int,
    "window": _window,
    "layers": _layers,
}

TABLE = """
[parallelism]
--tensor-model-parallel-size int 1 | ranks that share each weight matrix
--pipeline-model-parallel-size int 1 | pipeline stages
--num-layers-per-virtual-pipeline-stage int - | layers per interleaved stage
--num-virtual-stages-per-pipeline-rank int - | interleaved stages per rank
--context-parallel-size int 1 | ranks that share the tokens of a pack
--sequence-parallel on - | shard norm and dropout over the tensor-parallel ranks
--use-distributed-optimizer on - | shard optimizer state over data-parallel ranks
--overlap-grad-reduce on - | reduce gradients while backward runs
--overlap-param-gather on - | gather parameters while forward runs
--no-overlap-p2p-communication off:overlap_p2p_comm - | blocking pipeline sends
--ddp-bucket-size int - | parameters per gradient bucket
--distributed-backend one-of:nccl,gloo - | default: nccl with a GPU, gloo without
--distributed-timeout-minutes int 10 | time after which a collective is an error
--local-rank int - | as older launchers pass it; LOCAL_RANK of torchrun wins
--use-cpu-initialization on - | initialise weights on the CPU (always so without a GPU)

[model]
--num-layers int - | transformer layers
--hidden-size int - | width of the residual stream
--ffn-hidden-size int - | default: 4 x hidden, 8/3 x hidden with --swiglu
--num-attention-heads int - | query heads
--group-query-attention on - | fewer key/value heads than query heads
--num-query-groups int 1 | key/value heads with --group-query-attention
--kv-channels int - | head size; default hidden / heads
--normalization one-of:LayerNorm,RMSNorm LayerNorm | norm of every layer
--norm-epsilon float:layernorm_epsilon 1e-05 | epsilon of the norms
--swiglu on - | gated SiLU in the MLP
--squared-relu on - | squared ReLU in the MLP
--disable-bias-linear off:add_bias_linear - | linear layers without bias
--add-qkv-bias on - | bias on the QKV projection alone
--qk-layernorm on - | norm on queries and keys
--untie-embeddings-and-output-weights on - | a separate output matrix
--attention-dropout float 0.1 | must be 0.0: attention has no dropout here
--hidden-dropout float 0.1 | dropout on the residual branches
--apply-layernorm-1p on:layernorm_zero_centered_gamma - | store the weights of norms minus one
--softmax-type one-of:vanilla,off-by-one,learnable vanilla | attention sink
--window-size window - | left,right of a sliding window; -1 is open
--window-attn-skip-freq layers - | which layers attend in full
--apply-query-key-layer-scaling on - | divide scores by the layer number
--init-method-std float 0.02 | standard deviation of initial weights
--make-vocab-size-divisible-by int 128 | padding of the vocabulary
--transformer-impl one-of:local,transformer_engine - | default: the second where it is installed
--spec words - | module and name of a layer spec; ours, or --allow-custom-spec

[engine]
--no-bias-gelu-fusion off:bias_gelu_fusion - | bias and GELU in two kernels
--no-bias-swiglu-fusion off:bias_swiglu_fusion - | bias and SwiGLU in two kernels
--no-bias-dropout-fusion off:bias_dropout_fusion - | bias and dropout in two kernels
--no-rope-fusion off:apply_rope_fusion - | rotary embedding by torch, not Transformer Engine
--cross-entropy-loss-fusion on - | the loss in fewer kernels, its gradient rounded to bf16
--cross-entropy-fusion-impl one-of:native,te native | whose kernels: torch's or Transformer Engine's
--no-gradient-accumulation-fusion off:gradient_accumulation_fusion - | not apex's kernel for it
--no-persist-layer-norm on - | not apex's persistent LayerNorm kernel
--fp8-format one-of:e4m3,hybrid:fp8 - | linear layers of Transformer Engine in fp8; attention is not
--fp8-recipe one-of:delayed,tensorwise,mxfp8,blockwise delayed | how fp8 scales are found
--fp8-margin int 0 | margin of delayed scaling
--fp8-amax-history-len int 1 | steps that delayed scaling looks back
--fp8-amax-compute-algo one-of:most_recent,max most_recent | what it takes from them
--no-fp8-wgrad off:fp8_wgrad - | weight gradients in higher precision

[position embedding]
--max-position-embeddings int - | longest position; default --seq-length
--position-embedding-type one-of:learned_absolute,rope,none learned_absolute | their kind
--no-position-embedding off:add_position_embedding - | old; changes nothing with rotary positions
--use-rotary-position-embeddings on - | old spelling of --position-embedding-type rope
--rotary-base int 10000 | base of the rotary frequencies
--rotary-percent float 1.0 | share of the head that rotates
--rotary-seq-len-interpolation-factor int - | linear position interpolation
--use-rope-scaling on - | Llama 3.1 scaling of the frequencies
--rope-scaling-factor float 8.0 | factor of that scaling

[training]
--micro-batch-size int - | packs per replica and micro-batch
--global-batch-size int - | packs per step; default micro-batch x replicas
--train-iters int - | steps to train
--train-samples int - | packs to train on, instead of --train-iters
--exit-interval int - | stop after an iteration divisible by this
--exit-duration-in-mins int - | stop after this many minutes
--exit-signal-handler on - | on a signal to any rank, save and leave with code 0
--exit-signal one-of:SIGTERM,SIGINT,SIGUSR1,SIGUSR2 SIGTERM | which signal
--seed int 1234 | seed of weights, dropout and shuffling
--data-parallel-random-init on - | different weights per replica before the first step
--bf16 on - | train in bfloat16
--calculate-per-token-loss on - | divide the summed loss by all tokens of the step
--accumulate-allreduce-grads-in-fp32 on - | fp32 gradient buffers (always so with --bf16)
--grad-reduce-in-bf16 on - | bf16 gradient buffers
--no-check-for-nan-in-loss-and-grad off:check_for_nan_in_loss_and_grad - | go on
--check-weight-hash-across-dp-replicas-interval int - | steps between comparisons of replicas
--manual-gc on - | run the garbage collector only between steps
--manual-gc-interval int 0 | steps between collections; 0 is never
--deterministic-mode on - | the same bits on every run

[optimizer]
--optimizer one-of:adam,sgd adam | optimizer function
--weight-decay float 0.01 | decoupled weight decay
--start-weight-decay float - | initial weight decay of a growing one
--end-weight-decay float - | final weight decay of a growing one
--weight-decay-incr-style one-of:constant,linear,cosine constant | its growth
--clip-grad float 1.0 | largest gradient norm; 0 is no clipping
--adam-beta1 float 0.9 | decay of the first moment
--adam-beta2 float 0.999 | decay of the second moment
--adam-eps float 1e-08 | term in the denominator
--sgd-momentum float 0.9 | momentum of sgd

[learning rate]
--lr float - | largest learning rate
--min-lr float 0.0 | smallest learning rate
--lr-decay-style one-of:constant,linear,cosine,inverse-square-root,WSD linear | after the warm-up
--lr-wsd-decay-style one-of:exponential,linear,cosine,minus_sqrt exponential | WSD's last phase
--lr-decay-iters int - | default --train-iters
--lr-decay-samples int - | default --train-samples
--lr-wsd-decay-iters int - | length of WSD's last phase
--lr-wsd-decay-samples int - | the same in packs
--lr-warmup-fraction float - | share of the decay that warms up
--lr-warmup-iters int 0 | linear warm-up
--lr-warmup-samples int 0 | the same in packs
--lr-warmup-init float 0.0 | learning rate before the first step
--override-opt-param-scheduler/--override-opt_param-scheduler on - | flags win over checkpoint
--use-checkpoint-opt-param-scheduler/--use-checkpoint-opt_param-scheduler on - | or it wins

[recompute]
--recompute-granularity one-of:full,selective - | what backward computes again
--recompute-method one-of:uniform,block - | how layers are chosen
--recompute-num-layers int - | how many
--recompute-modules words - | modules of selective recompute
--recompute-activations on - | short for --recompute-granularity selective

[data]
--data-path words - | prefix of .bin/.idx
--train-data-path words - | the same, for training alone
--valid-data-path words - | the same, for validation alone
--test-data-path words - | the same, for the test alone
--split str - | shares of documents for training, validation and test; default 969,30,1
--mock-data on - | documents of a seeded generator
--seq-length int - | tokens per pack
--num-workers int 2 | loader workers; they also make the plans
--reset-position-ids on - | positions restart in each document
--reset-attention-mask on - | tokens look at their own document only
--dataloader-inter-document-masking on - | the two above, from the documents' true lengths
--eod-mask-loss on - | no loss on the end-of-document token

[tokenizer]
--tokenizer-type str - | HuggingFaceTokenizer, GPT2BPETokenizer, ByteLevel or NullTokenizer
--tokenizer-model str - | file or folder of the tokenizer
--vocab-file str - | vocab.json of GPT2BPETokenizer, which it and --merge-file choose
--merge-file str - | merges.txt of GPT2BPETokenizer
--vocab-size int - | vocabulary before padding; default the tokenizer's

[checkpoint]
--save str - | folder of checkpoints; the run's records go there too
--save-interval/--persistent-save-interval int - | steps between checkpoints
--save-retain-interval int - | older checkpoints kept: multiples of this
--load str - | folder of checkpoints to go on from
--dist-ckpt-optim-fully-reshardable on - | sharded optimizer state that any layout can load
--ckpt-step int - | iteration to load; default the latest
--ckpt-format one-of:torch_dist,torch torch_dist | format to save in; --load reads the folder's own
--no-ckpt-fully-parallel-save off:ckpt_fully_parallel_save - | the first replica writes all
--verify-integrity on - | hash the files of a save; compare them with their hashes before a load
--async-save on - | a forked process writes checkpoints while training goes on
--dist-ckpt-strictness str raise_all | which tensors model and checkpoint need not share
--exit-on-missing-checkpoint on - | an empty --load is an error
--finetune on - | load the weights alone and start at iteration 0
--no-save-optim on - | leave the optimizer out of checkpoints
--no-save-rng on - | leave the random states out of checkpoints
--no-load-optim on - | do not load the optimizer
--no-load-rng on - | do not load the random states

[evaluation]
--eval-iters int 100 | batches per evaluation
--eval-interval int - | steps between evaluations; default none before the end
--skip-train on - | evaluate only

[logging]
--log-interval int 100 | steps between log lines
--log-throughput on - | TFLOP/s per GPU, tokens per second and remaining time in the log line
--log-straggler on - | name the slowest ranks below the log line
--straggler-minmax-count int 1 | how many of them
--timing-log-level one-of-int:0,1,2 0 | timers: 0 none, 1 once a step, 2 every micro-batch and send
--timing-log-option one-of:max,minmax,all minmax | which ranks' times are printed
--log-timers-to-tensorboard on - | largest times beside the other metrics
--no-barrier-with-level-1-timing off:barrier_with_L1_time - | ranks need not wait for timers
--log-memory-interval int - | steps between lines about memory
--profile on - | write a trace of some steps into --tensorboard-dir, or --run-dir
--use-pytorch-profiler on - | the same: traces are always those of torch.profiler
--profile-step-start int 10 | steps before the trace
--profile-step-end int 12 | last step of the trace
--profile-ranks ints 0 | ranks that write one
--record-memory-history on - | record allocations of the last rank's GPU
--memory-snapshot-path str snapshot.pickle | where they are written at the end
--log-params-norm on - | norm of the parameters in the log line
--log-num-zeros-in-grad on - | zeros of the gradient in the log line
--log-progress on - | append to progress.txt in --save
--tensorboard-dir str - | folder of tensorboard events
--tensorboard-log-interval int 1 | steps between tensorboard and wandb rows
--tensorboard-queue-size int 1000 | events kept before they are written
--log-validation-ppl-to-tensorboard on - | perplexity beside the validation loss
--log-memory-to-tensorboard on - | GPU memory
--log-world-size-to-tensorboard on - | world size
--wandb-project str - | project; default megatron_cp (logged offline without a key)
--wandb-exp-name str - | name of the run
--wandb-save-dir str - | folder of the wandb run; default <save>/wandb
--wandb-entity str - | owner of the run

[beyond Megatron-LM]
--allow-custom-spec on - | let --spec import a module that is not ours
--plan-only on - | print the plans of the first batches and leave; builds no model
--plan-batches int 4 | batches that --plan-only shows
--run-dir str - | folder of run.json, metrics.jsonl and plan.json; default --save
--wandb-run-id str - | go on with this wandb run
--no-wandb off:wandb - | do not log to wandb
"""
