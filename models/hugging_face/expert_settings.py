"""Experts in the words of config.json and of Megatron-LM's arguments: which layers have them, how many, how chosen."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.mcore.settings.layer_patterns import layer_pattern
from megatron_cp.models.hugging_face.settings import (
    Arguments,
    Config,
    Keys,
    Setting,
    negated,
    same,
)

NUM_EXPERTS = same("num_local_experts", "num_experts", "num_experts")
NUM_EXPERTS_ALONE = same("num_experts")
ROUTED_EXPERTS = same("n_routed_experts", "num_experts", "num_local_experts")


def _top_k_from_config(config: Config) -> Arguments:
    """Returns how many experts are chosen: at least two, or Megatron-Core's weights of them would not sum to 1."""
    top_k = config["num_experts_per_tok"]
    if top_k < 2:
        raise NotImplementedError(
            f"num_experts_per_tok={top_k} in config.json is not served; Megatron-Core scales the "
            "weights of at least 2; convert a model with 2 or more"
        )
    return {"moe_router_topk": top_k}


TOP_K = Setting(
    keys=("num_experts_per_tok",),
    to_arguments=_top_k_from_config,
    to_config=lambda arguments: {"num_experts_per_tok": arguments["moe_router_topk"]},
)
LATENT_SIZE = Setting(
    keys=("moe_latent_size",),
    to_arguments=lambda config: {"moe_latent_size": config.get("moe_latent_size")},
    to_config=lambda arguments: {"moe_latent_size": arguments.get("moe_latent_size")},
)
EXPERT_WIDTH = same("moe_intermediate_size", "moe_ffn_hidden_size")
NO_DENSE_LAYERS = Setting(  # whose width Megatron-Core asks for all the same
    keys=("intermediate_size",),
    to_arguments=lambda config: {"ffn_hidden_size": config["moe_intermediate_size"]},
    to_config=lambda arguments: {},
)
EXPERTS_AS_WIDE_AS_MLP = Setting(
    keys=(),
    to_arguments=lambda config: {"moe_ffn_hidden_size": config["intermediate_size"]},
    to_config=lambda arguments: {},
)
# Softmax over the chosen experts alone is softmax over all, scaled to sum 1 over the chosen.
RENORMALISED = negated("norm_topk_prob", "moe_router_pre_softmax", False)
RENORMALISED_UNLESS_SAID = negated("norm_topk_prob", "moe_router_pre_softmax", True)


def _frequency(is_expert: list[int]) -> int | list[int]:
    return 1 if all(is_expert) else is_expert


def _expert_layers(arguments: Arguments) -> list[bool]:
    name = "moe_layer_freq"
    return layer_pattern(name, arguments[name], arguments["num_layers"])


def _sparse_layers_from_config(config: Config) -> Arguments:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    is_expert = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    return {"moe_layer_freq": _frequency(is_expert)}


SPARSE_LAYERS = Setting(
    keys=("decoder_sparse_step", "mlp_only_layers"),
    to_arguments=_sparse_layers_from_config,
    to_config=lambda arguments: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, on in enumerate(_expert_layers(arguments)) if not on],
    },
)
FIRST_DENSE_LAYERS = Setting(
    keys=("first_k_dense_replace",),
    to_arguments=lambda config: {
        "moe_layer_freq": _frequency(
            [
                int(layer >= config["first_k_dense_replace"])
                for layer in range(config["num_hidden_layers"])
            ]
        )
    },
    to_config=lambda arguments: {
        "first_k_dense_replace": [*_expert_layers(arguments), True].index(True)
    },
)


def _named_layers_from_config(config: Config) -> Arguments:
    """Returns which layers have experts. HF: a kind for each; without them the first is dense.

    transformers does not read first_k_dense_replace, which published folders have and other programs read.
    """
    return _layers_by_name(config, usual=1)


def _counted_layers_from_config(config: Config) -> Arguments:
    """Returns the same for families whose first_k_dense_replace says it where no kinds are named; HF: 3."""
    return _layers_by_name(config, usual=config.get("first_k_dense_replace", 3))


def _layers_by_name(config: Config, usual: int) -> Arguments:
    count, first = config["num_hidden_layers"], config.get("first_k_dense_replace")
    kinds = config.get("mlp_layer_types") or [
        "dense" if layer < usual else "sparse" for layer in range(count)
    ]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ValueError(
            f"mlp_layer_types={kinds} in config.json must be dense or sparse for each of num_hidden_layers={count}; "
            "correct it"
        )
    is_expert = [int(kind == "sparse") for kind in kinds]
    if first is not None and is_expert != [int(layer >= first) for layer in range(count)]:
        raise NotImplementedError(
            f"first_k_dense_replace={first} in config.json says other layers than mlp_layer_types (of which without "
            f"any {usual} are dense); give mlp_layer_types those of the weights, and leave out the other"
        )
    return {"moe_layer_freq": _frequency(is_expert)}


NAMED_LAYERS = Setting(
    keys=("mlp_layer_types", "first_k_dense_replace"),
    to_arguments=_named_layers_from_config,
    to_config=lambda arguments: {
        "mlp_layer_types": ["sparse" if on else "dense" for on in _expert_layers(arguments)]
    },
)
COUNTED_LAYERS = Setting(
    keys=NAMED_LAYERS.keys,
    to_arguments=_counted_layers_from_config,
    to_config=lambda arguments: (
        NAMED_LAYERS.to_config(arguments) | FIRST_DENSE_LAYERS.to_config(arguments)
    ),
)


NAMED_LAYERS_OR_COUNTED = replace(  # of one dense layer where nothing is said
    COUNTED_LAYERS,
    to_arguments=lambda config: _layers_by_name(config, config.get("first_k_dense_replace", 1)),
)


def _shared_from_config(config: Config) -> Arguments:
    num_shared = config["n_shared_experts"]
    if not num_shared:
        raise NotImplementedError(
            f"n_shared_experts={num_shared} in config.json is not served; this family's models "
            "have at least 1; convert a model with shared experts"
        )
    return {"moe_shared_expert_intermediate_size": num_shared * config["moe_intermediate_size"]}


SHARED_WIDTH = Setting(
    keys=("n_shared_experts",),
    to_arguments=_shared_from_config,
    to_config=lambda arguments: {
        "n_shared_experts": arguments["moe_shared_expert_intermediate_size"]
        // arguments["moe_ffn_hidden_size"]
    },
)


GATED_SHARED_WIDTH = same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")


def _groups_from_config(config: Config) -> Arguments:
    """Groups are chosen by the sum of their best experts: HF takes 2, Megatron top-k per group."""
    groups, chosen, top_k = config["n_group"], config["topk_group"], config["num_experts_per_tok"]
    if groups == 1:
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if top_k // chosen != 2:
        raise NotImplementedError(
            f"num_experts_per_tok={top_k} with topk_group={chosen} in config.json is not served; "
            "Megatron-Core ranks groups by as many experts as it takes of each, which must be 2; "
            "convert a model with num_experts_per_tok = 2 x topk_group"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


GROUPS = Setting(
    keys=("n_group", "topk_group"),
    to_arguments=_groups_from_config,
    to_config=lambda arguments: {
        "n_group": arguments["moe_router_num_groups"] or 1,
        "topk_group": arguments["moe_router_group_topk"] or 1,
    },
)

GROUPS_UNLESS_SAID = replace(  # one group where config.json is silent, or says null
    GROUPS,
    to_arguments=lambda config: _groups_from_config(
        Keys({**config, **{name: config.get(name) or 1 for name in GROUPS.keys}})
    ),
)


def _greedy_groups_from_config(config: Config) -> Arguments:
    """Groups are chosen by their best expert; of as many as Megatron-Core takes of each, it takes the sum."""
    method, top_k = config.get("topk_method", "greedy"), config["num_experts_per_tok"]
    if method == "greedy":
        return {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if method != "group_limited_greedy":
        raise NotImplementedError(
            f"topk_method={method!r} in config.json is not served; this family has 'greedy' and "
            "'group_limited_greedy'; convert a model with one of these"
        )
    groups, chosen = config["n_group"], config["topk_group"]
    if top_k // chosen != 1:
        raise NotImplementedError(
            f"num_experts_per_tok={top_k} with topk_group={chosen} of topk_method={method!r} in config.json is not "
            "served; Megatron-Core ranks groups by as many experts as it takes of each, and this family by one; "
            "convert a model of topk_method='greedy'"
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


GREEDY_GROUPS = Setting(
    keys=("topk_method", *GROUPS.keys),
    to_arguments=_greedy_groups_from_config,
    to_config=lambda arguments: {
        "topk_method": "group_limited_greedy" if arguments["moe_router_num_groups"] else "greedy",
        **GROUPS.to_config(arguments),
    },
)


def _scaled_from_config(config: Config) -> Arguments:
    """Returns nothing: chosen experts' weights sum to 1 before the factor, in Megatron-Core too. HF: unless said."""
    if not config.get("norm_topk_prob", False):
        raise NotImplementedError(
            "norm_topk_prob=False, which this family means where config.json is silent, is not served; Megatron-Core "
            "scales the weights that its sigmoid router chooses; convert a model with norm_topk_prob=True"
        )
    return {}


SCALED_TO_ONE = Setting(
    keys=("norm_topk_prob",),
    to_arguments=_scaled_from_config,
    to_config=lambda arguments: {"norm_topk_prob": True},
)
ROUTED_SCALING = same("routed_scaling_factor", "moe_router_topk_scaling_factor")
