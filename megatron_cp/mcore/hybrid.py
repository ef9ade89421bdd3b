"""Specs of Megatron's hybrid models: Mamba-2, softmax attention, MLPs and experts, each a layer of its own.

    spec = hybrid_stack_spec_of(config)                          # parts as the configuration means them
    MambaModel(config, spec, ..., hybrid_override_pattern="M-M*-")      # HybridModel in Megatron-Core 0.20

    pretrain_mamba.py ... --spec megatron_cp.mcore.hybrid hybrid_stack_spec     # stock Megatron-LM

Megatron's own spec is made of Transformer Engine's modules and of a mixer that needs the kernels of mamba_ssm. Here
parts are those of our decoder layers, cut in two: attention with its norm, MLP or experts with theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_cp.mcore.hybrid_recompute import RecomputedStack
from megatron_cp.mcore.mixing.mamba_mixer import ContextMambaMixer
from megatron_cp.mcore.parts.mtp import mark_prediction
from megatron_cp.mcore.parts.norm import LocalNorm
from megatron_cp.mcore.settings.hybrid_pattern import hybrid_pattern
from megatron_cp.mcore.settings.validation import check_spec
from megatron_cp.mcore.spec import uses_transformer_engine, with_context_parallel
from megatron_cp.mcore.versions import compat, hybrid_classes

_PARTS = hybrid_classes.hybrid_parts()
_STACK = _PARTS.stack if _PARTS.recomputes else RecomputedStack
_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")

if not compat.has_transformer_engine():
    _PARTS.module.TENorm = LocalNorm  # of the final norm, which no spec names


def hybrid_stack_spec_of(config: Any, **attention_options: Any) -> ModuleSpec:
    """Returns the decoder of a hybrid model with our mixers, attention and norms.

    Give it to Megatron's `MambaModel` (`HybridModel`) as its stack spec, with the pattern of layers.

    Args:
        config: Megatron's TransformerConfig. Its `transformer_impl` is set to "local" where Transformer Engine was
            asked for on a CPU.
        attention_options: extra constructor arguments of `ContextParallelAttention`.

    Raises:
        NotImplementedError: for a setting that the spec cannot follow, by its name.
        ValueError: for an engine that is not installed.
    """
    return ModuleSpec(module=_STACK, submodules=_submodules(config, **attention_options))


def _submodules(config: Any, **attention_options: Any) -> Any:
    use_te = uses_transformer_engine(config)
    check_spec(config)
    if config.multi_latent_attention:
        raise NotImplementedError(
            "multi_latent_attention=True in a hybrid model is not served; train the model with Megatron's own layers"
        )
    dense = compat.one_layer_spec(config, use_transformer_engine=use_te, with_experts=False)
    parts = {
        "mamba_layer": _mamba_layer(dense),
        "attention_layer": _half_of(dense, _ATTENTION),
        "mlp_layer": replace(_half_of(dense, _MLP), module=MLPLayer),
    }
    if config.num_moe_experts:
        experts = compat.one_layer_spec(config, use_transformer_engine=use_te, with_experts=True)
        parts["moe_layer"] = _half_of(experts, _MLP)
    if _PARTS.predicts:
        parts["mtp_block_spec"] = _predictions_of(NumberedPrediction, _prediction_parts(use_te))
    return with_context_parallel(_PARTS.submodules(**parts), **attention_options)


def prediction_parts(config: Any, stack_spec: ModuleSpec) -> Any:
    """Returns what predictions are made of where Megatron's model makes none itself; None where there are none.

    `stack_spec` is that of the decoder: its layers are those of the predictions too.
    """
    if _PARTS.predicts or not config.mtp_num_layers:
        return None
    from megatron_cp.mcore.hybrid_prediction import PredictionParts

    parts = _prediction_parts(uses_transformer_engine(config))
    return PredictionParts(
        letters=hybrid_pattern(config.hybrid_layer_pattern).prediction,
        norm=parts.hnorm,
        projection=parts.eh_proj,
        layers=stack_spec.submodules,
    )


def _prediction_parts(use_te: bool) -> Any:
    """Returns norms and projection around the layers of a prediction, as a submodules dataclass of Megatron."""
    layer = multi_token_prediction.get_mtp_layer_spec(None, use_transformer_engine=use_te)
    norm = compat.transformer_engine_norm() if use_te else LocalNorm
    return replace(layer.submodules, enorm=norm, hnorm=norm, layer_norm=norm)


def _predictions_of(layer: type, parts: Any) -> ModuleSpec:
    """Returns the spec of all predictions; Megatron builds as many of this one layer as the pattern has."""
    specs = [ModuleSpec(module=layer, submodules=parts)]
    return ModuleSpec(
        module=multi_token_prediction.MultiTokenPredictionBlock,
        submodules=multi_token_prediction.MultiTokenPredictionBlockSubmodules(layer_specs=specs),
    )


def _half_of(layer: ModuleSpec, names: tuple[str, ...]) -> ModuleSpec:
    """Returns the spec of a layer with these parts of `layer` alone; keys of their norm in a checkpoint stay."""
    parts = layer.submodules
    keys = {
        name: key
        for name, key in parts.sharded_state_dict_keys_map.items()
        if name.startswith(names[0])
    }
    own = TransformerLayerSubmodules(
        **{name: getattr(parts, name) for name in names}, sharded_state_dict_keys_map=keys
    )
    return replace(layer, submodules=own)


def _mamba_layer(layer: ModuleSpec) -> ModuleSpec:
    """Returns the spec of a Mamba-2 layer with projections and norm of this layer's attention."""
    parts = layer.submodules
    attention = parts.self_attention.submodules
    # Where the norm is a module of its own, checkpoints have it under the place of the fused one.
    keys = {
        name.replace("input_layernorm.", "norm."): key.replace(
            "self_attention.linear_qkv", "mixer.in_proj"
        )
        for name, key in parts.sharded_state_dict_keys_map.items()
        if name.startswith("input_layernorm.")
    }
    mixer = ModuleSpec(
        module=ContextMambaMixer,
        submodules=MambaMixerSubmodules(
            in_proj=attention.linear_qkv, out_proj=attention.linear_proj
        ),
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=parts.input_layernorm,
            mixer=mixer,
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


class NumberedPrediction(multi_token_prediction.MultiTokenPredictionLayer):
    """A prediction of Megatron (since 0.17) whose experts are logged in their own place."""

    def __init__(self, config: Any, submodules: Any = None, **megatrons: Any) -> None:
        """Builds Megatron's prediction; raises as `hybrid_stack_spec_of` where its parts are not given."""
        if submodules is None:  # named on a command line, before there is a configuration
            submodules = _prediction_parts(uses_transformer_engine(config))
            name = next(name for name in megatrons if name.endswith("_submodules"))
            megatrons[name] = _submodules(config)
        super().__init__(config, submodules, **megatrons)
        mark_prediction(self.mtp_model_layer, config, self.layer_number)


class ConfiguredStack(_STACK):  # type: ignore[misc, valid-type]
    """A stack that reads its parts from the configuration when it is built, as `spec.ConfiguredLayer` does."""

    follows_plans = True

    def __init__(self, config: Any, submodules: Any = None, **megatrons: Any) -> None:
        """Builds Megatron's stack from the parts that `config` means.

        Raises NotImplementedError or ValueError as `hybrid_stack_spec_of`.
        """
        super().__init__(config, _submodules(config), **megatrons)


hybrid_stack_spec = ModuleSpec(
    module=ConfiguredStack,
    submodules=_PARTS.submodules(mtp_block_spec=_predictions_of(NumberedPrediction, None))
    if _PARTS.predicts
    else None,
)
"""For `--spec megatron_cp.mcore.hybrid hybrid_stack_spec`; Megatron wants an object, not a function."""
