"""Completes and checks experts, latent attention and multi-token prediction.

What Megatron-Core or our attention cannot do with them is refused by `mcore/settings/validation.py`, the same way for
a swap-in. Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.training.arguments.faults import discard, require
from megatron_cp.training.arguments.hybrid_model import MEGATRONS_SPECS

_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
# What only experts have: given without --num-experts, they would be silently without effect.
_NEEDS_EXPERTS = (
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_grouped_gemm",
    "moe_router_enable_expert_bias",
    "moe_expert_capacity_factor",
    "moe_z_loss_coeff",
)
_NEEDS_LATENT = ("q_lora_rank",)


def complete_experts(args: Namespace) -> Iterator[str]:
    """Completes expert widths and ranks; lists of one value become that value."""
    args.num_experts = args.num_experts or None  # Megatron-LM: 0 is none
    args.mtp_num_layers = args.mtp_num_layers or None
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, name, value[0])
    yield from require(args, "expert_model_parallel_size", "expert_tensor_parallel_size")
    if args.num_experts is None:
        yield from _without_experts(args)
        return
    yield from require(args, "num_experts")
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
    # Megatron-Core divides experts by groups; a note says that these change nothing.
    args.moe_router_num_groups = args.moe_router_group_topk = None


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
    if args.moe_latent_size is not None:
        yield from require(args, "moe_latent_size")
        if args.moe_shared_expert_overlap:
            yield (
                "--moe-shared-expert-overlap with --moe-latent-size is not served by Megatron-Core; leave out "
                "--moe-shared-expert-overlap: the same results"
            )
    yield from _overlapped_experts(args)
    if shared is None and args.moe_shared_expert_gate:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; give it too"
    # Without it Megatron-Core evaluates with one dispatcher, and trains with none.
    only_evaluates = args.skip_train and args.moe_token_dispatcher_type == "allgather"
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel and not only_evaluates:
        yield (
            f"--num-experts {experts} with --tensor-model-parallel-size {args.tensor_model_parallel_size} needs "
            "--sequence-parallel in Megatron-Core; give it too: the same model"
        )


def _overlapped_experts(args: Namespace) -> Iterator[str]:
    """Yields what shared experts leave out where they are computed while tokens travel."""
    is_gated = args.swiglu or args.quick_geglu
    if not (
        args.moe_shared_expert_overlap and args.moe_shared_expert_intermediate_size and is_gated
    ):
        return
    for name in ("glu_linear_offset", "activation_func_clamp_value"):
        if value := getattr(args, name):
            yield (
                f"--moe-shared-expert-overlap with --{name.replace('_', '-')} {value} is not served: overlapped shared "
                "experts of Megatron-Core before 0.20 compute without it; leave out --moe-shared-expert-overlap: the "
                "model that was asked for"
            )


def check_expert_biases(args: Namespace) -> Iterator[str]:
    """Yields a line for each setting with which Megatron-Core's experts and router have no biases."""
    if args.num_experts is None or not args.add_bias_linear:
        return
    shared, tp = args.moe_shared_expert_intermediate_size, args.expert_tensor_parallel_size
    settings = {
        f"--moe-shared-expert-intermediate-size {shared}": shared is not None,
        f"--num-experts {args.num_experts} on --expert-tensor-parallel-size {tp}": tp > 1,
        "--init-method-xavier-uniform, which draws matrices alone,": args.init_method_xavier_uniform,
    }
    for setting in (text for text, is_given in settings.items() if is_given):
        yield (
            f"{setting} with biases is not served by Megatron-Core where there are experts; train a model with "
            "--disable-bias-linear"
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
    every = [kinds] if isinstance(kinds, str) else kinds
    for kind in every:
        if kind not in _BALANCING:
            yield (
                f"--moe-router-load-balancing-type {kind} is not served; choose one of "
                f"{', '.join(_BALANCING)}"
            )
    yield from _weights_of_balancing(kinds, weights)
    if "seq_aux_loss" in every:
        yield from _balance_of_samples(args, every)
    yield from _groups_of_experts(args)
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        yield (
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; give it too"
        )
    if args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor; give it too"
    if args.moe_apply_probs_on_input and args.moe_router_topk != 1:
        yield (
            f"--moe-apply-probs-on-input with --moe-router-topk {args.moe_router_topk} is not served by Megatron-Core: "
            "one expert alone weighs its input; leave it out, or train a model with --moe-router-topk 1"
        )


def _weights_of_balancing(kinds: str | list[str], weights: float | list[float]) -> Iterator[str]:
    """Yields the faults of auxiliary losses and their weights."""
    num_kinds = len(kinds) if isinstance(kinds, list) else 1
    num_weights = len(weights) if isinstance(weights, list) else 1
    if num_kinds != num_weights:
        yield (
            f"--moe-router-load-balancing-type has {num_kinds} kinds, --moe-aux-loss-coeff {num_weights} values; give "
            "as many values as kinds"
        )
    elif kinds == "sinkhorn" and weights:
        yield (
            f"--moe-aux-loss-coeff {weights} with --moe-router-load-balancing-type sinkhorn is not served: Sinkhorn "
            "routing has no auxiliary loss in Megatron-Core; leave it out"
        )
    elif isinstance(kinds, list) and "sinkhorn" in kinds:
        yield (
            f"--moe-router-load-balancing-type {' '.join(kinds)} is not served: Megatron-Core routes by sinkhorn where "
            "it is the only kind, and would drop it here; give it alone, or the others"
        )


def _groups_of_experts(args: Namespace) -> Iterator[str]:
    """Yields the faults of groups that limit a token's choice."""
    groups, chosen, top_k = (
        args.moe_router_num_groups,
        args.moe_router_group_topk,
        args.moe_router_topk,
    )
    if (groups is None) != (chosen is None):
        yield "--moe-router-num-groups and --moe-router-group-topk belong together; give both"
    elif groups is None:
        return
    elif args.num_experts % groups or not 0 < chosen <= groups:
        yield (
            f"--moe-router-num-groups {groups} must divide --num-experts {args.num_experts}, and "
            f"--moe-router-group-topk {chosen} lie in [1, {groups}]"
        )
    elif top_k > chosen * (args.num_experts // groups):
        yield (
            f"--moe-router-topk {top_k} must be at most --moe-router-group-topk {chosen} x "
            f"{args.num_experts // groups} experts of a group"
        )
    elif top_k < chosen < groups:
        yield (
            f"--moe-router-topk {top_k} with --moe-router-group-topk {chosen} is not served: Megatron-Core weighs a "
            f"group by its best {top_k} / {chosen} experts, which is none; give a --moe-router-group-topk of at most "
            f"{top_k}"
        )


def _balance_of_samples(args: Namespace, kinds: list[str]) -> Iterator[str]:
    """Completes micro-batches of one pack: the packs of a larger one are one sequence here.

    seq_aux_loss balances each pack by itself. One by one gives the same step where every pack has as
    many tokens in the loss, or each token weighs the same, and no other loss balances a micro-batch.
    """
    size = args.micro_batch_size
    if size is None or size <= 1 or args.plan_only:
        return
    if joined := [kind for kind in ("aux_loss", "global_aux_loss") if kind in kinds]:
        yield (
            f"--moe-router-load-balancing-type {' '.join(kinds)} with --micro-batch-size {size} is not served: "
            f"seq_aux_loss balances each pack by itself, {joined[0]} the {size} of a micro-batch together; give one of "
            "them alone, or --micro-batch-size 1 and the same --global-batch-size, where a micro-batch is a pack"
        )
        return
    documents = (
        "eod_mask_loss",
        "reset_attention_mask",
        "dataloader_inter_document_masking",
        "sft",
    )
    cross = args.packing == "megatron" and not args.sft  # labels do, whatever sees whom
    are_equal = not any(getattr(args, name) for name in (documents[:1] if cross else documents))
    are_equal = are_equal and args.packing != "keep"
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
    if args.mtp_use_repeated_layer and args.hybrid_layer_pattern is None:
        yield (
            "--mtp-use-repeated-layer without --hybrid-layer-pattern is not served: Megatron-Core 0.16 makes each "
            "prediction of a GPT with layers of its own; leave it out, for another model"
        )
    if args.mtp_num_layers is None:
        return
    yield from require(args, "mtp_num_layers")
    is_ours = args.spec is None or args.spec[0] == "megatron_cp.mcore.spec"
    if not is_ours and not (args.hybrid_layer_pattern and tuple(args.spec) in MEGATRONS_SPECS):
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
    if args.position_embedding_type == "none" and args.hybrid_layer_pattern is None:
        yield "--mtp-num-layers needs positions; give --position-embedding-type rope"
    if args.position_embedding_type == "learned_absolute" and args.pipeline_model_parallel_size > 1:
        # Each draws its own, and their gradients are never summed.
        yield (
            "--mtp-num-layers with --position-embedding-type learned_absolute and --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} is not served: the first stage and that of the predictions would "
            "learn two tables of positions; give --pipeline-model-parallel-size 1, or train a model with "
            "--position-embedding-type rope"
        )
    yield from _settings_of_layers(args)


def _settings_of_layers(args: Namespace) -> Iterator[str]:
    """Yields settings that say something of each layer of the decoder, and nothing of a layer behind them."""
    by_layer = {"no_rope_freq": args.no_rope_freq}
    if args.window_size is not None and isinstance(args.window_attn_skip_freq, list):
        by_layer["window_attn_skip_freq"] = args.window_attn_skip_freq
    for name, value in by_layer.items():
        if value is not None and not (name == "no_rope_freq" and args.multi_latent_attention):
            yield (
                f"--{name.replace('_', '-')} {value} with --mtp-num-layers {args.mtp_num_layers} is not served: "
                "Megatron-Core looks the layers of predictions up in a list that ends with the decoder; leave one out"
            )
    if args.window_size is not None and args.hybrid_layer_pattern is None:
        yield from _numbered_windows(args)


def _numbered_windows(args: Namespace) -> Iterator[str]:
    """Yields a line where versions of Megatron-Core number a prediction's layer so that it would see other keys."""
    every, layers = args.window_attn_skip_freq, args.num_layers
    if not isinstance(every, int) or every <= 0:
        return
    for number in range(1, args.mtp_num_layers + 1):
        if (number % every == 0) != ((layers + number) % every == 0):
            yield (
                f"--window-attn-skip-freq {every} with --mtp-num-layers {args.mtp_num_layers} and --num-layers "
                f"{layers} is not served: a prediction's layer is number {layers + number} with Megatron-Core 0.16 and "
                f"{number} since, and attends in full with one of them alone; give one that divides --num-layers"
            )
            return
