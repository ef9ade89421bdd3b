"""A hybrid model of Megatron-Core from Megatron-LM's arguments: Mamba-2, attention, MLPs and experts, over the context.

    arguments = {**sizes, "hybrid_layer_pattern": "M-M*-", "is_hybrid_model": True}
    model = build_hybrid(transformer_config(arguments), arguments, vocab_size=4096)

Install the CPU stand-ins (`megatron_cp.mcore.cpu.install`) before importing this module on a machine without CUDA.
"""

from __future__ import annotations

from typing import Any

from megatron_cp.mcore.hybrid import hybrid_stack_spec_of, prediction_parts
from megatron_cp.mcore.parts.rope import install_position_rotary
from megatron_cp.mcore.settings.hybrid_pattern import hybrid_layers
from megatron_cp.mcore.versions import hybrid_classes
from megatron_cp.models.gpt import Arguments, embedding_options

_EMBEDDING = (
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "seq_len_interpolation_factor",
)


def build_hybrid(
    config: Any,
    arguments: Arguments,
    *,
    vocab_size: int,
    spec: Any = None,
    pre_process: bool = True,
    post_process: bool = True,
    **attention_options: Any,
) -> Any:
    """Returns one pipeline stage of a `MambaModel` (`HybridModel`) whose layers follow the plans.

    Args:
        config: of `models.gpt.transformer_config`.
        arguments: what the configuration was made from.
        vocab_size: the padded one.
        spec: replaces our stack.
        pre_process: whether the stage holds the embedding.
        post_process: whether it holds the output layer and the loss.
        attention_options: of our attention in our stack, e.g. `backend="cpu"`.
    """
    parts = hybrid_classes.hybrid_parts()
    if spec is None:
        spec = hybrid_stack_spec_of(config, **attention_options)
    options = embedding_options(arguments)
    pattern, kind = arguments["hybrid_layer_pattern"], parts.model
    named = {parts.pattern: pattern, parts.spec: spec}
    prediction = prediction_parts(config, spec)
    if prediction is not None:
        from megatron_cp.mcore.hybrid_prediction import PredictingModel

        kind = PredictingModel
        named |= {parts.pattern: hybrid_layers(pattern), "prediction": prediction}
    model = kind(
        config,
        vocab_size=vocab_size,
        max_sequence_length=arguments["max_position_embeddings"],
        pre_process=pre_process,
        post_process=post_process,
        **named,
        **{name: options[name] for name in _EMBEDDING},
    )
    install_position_rotary(model)
    return model
