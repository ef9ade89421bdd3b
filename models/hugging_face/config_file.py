"""config.json as Megatron-LM's arguments and back, checked as a whole."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatron_cp.mcore.settings.layer_patterns import PATTERNS, layer_pattern
from megatron_cp.mcore.settings.longrope_settings import LONGROPE
from megatron_cp.models.hugging_face.families import FAMILIES
from megatron_cp.models.hugging_face.family import Family
from megatron_cp.models.hugging_face.refusal import ConversionError, listing, refuse
from megatron_cp.models.hugging_face.rope_settings import without_images
from megatron_cp.models.hugging_face.settings import Arguments, Config

# What does not change the weights or what they compute. Duplicates of a key that is read
# (experts_per_token) and counts that follow from others (qk_head_dim) are among them; so are prediction layers of
# families whose tensors of them are refused by name. The length of pretraining decides LongRoPE alone, which one
# family has and reads it.
_CHANGES_NOTHING = """
    _attn_implementation _name_or_path architectures attn_implementation auto_map bos_token_id
    cross_attention_hidden_size dtype eos_token_id ep_size experts_per_token head_dim
    initial_context_length initializer_range max_window_layers model_type num_mtp_layers
    num_nextn_predict_layers original_max_position_embeddings output_attentions output_hidden_states
    output_router_logits pad_token_id qk_head_dim return_dict router_aux_loss_coef aux_loss_alpha seq_aux
    sliding_window tokenizer_class torch_dtype transformers_version unsloth_fixed unsloth_version
    use_cache use_return_dict vocab_padding
"""
CHANGES_NOTHING = frozenset(_CHANGES_NOTHING.split())
_MOST_LAYERS = 10_000  # far more than any model has


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of the language model in config.json.

    Raises ConversionError where there is none, or no JSON object.
    """
    return _language_model_of(read_config_file(folder))


def _language_model_of(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the language model, which of a model for images too is a part."""
    model_type, inner = config.get("model_type"), config.get("text_config")
    families = [f for f in FAMILIES.values() if f.wrapper and f.wrapper.model_type == model_type]
    if not families:
        return config
    said = inner.get("model_type") if isinstance(inner, dict) else None
    family = next((family for family in families if family.model_type == said), None)
    if family is None or not isinstance(inner, dict):
        raise refuse(
            f"model_type={model_type!r} in config.json must have a text_config of model_type="
            f"{' or '.join(repr(family.model_type) for family in families)}; convert one of these"
        )
    of_both = {"dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"}
    outer = {key: value for key, value in config.items() if key in of_both}
    tied = {one["tie_word_embeddings"] for one in (outer, inner) if "tie_word_embeddings" in one}
    if len(tied) > 1:
        raise refuse(
            "config.json says tie_word_embeddings twice, and differently, in text_config; transformers reads one for "
            "the whole model and the other for its language model: give both the one that the model was trained with"
        )
    return {**outer, **inner, "architectures": [family.architecture]}


def read_config_file(folder: Path) -> dict[str, Any]:
    """Returns the content of config.json. Raises ConversionError where there is none, or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise refuse(f"{path} is missing; a Hugging Face folder has one; give another folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise refuse(
            f"{path} is not JSON ({problem}); it must be one object; download it again"
        ) from None
    if not isinstance(config, dict):
        raise refuse(
            f"{path} holds a {type(config).__name__}; it must be one object; download it again"
        )
    return config


def config_alone(family: Family, config: dict[str, Any], arguments: Arguments) -> dict[str, Any]:
    """Returns config.json of a language model of the family as transformers reads it alone.

    What it is silent of is said: another family's defaults may be others.
    """
    if family.alone is None:
        return config
    silent = (one for one in family.alone.settings if not config.keys() & {*one.keys})
    said = {key: value for one in silent for key, value in one.to_config(arguments).items()}
    own = {"model_type": family.alone.model_type, "architectures": [family.alone.architecture]}
    return said | without_images(config) | own


def family_of(config: Config) -> Family:
    """Returns the family that `model_type` names. Raises ConversionError for any other."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise refuse(
            f"model_type={model_type!r} in config.json is not served; served are "
            f"{', '.join(FAMILIES)}; convert one of these"
        )
    return FAMILIES[model_type]


def arguments_of(
    config: Config, *, make_vocab_size_divisible_by: int = 1, ignored_keys: Collection[str] = ()
) -> Arguments:
    """Returns Megatron-LM's arguments of the model, with the padded vocabulary.

    Args:
        config: content of config.json.
        make_vocab_size_divisible_by: what the padded vocabulary is a multiple of.
        ignored_keys: keys of config.json that the caller says change nothing.

    Raises:
        ConversionError: for what is missing, unknown or not served, all reasons at once.
    """
    family = family_of(config)
    config = _in_settings_words(config, family)
    ignored_keys = {family.words.get(key, key) for key in ignored_keys}
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:  # each is looked for by name
        raise refuse(
            f"num_hidden_layers={layers} in config.json is served up to {_MOST_LAYERS}; correct it"
        )
    arguments: Arguments = dict(family.constants)
    reasons = list(_not_served(family, config, ignored_keys))
    for setting in family.settings:
        try:
            arguments |= setting.read(config)
        except (ValueError, NotImplementedError) as problem:
            reasons.append(str(problem))
        except (TypeError, AttributeError, IndexError, ZeroDivisionError) as problem:
            said = {key: config[key] for key in setting.keys if key in config}
            reasons.append(
                f"{said} in config.json cannot be read ({problem}); it must be as transformers "
                "writes it; correct it"
            )
    if reasons:
        raise ConversionError(dict.fromkeys(reasons))
    _check_counts(arguments)
    unit = make_vocab_size_divisible_by
    arguments["padded_vocab_size"] = -(-arguments["vocab_size"] // unit) * unit
    return arguments


def _in_settings_words(config: Config, family: Family) -> dict[str, Any]:
    """Returns the configuration under the keys of the family's settings. Raises ConversionError for two that differ."""
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        name = family.words.get(key, key)
        if renamed.get(name, value) != value:
            raise refuse(
                f"config.json has {name} under two names, {renamed[name]!r} and {value!r}; leave the one that the "
                "model was trained with"
            )
        renamed[name] = value
    return renamed


def _not_served(family: Family, config: Config, ignored_keys: Collection[str]) -> Iterator[str]:
    """Yields one reason per key whose value is not served, and one for all keys that nobody knows."""
    read = {key for setting in family.settings for key in setting.keys}
    for key, allowed in family.only.items():
        value = config.get(key, allowed[0])
        values = value if isinstance(value, list) else [value]
        if key not in ignored_keys and not all(one in allowed for one in values):
            shown = ", ".join(repr(one) for one in allowed if one is not None) or "no value"
            shown_value = sorted({str(one) for one in values}) if len(values) > 1 else value
            yield (
                f"{key}={shown_value!r} in config.json is not served for {family.model_type}; "
                f"served is {shown}; convert a model without it"
            )
    nothing = CHANGES_NOTHING | family.changes_nothing | set(ignored_keys)
    unknown = sorted(set(config) - read - set(family.only) - nothing)
    if unknown:
        yield (
            f"config.json has keys that {family.model_type} is not known to have: "
            f"{listing(f'{key}={config[key]!r}' for key in unknown)}; what is unknown may change "
            f"the model; give --ignore-config-keys {' '.join(unknown)} if it does not"
        )


_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "num_attention_heads")
_SIZES_OF_STATES = (
    *("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"),
    *("linear_num_key_heads", "linear_key_head_dim"),
    *("linear_num_value_heads", "linear_value_head_dim"),
)


def _check_counts(arguments: Arguments) -> None:
    """Refuses sizes that are not positive whole numbers."""
    names = (*_SIZES, *(name for name in _SIZES_OF_STATES if name in arguments))
    bad = [
        f"{name}={arguments[name]!r}"
        for name in names
        if not _is_number(arguments[name], int) or arguments[name] <= 0
    ]
    if bad:
        raise refuse(f"{listing(bad)} of config.json must be positive whole numbers; correct it")
    for name in ("layernorm_epsilon", "rotary_base"):
        value = arguments.get(name, 1)
        if not _is_number(value, int, float) or not 0 < value < math.inf:
            raise refuse(f"{name}={value!r} of config.json must be positive and finite; correct it")


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def config_of(family: Family, arguments: Arguments) -> dict[str, Any]:
    """Returns a config.json made from Megatron-LM's arguments: what decides the model, no more.

    Raises:
        ConversionError: naming the arguments that the checkpoint does not hold.
    """
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.always,
    }
    missing = []
    for setting in family.settings:
        try:
            config |= setting.to_config(arguments)
        except KeyError as problem:
            missing.append(str(problem.args[0]))
    if missing:
        raise refuse(
            f"the checkpoint's arguments lack {listing(sorted(set(missing)))}; they decide "
            "config.json; give --hf-folder with the model's config.json"
        )
    for key in ("norm_topk_prob", "attention_bias"):  # their default differs from the family's
        if family.only.get(key, (None,))[0] is True:
            config[key] = True
    published = {name: key for key, name in family.words.items()}
    return {published.get(key, key): value for key, value in config.items()}


# Sizes that a run may choose: they are read from the tensors or change nothing.
_FREE = {
    *("vocab_size", "padded_vocab_size", "max_position_embeddings", "moe_router_dtype"),
    "is_hybrid_model",  # where training starts
}


# What makes another model of the same tensors, and what it must be where a family's config.json has no word for it.
_UNSAID = {
    "squared_relu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_k_norm_epsilon": None,
    "hybrid_layer_pattern": None,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "no_rope_freq": None,
    "llama_4_scaling_beta": None,
    "rotary_seq_len_interpolation_factor": None,
    **dict.fromkeys(LONGROPE),
    "use_mup": False,
}
_UNSAID_OF_EXPERTS = {
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_gate": False,
    "moe_latent_size": None,
    "moe_apply_probs_on_input": False,
    "moe_mlp_glu_interleave_size": None,
    "moe_shared_expert_glu_interleave_size": None,
}
# Of these 1 is as good as none.
_FACTORS = {
    "moe_router_num_groups",
    "moe_router_topk_scaling_factor",
    "rotary_seq_len_interpolation_factor",
}


def disagreements(said: Arguments, saved: Arguments) -> list[str]:
    """Returns how a checkpoint's own arguments contradict config.json; arguments it lacks are not asked.

    `said` are those of config.json; it also contradicts what it has no word for.
    """
    unsaid = _UNSAID | (_UNSAID_OF_EXPERTS if said.get("num_experts") else {})
    expected: Arguments = unsaid | said
    expected["apply_layernorm_1p"] = expected["layernorm_zero_centered_gamma"]  # Megatron-LM's name
    expected, saved = (
        {name: None if name in _FACTORS and value == 1 else value for name, value in one.items()}
        for one in (expected, saved)
    )
    free = _FREE | {"group_query_attention"}  # num_query_groups says it
    if expected["multi_latent_attention"]:
        free |= {"kv_channels", "num_query_groups"}  # Megatron does not read them then
    if expected["add_bias_linear"]:
        free |= {"add_qkv_bias"}  # this neither
    if saved.get("group_query_attention") is False:  # so the number of groups says nothing
        saved = saved | {"num_query_groups": saved.get("num_attention_heads")}
    if saved.get("moe_router_load_balancing_type") in ("sinkhorn", ["sinkhorn"]):
        saved["moe_router_pre_softmax"] = True  # so it weighs experts, whatever was said
    if (saved.get("vocab_size") or 0) > said["vocab_size"]:
        free -= {"vocab_size"}  # what the run learned of the others would be cut off
    if expected["window_size"] is not None:
        everywhere = [1] * said["num_layers"]
        for arguments in (
            expected,
            saved,
        ):  # without a frequency Megatron gives all layers the window
            if "window_attn_skip_freq" in arguments:
                frequency = arguments["window_attn_skip_freq"]
                arguments["window_attn_skip_freq"] = frequency or everywhere
    one, other = (
        _layer_by_layer(arguments, said["num_layers"]) for arguments in (expected, expected | saved)
    )
    return [
        f"{name}: config.json {'says' if name in said else 'means'} {value!r}, the checkpoint {saved[name]!r}"
        for name, value in expected.items()
        if name in saved and name not in free and not _means_the_same(one[name], other[name])
    ]


def _layer_by_layer(arguments: Arguments, num_layers: int) -> Arguments:
    """Returns arguments that say of each layer what it is, however that was said."""
    patterns: Arguments = {
        name: layer_pattern(name, arguments[name], num_layers)
        for name in PATTERNS
        if arguments.get(name)
    }
    if arguments["experimental_attention_variant"] == "gdn":  # Megatron-Core 0.20's name
        patterns["experimental_attention_variant"] = "gated_delta_net"
    return arguments | patterns


def _means_the_same(one: Any, other: Any) -> bool:
    """Returns whether values are equal, where a tuple may be a list and an absent value None, False or 0."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other or (not one and not other))
