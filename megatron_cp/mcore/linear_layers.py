"""Which layers of a model are linear attention, and what their states weigh: Megatron-LM's settings, read once.

    linear_attention_freq 4              L L L S L L L S ...        L linear, S softmax attention
    linear_attention_freq [1,1,0]        L L S

Settings are Megatron's TransformerConfig or parsed arguments; both have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_cp.mcore.layer_patterns import layer_pattern

GATED_DELTA_NET = ("gated_delta_net", "gdn")
"""Names of the one kind that is served; the second is that of Megatron-Core 0.20."""

_Frequency = int | list[int] | None


def linear_pattern(variant: str | None, frequency: _Frequency, num_layers: int) -> tuple[bool, ...]:
    """Returns for each decoder layer whether it is linear attention.

    Raises ValueError where `frequency` does not say it of each layer.
    """
    if variant not in GATED_DELTA_NET:
        return (False,) * num_layers
    if (isinstance(frequency, int) and frequency > 0) or (
        isinstance(frequency, list) and len(frequency) == num_layers
    ):
        return tuple(layer_pattern("linear_attention_freq", frequency, num_layers))
    raise ValueError(
        f"linear_attention_freq={frequency} must say of each of {num_layers} layers whether it is linear: N, every "
        f"Nth layer is softmax attention, or a list of {num_layers} numbers, 1 for linear and 0 for softmax attention"
    )


def linear_layers(settings: Any) -> tuple[bool, ...]:
    """Returns for each decoder layer of these settings whether it is linear attention."""
    variant = getattr(settings, "experimental_attention_variant", None)
    frequency = settings.linear_attention_freq if variant else None
    return linear_pattern(variant, frequency, settings.num_layers)


def linear_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns the same for arguments by their names."""
    get = arguments.get
    variant, frequency = get("experimental_attention_variant"), get("linear_attention_freq")
    return linear_pattern(variant, frequency, arguments["num_layers"])


def linear_state_bytes(settings: Any, tp_size: int) -> int | None:
    """Returns the bytes of a document's states in all linear layers of one tensor rank; None without such layers.

    What travels for a head is the map of a state, `K x (V + K)` numbers in fp32 (docs/linear_attention.md).
    """
    if not getattr(settings, "experimental_attention_variant", None):
        return None  # arguments of a recorded run may say no more
    count = sum(linear_layers(settings))
    if not count:
        return None
    key_dim, value_dim = settings.linear_key_head_dim, settings.linear_value_head_dim
    heads = settings.linear_num_value_heads // tp_size
    return int(count * heads * key_dim * (value_dim + key_dim) * 4)


def check_linear_layers(settings: Any) -> None:
    """Returns if the linear layers that settings ask for can be built; also where they ask for none.

    Raises:
        NotImplementedError: for another kind of layer.
        ValueError: for sizes that do not fit together.
    """
    variant = getattr(settings, "experimental_attention_variant", None)
    if not variant:
        return
    if variant not in GATED_DELTA_NET:
        raise NotImplementedError(
            f"experimental_attention_variant={variant!r} is not served with context parallelism: softmax attention "
            "and 'gated_delta_net' are; train such a model with Megatron's own attention"
        )
    linear_layers(settings)
    tp = getattr(settings, "tensor_model_parallel_size", 1)
    keys, values = settings.linear_num_key_heads, settings.linear_num_value_heads
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}; give that"
        )
    if keys % tp:
        raise ValueError(
            f"linear_num_key_heads={keys} must be a multiple of tensor_model_parallel_size={tp}; choose a tensor size "
            "that divides it"
        )
