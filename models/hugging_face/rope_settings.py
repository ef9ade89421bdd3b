"""RoPE in config.json's two forms and Megatron's three: plain, Llama 3's, and YaRN.

Older configurations have `rope_theta` and `rope_scaling` beside each other, newer ones put both
into `rope_parameters`; `rope_type` was called `type` once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_cp.models.hugging_face.settings import Arguments, Config, Keys, Setting

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def said_of_rope(config: Config) -> tuple[int | float, str, dict[str, Any]]:
    """Returns (base, kind, what else is said) of either form: flat with rope_scaling, or rope_parameters.

    Raises NotImplementedError where both are there and differ: versions of transformers take one or the other.
    """
    newer, older = (_said_by(config, name) for name in ("rope_parameters", "rope_scaling"))
    if newer and older and _scaling(newer) != _scaling(older):
        raise NotImplementedError(
            f"rope_parameters={newer} and rope_scaling={older} in config.json say different things; leave the one that "
            "the model was trained with"
        )
    for name in ("rope_theta", "partial_rotary_factor"):
        _refuse_two(name, config, newer, older)
    said = newer or older
    theta = said.pop("rope_theta", None)
    theta = config["rope_theta"] if theta is None else theta
    kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    return (int(theta) if float(theta).is_integer() else theta), kind, said


def _said_by(config: Config, name: str) -> dict[str, Any]:
    said = config.get(name) or {}
    if not isinstance(said, Mapping):
        raise ValueError(f"{name}={said!r} in config.json must be an object or null; correct it")
    return dict(said)


def _refuse_two(name: str, config: Config, newer: Config, older: Config) -> None:
    """Raises NotImplementedError where a number stands in two places and differs: versions read one or the other."""
    alone = config.get(name)
    found = [said.get(name, alone) for said in (newer, older) if said]
    if len({*found, *([] if alone is None else [alone])}) > 1:
        raise NotImplementedError(
            f"config.json has more than one {name} ({alone} by itself, {newer.get(name)} in rope_parameters, "
            f"{older.get(name)} in rope_scaling); give each form that is there the one that the model was trained with"
        )


def _scaling(said: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what either form says beside the base."""
    kind = said.get("rope_type") or said.get("type") or "default"
    names = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    return {"rope_type": kind} | {name: value for name, value in said.items() if name not in names}


def take(said: dict[str, Any], allowed: Mapping[str, tuple[Any, ...]], kind: str) -> None:
    """Refuses what a kind of RoPE says beside the `allowed` values (empty: any)."""
    for name, value in said.items():
        if value is None and name in allowed:
            raise NotImplementedError(
                f"{name}=null of rope type {kind!r} in config.json is not served: transformers finds a number of its "
                "own; give it"
            )
        if name not in allowed or (allowed[name] and value not in allowed[name]):
            values = " or ".join(map(str, allowed.get(name, ()))) or "no such parameter"
            raise NotImplementedError(
                f"{name}={value} of rope type {kind!r} in config.json is not served; Megatron-Core "
                f"has {values}; convert a model without it"
            )


def unknown_rope(kind: str, served: str) -> NotImplementedError:
    """Returns the refusal of a kind that a family does not have."""
    return NotImplementedError(
        f"rope_type={kind!r} in config.json is not served; this family has {served}; convert a "
        "model with one of these"
    )


# Megatron-Core's scaled RoPE has these three numbers in its code, not in its configuration.
_LLAMA3 = {
    "low_freq_factor": (1.0,),
    "high_freq_factor": (4.0,),
    "original_max_position_embeddings": (8192,),
}
_NUMBERS: dict[str, dict[str, tuple[float, ...]]] = {
    "default": {},
    "linear": {"factor": ()},
    "llama3": {"factor": (), **_LLAMA3},
}


def _rope_from_config(config: Config, ignored: tuple[str, ...] = ()) -> Arguments:
    theta, kind, said = said_of_rope(config)
    said = {name: value for name, value in said.items() if name not in ignored}
    if said.get("partial_rotary_factor") == 1:  # transformers moves it there from the outer keys
        del said["partial_rotary_factor"]
    if kind == "yarn":
        return _yarn_arguments(theta, said)
    arguments = {
        "position_embedding_type": "rope",
        "rotary_base": theta,
        "rotary_percent": 1.0,
        "use_rope_scaling": kind == "llama3",
    }
    if kind not in _NUMBERS:
        raise unknown_rope(kind, "'default', 'linear', 'llama3' and 'yarn'")
    take(said, _NUMBERS[kind], kind)
    if kind == "linear":
        factor = Keys(said)["factor"]
        if not float(factor).is_integer():
            raise NotImplementedError(
                f"factor={factor} of rope type 'linear' in config.json is not served; Megatron-LM takes whole numbers; "
                "convert a model with one"
            )
        arguments["rotary_seq_len_interpolation_factor"] = int(factor)
    if kind == "llama3":
        numbers = Keys(said)
        arguments["rope_scaling_factor"] = float(numbers["factor"])
        for name in _LLAMA3:
            numbers[name]  # raises where it is missing; its value was judged by take
    return arguments


def _rope_to_config(arguments: Arguments) -> dict[str, Any]:
    if arguments["position_embedding_type"] == "yarn":
        return YARN.to_config(arguments)
    scaling: dict[str, Any] | None = None
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if factor is not None:
        scaling = {"rope_type": "linear", "factor": float(factor)}
    if arguments["use_rope_scaling"]:
        numbers = {name: values[0] for name, values in _LLAMA3.items()}
        scaling = {"rope_type": "llama3", "factor": arguments["rope_scaling_factor"], **numbers}
    return {"rope_theta": float(arguments["rotary_base"]), "rope_scaling": scaling}


ROPE = Setting(keys=_ROPE_KEYS, to_arguments=_rope_from_config, to_config=_rope_to_config)


def _rope_but_yarn_from_config(config: Config) -> Arguments:
    """Returns RoPE of a family that rotates neighbours: Megatron-Core's YaRN rotates halves alone."""
    if said_of_rope(config)[1] == "yarn":
        raise unknown_rope("yarn", "'default', 'linear' and 'llama3'")
    return _rope_from_config(config)


ROPE_BUT_YARN = replace(ROPE, to_arguments=_rope_but_yarn_from_config)


# A text's tokens have one position: how pairs are dealt to time, height and width changes nothing.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
ROPE_OF_TEXTS = replace(ROPE, to_arguments=lambda config: _rope_from_config(config, _OF_IMAGES))


def without_images(config: Config) -> dict[str, Any]:
    """Returns the configuration without what is said of positions in images."""
    return {
        key: {name: one for name, one in value.items() if name not in _OF_IMAGES}
        if key in _ROPE_KEYS and isinstance(value, Mapping)
        else value
        for key, value in config.items()
    }


def partial_rope(default_share: float, ignored: tuple[str, ...] = ()) -> Setting:
    """Returns RoPE of a share of each head; `default_share` where config.json is silent; `ignored` changes nothing."""

    def to_arguments(config: Config) -> Arguments:
        theta, kind, said = said_of_rope(config)
        if kind != "default":
            raise unknown_rope(kind, "'default'")
        alone = config.get("partial_rotary_factor", default_share)
        share = said.pop("partial_rotary_factor", alone)
        take({name: value for name, value in said.items() if name not in ignored}, {}, kind)
        return {
            "position_embedding_type": "rope",
            "rotary_base": theta,
            "rotary_percent": share,
            "use_rope_scaling": False,
        }

    return Setting(
        keys=(*_ROPE_KEYS, "partial_rotary_factor"),
        to_arguments=to_arguments,
        to_config=lambda arguments: {
            "rope_theta": float(arguments["rotary_base"]),
            "rope_scaling": None,
            "partial_rotary_factor": arguments["rotary_percent"],
        },
    )


PARTIAL_ROPE_OF_TEXTS = partial_rope(0.25, _OF_IMAGES)
HALF_ROPE = partial_rope(0.5)
HALF_ROPE_OF_TEXTS = partial_rope(0.5, _OF_IMAGES)

_YARN = {
    "factor": "rotary_scaling_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "truncate": "yarn_correction_range_round_to_int",
}


def _yarn_from_config(config: Config) -> Arguments:
    theta, kind, said = said_of_rope(config)
    if kind != "yarn":
        raise unknown_rope(kind, "'yarn'")
    return _yarn_arguments(theta, said)


def _yarn_arguments(theta: float, said: dict[str, Any]) -> Arguments:
    take(said, dict.fromkeys(_YARN, ()), "yarn")
    said = Keys({"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True} | said)
    return {
        "position_embedding_type": "yarn",
        "rotary_base": theta,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        **{argument: said[name] for name, argument in _YARN.items()},
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }


YARN = Setting(
    keys=_ROPE_KEYS,
    to_arguments=_yarn_from_config,
    to_config=lambda arguments: {
        "rope_theta": float(arguments["rotary_base"]),
        "rope_scaling": {"rope_type": "yarn"}
        | {name: arguments[argument] for name, argument in _YARN.items()},
    },
)


_SCALED_QUERIES = "llama_4_scaling_beta"
_MSCALES = ("mscale", "mscale_all_dim")


def _mistral_yarn_from_config(config: Config) -> Arguments:
    """Returns YaRN with its scale of angles, and beta, by which queries grow with their position (query_scale.py)."""
    theta, kind, said = said_of_rope(config)
    if kind != "yarn":
        raise unknown_rope(kind, "'yarn'")
    beta = Keys(said)[_SCALED_QUERIES]
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < math.inf:
        raise ValueError(
            f"{_SCALED_QUERIES}={beta!r} in config.json must be a number from 0 on; correct it"
        )
    scales = {name: said.get(name) for name in _MSCALES}
    apart = (_SCALED_QUERIES, *_MSCALES, "max_position_embeddings")  # the last one is not read
    arguments = _yarn_arguments(theta, {k: v for k, v in said.items() if k not in apart})
    if all(scales.values()):  # transformers heeds both or none
        arguments |= scales
    return {**arguments, _SCALED_QUERIES: beta or None}


def _mistral_yarn_to_config(arguments: Arguments) -> dict[str, Any]:
    config = YARN.to_config(arguments)
    scales = {name: arguments[name] for name in _MSCALES}
    scales[_SCALED_QUERIES] = arguments[_SCALED_QUERIES] or 0.0
    return {**config, "rope_scaling": config["rope_scaling"] | scales}


MISTRAL_YARN = Setting(
    keys=_ROPE_KEYS, to_arguments=_mistral_yarn_from_config, to_config=_mistral_yarn_to_config
)


_LATENT_YARN = {
    "factor": "rotary_scaling_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


def _latent_rope_from_config(config: Config) -> Arguments:
    theta, kind, said = said_of_rope(config)
    for name in ("mscale", "mscale_all_dim"):
        if not said.get(name):
            said.pop(name, None)  # null and 0 are as if it were not there
    arguments = {
        "position_embedding_type": "rope",
        "rope_type": "rope" if kind == "default" else "yarn",
        "rotary_base": theta,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rotary_scaling_factor": 1.0,
    }
    if kind not in ("default", "yarn"):
        raise unknown_rope(kind, "'default' and 'yarn'")
    numbers: dict[str, tuple[float, ...]] = dict.fromkeys(
        _LATENT_YARN if kind == "yarn" else (), ()
    )
    take(said, {**numbers, "partial_rotary_factor": (1.0,)}, kind)
    if kind == "yarn":
        if bool(said.get("mscale")) != bool(said.get("mscale_all_dim")):
            raise NotImplementedError(
                f"mscale={said.get('mscale')} with mscale_all_dim={said.get('mscale_all_dim')} in "
                "config.json is not served; both or none of them must be given; convert such a "
                "model"
            )
        said = Keys({"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0} | said)
        arguments |= {argument: said[name] for name, argument in _LATENT_YARN.items()}
    return arguments


LATENT_ROPE = Setting(
    keys=_ROPE_KEYS,
    to_arguments=_latent_rope_from_config,
    to_config=lambda arguments: {
        "rope_theta": float(arguments["rotary_base"]),
        "rope_scaling": None
        if arguments["rope_type"] == "rope"
        else {"rope_type": "yarn"}
        | {
            name: arguments[argument]
            for name, argument in _LATENT_YARN.items()
            if arguments["mscale_all_dim"] or not name.startswith("mscale")
        },
    },
)
