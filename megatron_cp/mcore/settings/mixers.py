"""Which layers of a model mix tokens and how, and what recurrent states weigh: Megatron-LM's settings, read once.

    linear_attention_freq 4              D D D S D D D S ...        D gated delta net, S softmax attention
    linear_attention_freq [1,1,0]        D D S
    hybrid_layer_pattern M-M*ME/*E       M . M S M .                M Mamba-2, . an MLP or experts alone; / a prediction

Settings are Megatron's TransformerConfig or parsed arguments; both have the same names.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_cp.mcore.settings import hybrid_pattern
from megatron_cp.mcore.settings.layer_patterns import layer_pattern
from megatron_cp.mcore.settings.sparse_settings import SPARSE, check_sparse

GATED_DELTA_NET = ("gated_delta_net", "gdn")
"""Names of one kind of linear attention; the second is that of Megatron-Core 0.20."""

KIMI_DELTA = ("kimi_delta_attention", "kda")
"""Of another, which forgets by key channel; Megatron-Core has none."""

SOFTMAX, DELTA, KDA, MAMBA = "softmax", "gated delta net", "kimi delta attention", "mamba"
"""Names of mixers; a layer with none of them is an MLP or experts alone."""

_HYBRID = {hybrid_pattern.ATTENTION: SOFTMAX, hybrid_pattern.MAMBA: MAMBA}

_Frequency = int | list[int] | None


def layer_mixers(settings: Any) -> tuple[str | None, ...]:
    """Returns the mixer of each decoder layer of these settings.

    Raises ValueError where they do not say it of each layer.
    """
    pattern = getattr(settings, "hybrid_layer_pattern", None)
    if pattern is not None:
        return _mixers_of_letters(hybrid_pattern.hybrid_layers(pattern))
    variant = getattr(settings, "experimental_attention_variant", None)
    frequency = settings.linear_attention_freq if variant else None
    is_linear = _linear_pattern(variant, frequency, settings.num_layers)
    kind = KDA if variant in KIMI_DELTA else DELTA
    return tuple(kind if linear else SOFTMAX for linear in is_linear)


def prediction_mixers(settings: Any) -> tuple[str | None, ...]:
    """Returns the mixer of each layer of the predictions; without a pattern they are like the last of the decoder.

    A layer that is repeated counts at each prediction.
    """
    pattern = getattr(settings, "hybrid_layer_pattern", None)
    if pattern is not None:
        said = hybrid_pattern.hybrid_pattern(pattern)
        return _mixers_of_letters(said.prediction) * said.num_predictions
    predicted = getattr(settings, "mtp_num_layers", None) or 0
    return layer_mixers(settings)[-1:] * predicted


def _mixers_of_letters(letters: str) -> tuple[str | None, ...]:
    return tuple(_HYBRID.get(letter) for letter in letters)


def layer_mixers_of(arguments: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Returns the same for arguments by their names; what is absent has Megatron's default."""
    return layer_mixers(Namespace(**{"linear_attention_freq": None, **arguments}))


def linear_layers(settings: Any) -> tuple[bool, ...]:
    """Returns for each decoder layer whether it is a gated delta net, of either kind."""
    return tuple(mixer in (DELTA, KDA) for mixer in layer_mixers(settings))


def linear_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns the same for arguments by their names."""
    return tuple(mixer in (DELTA, KDA) for mixer in layer_mixers_of(arguments))


def _linear_pattern(variant: str | None, frequency: _Frequency, num_layers: int) -> list[bool]:
    """Returns for each decoder layer whether it is linear attention."""
    if variant not in GATED_DELTA_NET + KIMI_DELTA:
        return [False] * num_layers
    if (isinstance(frequency, int) and frequency > 0) or (
        isinstance(frequency, list) and len(frequency) == num_layers
    ):
        return layer_pattern("linear_attention_freq", frequency, num_layers)
    raise ValueError(
        f"linear_attention_freq={frequency} must say of each of {num_layers} layers whether it is linear: N, every "
        f"Nth layer is softmax attention, or a list of {num_layers} numbers, 1 for linear and 0 for softmax attention"
    )


MAMBA_TAPS = 4
"""Tokens that the convolution of a Mamba-2 mixer sees."""


class MambaSizes(NamedTuple):
    """Sizes of a Mamba-2 mixer, all tensor ranks together."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int


def mamba_sizes(settings: Any) -> MambaSizes:
    """Returns the sizes of the model's Mamba-2 mixers; heads fill twice the hidden size where none are named."""
    heads = settings.mamba_num_heads
    if heads is None:
        heads = 2 * settings.hidden_size // settings.mamba_head_dim
    return MambaSizes(
        heads, settings.mamba_head_dim, settings.mamba_num_groups, settings.mamba_state_dim
    )


def linear_state_bytes(settings: Any, tp_size: int) -> int | None:
    """Returns the bytes of a document's states in all recurrent layers of one tensor rank; None without such layers.

    What travels for a head is the map of a state in fp32: `K x (V + K)` numbers under the delta rule, else
    `K x (V + 1)` (docs/linear_attention.md).
    """
    is_hybrid = getattr(settings, "hybrid_layer_pattern", None) is not None
    if not is_hybrid and not getattr(settings, "experimental_attention_variant", None):
        return None  # arguments of a recorded run may say no more
    mixers, size = layer_mixers(settings) + prediction_mixers(settings), 0
    num_deltas = mixers.count(DELTA) + mixers.count(KDA)
    if num_deltas:
        key_dim, value_dim = settings.linear_key_head_dim, settings.linear_value_head_dim
        heads = settings.linear_num_value_heads // tp_size
        size += num_deltas * heads * key_dim * (value_dim + key_dim) * 4
    if MAMBA in mixers:
        mamba = mamba_sizes(settings)
        heads = mamba.num_heads // tp_size
        size += mixers.count(MAMBA) * heads * mamba.state_dim * (mamba.head_dim + 1) * 4
    return int(size) or None


def check_mixers(settings: Any) -> None:
    """Returns if the recurrent layers that settings ask for can be built; also where they ask for none.

    Raises:
        NotImplementedError: for another kind of layer.
        ValueError: for sizes that do not fit together.
    """
    variant = getattr(settings, "experimental_attention_variant", None)
    tp = getattr(settings, "tensor_model_parallel_size", 1)
    if getattr(settings, "hybrid_layer_pattern", None) is not None:
        _check_hybrid(settings, variant, tp)
        return
    if not variant:
        return
    if variant == SPARSE:
        check_sparse(settings)
        return
    if variant not in GATED_DELTA_NET + KIMI_DELTA:
        raise NotImplementedError(
            f"experimental_attention_variant={variant!r} is not served with context parallelism: softmax attention, "
            "'gated_delta_net', 'kimi_delta_attention' and 'dsa' are; train such a model with Megatron's own attention"
        )
    layer_mixers(settings)
    keys, values = settings.linear_num_key_heads, settings.linear_num_value_heads
    if variant in KIMI_DELTA:
        _check_kimi_delta(settings, tp)
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads={values} must be a multiple of linear_num_key_heads={keys}; give that"
        )
    if keys % tp:
        raise ValueError(
            f"linear_num_key_heads={keys} must be a multiple of tensor_model_parallel_size={tp}; choose a tensor size "
            "that divides it"
        )


def _check_kimi_delta(settings: Any, tp: int) -> None:
    keys, values = settings.linear_num_key_heads, settings.linear_num_value_heads
    if keys != values:
        raise ValueError(
            f"linear_num_key_heads={keys} and linear_num_value_heads={values} must be equal in Kimi delta attention; "
            "give the same"
        )
    if settings.linear_value_head_dim % tp:
        raise ValueError(
            f"linear_value_head_dim={settings.linear_value_head_dim} must be a multiple of tensor_model_parallel_size="
            f"{tp} in Kimi delta attention; choose a tensor size that divides it"
        )


def _check_hybrid(settings: Any, variant: str | None, tp: int) -> None:
    if variant:
        raise NotImplementedError(
            f"experimental_attention_variant={variant!r} with hybrid_layer_pattern is not served: the pattern names "
            "its layers; leave out one of them"
        )
    frequency = getattr(settings, "window_attn_skip_freq", None)
    windowed = getattr(settings, "window_size", None) is not None and frequency is not None
    if windowed and SOFTMAX in prediction_mixers(settings):
        raise NotImplementedError(
            f"window_attn_skip_freq={frequency} with attention in the predictions of hybrid_layer_pattern is not "
            "served: it counts layers of the decoder; train a model without it"
        )
    if MAMBA not in layer_mixers(settings) + prediction_mixers(settings):
        return
    for name in ("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"):
        value = getattr(settings, name)
        if value is not None and value <= 0:
            raise ValueError(
                f"{name}={value} must be positive; leave it out for Megatron's default"
            )
    sizes = mamba_sizes(settings)
    if settings.mamba_num_heads is None and 2 * settings.hidden_size % sizes.head_dim:
        raise ValueError(
            f"mamba_head_dim={sizes.head_dim} must divide twice hidden_size={settings.hidden_size}; give that, or "
            "mamba_num_heads"
        )
    if sizes.num_heads % sizes.num_groups:
        raise ValueError(
            f"mamba_num_heads={sizes.num_heads} must be a multiple of mamba_num_groups={sizes.num_groups}; give that"
        )
    if sizes.num_groups % tp:
        raise ValueError(
            f"mamba_num_groups={sizes.num_groups} must be a multiple of tensor_model_parallel_size={tp}; choose a "
            "tensor size that divides it"
        )
