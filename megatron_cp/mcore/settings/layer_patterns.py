"""Which layers are of a kind, where Megatron-LM's setting is a number N or a list of a flag for each layer.

    N = 3                     layer 1 2 3 4 5 6
    window_attn_skip_freq           x x . x x .     looks through the window
    linear_attention_freq           x x . x x .     is linear attention
    no_rope_freq                    . . x . . x     does not rotate
    moe_layer_freq                  x . . x . .     has experts

Source: Megatron-Core's `is_layer_window_attention`, `TransformerConfig` and `get_gpt_decoder_layer_specs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_cp.mcore.settings.hybrid_pattern import EXPERTS, MLP, hybrid_layers, hybrid_pattern

_OF_KIND: dict[str, Callable[[int, int], bool]] = {
    "window_attn_skip_freq": lambda layer, every: layer % every != 0,
    "linear_attention_freq": lambda layer, every: layer % every != 0,
    "no_rope_freq": lambda layer, every: layer % every == 0,
    "moe_layer_freq": lambda layer, every: (layer - 1) % every == 0,
}
PATTERNS = tuple(_OF_KIND)
"""Names of these settings."""


def layer_pattern(name: str, frequency: int | Sequence[int], num_layers: int) -> list[bool]:
    """Returns for each layer whether it is of the kind that the setting `name` is about."""
    if isinstance(frequency, int):
        return [_OF_KIND[name](layer, frequency) for layer in range(1, num_layers + 1)]
    return [bool(flag) for flag in frequency]


def has_mlps(arguments: Mapping[str, Any]) -> list[bool]:
    """Returns for each decoder layer whether it has an MLP or experts; all have but mixers of a hybrid model."""
    pattern = arguments.get("hybrid_layer_pattern")
    if pattern is None:
        return [True] * arguments["num_layers"]
    return [letter in (MLP, EXPERTS) for letter in hybrid_layers(pattern)]


def expert_layers(arguments: Mapping[str, Any]) -> list[bool]:
    """Returns for each decoder layer whether it has experts."""
    pattern = arguments.get("hybrid_layer_pattern")
    if pattern is not None:
        return [letter == EXPERTS for letter in hybrid_layers(pattern)]
    if not arguments.get("num_experts"):
        return [False] * arguments["num_layers"]
    frequency = arguments.get("moe_layer_freq") or 1
    return layer_pattern("moe_layer_freq", frequency, arguments["num_layers"])


def experts_of_predictions(arguments: Mapping[str, Any]) -> list[int]:
    """Returns for each prediction of further tokens how many of its layers have experts.

    Where one set of layers makes all predictions, it counts in the first alone. Megatron-LM counts so too.
    """
    predicted = arguments.get("mtp_num_layers") or 0
    pattern = arguments.get("hybrid_layer_pattern")
    if pattern is None:
        return [int(is_expert) for is_expert in expert_layers(arguments)[-1:]] * predicted
    each = hybrid_pattern(pattern).prediction.count(EXPERTS)
    if predicted and arguments.get("mtp_use_repeated_layer"):
        return [each] + [0] * (predicted - 1)
    return [each] * predicted
