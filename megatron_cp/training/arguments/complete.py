"""Completes the arguments, and finds what cannot be run before any process group exists.

The order is that of a reader: parallel layout, model, batch, schedule, precision, recompute, data,
checkpoint. Each check is a plain function of the arguments, so every rank comes to the same
verdict; it yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_cp.mcore.settings.validation import SETTING_CHECKS
from megatron_cp.training.arguments.experts import (
    check_expert_biases,
    check_expert_ranks,
    check_experts,
    check_latent_attention,
    check_prediction,
    check_rank_order,
    check_routing,
    complete_experts,
)
from megatron_cp.training.arguments.faults import discard, faults_of, require
from megatron_cp.training.arguments.files import (
    check_blends,
    check_chats,
    check_checkpoints,
    check_fill_in_the_middle,
    check_order,
    check_places,
    check_pretrained,
    check_profile,
    check_text_samples,
    check_token_files,
    complete_records,
    complete_sources,
    complete_tokenizer,
)
from megatron_cp.training.arguments.hybrid import check_hybrid
from megatron_cp.training.arguments.hybrid_model import (
    MEGATRONS_SPECS,
    check_hybrid_model,
    complete_hybrid_model,
)
from megatron_cp.training.arguments.linear import complete_linear
from megatron_cp.training.arguments.machine import check_devices
from megatron_cp.training.arguments.memory import (
    check_chunks,
    check_recomputed_layers,
    check_recomputed_modules,
    check_recomputed_predictions,
    complete_recompute,
)
from megatron_cp.training.arguments.positions import (
    check_latent_positions,
    check_longrope,
    check_yarn,
    note_stretched_positions,
)
from megatron_cp.training.arguments.precision import (
    check_instances,
    check_optimizer_state,
    check_qk_clip,
    complete_engine,
    complete_expert_engine,
    complete_muon,
    complete_precision,
)
from megatron_cp.training.arguments.ranges import (
    check_layer_kinds,
    check_ranges,
    check_rotation,
    check_skipped_rotation,
)
from megatron_cp.training.arguments.stages import check_shared_picks, complete_stages
from megatron_cp.training.arguments.steps import (
    check_decoupled_rates,
    check_intervals,
    check_rates,
    check_scheduler_source,
    check_validation,
    check_virtual_batches,
    complete_batch,
    complete_schedule,
    complete_steps,
    complete_weight_decay,
)

OUR_SPECS = frozenset({("megatron_cp.mcore.spec", "gpt_layer_spec")})


def complete_and_check(args: Namespace) -> list[str]:
    """Returns every fault of the arguments, one line each, and fills in what follows from others."""
    checks = _CHECKS + (_PLAN_CHECKS if args.plan_only else _STEP_CHECKS) + _LAST_CHECKS
    return [fault for check, *completes in checks for fault in faults_of(check, args, *completes)]


def _layout(args: Namespace) -> Iterator[str]:
    """World size = tensor x context x pipeline x data."""
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    yield from require(args, *sizes)
    tp, cp, pp = (getattr(args, name) for name in sizes)
    per_replica = tp * cp * pp
    if args.world_size % per_replica:
        yield (
            f"world size {args.world_size} must be a multiple of tensor x context x pipeline "
            "parallel size = "
            f"{tp} x {cp} x {pp} = {per_replica}; start {per_replica} ranks (or a multiple), or "
            "change the sizes"
        )
    args.data_parallel_size = args.world_size // per_replica


def _overlap(args: Namespace) -> Iterator[str]:
    """Flags of parallelism that need others."""
    tp = args.tensor_model_parallel_size
    if args.sequence_parallel and tp == 1:
        args.sequence_parallel = False
        args.notes.append(
            "--sequence-parallel changes nothing here: there is one tensor-parallel rank"
        )
    needed = ("use_distributed_optimizer", "overlap_grad_reduce")
    missing = ["--" + name.replace("_", "-") for name in needed if not getattr(args, name)]
    begins_anew = args.load is None and args.pretrained_checkpoint is None
    if args.pipeline_model_parallel_size > 1 and begins_anew:
        args.notes.append(
            "each pipeline stage draws its initial weights from a seed of its own (--seed + 100 x stage), as in "
            "Megatron-LM: another --pipeline-model-parallel-size starts from other weights"
        )
    if args.expert_model_parallel_size > 1 and begins_anew:
        args.notes.append(
            "each expert-parallel rank draws the weights of its experts from a seed of its own, as in Megatron-LM: "
            "another --expert-model-parallel-size starts from other weights"
        )
    if args.overlap_param_gather and missing:
        yield f"--overlap-param-gather needs {' and '.join(missing)}; give that too"


def _sizes(args: Namespace) -> Iterator[str]:
    """Sizes that have no default."""
    yield from require(
        args,
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "make_vocab_size_divisible_by",
    )


def _head_size(args: Namespace) -> Iterator[str]:
    """Head size: by default the width is dealt to the heads."""
    if args.kv_channels is not None:
        return
    heads = args.num_attention_heads
    if args.hidden_size % heads:
        yield (
            f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads "
            f"{heads}; or give --kv-channels"
        )
        discard(args, "num_attention_heads")
    args.kv_channels = args.hidden_size // heads


def _mlp(args: Namespace) -> Iterator[str]:
    """Width and activation of the MLP."""
    given = [name for name in ("swiglu", "squared_relu", "quick_geglu") if getattr(args, name)]
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        yield f"{names} exclude each other; give one"
    # Megatron-LM's rule: 8/3 of the width for a gated MLP, in multiples of 64
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = (
            int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
        )
    if args.ffn_hidden_size == 0:
        yield (
            f"--ffn-hidden-size is missing: its default with --swiglu, 8/3 x --hidden-size {args.hidden_size} in whole "
            "multiples of 64, is 0; give it"
        )


def _heads(args: Namespace) -> Iterator[str]:
    """Key/value heads."""
    heads = args.num_attention_heads
    if not args.group_query_attention:
        args.num_query_groups = heads
    if args.num_query_groups <= 0 or heads % args.num_query_groups:
        yield (
            f"--num-attention-heads {heads} must be a multiple of --num-query-groups "
            f"{args.num_query_groups}"
        )


def _tensor_shares(args: Namespace) -> Iterator[str]:
    """Sizes that tensor parallelism divides."""
    tp = args.tensor_model_parallel_size
    uneven = [
        f"--{name.replace('_', '-')} {getattr(args, name)}"
        for name in ("num_attention_heads", "ffn_hidden_size")
        if hasattr(args, name) and getattr(args, name) % tp
    ]
    if uneven:
        word = "a multiple" if len(uneven) == 1 else "multiples"
        yield f"{' and '.join(uneven)} must be {word} of --tensor-model-parallel-size {tp}"
        discard(args, "tensor_model_parallel_size")


def _tensor_groups(args: Namespace) -> Iterator[str]:
    """Key/value heads are split over the tensor-parallel ranks, or repeated."""
    tp = args.tensor_model_parallel_size
    if args.num_query_groups % tp and tp % args.num_query_groups:
        yield (
            f"--num-query-groups {args.num_query_groups} must divide, or be a multiple of, "
            f"tensor size {tp}"
        )
    if args.attention_output_gate and args.num_query_groups < tp:
        yield (
            f"--attention-output-gate with --num-query-groups {args.num_query_groups} and tensor size {tp} is not "
            "served: Megatron-Core gives each rank the gates of all heads of its group; give a tensor size of at most "
            f"{args.num_query_groups}"
        )


def _sinks(args: Namespace) -> Iterator[str]:
    """Attention sinks are vectors."""
    if args.softmax_type == "learnable" and args.init_method_xavier_uniform:
        yield (
            "--softmax-type learnable with --init-method-xavier-uniform is not served: that draws matrices, and sinks "
            "are vectors; leave out --init-method-xavier-uniform, or train a model with another --softmax-type"
        )


def _positions(args: Namespace) -> Iterator[str]:
    """Kind of position embedding and the longest position."""
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if not args.add_position_embedding and args.position_embedding_type not in ("rope", "yarn"):
        yield (
            f"--no-position-embedding with --position-embedding-type {args.position_embedding_type}"
            " is not served; give --position-embedding-type none or rope"
        )
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        yield (
            f"--max-position-embeddings {args.max_position_embeddings} must be at least "
            f"--seq-length {args.seq_length}"
        )


def _spec(args: Namespace) -> Iterator[str]:
    """Only our own layer specs, unless the user allows an import of others: a spec is code."""
    if args.spec is None:
        return
    if len(args.spec) != 2:
        yield (
            f"--spec {' '.join(args.spec)} must be a module and a name: --spec "
            "megatron_cp.mcore.spec gpt_layer_spec"
        )
    elif args.hybrid_layer_pattern is not None and tuple(args.spec) in MEGATRONS_SPECS:
        args.spec = None  # ours is made of the same layers
    elif tuple(args.spec) not in OUR_SPECS and not args.allow_custom_spec:
        yield (
            f"--spec {' '.join(args.spec)} imports code that is not ours; give "
            "--allow-custom-spec if you trust it"
        )


def _settings(args: Namespace) -> Iterator[str]:
    """What our attention and Megatron-Core's layers cannot honour."""
    for check in SETTING_CHECKS:
        try:
            check(args)
        except (ValueError, NotImplementedError) as refusal:
            yield str(refusal)


def _one_batch(args: Namespace) -> Iterator[str]:
    """Batch sizes of --plan-only, which makes no step."""
    args.micro_batch_size = args.micro_batch_size or 1
    args.global_batch_size = (
        args.global_batch_size or args.micro_batch_size * args.data_parallel_size
    )
    args.train_iters = args.lr_decay_steps = args.lr_warmup_steps = 0
    args.eval_global_batch_size = args.global_batch_size
    args.eval_micro_batch_size = args.micro_batch_size
    args.batch_schedule = ((0, args.global_batch_size),)
    args.lr, args.wsd_decay_steps, args.wd_incr_steps = args.lr or 0.0, None, 0
    args.start_weight_decay = args.end_weight_decay = args.weight_decay
    yield from ()  # it completes, and finds no fault


# Each row: a check, and what it completes.
_CHECKS: tuple[tuple[Any, ...], ...] = (
    (check_ranges,),
    (_layout, "data_parallel_size"),
    (_overlap,),
    (complete_hybrid_model, "num_layers"),
    (_sizes,),
    (_head_size, "kv_channels"),
    (_mlp, "ffn_hidden_size"),
    (complete_experts, "num_experts"),
    (_heads, "num_query_groups"),
    (_tensor_shares,),
    (_tensor_groups,),
    (_sinks,),
    (complete_linear,),
    (_positions, "max_position_embeddings"),
    (check_experts,),
    (check_expert_biases,),
    (check_expert_ranks,),
    (check_rank_order,),
    (check_routing,),
    (check_latent_attention,),
    (check_prediction,),
    (check_hybrid,),
    (check_hybrid_model,),
    (complete_stages, "virtual_pipeline_model_parallel_size"),
    (check_shared_picks,),
    (complete_precision,),
    (complete_engine,),
    (complete_expert_engine,),
    (complete_muon,),
    (check_optimizer_state,),
    (check_qk_clip,),
    (check_instances,),
    (complete_recompute, "recompute_num_layers"),
    (check_layer_kinds,),
    (check_rotation,),
    (check_skipped_rotation,),
    (check_yarn,),
    (check_longrope,),
    (note_stretched_positions,),
    (check_latent_positions,),
    (check_recomputed_modules,),
    (check_recomputed_layers,),
    (check_recomputed_predictions,),
    (check_chunks,),
    (check_places,),
    (complete_sources, "data_path", "train_data_path", "valid_data_path", "test_data_path"),
    (check_blends,),
    (complete_tokenizer,),
    (check_token_files,),
    (check_order,),
    (check_chats,),
    (check_fill_in_the_middle,),
)
_STEP_CHECKS: tuple[tuple[Any, ...], ...] = (
    (complete_batch, "global_batch_size", "batch_schedule"),
    (check_virtual_batches,),
    (complete_steps, "train_iters"),
    (check_intervals,),
    (check_validation,),
    (check_rates,),
    (check_decoupled_rates,),
    (complete_schedule,),
    (check_scheduler_source,),
    (complete_weight_decay,),
)
_PLAN_CHECKS: tuple[tuple[Any, ...], ...] = ((_one_batch, "global_batch_size"),)
_LAST_CHECKS: tuple[tuple[Any, ...], ...] = (
    (check_devices,),
    (complete_records,),
    (check_checkpoints,),
    (check_pretrained,),
    (check_profile,),
    (check_text_samples,),
    (_spec,),
    (_settings,),
)
