"""What cannot be honoured is refused here, before the model is built, in one line each.

`validate_config` looks at Megatron's TransformerConfig (the attention module calls it too, so a
bare swap-in is covered); `validate_arguments` looks at parsed command-line arguments in
Megatron-LM's names. Both are pure: every rank decides alike.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megatron_cp.attn.dropout import check_rate
from megatron_cp.mcore.settings.mixers import check_mixers
from megatron_cp.mcore.settings.sparse_settings import is_sparse
from megatron_cp.mcore.versions import compat

# name -> why, and what to do; refused when the value is true.
_REFUSED_SETTINGS = {
    "fp8_dot_product_attention": "attention computes in fp32, bf16 or fp16; switch it off (fp8 "
    "linear layers are served)",
    "fp8_multi_head_attention": "attention computes in fp32, bf16 or fp16; switch it off (fp8 "
    "linear layers are served)",
    "hybrid_context_parallel": "Megatron's schedule for it sizes groups by itself; drop the flag, or give it to "
    "our pretrain_gpt.py, where one plan spans all replicas",
    "dynamic_context_parallel": "packs of any lengths are balanced by the planner; drop "
    "--dynamic-context-parallel",
    "hierarchical_context_parallel_sizes": "the planner knows nodes by its topology; drop the flag, and name another "
    "machine by --cp-topology of our pretrain_gpt.py, or hooks.install(topology=...) in a spec module of yours",
    "flash_decode": "is for inference; switch it off",
}


def validate_config(config: Any) -> None:
    """Returns if our attention honours every attention setting of this TransformerConfig.

    Raises:
        NotImplementedError: naming the setting, its value and what to do.
    """
    for name, advice in _REFUSED_SETTINGS.items():
        if getattr(config, name, None):
            raise NotImplementedError(
                f"{name}={getattr(config, name)!r} is not served with context parallelism: {advice}"
            )
    check_mixers(config)
    check_rate(config.attention_dropout, "attention_dropout")
    _check_window(config.window_size)
    check_low_precision(config, getattr(config, "transformer_impl", "local"))
    _check_experts(config)
    if config.softmax_type not in ("vanilla", "off-by-one", "learnable"):
        raise NotImplementedError(
            f"softmax_type={config.softmax_type!r}; allowed are 'vanilla', 'off-by-one' and "
            "'learnable'; train another with Megatron's own attention"
        )
    if getattr(config, "cuda_graph_impl", "none") not in (None, "none") or getattr(
        config, "enable_cuda_graph", False
    ):
        raise NotImplementedError(
            "CUDA graphs are on; plans change with every batch and cannot be captured; use "
            "--cuda-graph-impl none"
        )
    _check_latent_attention(config)
    if (
        getattr(config, "virtual_pipeline_model_parallel_size", None)
        and config.pipeline_model_parallel_size == 2
        and not config.overlap_p2p_comm
    ):
        raise ValueError(
            "overlap_p2p_comm=False with two interleaved pipeline stages: neighbours on both sides "
            "are one rank, and its messages cross silently; set overlap_p2p_comm=True and "
            "batch_p2p_comm=False"
        )
    kinds = getattr(config, "cp_comm_type", None)
    if isinstance(kinds, (list, tuple)) and len(set(kinds)) > 1:
        raise NotImplementedError(
            f"cp_comm_type={list(kinds)} differs by layer; one plan serves all layers; give one kind, and choose "
            "by --cp-planner of our pretrain_gpt.py, or hooks.install(planner=...) in a spec module of yours"
        )


def check_engine(transformer_impl: str) -> None:
    """Returns if layers can be built from these modules on this machine.

    Raises:
        NotImplementedError: for an engine of inference.
        ValueError: for Transformer Engine on a GPU without it. A CPU cannot have it; there
            Megatron's local layers do the same computation.
    """
    if transformer_impl not in ("local", "transformer_engine"):
        raise NotImplementedError(
            f"transformer_impl={transformer_impl!r}; training needs 'local' or "
            "'transformer_engine'; choose one"
        )
    if (
        transformer_impl == "transformer_engine"
        and not compat.has_transformer_engine()
        and torch.cuda.is_available()
    ):
        raise ValueError(
            "transformer_impl=transformer_engine, but Transformer Engine is not installed; install "
            "it, or give --transformer-impl local (the same computation without its kernels)"
        )


def check_spec(config: Any) -> None:
    """Returns if our specs can follow this TransformerConfig.

    Raises:
        NotImplementedError: naming the setting and what to do.
    """
    for name, advice in (
        ("heterogeneous_block_specs", "its layers differ one by one"),
        ("use_kitchen", "its quantised layers bring an attention of their own"),
    ):
        if getattr(config, name, False):
            raise NotImplementedError(
                f"{name}=True: {advice}; gpt_layer_spec and gpt_block_spec cannot follow it; make "
                "the spec with Megatron's function and swap attention in: "
                "with_context_parallel(spec)"
            )
    if getattr(config, "moe_grouped_gemm", False) and config.transformer_impl == "local":
        raise NotImplementedError(
            "moe_grouped_gemm=True needs Transformer Engine (transformer_impl='transformer_engine' "
            "on a GPU); without it give moe_grouped_gemm=False: experts are computed one by one, "
            "with other initial random weights and the same mathematics"
        )


def check_low_precision(
    settings: Any, transformer_impl: str, *, has_engine: bool | None = None
) -> None:
    """Returns if low precision is that of Transformer Engine's linear layers alone.

    Megatron opens Transformer Engine's fp8 context around whole layers, attention included. Only
    modules of Transformer Engine ask for it; attention has none and computes in the dtype of its
    inputs, inside the context as outside. It is not left: leaving and entering again would make
    the engine reduce its scales once more per layer.

    Args:
        settings: Megatron's TransformerConfig or parsed arguments.
        transformer_impl: what layers are built from.
        has_engine: whether Transformer Engine is installed; None looks.

    Raises:
        NotImplementedError: for fp4.
        ValueError: for fp8 where no linear layer would compute in it.
    """
    fp4 = getattr(settings, "fp4", None)
    if fp4:
        raise NotImplementedError(
            f"fp4={fp4!r} is not served with context parallelism; train in bf16 or with fp8 "
            "linear layers (--fp8-format)"
        )
    fp8 = getattr(settings, "fp8", None)
    if not fp8:
        return
    if not (compat.has_transformer_engine() if has_engine is None else has_engine):
        raise ValueError(
            f"fp8={fp8!r} computes linear layers in Transformer Engine, which is not installed; "
            "install it (it needs a GPU), or train in bf16"
        )
    if transformer_impl != "transformer_engine":
        raise ValueError(
            f"fp8={fp8!r} with transformer_impl={transformer_impl!r}, whose layers would silently "
            "stay in 16 bits; give --transformer-impl transformer_engine"
        )


def _check_latent_attention(config: Any) -> None:
    """Refuses latent attention where Megatron's own layers are wrong or slice positions."""
    if getattr(config, "multi_latent_attention", False) and config.apply_rope_fusion:
        raise NotImplementedError(
            "apply_rope_fusion=True with multi-latent attention slices positions by itself; give "
            "--no-rope-fusion"
        )
    _check_latent_ranks(config)


def _check_latent_ranks(settings: Any) -> None:
    """Refuses latent attention on tensor-parallel ranks without Transformer Engine."""
    tp = getattr(settings, "tensor_model_parallel_size", 1)
    is_latent = getattr(settings, "multi_latent_attention", False)
    is_local = getattr(settings, "transformer_impl", None) == "local"
    if is_latent and tp > 1 and is_local and not is_sparse(settings):  # sums it itself
        # Measured on 0.16.1, with Megatron's attention too: the gradient norm of the first step is
        # 1.5905 on two tensor-parallel ranks and 1.5908 on one. The rotary part of the keys is
        # gathered over the ranks, and its gradient is split again without being summed.
        raise NotImplementedError(
            f"multi_latent_attention with tensor_model_parallel_size={tp} and "
            "transformer_impl='local': these layers of Megatron lose part of a gradient; use "
            "tensor_model_parallel_size=1, or transformer_impl='transformer_engine'"
        )


def _has_experts(settings: Any) -> bool:
    """Returns whether a TransformerConfig, or arguments, say that there are experts."""
    return bool(
        getattr(settings, "num_moe_experts", None) or getattr(settings, "num_experts", None)
    )


def _check_experts(config: Any) -> None:
    """Refuses routing that depends on how tokens are dealt to context or tensor ranks."""
    if not _has_experts(config):
        return
    _check_capacity(config)
    _check_expert_shards(config)
    cp = getattr(config, "context_parallel_size", 1)
    if cp == 1:
        return
    for kind in _balancing(config):
        if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"):
            raise NotImplementedError(
                f"moe_router_load_balancing_type={kind!r} with context_parallel_size={cp}: Megatron "
                "balances each rank's own rows, so results would depend on the dispatch; aux_loss, "
                "seq_aux_loss, global_aux_loss, sinkhorn and none do not; choose one or use "
                "context_parallel_size=1"
            )


def _check_expert_shards(settings: Any) -> None:
    """Refuses experts cut otherwise than the rest where ranks hold all of them: their gradients would differ."""
    tp, ep = (getattr(settings, f"{x}_model_parallel_size", 1) for x in ("tensor", "expert"))
    etp = getattr(settings, "expert_tensor_parallel_size", None)
    if ep == 1 and etp not in (None, tp):
        raise NotImplementedError(
            f"expert_tensor_parallel_size={etp} with tensor_model_parallel_size={tp} and no expert ranks: Megatron "
            "adds their gradients over the wrong ranks; leave it out, or give expert_model_parallel_size 2 or more"
        )


def _check_capacity(settings: Any) -> None:
    """Refuses a capacity of experts where the rows of a micro-batch are spread over ranks."""
    capacity = getattr(settings, "moe_expert_capacity_factor", None)
    if capacity is None or capacity < 0:  # Megatron: negative is none
        return
    is_split = getattr(settings, "sequence_parallel", False)
    for name in ("context_parallel_size", "tensor_model_parallel_size")[: 1 + is_split]:
        size = getattr(settings, name, 1)
        if size > 1:
            raise NotImplementedError(
                f"moe_expert_capacity_factor={capacity} with {name}={size}: Megatron drops tokens by the load of each "
                "rank's own rows, so results would depend on how rows are dealt to ranks; train without a capacity "
                f"(no token is dropped) or with {name}=1"
            )


def _balancing(settings: Any) -> list[str]:
    """Returns the kinds of balancing of a TransformerConfig or arguments."""
    kinds = getattr(settings, "moe_router_load_balancing_type", "aux_loss")
    return [kinds] if isinstance(kinds, str) else list(kinds)


def balances_samples(settings: Any) -> bool:
    """Returns whether a TransformerConfig, or arguments, have experts that are balanced sample by sample."""
    return _has_experts(settings) and "seq_aux_loss" in _balancing(settings)


def check_samples(config: Any, num_samples: int, cp_size: int) -> None:
    """Raises NotImplementedError where Megatron would take rows of several samples in turn for one, and balance it."""
    if num_samples > 1 and cp_size > 1 and balances_samples(config):
        raise NotImplementedError(
            f"moe_router_load_balancing_type='seq_aux_loss' with {num_samples} samples in a "
            f"micro-batch and context_parallel_size={cp_size}: the rows of a rank are not sorted by "
            "sample; give --micro-batch-size 1 and the same --global-batch-size"
        )


def check_padding(config: Any, num_rows: int, num_tokens: int) -> None:
    """Returns if rows that only fill the ranks up cannot change how experts are balanced.

    Args:
        config: Megatron's TransformerConfig.
        num_rows: rows of a micro-batch over all context ranks.
        num_tokens: how many of them hold a token.

    Raises:
        NotImplementedError: where the router would count rows that exist at this number of context
            ranks alone.
    """
    if num_rows == num_tokens or not _has_experts(config):
        return
    coefficients = getattr(config, "moe_aux_loss_coeff", 0.0)
    has_loss = any(coefficients) if isinstance(coefficients, list) else bool(coefficients)
    for name, is_set in (
        ("moe_aux_loss_coeff", has_loss),
        ("moe_router_load_balancing_type", "sinkhorn" in _balancing(config)),
        ("moe_z_loss_coeff", bool(getattr(config, "moe_z_loss_coeff", None))),
        (
            "moe_router_enable_expert_bias",
            getattr(config, "moe_router_enable_expert_bias", False),
        ),
    ):
        if is_set:
            raise NotImplementedError(
                f"{name}={getattr(config, name)} with packs of {num_tokens} tokens on {num_rows} "
                "rows: the rows that fill up would be counted as tokens of experts; give a "
                "sequence length that is a multiple of the context-parallel size times the chunk "
                "size"
            )


def _check_window(window_size: Any) -> None:
    if window_size is None:
        return
    left, right = window_size
    if left < -1 or right not in (-1, 0):
        raise NotImplementedError(
            f"window_size=({left}, {right}); a causal window is (keys before the query or -1, 0); "
            f"--window-size {max(left, 0)},0 is its causal part, which is another model"
        )


def validate_arguments(args: Namespace, *, world_size: int) -> None:
    """Returns if these arguments can train with context parallelism on `world_size` ranks.

    Only what is present is looked at, so it serves our parser's result and Megatron-LM's.

    Raises:
        ValueError: for numbers that do not fit together, with the nearest legal one.
        NotImplementedError: for settings that are not served.
    """
    tp = getattr(args, "tensor_model_parallel_size", 1)
    pp = getattr(args, "pipeline_model_parallel_size", 1)
    cp = getattr(args, "context_parallel_size", 1)
    replica = tp * pp * cp
    if world_size % replica:
        raise ValueError(
            f"world size {world_size} must be a multiple of tensor x pipeline x context parallel "
            f"sizes = {tp} x {pp} x {cp} = {replica}; start "
            f"{max(1, world_size // replica) * replica} ranks or change a size"
        )
    _check_heads(args, tp)
    for check in SETTING_CHECKS:
        check(args)


def _check_heads(args: Namespace, tp: int) -> None:
    heads = getattr(args, "num_attention_heads", None)
    if heads is not None and heads % tp:
        raise ValueError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size "
            f"{tp}; give {max(1, round(heads / tp)) * tp} heads or another size"
        )


def _check_length(args: Namespace) -> None:
    seq_length = getattr(args, "seq_length", None)
    cp = getattr(args, "context_parallel_size", 1)
    if seq_length is not None and seq_length < cp:
        raise ValueError(
            f"--seq-length {seq_length} must be at least --context-parallel-size {cp}; give "
            f"--seq-length {cp}"
        )


def _check_refused_settings(args: Namespace) -> None:
    for name in _REFUSED_SETTINGS:
        if getattr(args, name, None):
            raise NotImplementedError(
                f"--{name.replace('_', '-')} is not served with context parallelism: "
                f"{_REFUSED_SETTINGS[name]}"
            )


def _check_position(args: Namespace) -> None:
    position = getattr(args, "position_embedding_type", "rope")
    if position not in ("rope", "yarn", "learned_absolute", "none"):
        raise NotImplementedError(
            f"--position-embedding-type {position} is not served: positions travel with the tokens "
            "for rope, yarn, learned_absolute and none; choose one of them"
        )


def _check_formats(args: Namespace) -> None:
    machine = getattr(args, "machine", None)
    has_engine = None if machine is None else machine.has_transformer_engine
    check_low_precision(args, _engine_of(args), has_engine=has_engine)


def _engine_of(args: Namespace) -> str:
    return getattr(args, "transformer_impl", None) or "local"


# What `validate_arguments` asks of single settings; each looks only at what is present.
SETTING_CHECKS: tuple[Callable[[Namespace], None], ...] = (
    _check_length,
    _check_refused_settings,
    check_mixers,
    lambda args: check_rate(getattr(args, "attention_dropout", 0.0), "attention_dropout"),
    lambda args: _check_window(getattr(args, "window_size", None)),
    lambda args: check_engine(_engine_of(args)),
    _check_formats,
    _check_position,
    _check_experts,
    _check_latent_ranks,
)
