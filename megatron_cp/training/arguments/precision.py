"""Completes and checks formats of numbers, and engine.

Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

_LOW_PRECISION_STATE = (
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)


def complete_precision(args: Namespace) -> Iterator[str]:
    """Completes gradient buffers and checks for infinities, as Megatron-LM does."""
    if args.fp16 and args.bf16:
        yield "--fp16 and --bf16 exclude each other; give one"
    if args.fp16 and args.loss_scale is None:
        # An overflow is how the scale is found: it skips a step and is no error.
        args.check_for_nan_in_loss_and_grad = False
    if args.on_bad_step == "skip" and not args.check_for_nan_in_loss_and_grad:
        yield (
            "--on-bad-step skip does nothing where loss and gradients are not looked at: --fp16 without --loss-scale "
            "leaves overflows out by itself, and --no-check-for-nan-in-loss-and-grad applies them; drop one"
        )
    if args.grad_reduce_in_bf16 and not args.bf16:
        yield "--grad-reduce-in-bf16 needs --bf16; give it too or drop the flag"
    if args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32:
        yield (
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; "
            "give one"
        )
    if args.main_grads_dtype == "bf16" and args.accumulate_allreduce_grads_in_fp32:
        yield (
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; "
            "give one"
        )
    if args.bf16 and not args.grad_reduce_in_bf16 and args.main_grads_dtype == "fp32":
        args.accumulate_allreduce_grads_in_fp32 = True
    if args.fp32_residual_connection and not (args.fp16 or args.bf16):
        yield "--fp32-residual-connection needs --bf16 or --fp16; give one too"


def complete_engine(args: Namespace) -> Iterator[str]:
    """Completes what layers are built from: Megatron-LM's default where it is installed."""
    machine = args.machine
    has_engine = machine.has_transformer_engine
    if args.transformer_impl is None:
        args.transformer_impl = "transformer_engine" if has_engine else "local"
    elif args.transformer_impl != "local" and not has_engine and not machine.has_cuda:
        args.transformer_impl = "local"
        args.notes.append(
            "--transformer-impl transformer_engine needs a GPU: Megatron's local layers are built, "
            "the same computation"
        )
    if args.fp8_recipe == "mxfp8" and args.fp8_param_gather:
        # Megatron-Core gathers them in the buffer of gradients, and its own loop takes them out of it.
        args.fp8_param_gather = False
        args.notes.append(
            "--fp8-param-gather with --fp8-recipe mxfp8 keeps weights in their format here, from which each pass makes "
            "the same fp8: more memory"
        )
    needs_engine = args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te"
    if needs_engine and not has_engine:
        yield (
            "--cross-entropy-fusion-impl te needs Transformer Engine, which is not installed; "
            "give --cross-entropy-fusion-impl native: the same computation"
        )
    if args.deterministic_mode and needs_engine:
        yield (
            "--cross-entropy-fusion-impl te does not promise the same bits on every run, which --deterministic-mode "
            "asks for; give --cross-entropy-fusion-impl native: the same computation"
        )


def complete_expert_engine(args: Namespace) -> Iterator[str]:
    """Completes how experts are computed: one by one without Transformer Engine and without a GPU."""
    machine = args.machine
    if args.num_experts is None or machine.has_transformer_engine:
        return
    fused = [n for n in ("moe_permute_fusion", "moe_router_fusion") if getattr(args, n)]
    if args.moe_token_dispatcher_type == "flex":
        yield (
            "--moe-token-dispatcher-type flex needs a GPU and its library (DeepEP, HybridEP); give "
            "--moe-token-dispatcher-type alltoall: the same computation"
        )
    if machine.has_cuda:
        for name in (*fused, *(["moe_grouped_gemm"] if args.moe_grouped_gemm else [])):
            yield f"--{name.replace('_', '-')} needs Transformer Engine; install it"
        return
    if args.moe_grouped_gemm:
        args.moe_grouped_gemm = False
        args.notes.append(
            "--moe-grouped-gemm needs a GPU: experts are computed one by one, the same mathematics "
            "from other initial random weights"
        )
    if args.moe_shared_expert_overlap:
        args.moe_shared_expert_overlap = False
        args.notes.append(
            "--moe-shared-expert-overlap needs a GPU: shared experts are computed after the others"
        )
    for name in fused:
        setattr(args, name, False)
        args.notes.append(f"--{name.replace('_', '-')} needs a GPU: the same computation unfused")


def check_optimizer_state(args: Namespace) -> Iterator[str]:
    """Yields the faults of optimizer state that is not in fp32 on the GPU, or not Adam's."""
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        yield (
            "--optimizer sgd with --use-distributed-optimizer is not served: Megatron-Core shards the "
            "state of Adam alone; leave out --use-distributed-optimizer"
        )
    changed = [name for name in _LOW_PRECISION_STATE if getattr(args, name) != "fp32"]
    if changed and not args.use_precision_aware_optimizer:
        names = ", ".join("--" + name.replace("_", "-") for name in changed)
        yield f"{names} needs --use-precision-aware-optimizer; give it too"
    if args.use_precision_aware_optimizer:
        if not args.use_distributed_optimizer:
            yield "--use-precision-aware-optimizer needs --use-distributed-optimizer; give it too"
        if not args.machine.has_transformer_engine:
            yield (
                "--use-precision-aware-optimizer needs Transformer Engine's Adam, which is not "
                "installed; install it"
            )
    if args.optimizer_cpu_offload:
        if not args.machine.has_cuda:
            yield "--optimizer-cpu-offload needs a GPU to move the optimizer from; leave it out"
        if not args.use_precision_aware_optimizer:
            yield "--optimizer-cpu-offload needs --use-precision-aware-optimizer; give it too"
        if not 0.0 <= args.optimizer_offload_fraction <= 1.0:
            yield (
                f"--optimizer-offload-fraction {args.optimizer_offload_fraction} must lie in [0, 1]"
            )


def check_qk_clip(args: Namespace) -> Iterator[str]:
    """Yields the faults of QK-Clip."""
    if args.qk_clip and args.use_distributed_optimizer:
        yield (
            "--qk-clip with --use-distributed-optimizer is not served: Megatron-Core scales whole weights, not the "
            "shards of their fp32 copies; leave out --use-distributed-optimizer"
        )
    tp = args.tensor_model_parallel_size
    if args.qk_clip and tp > 1 and not args.multi_latent_attention:
        yield (
            f"--qk-clip with --tensor-model-parallel-size {tp} is not served: Megatron-Core cuts the weights of a rank "
            "by the sizes of all ranks; give --tensor-model-parallel-size 1"
        )
    norms = [name for name in ("qk_layernorm", "qk_l2_norm") if getattr(args, name)]
    if args.qk_clip and norms and not args.multi_latent_attention:
        yield (
            f"--qk-clip with --{norms[0].replace('_', '-')} is not served: the norm behind the weights undoes their "
            "scale, so that they would shrink to nothing step by step; leave out --qk-clip"
        )
    if args.qk_clip and args.attention_output_gate:
        yield (
            "--qk-clip with --attention-output-gate is not served: Megatron-Core does not know where among the weights "
            "of queries and keys those of the gate lie; train without --qk-clip"
        )


def complete_muon(args: Namespace) -> Iterator[str]:
    """Completes how muon's state is spread: whole layers over replicas, in place of shards.

    Source: Megatron-LM since 0.19 (`dist_muon` is its older name for it).
    """
    args.layer_wise_optimizer = False
    if args.optimizer not in ("muon", "dist_muon"):
        return
    args.layer_wise_optimizer = args.optimizer == "dist_muon" or args.use_distributed_optimizer
    args.optimizer, args.use_distributed_optimizer = "muon", False
    if args.tensor_model_parallel_size > 1 and args.muon_tp_mode == "blockwise":
        args.notes.append(
            "--muon-tp-mode blockwise, the default here and in Megatron-LM up to 0.19, takes each tensor rank's share "
            "for a matrix: results depend on --tensor-model-parallel-size; those of duplicated, the default of "
            "Megatron-LM 0.20, do not"
        )
    if not args.machine.has_emerging_optimizers:
        yield (
            "--optimizer muon needs the package emerging-optimizers, which is not installed; "
            "install it (github.com/NVIDIA-NeMo/Emerging-Optimizers)"
        )
    if args.fp16:
        yield "--optimizer muon with --fp16 is not served by Megatron-Core; give --bf16"
    if args.multi_latent_attention:
        yield (
            "--optimizer muon with --multi-latent-attention is not served: Megatron-Core cuts "
            "queries, keys and values of plain attention alone; choose another optimizer"
        )
    if args.attention_output_gate and args.muon_split_qkv:
        yield (
            "--optimizer muon with --attention-output-gate is not served: Megatron-Core does not know where among the "
            "weights of queries, keys and values those of the gate lie; give --muon-no-split-qkv, which takes them for "
            "one matrix, or choose another optimizer"
        )
    if args.layer_wise_optimizer and not args.bf16:
        yield "--optimizer muon --use-distributed-optimizer needs --bf16 to be saved; give it too"
    if args.layer_wise_optimizer and not args.machine.has_cuda:
        yield (
            "--optimizer muon --use-distributed-optimizer gathers layers of unequal sizes, which "
            "gloo cannot; leave out --use-distributed-optimizer: results stay the same"
        )
    if args.overlap_param_gather:
        yield "--optimizer muon has no --overlap-param-gather here; leave it out: results stay the same"


def check_instances(args: Namespace) -> Iterator[str]:
    """Yields the faults of several instances of the distributed optimizer."""
    instances = args.num_distributed_optimizer_instances
    if instances == 1:
        return
    if not args.use_distributed_optimizer:
        yield "--num-distributed-optimizer-instances needs --use-distributed-optimizer; give it too"
    replicas = args.data_parallel_size * args.context_parallel_size
    if instances <= 0 or replicas % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} must divide data x context parallel "
            f"size = {args.data_parallel_size} x {args.context_parallel_size}"
        )
    elif not args.machine.has_einops:
        yield (
            "--num-distributed-optimizer-instances needs einops, which Megatron-Core imports and does "
            "not install; pip install einops"
        )
