"""Completes and checks experts, latent attention and multi-token prediction.

What Megatron-Core or our attention cannot do with them is refused by `mcore/validation.py`, the same way for
a swap-in. Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.training.arguments.faults import discard, require

_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
# What only experts have: given without --num-experts, they would be silently without effect.
_NEEDS_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_grouped_gemm",
    "moe_router_enable_expert_bias",
    "moe_expert_capacity_factor",
    "moe_z_loss_coeff",
)
_NEEDS_LATENT = ("q_lora_rank",)


def complete_experts(args: Namespace) -> Iterator[str]:
    """Completes expert widths and ranks; lists of one value become that value."""
    args.num_experts = args.num_experts or None  # Megatron-LM: 0 is none
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, name, value[0])
    if args.num_experts is None:
        yield from _without_experts(args)
        return
    yield from require(
        args, "num_experts", "expert_model_parallel_size", "expert_tensor_parallel_size"
    )
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    yield from require(args, "moe_ffn_hidden_size", "moe_router_topk")
    if args.moe_layer_recompute:
        args.recompute_granularity = args.recompute_granularity or "selective"
        args.recompute_modules = sorted({*(args.recompute_modules or ("core_attn",)), "moe"})
        args.moe_layer_recompute = False


def _without_experts(args: Namespace) -> Iterator[str]:
    """Flags that would do nothing are errors: their model was another one."""
    given = [name for name in _NEEDS_EXPERTS if getattr(args, name)]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        yield f"{names} without --num-experts; give the number of experts"
    if args.expert_model_parallel_size > 1:
        yield (
            f"--expert-model-parallel-size {args.expert_model_parallel_size} needs --num-experts; "
            "give the number of experts"
        )
        discard(args, "expert_model_parallel_size")


def check_experts(args: Namespace) -> Iterator[str]:
    """Yields the faults of experts: sizes that do not divide, choices that do not fit."""
    if args.num_experts is None:
        return
    experts, ranks, top_k = args.num_experts, args.expert_model_parallel_size, args.moe_router_topk
    if experts % ranks:
        yield f"--num-experts {experts} must be a multiple of --expert-model-parallel-size {ranks}"
        discard(args, "expert_model_parallel_size")
    if top_k > experts:
        yield f"--moe-router-topk {top_k} must be at most --num-experts {experts}"
    width, tp = args.moe_ffn_hidden_size, args.expert_tensor_parallel_size
    if width % tp:
        yield f"--moe-ffn-hidden-size {width} must be a multiple of --expert-tensor-parallel-size {tp}"
    shared = args.moe_shared_expert_intermediate_size
    if shared is not None and (shared <= 0 or shared % args.tensor_model_parallel_size):
        yield (
            f"--moe-shared-expert-intermediate-size {shared} must be a positive multiple of "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}"
        )
    weighs_losses = args.moe_z_loss_coeff or args.moe_aux_loss_coeff not in (0.0, [0.0])
    if args.sequence_parallel and args.calculate_per_token_loss and weighs_losses:
        args.notes.append(
            "--calculate-per-token-loss with --sequence-parallel: Megatron-Core before 0.19 divides the "
            "weight of the experts' auxiliary losses by --tensor-model-parallel-size"
        )
    if shared is None and args.moe_shared_expert_gate:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; give it too"
    if (
        args.tensor_model_parallel_size > 1
        and not args.sequence_parallel
        and args.moe_token_dispatcher_type != "allgather"
    ):
        yield (
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type} with "
            "--tensor-model-parallel-size needs --sequence-parallel; give it too"
        )


def check_expert_layers(args: Namespace) -> Iterator[str]:
    """Yields a line if the layers with experts do not fit the number of layers."""
    frequency = args.moe_layer_freq
    if isinstance(frequency, int) and frequency <= 0:
        yield f"--moe-layer-freq {frequency} must be positive, or a list"
    if isinstance(frequency, list) and (
        len(frequency) != args.num_layers or set(frequency) - {0, 1}
    ):
        yield (
            f"--moe-layer-freq {frequency} must hold one 0 (dense) or 1 (experts) for each of "
            f"--num-layers {args.num_layers}"
        )


def check_expert_ranks(args: Namespace) -> Iterator[str]:
    """Yields a line if the ranks of experts do not tile those of a pipeline stage.

    Megatron-Core makes their groups for a model without experts too.
    """
    tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ep, pp = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    if (args.world_size // pp) % (tp * ep):
        yield (
            f"world size {args.world_size} / pipeline size {pp} must be a multiple of expert tensor x "
            f"expert size = {tp} x {ep}; change --expert-model-parallel-size or the number of ranks"
        )
    is_uneven = args.num_experts is not None and args.moe_token_dispatcher_type == "alltoall"
    if is_uneven and tp > 1 and not args.machine.has_cuda:
        yield (
            f"--moe-token-dispatcher-type alltoall with --expert-tensor-parallel-size {tp} gathers "
            "parts of different sizes, which gloo cannot; give --moe-token-dispatcher-type allgather"
        )


def check_rank_order(args: Namespace) -> Iterator[str]:
    """Yields a line if Megatron-Core cannot number ranks by stage before replica."""
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    pp = args.pipeline_model_parallel_size
    experts = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size
    if args.use_tp_pp_dp_mapping and pp > 1 and experts != tp * cp:
        yield (
            f"--use-tp-pp-dp-mapping with --pipeline-model-parallel-size {pp} needs expert tensor x "
            f"expert size = tensor x context size = {tp} x {cp}; it is {experts}: change "
            "--expert-tensor-parallel-size, or leave out --use-tp-pp-dp-mapping"
        )


def check_routing(args: Namespace) -> Iterator[str]:
    """Yields the faults of the router's settings."""
    if args.num_experts is None:
        return
    kinds, weights = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in _BALANCING:
            yield (
                f"--moe-router-load-balancing-type {kind} is not served; choose one of "
                f"{', '.join(_BALANCING)}"
            )
    if isinstance(kinds, list) and (not isinstance(weights, list) or len(weights) != len(kinds)):
        yield (
            f"--moe-router-load-balancing-type has {len(kinds)} kinds; give as many values of "
            "--moe-aux-loss-coeff"
        )
    if "seq_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds):
        yield from _balance_of_samples(args)
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    if (groups is None) != (chosen is None):
        yield "--moe-router-num-groups and --moe-router-group-topk belong together; give both"
    elif groups is not None and (args.num_experts % groups or not 0 < chosen <= groups):
        yield (
            f"--moe-router-num-groups {groups} must divide --num-experts {args.num_experts}, and "
            f"--moe-router-group-topk {chosen} lie in [1, {groups}]"
        )
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        yield (
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; give it too"
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; give it too"


def _balance_of_samples(args: Namespace) -> Iterator[str]:
    """Completes micro-batches of one pack: the packs of a larger one are one sequence here.

    seq_aux_loss balances each pack by itself. One by one gives the same step where every pack has as
    many tokens in the loss, or each token weighs the same.
    """
    size = args.micro_batch_size
    if size is None or size <= 1 or args.plan_only:
        return
    documents = (
        "eod_mask_loss",
        "reset_attention_mask",
        "dataloader_inter_document_masking",
        "sft",
    )
    are_equal = not any(getattr(args, name) for name in documents) and args.packing != "keep"
    if not are_equal and not args.calculate_per_token_loss:
        yield (
            f"--moe-router-load-balancing-type seq_aux_loss with --micro-batch-size {size} is not "
            "served for packs with different numbers of tokens in the loss; give --micro-batch-size 1 "
            "and the same --global-batch-size, where each pack weighs the same, or "
            "--calculate-per-token-loss, where each token does"
        )
        return
    if args.global_batch_size is None and args.step_batch_size_schedule is None:
        args.global_batch_size = size * args.data_parallel_size
    args.micro_batch_size = 1
    args.notes.append(
        f"--micro-batch-size {size}: packs are run one by one, so that seq_aux_loss balances each by "
        "itself; the steps are the same"
    )


def check_latent_attention(args: Namespace) -> Iterator[str]:
    """Yields the faults of latent attention's sizes."""
    if not args.multi_latent_attention:
        given = [name for name in _NEEDS_LATENT if getattr(args, name) is not None]
        for name in given:
            yield f"--{name.replace('_', '-')} needs --multi-latent-attention; give it too"
        return
    yield from require(args, "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    if args.q_lora_rank is not None:
        yield from require(args, "q_lora_rank")
    if args.group_query_attention:
        yield "--group-query-attention and --multi-latent-attention exclude each other; give one"
    if args.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim} must be even; rotation turns pairs"


def check_prediction(args: Namespace) -> Iterator[str]:
    """Yields the faults of multi-token prediction."""
    if args.mtp_num_layers is None:
        return
    yield from require(args, "mtp_num_layers")
    if args.spec is not None and args.spec[0] != "megatron_cp.mcore.spec":
        yield (
            f"--mtp-num-layers with --spec {' '.join(args.spec)} is not served: its layers would be "
            "ours, not those of the spec; leave out --spec"
        )
    if args.pipeline_model_parallel_size > 1 and not args.untie_embeddings_and_output_weights:
        # Its sharded_state_dict asserts an output layer on the last stage, which then has none.
        yield (
            "--mtp-num-layers with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} and tied embeddings cannot be saved by "
            "Megatron-Core; give --pipeline-model-parallel-size 1, or train a model with "
            "--untie-embeddings-and-output-weights"
        )
    if args.position_embedding_type == "none":
        yield "--mtp-num-layers needs positions; give --position-embedding-type rope"
