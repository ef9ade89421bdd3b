"""Specs: how a Megatron model gets our core attention.

    spec = with_context_parallel(get_gpt_layer_local_spec())    # any layer, block or MTP spec
    GPTModel(config, spec, ...)

    pretrain_gpt.py ... --spec megatron_cp.mcore.spec gpt_layer_spec         # stock Megatron-LM

A spec is a tree of dataclasses; only its `core_attention` leaves are exchanged, in a copy.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_cp.mcore import compat
from megatron_cp.mcore.attention import ContextParallelAttention
from megatron_cp.mcore.norm import TorchNorm

compat.check_megatron_version()


def with_context_parallel(spec: Any, **attention_options: Any) -> Any:
    """Returns a copy of `spec` whose self-attention layers compute with `ContextParallelAttention`.

    Args:
        spec: a layer spec, a block's submodules or an MTP block spec of Megatron; it is not
            changed.
        attention_options: extra constructor arguments of `ContextParallelAttention`, e.g.
            `backend="cpu"`.

    Raises:
        ValueError: if there is no core attention in it.
        NotImplementedError: for cross attention, and for attention variants that are more than
            softmax attention.
    """
    replacement: Any = ContextParallelAttention
    if attention_options:
        replacement = ModuleSpec(module=ContextParallelAttention, params=attention_options)
    copy, num_replaced = _replace_core_attention(spec, replacement)
    if not num_replaced:
        raise ValueError(
            f"spec={type(spec).__name__} holds no core_attention; give a layer spec such as "
            "get_gpt_layer_local_spec(), "
            "a TransformerBlockSubmodules or an MTP block spec"
        )
    return copy


def _replace_core_attention(node: Any, replacement: Any) -> tuple[Any, int]:
    """Returns the copied node and how many core attentions were exchanged below it."""
    if isinstance(node, CrossAttentionSubmodules):
        raise NotImplementedError(
            "the spec has cross attention; context parallelism serves self attention only; "
            "leave encoder-decoder layers to Megatron's own attention"
        )
    if isinstance(node, (list, tuple)):
        items = [_replace_core_attention(item, replacement) for item in node]
        return type(node)(item for item, _ in items), sum(count for _, count in items)
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return node, 0
    changes: dict[str, Any] = {}
    total = 0
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if field.name == "core_attention" and value is not None:
            _check_is_softmax_attention(value)
            changes[field.name] = replacement
            total += 1
            continue
        copied, count = _replace_core_attention(value, replacement)
        if count:
            changes[field.name] = copied
            total += count
    return (replace(node, **changes) if changes else node), total


def _check_is_softmax_attention(core_attention: Any) -> None:
    """Refuses a core attention with modules of its own, such as sparse indexers."""
    if getattr(core_attention, "submodules", None) is not None:
        raise NotImplementedError(
            f"core_attention={getattr(core_attention, 'module', core_attention)!r} has modules of "
            "its own; only plain "
            "softmax attention can be replaced; remove experimental_attention_variant"
        )


class DenseTransformerLayer(TransformerLayer):
    """Megatron's layer for a spec that was made before the configuration was known.

    Query-key norms follow `config.qk_layernorm`; what the spec cannot follow is refused.
    """

    def __init__(self, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        """Builds it as Megatron's layer.

        Raises:
            NotImplementedError: for experts and multi-latent attention, which need another spec.
        """
        for name in ("num_moe_experts", "multi_latent_attention"):
            if getattr(config, name, None):
                raise NotImplementedError(
                    f"{name}={getattr(config, name)}; gpt_layer_spec is for dense layers with "
                    "plain attention; build the spec in code: "
                    "with_context_parallel(get_gpt_decoder_block_spec(config, ...))"
                )
        if config.qk_layernorm:
            norms = {"q_layernorm": _norm_class(), "k_layernorm": _norm_class()}
            attention = submodules.self_attention
            attention = replace(attention, submodules=replace(attention.submodules, **norms))
            submodules = replace(submodules, self_attention=attention)
        super().__init__(config, submodules, *args, **kwargs)


def _norm_class() -> Any:
    """Returns the norm that works under sequence parallelism: Transformer Engine's, else ours."""
    if not compat.has_transformer_engine():
        return TorchNorm
    from megatron.core.extensions.transformer_engine import TENorm  # never run on a GPU yet

    return TENorm


def _layer_spec() -> ModuleSpec:
    """Returns a dense layer with our attention, on Transformer Engine where it is installed."""
    if compat.has_transformer_engine():
        spec = compat.transformer_engine_layer_spec()
        return with_context_parallel(replace(spec, module=DenseTransformerLayer))
    spec = with_context_parallel(compat.local_layer_spec())
    norms = {"input_layernorm": TorchNorm, "pre_mlp_layernorm": TorchNorm}
    return replace(spec, module=DenseTransformerLayer, submodules=replace(spec.submodules, **norms))


gpt_layer_spec = _layer_spec()
"""For `--spec megatron_cp.mcore.spec gpt_layer_spec`; Megatron wants an object, not a function."""


def gpt_block_spec(
    config: Any, *, vp_stage: int | None = None, **attention_options: Any
) -> TransformerBlockSubmodules:
    """Returns the decoder block of this pipeline stage with our attention and norms.

    Give it to `GPTModel` as `transformer_layer_spec`. Query-key norms follow `config.qk_layernorm`.

    Args:
        config: Megatron's TransformerConfig.
        vp_stage: the virtual pipeline stage, where interleaving is on.
        attention_options: extra constructor arguments of `ContextParallelAttention`.
    """
    layer = with_context_parallel(gpt_layer_spec, **attention_options)
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=_norm_class())
