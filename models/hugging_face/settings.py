"""What config.json says in the words of Megatron-LM's arguments, and back.

A setting is a pair of functions over a few keys: the one direction is never written twice, and a
test turns every family's settings round. A key that no setting reads, that is not known to change
nothing, and whose value is not the one a family must have is refused, never ignored.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.mcore.settings.layer_patterns import layer_pattern
from megatron_cp.mcore.settings.sparse_settings import layers_that_pick

Config = Mapping[str, Any]
Arguments = dict[str, Any]


class MissingKeyError(ValueError):
    """config.json lacks a key that decides the model."""


class Keys(dict[str, Any]):
    """A configuration that names the key it lacks."""

    def __missing__(self, key: str) -> Any:
        raise MissingKeyError(f"{key} is missing in config.json; it must be there; add it")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Keys of config.json and the arguments that say the same."""

    keys: tuple[str, ...]
    to_arguments: Callable[[Config], Arguments]
    to_config: Callable[[Arguments], dict[str, Any]]

    def read(self, config: Config) -> Arguments:
        """Returns the arguments. Raises ValueError or NotImplementedError, naming the key."""
        return self.to_arguments(Keys(config))


def same(key: str, argument: str | None = None, *aliases: str) -> Setting:
    """Returns a value that both sides have, under the key's name (None) or another; `aliases` are older keys."""
    name = argument or key

    def to_arguments(config: Config) -> Arguments:
        return {name: config[next((a for a in aliases if a in config), key)]}

    return Setting(
        keys=(key, *aliases),
        to_arguments=to_arguments,
        to_config=lambda arguments: {key: arguments[name]},
    )


def negated(key: str, argument: str, default: bool) -> Setting:
    """Returns a switch that Megatron has the other way round."""
    return Setting(
        keys=(key,),
        to_arguments=lambda config: {argument: not config.get(key, default)},
        to_config=lambda arguments: {key: not arguments[argument]},
    )


def heads_of(config: Config, width: int | None = None) -> Arguments:
    """Returns heads of queries, of keys and values, and their width, which has a default."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or width or config["hidden_size"] // heads
    for name, value in (("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if value <= 0:
            raise ValueError(f"{name}={value} in config.json must be positive; correct it")
    if heads % groups:
        raise ValueError(
            f"num_attention_heads={heads} in config.json must be a multiple of "
            f"num_key_value_heads={groups}; correct it"
        )
    return {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "group_query_attention": groups != heads,
        "kv_channels": width,
    }


HEADS = Setting(
    keys=("num_attention_heads", "num_key_value_heads", "head_dim"),
    to_arguments=heads_of,
    to_config=lambda arguments: {
        "num_attention_heads": arguments["num_attention_heads"],
        "num_key_value_heads": arguments["num_query_groups"],
        "head_dim": arguments["kv_channels"],
    },
)


def heads_of_width(default: int) -> Setting:
    """Returns the heads of a family whose width has a default of its own; `attention_head_dim` is an older key."""

    def to_arguments(config: Config) -> Arguments:
        if "num_key_value_heads" not in config:  # a default of its own too, and not the heads
            raise MissingKeyError(
                "num_key_value_heads is missing in config.json; it must be there; add it"
            )
        return heads_of(config, config.get("attention_head_dim") or default)

    return replace(HEADS, keys=(*HEADS.keys, "attention_head_dim"), to_arguments=to_arguments)


_WIDTHS_OF_ALL = (
    same("num_hidden_layers", "num_layers"),
    same("hidden_size"),
    same("vocab_size"),
    same("max_position_embeddings"),
    same("rms_norm_eps", "layernorm_epsilon"),
)
_WIDTHS = (*_WIDTHS_OF_ALL, same("intermediate_size", "ffn_hidden_size"))
SIZES = (*_WIDTHS, HEADS)
SIZES_OF_EXPERTS_ALONE = (*_WIDTHS_OF_ALL, HEADS)
TIED = negated("tie_word_embeddings", "untie_embeddings_and_output_weights", False)
TIED_UNLESS_SAID = negated("tie_word_embeddings", "untie_embeddings_and_output_weights", True)


def layers_of_kind(kind: str, kinds: Sequence[str]) -> list[int]:
    """Returns 1 for each layer of the kind, 0 for each of full attention. Raises NotImplementedError for others."""
    unknown = sorted(set(kinds) - {kind, "full_attention"})
    if unknown:
        raise NotImplementedError(
            f"layer_types={unknown} in config.json is not served; layers may be {kind} "
            "or full_attention; convert a model of such layers"
        )
    return [int(one == kind) for one in kinds]


SWIGLU_LIMIT = same("swiglu_limit", "activation_func_clamp_value")


def _linear_layers_from_config(config: Config) -> Arguments:
    """Returns the linear layers. HF: a kind for each layer, or a full one after each so many - 1 linear ones."""
    every, count = config.get("full_attention_interval", 4), config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(count)
    ]
    is_linear = layers_of_kind("linear_attention", kinds)
    first = (is_linear.index(0) if 0 in is_linear else count) + 1
    regular = layer_pattern("linear_attention_freq", first, count)
    return {"linear_attention_freq": first if is_linear == regular else is_linear}


def _linear_layers_to_config(arguments: Arguments) -> dict[str, Any]:
    name = "linear_attention_freq"
    is_linear = layer_pattern(name, arguments[name], arguments["num_layers"])
    return {"layer_types": [f"{'linear' if on else 'full'}_attention" for on in is_linear]}


LINEAR_LAYERS = (
    Setting(
        keys=("layer_types", "full_attention_interval"),
        to_arguments=_linear_layers_from_config,
        to_config=_linear_layers_to_config,
    ),
    same("linear_conv_kernel_dim"),
    same("linear_key_head_dim"),
    same("linear_value_head_dim"),
    same("linear_num_key_heads"),
    same("linear_num_value_heads"),
)


def _unrotated_layers_from_config(config: Config) -> Arguments:
    """Returns the layers that do not rotate. HF: 1 for each that does, or after each so many - 1 one does not."""
    every, count = config.get("no_rope_layer_interval", 4), config["num_hidden_layers"]
    rotates = config.get("no_rope_layers")
    if rotates is None:
        rotates = [(layer + 1) % every for layer in range(count)]
    if len(rotates) != count:
        raise ValueError(
            f"no_rope_layers of {len(rotates)} in config.json must have one number for each of num_hidden_layers="
            f"{count}; correct it"
        )
    return {"no_rope_freq": None if all(rotates) else [int(not one) for one in rotates]}


UNROTATED_LAYERS = Setting(
    keys=("no_rope_layers", "no_rope_layer_interval"),
    to_arguments=_unrotated_layers_from_config,
    to_config=lambda arguments: {
        "no_rope_layers": [
            int(not one) for one in arguments["no_rope_freq"] or [0] * arguments["num_layers"]
        ]
    },
)


def switch(key: str, argument: str, default: bool = False) -> Setting:
    """Returns a switch that both sides have; `default` where config.json is silent."""
    return Setting(
        keys=(key,),
        to_arguments=lambda config: {argument: bool(config.get(key, default))},
        to_config=lambda arguments: {key: arguments[argument]},
    )


QKV_BIASES = switch("attention_bias", "add_qkv_bias")
ATTENTION_BIASES_UNLESS_SAID = switch("attention_bias", "add_qkv_bias", True)
QKV_BIASES_UNLESS_SAID = switch("qkv_bias", "add_qkv_bias", True)
QK_NORMS = switch("use_qk_norm", "qk_layernorm")


# Whether a folder holds their tensors is another matter: transformers drops them.
def _prediction_layers(key: str) -> Setting:
    return Setting(
        keys=(key,),
        to_arguments=lambda config: {"mtp_num_layers": config.get(key) or None},
        to_config=lambda arguments: {key: arguments.get("mtp_num_layers") or 0},
    )


PREDICTION_LAYERS = _prediction_layers("num_nextn_predict_layers")
MTP_LAYERS = _prediction_layers("mtp_num_hidden_layers")
A_PREDICTION_LAYER = Setting(  # of which config.json says nothing
    keys=(), to_arguments=lambda config: {"mtp_num_layers": 1}, to_config=lambda arguments: {}
)


def _latent_heads_from_config(config: Config) -> Arguments:
    arguments = heads_of(Keys({**config, "head_dim": config["v_head_dim"]}))
    if arguments["group_query_attention"]:
        raise NotImplementedError(
            f"num_key_value_heads={arguments['num_query_groups']} in config.json is not served; "
            "multi-latent attention has one per query head; set it to num_attention_heads"
        )
    return arguments


INDEX_SIZES = (
    same("index_n_heads", "dsa_indexer_n_heads"),
    same("index_head_dim", "dsa_indexer_head_dim"),
    same("index_topk", "dsa_indexer_topk"),
)


def _layers_that_pick(config: Config) -> list[str]:
    """Returns "full" for each layer whose index picks keys, "shared" for those that take a layer's before them."""
    num_layers, pattern = config["num_hidden_layers"], config.get("index_topk_pattern")
    if config.get("indexer_types") is not None:
        return list(config["indexer_types"])
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    offset = config.get("index_skip_topk_offset", 2)
    frequency = max(config.get("index_topk_freq") or 1, 1)
    is_full = [max(i + 1 - offset, 0) % frequency == 0 for i in range(num_layers)]
    return ["full" if one else "shared" for one in is_full]


def _sharing_from_config(config: Config) -> Arguments:
    """Returns every how many layers, and from which on, an index picks. Raises NotImplementedError for other orders."""
    kinds = _layers_that_pick(config)
    counted = range(1, config["num_hidden_layers"] + 1)
    for frequency, offset in ((f, o) for f in counted for o in counted):
        settings = Namespace(
            num_layers=len(counted),
            dsa_indexer_topk_freq=frequency,
            dsa_indexer_skip_topk_offset=offset,
        )
        if kinds == ["full" if one else "shared" for one in layers_that_pick(settings)]:
            return {
                "dsa_indexer_topk_freq": frequency,
                "dsa_indexer_skip_topk_offset": offset if frequency > 1 else 0,
            }
    raise NotImplementedError(
        f"indexer_types={kinds} in config.json is not served; for each of {len(counted)} layers it must be 'full', or "
        "'shared' behind one, with every so many layers a full one; convert a model of such layers"
    )


def _sharing_to_config(arguments: Arguments) -> dict[str, Any]:
    picks = layers_that_pick(Namespace(**arguments))
    return {"indexer_types": ["full" if one else "shared" for one in picks]}


SHARED_PICKS = Setting(
    keys=("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    to_arguments=_sharing_from_config,
    to_config=_sharing_to_config,
)
LATENT_SIZES = (
    *_WIDTHS,
    Setting(
        keys=("num_attention_heads", "num_key_value_heads"),
        to_arguments=_latent_heads_from_config,
        to_config=lambda arguments: {
            "num_attention_heads": arguments["num_attention_heads"],
            "num_key_value_heads": arguments["num_query_groups"],
        },
    ),
    same("q_lora_rank"),
    same("kv_lora_rank"),
    same("qk_nope_head_dim", "qk_head_dim"),
    same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    same("v_head_dim"),
)
