"""The range of every single number, as a table; and lists that must fit the number of layers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.plan.study.workloads import MAX_TOKENS
from megatron_cp.training.arguments.faults import discard

_POSITIVE, _NOT_NEGATIVE = "(0, inf)", "[0, inf)"

# attribute -> where its value lies; not a number lies nowhere, None (not given) is left alone.
RANGES = {
    "seq_length": f"[2, {MAX_TOKENS}]",
    "ffn_hidden_size": _POSITIVE,
    "kv_channels": _POSITIVE,
    "layernorm_epsilon": _POSITIVE,
    "init_method_std": _POSITIVE,
    "rotary_base": _POSITIVE,
    "rotary_percent": "(0, 1]",
    "rotary_seq_len_interpolation_factor": _POSITIVE,
    "rope_scaling_factor": _POSITIVE,
    "rotary_scaling_factor": _POSITIVE,
    "yarn_original_max_position_embeddings": _POSITIVE,
    "yarn_beta_fast": _POSITIVE,
    "yarn_beta_slow": _POSITIVE,
    "llama_4_scaling_beta": _POSITIVE,
    "longrope_original_max_position_embeddings": _POSITIVE,
    "longrope_attention_factor": _POSITIVE,
    "beta_fast": _POSITIVE,
    "beta_slow": _POSITIVE,
    "original_max_position_embeddings": _POSITIVE,
    "activation_func_clamp_value": _POSITIVE,
    "embedding_init_method_std": _POSITIVE,
    "moe_input_jitter_eps": _POSITIVE,
    "moe_z_loss_coeff": _NOT_NEGATIVE,
    "moe_router_topk_scaling_factor": _POSITIVE,
    "moe_router_bias_update_rate": _NOT_NEGATIVE,
    "moe_expert_capacity_factor": _POSITIVE,
    "mtp_loss_scaling_factor": _NOT_NEGATIVE,
    "loss_scale": _POSITIVE,
    "initial_loss_scale": _POSITIVE,
    "min_loss_scale": _POSITIVE,
    "loss_scale_window": _POSITIVE,
    "hysteresis": _POSITIVE,
    "microbatch_group_size_per_vp_stage": _POSITIVE,
    "loss_chunk_size": _POSITIVE,
    "mlp_chunks_for_training": _POSITIVE,
    "attention_dropout": "[0, 1)",
    "hidden_dropout": "[0, 1)",
    "ddp_bucket_size": _POSITIVE,
    "distributed_timeout_minutes": _POSITIVE,
    "plan_batches": _POSITIVE,
    "seed": "[0, 4000000000]",
    "dsa_indexer_loss_coeff": _NOT_NEGATIVE,
    "dsa_indexer_k_norm_epsilon": _POSITIVE,
    "qk_clip_alpha": "(0, 1)",
    "qk_clip_threshold": _POSITIVE,
    "lr": _NOT_NEGATIVE,
    "decoupled_lr": _NOT_NEGATIVE,
    "decoupled_min_lr": _NOT_NEGATIVE,
    "lr_decay_iters": _POSITIVE,
    "lr_decay_samples": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "start_weight_decay": _NOT_NEGATIVE,
    "end_weight_decay": _NOT_NEGATIVE,
    "clip_grad": _NOT_NEGATIVE,
    "adam_beta1": "[0, 1)",
    "adam_beta2": "[0, 1)",
    "adam_eps": _POSITIVE,
    "sgd_momentum": "[0, 1)",
    "fim_rate": "[0, 1]",
    "fim_spm_rate": "[0, 1]",
    "fim_fragment_rate": "[0, 1]",
    "num_workers": _NOT_NEGATIVE,
    "eval_iters": _NOT_NEGATIVE,
    "manual_gc_interval": _NOT_NEGATIVE,
    "tensorboard_queue_size": _POSITIVE,
    "straggler_minmax_count": _POSITIVE,
}
_ADVICE = {
    "seq_length": "a token needs one to predict, and a plan has no more",
    "clip_grad": "0 is no clipping",
    "num_workers": "0 plans in the training process",
    "eval_iters": "0 is no evaluation",
    "moe_input_jitter_eps": "leave it out for no noise",
}
_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}
_WORDS = {_POSITIVE: "be positive and finite", _NOT_NEGATIVE: "be finite and not negative"}


def check_ranges(args: Namespace) -> Iterator[str]:
    """Yields a line for each number outside its range."""
    for name, interval in RANGES.items():
        value = getattr(args, name, None)
        if value is None or _lies_in(value, interval):
            continue
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        advice = f"; {_ADVICE[name]}" if name in _ADVICE else ""
        yield f"{flag} {value} must {_WORDS.get(interval, f'lie in {interval}')}{advice}"
        discard(args, name)


def _lies_in(value: float, interval: str) -> bool:
    """Whether the value lies in `[low, high)`, with either bracket at either end."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


# Argument that says it of each layer -> what 0 and 1 mean in its list.
_LAYER_KINDS = {
    "window_attn_skip_freq": ("full", "window"),
    "no_rope_freq": ("rotates", "does not"),
    "moe_layer_freq": ("dense", "experts"),
    "linear_attention_freq": ("softmax", "linear"),
}


def check_layer_kinds(args: Namespace) -> Iterator[str]:
    """Yields a line for each number or list that does not say of every layer what it is."""
    for name, (zero, one) in _LAYER_KINDS.items():
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if isinstance(value, int) and value <= 0:
            yield f"{flag} {value} must be positive, or a list"
        elif isinstance(value, list) and (len(value) != args.num_layers or set(value) - {0, 1}):
            yield (
                f"{flag} {value} must hold one 0 ({zero}) or 1 ({one}) for each of --num-layers {args.num_layers}"
            )
        else:
            continue
        discard(args, name)


def check_rotation(args: Namespace) -> Iterator[str]:
    """Yields a line for heads that cannot rotate."""
    if args.position_embedding_type in ("rope", "yarn") and args.kv_channels % 2:
        yield (
            f"--kv-channels {args.kv_channels} must be even with rotary positions; they turn pairs"
        )


def check_skipped_rotation(args: Namespace) -> Iterator[str]:
    """Yields a line if every so many layers without rotation do not fit the number of layers."""
    frequency = args.no_rope_freq
    if isinstance(frequency, int) and args.num_layers % frequency:
        yield f"--no-rope-freq {frequency} must divide --num-layers {args.num_layers}, or be a list"
