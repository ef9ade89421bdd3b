"""Completes the arguments (what follows from others) and refuses what cannot be run.

Before any process group exists.

The order is that of a reader: parallel layout, model, batch, schedule, precision, recompute, data,
checkpoint. Each check is a plain function of the arguments, so every rank comes to the same
verdict.
"""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron_cp.mcore import compat
from megatron_cp.mcore.validation import validate_arguments
from megatron_cp.training.checkpoint.compare import STRICTNESS
from megatron_cp.training.validate_ranges import check_layers, check_ranges
from megatron_cp.training.validate_steps import (
    complete_batch,
    complete_schedule,
    complete_weight_decay,
    require,
)

OUR_SPECS = frozenset({("megatron_cp.mcore.spec", "gpt_layer_spec")})


def complete_and_check(args: Namespace) -> None:
    """Fills in what follows from other flags.

    Raises ValueError or NotImplementedError with one line.
    """
    check_ranges(args)
    _layout(args)
    _model(args)
    _positions(args)
    _pipeline(args)
    _precision(args)
    _engine(args)
    _recompute(args)
    check_layers(args)
    _data(args)
    if not args.plan_only:
        complete_batch(args)
        complete_schedule(args)
        complete_weight_decay(args)
    else:
        args.micro_batch_size = args.micro_batch_size or 1
        args.global_batch_size = (
            args.global_batch_size or args.micro_batch_size * args.data_parallel_size
        )
    _records(args)
    _spec(args)
    validate_arguments(args, world_size=args.world_size)


def _layout(args: Namespace) -> None:
    """World size = tensor x context x pipeline x data."""
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    require(args, *sizes)
    tp, cp, pp = (getattr(args, name) for name in sizes)
    per_replica = tp * cp * pp
    if args.world_size % per_replica:
        raise ValueError(
            f"world size {args.world_size} must be a multiple of tensor x context x pipeline "
            "parallel size = "
            f"{tp} x {cp} x {pp} = {per_replica}; start {per_replica} ranks (or a multiple), or "
            "change the sizes"
        )
    args.data_parallel_size = args.world_size // per_replica
    if args.sequence_parallel and tp == 1:
        args.sequence_parallel = False
        args.notes.append(
            "--sequence-parallel changes nothing here: there is one tensor-parallel rank"
        )
    if args.overlap_param_gather and not args.use_distributed_optimizer:
        raise ValueError("--overlap-param-gather needs --use-distributed-optimizer; give it too")
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        raise ValueError("--overlap-param-gather needs --overlap-grad-reduce; give it too")


def _model(args: Namespace) -> None:
    """Sizes of the layers, and their divisibility by the tensor-parallel size."""
    require(
        args,
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "make_vocab_size_divisible_by",
    )
    heads = args.num_attention_heads
    if args.kv_channels is None:
        if args.hidden_size % heads:
            raise ValueError(
                f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads "
                f"{heads}; or give --kv-channels"
            )
        args.kv_channels = args.hidden_size // heads
    # Megatron-LM's rule: 8/3 of the width for a gated MLP, in multiples of 64
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = (
            int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
        )
    _heads(args)
    if args.swiglu and args.squared_relu:
        raise ValueError("--swiglu and --squared-relu exclude each other; give one")
    if args.attention_dropout != 0.0:
        raise NotImplementedError(
            f"--attention-dropout {args.attention_dropout} is not served: attention has no "
            "dropout under context parallelism; give --attention-dropout 0.0 (Megatron-LM's "
            "default is 0.1)"
        )


def _heads(args: Namespace) -> None:
    """Key/value heads, and what tensor parallelism must divide."""
    heads, tp = args.num_attention_heads, args.tensor_model_parallel_size
    if not args.group_query_attention:
        args.num_query_groups = heads
    if args.num_query_groups <= 0 or heads % args.num_query_groups:
        raise ValueError(
            f"--num-attention-heads {heads} must be a multiple of --num-query-groups "
            f"{args.num_query_groups}"
        )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(args, name) % tp:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {getattr(args, name)} must be a multiple of "
                f"--tensor-model-parallel-size {tp}"
            )
    if args.num_query_groups % tp and tp % args.num_query_groups:
        raise ValueError(
            f"--num-query-groups {args.num_query_groups} must divide, or be a multiple of, "
            f"tensor size {tp}"
        )


def _positions(args: Namespace) -> None:
    """Kind of position embedding and the longest position."""
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise ValueError(
            f"--max-position-embeddings {args.max_position_embeddings} must be at least "
            f"--seq-length {args.seq_length}"
        )


def _pipeline(args: Namespace) -> None:
    """Layers per stage and per virtual stage."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    if layers % pp:
        raise ValueError(
            f"--num-layers {layers} must be a multiple of --pipeline-model-parallel-size {pp}"
        )
    per_virtual, num_virtual = (
        args.num_layers_per_virtual_pipeline_stage,
        args.num_virtual_stages_per_pipeline_rank,
    )
    if per_virtual is not None and num_virtual is not None:
        raise ValueError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "say the same; give one"
        )
    args.virtual_pipeline_model_parallel_size = None
    if per_virtual is None and num_virtual is None:
        return
    if pp < 2:
        raise ValueError("virtual pipeline stages need --pipeline-model-parallel-size of 2 or more")
    if per_virtual is not None:
        if per_virtual <= 0 or (layers // pp) % per_virtual:
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage {per_virtual} must divide "
                f"{layers // pp} layers a rank"
            )
        num_virtual = layers // pp // per_virtual
    if num_virtual <= 0 or (layers // pp) % num_virtual:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {num_virtual} must divide {layers // pp} "
            "layers a rank"
        )
    args.virtual_pipeline_model_parallel_size = num_virtual if num_virtual > 1 else None


def _precision(args: Namespace) -> None:
    """Gradient buffers: fp32 with bf16 parameters unless the user says otherwise."""
    if args.grad_reduce_in_bf16 and not args.bf16:
        raise ValueError("--grad-reduce-in-bf16 needs --bf16; give it too or drop the flag")
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        raise ValueError(
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; "
            "give one"
        )
    if args.bf16 and not args.grad_reduce_in_bf16:
        args.accumulate_allreduce_grads_in_fp32 = True


def _engine(args: Namespace) -> None:
    """What layers are built from: Megatron-LM's default where it is installed."""
    is_installed = compat.has_transformer_engine()
    if args.transformer_impl is None:
        args.transformer_impl = "transformer_engine" if is_installed else "local"
    elif args.transformer_impl != "local" and not is_installed and not torch.cuda.is_available():
        args.transformer_impl = "local"
        args.notes.append(
            "--transformer-impl transformer_engine needs a GPU: Megatron's local layers are built, "
            "the same computation"
        )


def _recompute(args: Namespace) -> None:
    """Recompute flags that belong together."""
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise ValueError(
                "--recompute-activations means --recompute-granularity selective, not full; give "
                "one"
            )
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full" and args.recompute_method is None:
        raise ValueError("--recompute-granularity full needs --recompute-method uniform or block")
    if args.recompute_granularity != "full" and args.recompute_method is not None:
        raise ValueError("--recompute-method needs --recompute-granularity full")
    if args.recompute_method is not None:
        if args.recompute_num_layers is None:
            args.recompute_num_layers = 1
        require(args, "recompute_num_layers")


def _data(args: Namespace) -> None:
    """One source of documents, and masks that follow from its flags."""
    if args.dataloader_inter_document_masking:
        args.reset_attention_mask = args.reset_position_ids = True
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    num_sources = sum((bool(args.data_path), any(per_split), args.mock_data))
    if num_sources != 1:
        raise ValueError(
            f"{num_sources} sources of documents given; exactly one of --data-path, "
            "--train-data-path (with "
            "--valid-data-path, --test-data-path) and --mock-data is needed"
        )
    for flag, paths in zip(
        ("", "train-", "valid-", "test-"), [args.data_path, *per_split], strict=True
    ):
        if paths and len(paths) > 1:
            raise NotImplementedError(
                f"--{flag}data-path with {len(paths)} values is not served: blending comes "
                "later; give one prefix"
            )


def _records(args: Namespace) -> None:
    """Where checkpoints and the records of the run go."""
    if args.run_dir is None:
        args.run_dir = args.save
    if args.save_interval is not None and args.save is None:
        raise ValueError("--save-interval needs --save <folder>; give it too")
    if args.dist_ckpt_strictness not in STRICTNESS:
        raise ValueError(
            f"--dist-ckpt-strictness {args.dist_ckpt_strictness} is unknown; choose one of "
            f"{', '.join(STRICTNESS)}"
        )
    if args.ckpt_step is not None and args.load is None:
        raise ValueError("--ckpt-step needs --load <folder>; give it too")
    if args.exit_on_missing_checkpoint and args.load is None:
        raise ValueError("--exit-on-missing-checkpoint needs --load <folder>; give it too")
    if args.wandb_exp_name == "":
        raise ValueError("--wandb-exp-name is empty; give a name or drop the flag")


def _spec(args: Namespace) -> None:
    """Only our own layer specs, unless the user allows an import of others: a spec is code."""
    if args.spec is None:
        return
    if len(args.spec) != 2:
        raise ValueError(
            f"--spec {' '.join(args.spec)} must be a module and a name: --spec "
            "megatron_cp.mcore.spec gpt_layer_spec"
        )
    if tuple(args.spec) not in OUR_SPECS and not args.allow_custom_spec:
        raise ValueError(
            f"--spec {' '.join(args.spec)} imports code that is not ours; give "
            "--allow-custom-spec if you trust it"
        )
