"""LongRoPE in config.json (Phi-3 of 128K tokens, Phi-4-mini) and in Megatron-LM's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_cp.mcore.settings.longrope_settings import are_factors
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face.settings import Arguments, Config, Keys, Setting, heads_of

_LISTS = {"short_factor": "longrope_short_factors", "long_factor": "longrope_long_factors"}
_LENGTH = "original_max_position_embeddings"
_NUMBERS = ("factor", "attention_factor")
_PLAIN = rope.partial_rope(1.0)


def _from_config(config: Config) -> Arguments:
    theta, kind, said = rope.said_of_rope(config)
    if kind == "default":
        return _PLAIN.to_arguments(config)
    if kind not in ("longrope", "su"):  # its older name
        raise rope.unknown_rope(kind, "'default' and 'longrope'")
    share = said.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    length, inner = config[_LENGTH], said.pop(_LENGTH, config[_LENGTH])
    if inner != length:
        raise NotImplementedError(
            f"{_LENGTH}={length} in config.json and {inner} in its rope_parameters say different things; give both the "
            "one that the model was trained with"
        )
    scalars = {name: said.pop(name) for name in _NUMBERS if name in said}
    rope.take(said, dict.fromkeys(_LISTS, ()), kind)
    lists = {argument: Keys(said)[name] for name, argument in _LISTS.items()}
    count = int(heads_of(config)["kv_channels"] * share) // 2
    for name, argument in _LISTS.items():
        found = lists[argument]
        if not are_factors(found, count):
            raise ValueError(
                f"{name} of {len(found)} in config.json must be {count} positive numbers, one for each frequency; "
                "correct it"
            )
    return {
        "position_embedding_type": "rope",
        "rotary_base": theta,
        "rotary_percent": share,
        "use_rope_scaling": False,
        **{argument: [float(one) for one in found] for argument, found in lists.items()},
        "longrope_original_max_position_embeddings": length,
        "longrope_attention_factor": _scale(config, scalars),
    }


def _scale(config: Config, said: Mapping[str, Any]) -> float:
    """Returns what cosines and sines are scaled by, where it is not said by how far positions are stretched."""
    if said.get("attention_factor") is not None:
        return float(said["attention_factor"])
    factor = said.get("factor")
    factor = config["max_position_embeddings"] / config[_LENGTH] if factor is None else factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(config[_LENGTH]))


def _to_config(arguments: Arguments) -> dict[str, Any]:
    config = _PLAIN.to_config(arguments)
    if arguments.get("longrope_long_factors") is None:
        return config
    length = arguments["longrope_original_max_position_embeddings"]
    scaling = {
        "rope_type": "longrope",
        **{name: arguments[argument] for name, argument in _LISTS.items()},
        "attention_factor": arguments["longrope_attention_factor"],
        _LENGTH: length,
    }
    return config | {"rope_scaling": scaling, _LENGTH: length}


PARTIAL_OR_LONG_ROPE = Setting(
    keys=(*_PLAIN.keys, _LENGTH), to_arguments=_from_config, to_config=_to_config
)
