"""Specs: how a Megatron model gets our core attention.

    spec = with_context_parallel(get_gpt_layer_local_spec())    # any layer, block or MTP spec
    spec = gpt_block_spec(config)                               # dense, experts, latent attention
    GPTModel(config, spec, ...)
    use_in_every_gpt(thd_split="per_document")                  # where a program makes the specs itself

    pretrain_gpt.py ... --spec megatron_cp.mcore.spec gpt_layer_spec         # stock Megatron-LM

A spec is a tree of dataclasses. In a copy of it these leaves are exchanged:

    core_attention    for `ContextParallelAttention`
    recurrent layers  for `ContextGatedDeltaNet`, `ContextMambaMixer`; ours stay
    a local norm      for `LocalNorm`, the same but fit for sequence parallelism
    router            for `ContextRouter`, which does not depend on the dispatch
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer import transformer_block
from megatron.core.transformer.attention import CrossAttentionSubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from megatron_cp.mcore import hooks, layers, model_hooks
from megatron_cp.mcore.documents import split
from megatron_cp.mcore.mixing.attention import ContextParallelAttention
from megatron_cp.mcore.mixing.gated_delta_net import ContextGatedDeltaNet, gated_delta_net_layer
from megatron_cp.mcore.mixing.kimi_delta import KimiDeltaAttention
from megatron_cp.mcore.mixing.mamba_mixer import ContextMambaMixer
from megatron_cp.mcore.mixing.sparse_latent import SparseCore, sparse_latent_layer
from megatron_cp.mcore.parts.norm import MEGATRONS_OWN, LocalNorm
from megatron_cp.mcore.parts.router import ContextRouter, EqualWeightRouter
from megatron_cp.mcore.settings.mixers import KIMI_DELTA, linear_layers
from megatron_cp.mcore.settings.sparse_settings import is_sparse
from megatron_cp.mcore.settings.validation import check_engine, check_spec
from megatron_cp.mcore.versions import compat, program

compat.check_megatron_version()
compat.repair_megatron()
program.check_builds_predictions(compat.megatron_version())
hooks.install()
# A block made from a layer spec takes its final norm from here. Without Transformer Engine that one
# refuses sequence parallelism (apex: RMSNorm); ours builds the same norm where it does not.
if transformer_block.LayerNormImpl in MEGATRONS_OWN:
    transformer_block.LayerNormImpl = LocalNorm

_log = logging.getLogger(__name__)

# Megatron's recurrent layers, and ours: what stands for them.
_RECURRENT = {
    GatedDeltaNet: ContextGatedDeltaNet,
    MambaMixer: ContextMambaMixer,
    ContextGatedDeltaNet: ContextGatedDeltaNet,
    KimiDeltaAttention: KimiDeltaAttention,
    ContextMambaMixer: ContextMambaMixer,
}


def with_context_parallel(
    spec: Any, *, replaces: Sequence[type] = (), **attention_options: Any
) -> Any:
    """Returns a copy of `spec` whose self-attention layers compute with our attention.

    Megatron's and Transformer Engine's plain attention is replaced, with the parameters that its spec has.

    Args:
        spec: a layer spec, a block's submodules or an MTP block spec of Megatron; it is not
            changed.
        replaces: classes of core attention besides that ours may stand for: they must compute plain softmax
            attention under the configuration's settings. A cap on logits, say, would be lost.
        attention_options: extra constructor arguments of `ContextParallelAttention`, e.g.
            `backend="cpu"`.

    Raises:
        ValueError: if there is no core attention in it, or ours with options already.
        NotImplementedError: for cross attention, and for attention of another class or with parameters that
            ours does not know: it may compute something else.
    """
    if getattr(spec, "module", None) is ConfiguredLayer:
        if not _takes_options(spec.params.get("attention_options"), attention_options):
            return spec
        return replace(spec, params={**spec.params, "attention_options": attention_options})
    num_replaced = 0

    def exchange(name: str, leaf: Any) -> Any:
        nonlocal num_replaced
        if name == "core_attention" and leaf is not None:
            num_replaced += 1
            if getattr(leaf, "module", leaf) is SparseCore:
                return replace(leaf, params={**leaf.params, **_way_of_cutting(attention_options)})
            if getattr(leaf, "module", leaf) is ContextParallelAttention:
                if not _takes_options(_params_of(leaf), attention_options):
                    return leaf
            else:
                _check_is_plain_attention(leaf, replaces)
            params = {**_params_of(leaf), **attention_options}
            return (
                ModuleSpec(ContextParallelAttention, params) if params else ContextParallelAttention
            )
        if getattr(leaf, "module", None) in _RECURRENT:
            num_replaced += 1
            return _over_context(leaf, attention_options)
        return _exchange_norm_or_router(name, leaf)

    copy = _copy_with(spec, exchange)
    if not num_replaced:
        layer_specs = getattr(spec, "layer_specs", None) or [spec]
        modules = {getattr(one, "module", type(one)) for one in layer_specs}
        names = ", ".join(sorted(getattr(module, "__name__", str(module)) for module in modules))
        raise ValueError(
            f"spec={type(spec).__name__} ({names}) holds no core_attention; give a layer spec such as "
            "get_gpt_layer_local_spec(), a TransformerBlockSubmodules or an MTP block spec, whose layers do not attend "
            "in a module of their own"
        )
    return copy


def use_in_every_gpt(**attention_options: Any) -> None:
    """From now on every `GPTModel` of this process has our attention, whoever makes its specs; they are copied.

    So has every hybrid model (`MambaModel`, `HybridModel`), with our mixers. For programs that do not let one see the
    spec (docs/frameworks.md); called before they build a model. Modules that are neither, encoders of images say, keep
    their attention. Options and errors are those of `with_context_parallel`, the errors when a model is built. A second
    call replaces the options.
    """
    split.check_thd_split(attention_options.get("thd_split"))

    def exchange(spec: Any) -> Any:
        if isinstance(spec, TransformerBlockSubmodules) and not spec.layer_specs:
            layers.note_thd_split(attention_options.get("thd_split"))  # its batches are cut alike
            return _copy_with(spec, _exchange_norm_or_router)  # a stage without layers
        return with_context_parallel(spec, **attention_options)

    model_hooks.exchange_specs(exchange)


def _over_context(spec: ModuleSpec, attention_options: dict[str, Any]) -> ModuleSpec:
    """Returns our layer with the parts of Megatron's; of the options it takes how batches were cut."""
    return ModuleSpec(
        module=_RECURRENT[spec.module],
        params={**spec.params, **_way_of_cutting(attention_options)},
        submodules=_copy_with(spec.submodules, _exchange_norm_or_router),
        metainfo=spec.metainfo,
    )


def _way_of_cutting(attention_options: dict[str, Any]) -> dict[str, Any]:
    """Returns those of the options that other layers than softmax attention take as well."""
    return {name: attention_options[name] for name in ("thd_split",) if name in attention_options}


def _params_of(leaf: Any) -> dict[str, Any]:
    return leaf.params if isinstance(leaf, ModuleSpec) else {}


def _takes_options(given: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    """Returns whether attention that has options already is exchanged for one with those wanted."""
    if given and wanted and given != wanted:
        raise ValueError(
            f"the spec has context-parallel attention with options {given} already; {wanted} would "
            "replace them; apply with_context_parallel once, with all options"
        )
    return bool(wanted) and given != wanted


def _exchange_norm_or_router(name: str, leaf: Any) -> Any:
    """Returns what stands for a norm or router of Megatron; any other leaf as it is."""
    if any(leaf is norm for norm in MEGATRONS_OWN):
        return LocalNorm
    if leaf is TopKRouter:
        return EqualWeightRouter if compat.weighs_auxiliary_losses_by_rank() else ContextRouter
    return leaf


def _copy_with(node: Any, exchange: Callable[[str, Any], Any], name: str = "") -> Any:
    """Returns the node with every leaf below it exchanged; the node itself where none was."""
    if name == "dsa_layer":  # of a hybrid's stack, which builds it for a letter that is refused
        return node
    changed = exchange(name, node)
    if changed is not node:
        return changed
    if isinstance(node, CrossAttentionSubmodules):
        raise NotImplementedError(
            "the spec has cross attention, whose layers Megatron splits over no context ranks; train it with "
            "--context-parallel-size 1 and without this spec, or call megatron_cp.cp_attention in a layer of yours "
            "(docs/plan.md, Cross attention)"
        )
    if isinstance(node, (list, tuple)):
        items = [_copy_with(item, exchange) for item in node]
        is_same = all(copy is item for copy, item in zip(items, node, strict=True))
        return node if is_same else type(node)(items)
    if isinstance(node, functools.partial):
        keywords = _changes(node.keywords, exchange)
        return functools.partial(node, **keywords) if keywords else node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
        changes = _changes(fields, exchange)
        return replace(node, **changes) if changes else node
    return node


def _changes(values: dict[str, Any], exchange: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Returns those of the named values in which something was exchanged."""
    copies = {name: _copy_with(value, exchange, name) for name, value in values.items()}
    return {name: copy for name, copy in copies.items() if copy is not values[name]}


# Megatron's own, and its face of Transformer Engine's.
_PLAIN = ("DotProductAttention", "TEDotProductAttention")


def _check_is_plain_attention(core_attention: Any, replaces: Sequence[type]) -> None:
    """Refuses a core attention that may compute anything but what ours does."""
    module = getattr(core_attention, "module", core_attention)
    name = getattr(module, "__name__", repr(module))
    if getattr(core_attention, "submodules", None) is not None:
        raise NotImplementedError(
            f"core_attention={name} has modules of its own; only plain softmax attention can be replaced; remove "
            "experimental_attention_variant"
        )
    is_megatrons = str(getattr(module, "__module__", "")).startswith("megatron.core.")
    if module not in replaces and not (is_megatrons and name in _PLAIN):
        raise NotImplementedError(
            f"core_attention={name} is neither {' nor '.join(_PLAIN)} of Megatron-Core: what it computes besides plain "
            f"softmax attention would be lost; if that is nothing, say so where ours is asked for: replaces=({name},)"
        )
    known = inspect.signature(ContextParallelAttention.__init__).parameters
    unknown = sorted(_params_of(core_attention).keys() - known.keys())
    if unknown:
        raise NotImplementedError(
            f"core_attention={name} has parameters that ours does not know: {', '.join(unknown)}; leave them out of "
            "the spec"
        )


class ConfiguredLayer(TransformerLayer):
    """A decoder layer that reads its own parts from the configuration when it is built.

    A spec named on a command line is made before the configuration is known. This layer asks for
    the parts in its constructor, where the configuration, its number and the pipeline stage are
    given: dense or experts, plain or latent attention, Transformer Engine or not.
    """

    follows_plans = True

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        *,
        pg_collection: Any = None,
        vp_stage: int | None = None,
        attention_options: dict[str, Any] | None = None,
        **megatrons: Any,
    ) -> None:
        """Builds Megatron's layer from the parts that `config` means.

        Raises:
            NotImplementedError: for a setting that the spec cannot follow, by its name.
            ValueError: for an engine that is not installed.
        """
        use_te = uses_transformer_engine(config)
        check_spec(config)
        offset = 0
        if megatrons.get("add_layer_offset", True):
            stage = None if pg_collection is None else pg_collection.pp.rank()
            offset = get_transformer_layer_offset(config, vp_stage, stage)
        spec = _decoder_layers(config, use_te)[layer_number + offset - 1]
        layer = with_context_parallel(spec, **(attention_options or {}))
        super().__init__(
            config,
            layer.submodules,
            layer_number,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            **megatrons,
        )

    @staticmethod
    def prediction_spec(
        config: Any, vp_stage: int | None, attention_options: dict[str, Any] | None = None
    ) -> Any:
        """Returns the multi-token prediction of a model of such layers: Megatron-LM's has an attention of its own."""
        return mtp_block_spec(config, vp_stage=vp_stage, **(attention_options or {}))


gpt_layer_spec = ModuleSpec(module=ConfiguredLayer)
"""For `--spec megatron_cp.mcore.spec gpt_layer_spec`; Megatron wants an object, not a function."""


def gpt_block_spec(config: Any, *, vp_stage: int | None = None, **attention_options: Any) -> Any:
    """Returns the decoder block of this pipeline stage with our attention and norms.

    Give it to `GPTModel` as `transformer_layer_spec`. Experts, latent attention, norms and engine
    follow the configuration.

    Args:
        config: Megatron's TransformerConfig. Its `transformer_impl` is set to "local" where
            Transformer Engine was asked for on a CPU.
        vp_stage: the virtual pipeline stage, where interleaving is on.
        attention_options: extra constructor arguments of `ContextParallelAttention`.

    Raises:
        NotImplementedError: for a setting that the spec cannot follow, by its name.
        ValueError: for an engine that is not installed.
    """
    use_te = uses_transformer_engine(config)
    check_spec(config)
    block = compat.decoder_block_spec(config, use_transformer_engine=use_te, vp_stage=vp_stage)
    if any(linear_layers(config)) or is_sparse(config):
        own = compat.layers_of_stage(config, vp_stage)
        every = _decoder_layers(config, use_te)
        block = replace(block, layer_specs=[every[layer] for layer in own])
    if not block.layer_specs:  # a pipeline stage may hold the embedding or the loss alone
        layers.register_stage(config)
        layers.note_thd_split(attention_options.get("thd_split"))
        return _copy_with(block, _exchange_norm_or_router)
    return with_context_parallel(block, **attention_options)


def mtp_block_spec(config: Any, *, vp_stage: int | None = None, **attention_options: Any) -> Any:
    """Returns the multi-token prediction of this pipeline stage with our attention; None if none.

    Its layers are built like the last decoder layer, as in Megatron-LM. Give it to `GPTModel` as
    `mtp_block_spec`, beside `gpt_block_spec(config)`. Arguments and errors are those of that.
    """
    if not config.mtp_num_layers:
        return None
    use_te = uses_transformer_engine(config)
    last_layer = _decoder_layers(config, use_te)[-1]
    block = gpt_layer_specs.get_gpt_mtp_block_spec(
        config, last_layer, use_transformer_engine=use_te, vp_stage=vp_stage
    )
    return None if block is None else with_context_parallel(block, **attention_options)


def _decoder_layers(config: Any, use_te: bool) -> list[Any]:
    """Returns the spec of every decoder layer of the model, with gated delta nets or sparse attention where asked."""
    norm = compat.transformer_engine_norm() if use_te else LocalNorm
    if is_sparse(config):
        bare = compat.layer_specs_without_query_norms(config, use_transformer_engine=use_te)
        return [sparse_latent_layer(spec, norm if config.qk_layernorm else None) for spec in bare]
    specs = compat.decoder_layer_specs(config, use_transformer_engine=use_te)
    pattern = linear_layers(config)
    if not any(pattern):
        return specs
    plain = compat.plain_layer_specs(config, use_transformer_engine=use_te)
    is_kimi = config.experimental_attention_variant in KIMI_DELTA
    module = KimiDeltaAttention if is_kimi else ContextGatedDeltaNet
    return [
        gated_delta_net_layer(spec, one, norm, module) if is_linear else spec
        for spec, one, is_linear in zip(specs, plain, pattern, strict=True)
    ]


def uses_transformer_engine(config: Any) -> bool:
    """Returns whether layers are built from Transformer Engine's modules."""
    check_engine(config.transformer_impl)
    if config.transformer_impl == "transformer_engine" and not compat.has_transformer_engine():
        # Megatron asks this field again while it builds latent attention.
        config.transformer_impl = "local"
        _note_local_layers()
    return bool(config.transformer_impl == "transformer_engine")


@functools.cache
def _note_local_layers() -> None:
    """Says once, on one rank, that the CPU runs Megatron's local layers."""
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        _log.warning(
            "transformer_impl=transformer_engine, but Transformer Engine needs a GPU and there is "
            "none: Megatron's local layers are built, the same computation"
        )
