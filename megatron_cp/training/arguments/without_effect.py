"""Notes which flags change nothing, because what they belong to is not there.

Megatron-LM says nothing of them, and published recipes pass some: a line at the start, never an error. Flags that
would make another model, if they were heeded, are refused by `experts.py` and `positions.py` instead.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from megatron_cp.mcore.settings.mixers import GATED_DELTA_NET, KIMI_DELTA
from megatron_cp.mcore.settings.sparse_settings import is_sparse


def _rotates(args: Namespace) -> bool:
    return args.multi_latent_attention or args.position_embedding_type in ("rope", "yarn")


def _has_yarn(args: Namespace) -> bool:
    latent = args.multi_latent_attention and args.rope_type in (None, "yarn")
    return latent or args.position_embedding_type == "yarn"


def _scales_by_yarn(args: Namespace) -> bool:
    """Latent attention scales its scores by these two together, whatever it rotates by."""
    both = args.rotary_scaling_factor > 1 and args.mscale_all_dim
    return _has_yarn(args) or (args.multi_latent_attention and both)


_YARN = "--position-embedding-type yarn, or --rope-type yarn with --multi-latent-attention"

# flags (* for any letters), whether what they need is there, and how that is said
_NEEDS: tuple[tuple[str, Callable[[Namespace], object], str], ...] = (
    ("--moe-*", lambda a: a.num_experts, "--num-experts"),
    ("--num-query-groups", lambda a: a.group_query_attention, "--group-query-attention"),
    (
        "--glu-linear-offset --activation-func-clamp-value",
        lambda a: a.swiglu or a.quick_geglu,
        "--swiglu or --quick-geglu",
    ),
    (
        "--add-qkv-bias",
        lambda a: not a.multi_latent_attention,
        "attention without --multi-latent-attention, whose projections have none",
    ),
    ("--window-attn-skip-freq", lambda a: a.window_size, "--window-size"),
    ("--apply-wd-to-qk-layernorm", lambda a: a.qk_layernorm, "--qk-layernorm"),
    (
        "--linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads "
        "--linear-num-value-heads",
        lambda a: a.experimental_attention_variant in GATED_DELTA_NET + KIMI_DELTA,
        "--experimental-attention-variant gated_delta_net or kimi_delta_attention",
    ),
    ("--dsa-* --*-dsa-*", is_sparse, "--experimental-attention-variant dsa"),
    (
        "--dsa-indexer-use-sparse-loss",
        lambda a: a.dsa_indexer_loss_coeff,
        "--dsa-indexer-loss-coeff",
    ),
    (
        "--mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads --disable-mamba-mem-eff-path",
        lambda a: a.hybrid_layer_pattern,
        "--hybrid-layer-pattern",
    ),
    ("--decoupled-min-lr", lambda a: a.decoupled_lr is not None, "--decoupled-lr"),
    ("--mtp-loss-scaling-factor", lambda a: a.mtp_num_layers, "--mtp-num-layers"),
    (
        "--initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis",
        lambda a: a.fp16 and not a.loss_scale,
        "--fp16, and no --loss-scale",
    ),
    (
        "--fp8-* --no-fp8-wgrad --first-last-layers-bf16 --num-layers-at-*-in-bf16",
        lambda a: a.fp8,
        "--fp8-format",
    ),
    (
        "--recompute-modules --offload-recompute-inputs",
        lambda a: a.recompute_granularity,
        "--recompute-granularity",
    ),
    ("--muon-*", lambda a: "muon" in a.optimizer, "--optimizer muon"),
    ("--sgd-momentum", lambda a: a.optimizer == "sgd", "--optimizer sgd"),
    ("--adam-*", lambda a: a.optimizer != "sgd", "--optimizer adam"),
    ("--qk-clip-*", lambda a: a.qk_clip, "--qk-clip"),
    (
        "--kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rope-type",
        lambda a: a.multi_latent_attention,
        "--multi-latent-attention",
    ),
    (
        "--beta-fast --beta-slow --original-max-position-embeddings",
        lambda a: a.multi_latent_attention and _has_yarn(a),
        "--multi-latent-attention with --rope-type yarn",
    ),
    ("--yarn-* --no-yarn-* --mscale", _has_yarn, _YARN),
    ("--rotary-scaling-factor --mscale-all-dim", _scales_by_yarn, _YARN),
    ("--rope-scaling-factor", lambda a: a.use_rope_scaling, "--use-rope-scaling"),
    (
        "--rotary-base --rotary-percent --rotary-interleaved --rotary-seq-len-interpolation-factor "
        "--use-rope-scaling --no-rope-freq",
        _rotates,
        "--position-embedding-type rope",
    ),
    (
        "--finetune --no-load-optim --no-load-rng --verify-integrity --no-verify-checkpoint --ckpt-fallback "
        "--no-ckpt-fallback --dist-ckpt-strictness --override-opt-param-scheduler "
        "--override-opt_param-scheduler --use-checkpoint-opt-param-scheduler "
        "--use-checkpoint-opt_param-scheduler",
        lambda a: a.load or a.pretrained_checkpoint,
        "--load",
    ),
    (
        "--use-mp-args-from-checkpoint-args --*-use-tokenizer-model-from-checkpoint-args",
        lambda a: a.use_checkpoint_args,
        "--use-checkpoint-args",
    ),
    (
        "--save-retain-interval --async-save --no-save-optim --no-save-rng --on-save-error --ckpt-format "
        "--no-ckpt-fully-parallel-save --log-progress",
        lambda a: a.save,
        "--save",
    ),
    ("--lr-wsd-*", lambda a: a.lr_decay_style == "WSD", "--lr-decay-style WSD"),
    ("--lr-warmup-init", lambda a: a.lr_warmup_steps, "a warm-up, as --lr-warmup-iters gives"),
    (
        "--optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d "
        "--no-pin-cpu-grads --no-pin-cpu-params",
        lambda a: a.optimizer_cpu_offload,
        "--optimizer-cpu-offload",
    ),
    (
        "--recompute-num-layers",
        lambda a: a.recompute_granularity == "full",
        "--recompute-granularity full",
    ),
    ("--sft-tokenizer-prompt-format", lambda a: a.sft, "--sft"),
    ("--mid-level-dataset-surplus", lambda a: a.packing == "megatron", "--packing megatron"),
    (
        "--tiktoken-* --tokenizer-special-tokens",
        lambda a: a.tokenizer_type == "TikTokenizer",
        "--tokenizer-type TikTokenizer",
    ),
    (
        "--eval-interval --eval-global-batch-size --eval-micro-batch-size",
        lambda a: a.eval_iters or a.full_validation,
        "--eval-iters above 0",
    ),
    ("--start-eval-at-iter", lambda a: a.eval_interval, "--eval-interval"),
    ("--exit-signal", lambda a: a.exit_signal_handler, "--exit-signal-handler"),
    ("--bad-steps-in-a-row", lambda a: a.on_bad_step == "skip", "--on-bad-step skip"),
    ("--manual-gc-interval", lambda a: a.manual_gc, "--manual-gc"),
    ("--profile-*", lambda a: a.profile, "--profile"),
    ("--memory-snapshot-path", lambda a: a.record_memory_history, "--record-memory-history"),
    ("--straggler-minmax-count", lambda a: a.log_straggler, "--log-straggler"),
    (
        "--timing-log-option --log-timers-to-tensorboard --no-barrier-with-level-1-timing",
        lambda a: a.timing_log_level,
        "--timing-log-level 1 or 2",
    ),
    ("--plan-batches", lambda a: a.plan_only, "--plan-only"),
)


def notes_without_effect(args: Namespace, flags: Iterable[str]) -> list[str]:
    """Returns a line for each of these flags that needs another one.

    Args:
        args: complete and without faults.
        flags: as they were given.
    """
    return [
        f"{flag} changes nothing here: it needs {needed}"
        for flag in dict.fromkeys(flags)
        for patterns, is_there, needed in _NEEDS
        if any(fnmatchcase(flag, pattern) for pattern in patterns.split()) and not is_there(args)
    ]
