"""The served command line: Megatron-LM's argument names, types, defaults and meanings.

One function per group, in Megatron-LM's order, so that a shell script written for ``pretrain_gpt.py`` of Megatron-LM runs
unchanged. A flag that stands here is honoured; a flag of Megatron-LM that does not stand here is refused by name
(``known_flags.py``). Four defaults differ because Megatron-LM's own need packages that not every machine has; each says so.

Source: the parser of Megatron-LM core_v0.19.0 (names, types and defaults are its interface).
"""

from __future__ import annotations

import argparse

_Group = argparse._ArgumentGroup


def add_served_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag that the training loop honours."""
    for title, add in (
        ("parallelism", _add_parallelism),
        ("model", _add_model),
        ("position embedding", _add_positions),
        ("training", _add_training),
        ("optimizer", _add_optimizer),
        ("learning rate", _add_learning_rate),
        ("recompute", _add_recompute),
        ("data", _add_data),
        ("tokenizer", _add_tokenizer),
        ("checkpoint", _add_checkpoint),
        ("evaluation", _add_evaluation),
        ("logging", _add_logging),
        ("beyond Megatron-LM", _add_ours),
    ):
        add(parser.add_argument_group(title))


def _switch(group: _Group, *names: str, help: str, dest: str | None = None, off: bool = False) -> None:
    """Adds a flag without a value; ``off`` makes it store False (default True)."""
    action = "store_false" if off else "store_true"
    if dest is None:
        group.add_argument(*names, action=action, help=help)
    else:
        group.add_argument(*names, action=action, dest=dest, help=help)


def _add_parallelism(group: _Group) -> None:
    add = group.add_argument
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share each weight matrix")
    add("--pipeline-model-parallel-size", type=int, default=1, help="pipeline stages")
    add("--num-layers-per-virtual-pipeline-stage", type=int, default=None, help="layers per interleaved stage")
    add("--num-virtual-stages-per-pipeline-rank", type=int, default=None, help="interleaved stages per rank")
    add("--context-parallel-size", type=int, default=1, help="ranks that share the tokens of a pack")
    _switch(group, "--sequence-parallel", help="shard norm and dropout over the tensor-parallel ranks")
    _switch(group, "--use-distributed-optimizer", help="shard optimizer state over data-parallel ranks")
    _switch(group, "--overlap-grad-reduce", help="reduce gradients while backward runs")
    _switch(group, "--overlap-param-gather", help="gather parameters while forward runs")
    _switch(group, "--no-overlap-p2p-communication", dest="overlap_p2p_comm", off=True, help="blocking pipeline sends")
    add("--ddp-bucket-size", type=int, default=None, help="parameters per gradient bucket")
    add("--distributed-backend", choices=("nccl", "gloo"), default=None, help="default: nccl with a GPU, gloo without")
    add("--distributed-timeout-minutes", type=int, default=10, help="time after which a collective is an error")
    add("--local-rank", type=int, default=None, help="as older launchers pass it; LOCAL_RANK of torchrun wins")
    _switch(group, "--use-cpu-initialization", help="initialise weights on the CPU (always so without a GPU)")


def _window(text: str) -> tuple[int, int]:
    """The pair of ``--window-size 127,0`` (left, right); -1 is an open side."""
    left, _, right = text.strip("()").partition(",")
    return int(left), int(right)


def _skip_frequency(text: str) -> int | list[int]:
    """The value of ``--window-attn-skip-freq``: N, or a list such as ``[1,1,0]`` or ``([1]*3+[0]*1)*2``."""
    if text.isdigit():
        return int(text)
    return _list_expression(text.replace(" ", ""))


def _list_expression(text: str) -> list[int]:
    """The list of 0/1 that a sum of ``[..]*n`` terms describes, without evaluating Python. Raises ValueError."""
    result: list[int] = []
    depth = start = 0
    terms: list[str] = []
    for place, char in enumerate(text + "+"):
        depth += (char in "([") - (char in ")]")
        if char == "+" and depth == 0:
            terms.append(text[start:place])
            start = place + 1
    for term in terms:
        body, _, times = term.rpartition("*") if "*" in term and term[-1].isdigit() else (term, "", "1")
        if body.startswith("(") and body.endswith(")"):
            part = _list_expression(body[1:-1])
        elif body.startswith("[") and body.endswith("]"):
            part = [int(item) for item in body[1:-1].split(",") if item]
        else:
            raise ValueError(text)
        result += part * int(times)
    return result


def _add_model(group: _Group) -> None:
    add = group.add_argument
    add("--num-layers", type=int, default=None, help="transformer layers")
    add("--hidden-size", type=int, default=None, help="width of the residual stream")
    add("--ffn-hidden-size", type=int, default=None, help="default: 4 x hidden, 8/3 x hidden with --swiglu")
    add("--num-attention-heads", type=int, default=None, help="query heads")
    _switch(group, "--group-query-attention", help="fewer key/value heads than query heads")
    add("--num-query-groups", type=int, default=1, help="key/value heads with --group-query-attention")
    add("--kv-channels", type=int, default=None, help="head size; default hidden / heads")
    add("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm", help="norm of every layer")
    add("--norm-epsilon", type=float, default=1e-5, help="epsilon of the norms")
    _switch(group, "--swiglu", help="gated SiLU in the MLP")
    _switch(group, "--squared-relu", help="squared ReLU in the MLP")
    _switch(group, "--disable-bias-linear", dest="add_bias_linear", off=True, help="linear layers without bias")
    _switch(group, "--add-qkv-bias", help="bias on the QKV projection alone")
    _switch(group, "--qk-layernorm", help="norm on queries and keys")
    _switch(group, "--untie-embeddings-and-output-weights", help="a separate output matrix")
    add("--attention-dropout", type=float, default=0.1, help="must be 0.0: attention has no dropout here")
    add("--hidden-dropout", type=float, default=0.1, help="dropout on the residual branches")
    add("--softmax-type", choices=("vanilla", "off-by-one", "learnable"), default="vanilla", help="attention sink")
    add("--window-size", type=_window, default=None, help="left,right of a sliding window; -1 is open")
    add("--window-attn-skip-freq", type=_skip_frequency, default=None, help="which layers attend in full")
    _switch(group, "--apply-query-key-layer-scaling", help="divide scores by the layer number")
    add("--init-method-std", type=float, default=0.02, help="standard deviation of initial weights")
    add("--make-vocab-size-divisible-by", type=int, default=128, help="padding of the vocabulary")
    add(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default=None,
        help="default: transformer_engine where it is installed, local elsewhere (Megatron-LM: transformer_engine)",
    )
    add("--spec", nargs="*", default=None, help="module and name of a layer spec; ours, or --allow-custom-spec")
    add("--mtp-num-layers", type=int, default=None, help="multi-token-prediction layers")
    add("--mtp-loss-scaling-factor", type=float, default=0.1, help="weight of their loss")


def _add_positions(group: _Group) -> None:
    add = group.add_argument
    add("--max-position-embeddings", type=int, default=None, help="longest position; default --seq-length")
    add(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
        help="kind of position embedding",
    )
    _switch(group, "--use-rotary-position-embeddings", help="old spelling of --position-embedding-type rope")
    add("--rotary-base", type=int, default=10000, help="base of the rotary frequencies")
    add("--rotary-percent", type=float, default=1.0, help="share of the head that rotates")
    add("--rotary-seq-len-interpolation-factor", type=int, default=None, help="linear position interpolation")
    _switch(group, "--use-rope-scaling", help="Llama 3.1 scaling of the frequencies")
    add("--rope-scaling-factor", type=float, default=8.0, help="factor of that scaling")


def _add_training(group: _Group) -> None:
    add = group.add_argument
    add("--micro-batch-size", type=int, default=None, help="packs per replica and micro-batch")
    add("--global-batch-size", type=int, default=None, help="packs per step; default micro-batch x replicas")
    add("--train-iters", type=int, default=None, help="steps to train")
    add("--train-samples", type=int, default=None, help="packs to train on, instead of --train-iters")
    add("--exit-interval", type=int, default=None, help="stop after an iteration divisible by this")
    add("--exit-duration-in-mins", type=int, default=None, help="stop after this many minutes")
    add("--seed", type=int, default=1234, help="seed of weights, dropout and shuffling")
    _switch(group, "--data-parallel-random-init", help="different weights per replica before the first step")
    _switch(group, "--bf16", help="train in bfloat16")
    _switch(group, "--calculate-per-token-loss", help="divide the summed loss by all tokens of the step")
    _switch(group, "--accumulate-allreduce-grads-in-fp32", help="fp32 gradient buffers (always so with --bf16)")
    _switch(group, "--grad-reduce-in-bf16", help="bf16 gradient buffers")
    _switch(group, "--no-check-for-nan-in-loss-and-grad", dest="check_for_nan_in_loss_and_grad", off=True, help="go on")
    _switch(group, "--manual-gc", help="run the garbage collector only between steps")
    add("--manual-gc-interval", type=int, default=0, help="steps between collections; 0 is never")
    _switch(group, "--deterministic-mode", help="the same bits on every run")


def _add_optimizer(group: _Group) -> None:
    add = group.add_argument
    add("--optimizer", choices=("adam", "sgd"), default="adam", help="optimizer function")
    add("--weight-decay", type=float, default=0.01, help="decoupled weight decay")
    add("--start-weight-decay", type=float, default=None, help="initial weight decay of a growing one")
    add("--end-weight-decay", type=float, default=None, help="final weight decay of a growing one")
    add("--weight-decay-incr-style", choices=("constant", "linear", "cosine"), default="constant", help="its growth")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0 is no clipping")
    add("--adam-beta1", type=float, default=0.9, help="decay of the first moment")
    add("--adam-beta2", type=float, default=0.999, help="decay of the second moment")
    add("--adam-eps", type=float, default=1e-8, help="term in the denominator")
    add("--sgd-momentum", type=float, default=0.9, help="momentum of sgd")


def _add_learning_rate(group: _Group) -> None:
    add = group.add_argument
    add("--lr", type=float, default=None, help="largest learning rate")
    add("--min-lr", type=float, default=0.0, help="smallest learning rate")
    styles = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    add("--lr-decay-style", choices=styles, default="linear", help="shape after the warm-up")
    wsd_styles = ("exponential", "linear", "cosine", "minus_sqrt")
    add("--lr-wsd-decay-style", choices=wsd_styles, default="exponential", help="shape of WSD's last phase")
    add("--lr-decay-iters", type=int, default=None, help="default --train-iters")
    add("--lr-decay-samples", type=int, default=None, help="default --train-samples")
    add("--lr-wsd-decay-iters", type=int, default=None, help="length of WSD's last phase")
    add("--lr-wsd-decay-samples", type=int, default=None, help="the same in packs")
    add("--lr-warmup-fraction", type=float, default=None, help="share of the decay that warms up")
    add("--lr-warmup-iters", type=int, default=0, help="linear warm-up")
    add("--lr-warmup-samples", type=int, default=0, help="the same in packs")
    add("--lr-warmup-init", type=float, default=0.0, help="learning rate before the first step")
    names = ("--override-opt-param-scheduler", "--override-opt_param-scheduler")
    _switch(group, *names, dest="override_opt_param_scheduler", help="the command line wins over the checkpoint")
    names = ("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler")
    _switch(group, *names, dest="use_checkpoint_opt_param_scheduler", help="the checkpoint wins")


def _add_recompute(group: _Group) -> None:
    add = group.add_argument
    add("--recompute-granularity", choices=("full", "selective"), default=None, help="what backward computes again")
    add("--recompute-method", choices=("uniform", "block"), default=None, help="how layers are chosen")
    add("--recompute-num-layers", type=int, default=None, help="how many")
    add("--recompute-modules", nargs="*", default=None, help="modules of selective recompute")
    _switch(group, "--recompute-activations", help="short for --recompute-granularity selective")


def _add_data(group: _Group) -> None:
    add = group.add_argument
    add("--data-path", nargs="*", default=None, help="prefix of .bin/.idx")
    add("--train-data-path", nargs="*", default=None, help="the same, for training alone")
    add("--valid-data-path", nargs="*", default=None, help="the same, for validation alone")
    add("--test-data-path", nargs="*", default=None, help="the same, for the test alone")
    add("--split", default=None, help="shares of documents for training, validation and test; default 969,30,1")
    _switch(group, "--mock-data", help="documents of a seeded generator")
    add("--seq-length", type=int, default=None, help="tokens per pack")
    add("--num-workers", type=int, default=2, help="loader workers; they also make the plans")
    _switch(group, "--reset-position-ids", help="positions restart in each document")
    _switch(group, "--reset-attention-mask", help="tokens look at their own document only")
    _switch(group, "--dataloader-inter-document-masking", help="the two above, from the documents' true lengths")
    _switch(group, "--eod-mask-loss", help="no loss on the end-of-document token")


def _add_tokenizer(group: _Group) -> None:
    add = group.add_argument
    add("--tokenizer-type", default=None, help="HuggingFaceTokenizer, ByteLevelTokenizer or NullTokenizer")
    add("--tokenizer-model", default=None, help="file or folder of the tokenizer")
    add("--vocab-size", type=int, default=None, help="vocabulary before padding; default the tokenizer's")


def _add_checkpoint(group: _Group) -> None:
    add = group.add_argument
    add("--save", default=None, help="folder of checkpoints; the run's records go there too")
    add("--save-interval", "--persistent-save-interval", type=int, default=None, help="steps between checkpoints")
    add("--save-retain-interval", type=int, default=None, help="older checkpoints kept: multiples of this")
    add("--load", default=None, help="folder of checkpoints to go on from")
    add("--ckpt-step", type=int, default=None, help="iteration to load; default the latest")
    add("--ckpt-format", choices=("torch_dist",), default="torch_dist", help="format of a checkpoint")
    _switch(group, "--exit-on-missing-checkpoint", help="an empty --load is an error")
    _switch(group, "--finetune", help="load the weights alone and start at iteration 0")
    _switch(group, "--no-save-optim", help="leave the optimizer out of checkpoints")
    _switch(group, "--no-save-rng", help="leave the random states out of checkpoints")
    _switch(group, "--no-load-optim", help="do not load the optimizer")
    _switch(group, "--no-load-rng", help="do not load the random states")


def _add_evaluation(group: _Group) -> None:
    add = group.add_argument
    add("--eval-iters", type=int, default=100, help="batches per evaluation")
    add("--eval-interval", type=int, default=None, help="steps between evaluations; default none before the end")
    _switch(group, "--skip-train", help="evaluate only")


def _add_logging(group: _Group) -> None:
    add = group.add_argument
    add("--log-interval", type=int, default=100, help="steps between log lines")
    _switch(group, "--log-throughput", help="TFLOP/s per GPU in the log line")
    _switch(group, "--log-params-norm", help="norm of the parameters in the log line")
    _switch(group, "--log-num-zeros-in-grad", help="zeros of the gradient in the log line")
    _switch(group, "--log-progress", help="append to progress.txt in --save")
    add("--tensorboard-dir", default=None, help="folder of tensorboard events")
    add("--tensorboard-log-interval", type=int, default=1, help="steps between tensorboard and wandb rows")
    add("--tensorboard-queue-size", type=int, default=1000, help="events kept before they are written")
    _switch(group, "--log-validation-ppl-to-tensorboard", help="perplexity beside the validation loss")
    _switch(group, "--log-memory-to-tensorboard", help="GPU memory")
    _switch(group, "--log-world-size-to-tensorboard", help="world size")
    add("--wandb-project", default=None, help="project; default megatron_cp (logged offline without a key)")
    add("--wandb-exp-name", default=None, help="name of the run")
    add("--wandb-save-dir", default=None, help="folder of the wandb run; default <save>/wandb")
    add("--wandb-entity", default=None, help="owner of the run")


def _add_ours(group: _Group) -> None:
    add = group.add_argument
    _switch(group, "--allow-custom-spec", help="let --spec import a module that is not ours")
    _switch(group, "--plan-only", help="print the plans of the first batches and leave; builds no model")
    add("--plan-batches", type=int, default=4, help="batches that --plan-only shows")
    add("--run-dir", default=None, help="folder of run.json, metrics.jsonl and plan.json; default --save")
    add("--wandb-run-id", default=None, help="go on with this wandb run")
    _switch(group, "--no-wandb", dest="wandb", off=True, help="do not log to wandb")
