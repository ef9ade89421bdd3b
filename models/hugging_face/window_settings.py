"""Windows in the words of config.json and of Megatron-LM's arguments: how wide, and of which layers.

Hugging Face counts the keys that a query sees, its own among them; Megatron-LM those on its left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_cp.mcore.settings.layer_patterns import layer_pattern
from megatron_cp.models.hugging_face.settings import Arguments, Config, Setting, layers_of_kind


def _windows_of(config: Config, kinds: Sequence[str]) -> Arguments:
    """Returns the windows of the layers whose kind is sliding_attention."""
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(
            f"layer_types of {len(kinds)} in config.json must have a kind for each of num_hidden_layers="
            f"{config['num_hidden_layers']}; correct it"
        )
    is_window = layers_of_kind("sliding_attention", kinds)
    if not any(is_window):
        return {"window_size": None, "window_attn_skip_freq": None}
    every_second = layer_pattern("window_attn_skip_freq", 2, len(kinds))
    return {
        "window_size": (config["sliding_window"] - 1, 0),
        "window_attn_skip_freq": 2 if is_window == every_second else is_window,
    }


def _has_window(arguments: Arguments) -> list[bool]:
    """Returns of each layer whether it has a window."""
    size, frequency = arguments["window_size"], arguments["window_attn_skip_freq"]
    if size is None or frequency is None:
        return [size is not None] * arguments["num_layers"]
    return layer_pattern("window_attn_skip_freq", frequency, arguments["num_layers"])


def _windows_to_config(arguments: Arguments) -> dict[str, Any]:
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        **_width_to_config(arguments),
        "layer_types": [kinds[on] for on in _has_window(arguments)],
    }


def _width_to_config(arguments: Arguments) -> dict[str, Any]:
    size = arguments["window_size"]
    return {"sliding_window": None if size is None else size[0] + 1}


WINDOWS = Setting(
    keys=("sliding_window", "layer_types"),
    to_arguments=lambda config: _windows_of(config, config["layer_types"]),
    to_config=_windows_to_config,
)


def windows_unless_named(usual: Callable[[Config], Sequence[str]], *keys: str) -> Setting:
    """Returns the same of a family whose layers have their `usual` kinds where config.json names none."""
    return replace(
        WINDOWS,
        keys=(*WINDOWS.keys, *keys),
        to_arguments=lambda config: _windows_of(config, config.get("layer_types") or usual(config)),
    )


def _kinds(is_full: Sequence[bool]) -> list[str]:
    return ["full_attention" if full else "sliding_attention" for full in is_full]


WINDOWS_BUT_EVERY_FOURTH = windows_unless_named(
    lambda config: _kinds([layer % 4 == 0 for layer in range(config["num_hidden_layers"])])
)
WINDOWS_OF_ALL = windows_unless_named(
    lambda config: _kinds([config["sliding_window"] is None] * config["num_hidden_layers"])
)
WINDOWS_OF_LAST_LAYERS = windows_unless_named(
    lambda config: _kinds(
        [
            config.get("sliding_window", 4096) is None
            or layer < config.get("max_window_layers", 62)
            for layer in range(config["num_hidden_layers"])
        ]
    ),
    "max_window_layers",
)


def window_everywhere(default: int | None) -> Setting:
    """Returns one window of all layers, or none; `default` where config.json is silent."""

    def to_arguments(config: Config) -> Arguments:
        width = config.get("sliding_window", default)
        return {
            "window_size": None if width is None else (width - 1, 0),
            "window_attn_skip_freq": None,
        }

    return Setting(keys=("sliding_window",), to_arguments=to_arguments, to_config=_width_to_config)


def _only_windows_rotate(config: Config) -> Arguments:
    """Returns windows, and that full layers rotate nothing where others have windows."""
    every, count = config.get("sliding_window_pattern", 4), config["num_hidden_layers"]
    kinds = config.get("layer_types") or _kinds([not (layer + 1) % every for layer in range(count)])
    windows = _windows_of(config, kinds)
    has_window = _has_window({"num_layers": count, **windows})
    if config["sliding_window"] is None:
        return {**windows, "no_rope_freq": None}
    if not any(has_window):
        raise NotImplementedError(
            f"sliding_window={config['sliding_window']} in config.json is not served without a layer that has it; no "
            "layer would rotate; set it to null for layers that do"
        )
    return {
        **windows,
        "no_rope_freq": None if all(has_window) else [int(not on) for on in has_window],
    }


WINDOWS_ALONE_ROTATE = replace(
    WINDOWS, keys=(*WINDOWS.keys, "sliding_window_pattern"), to_arguments=_only_windows_rotate
)
