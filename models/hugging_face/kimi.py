"""Kimi Linear: layers of Kimi delta attention, between them latent attention without positions; experts behind."""

from __future__ import annotations

from typing import Any

from megatron_cp.mcore.settings.layer_patterns import layer_pattern
from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.common import EXPERTS_BY_SIGMOID, LLAMA_LIKE, NO_BIAS, PLAIN
from megatron_cp.models.hugging_face.family import Family

_LINEAR = "linear_attn_config"
_OF_LINEAR = {  # in it, and beside it
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_KINDS = {"kda_layers": "linear_attention", "full_attn_layers": "full_attention"}


def _linear_from_config(config: s.Config) -> s.Arguments:
    """Returns which layers are linear and their sizes; published folders say both in one object, counted from 1."""
    inner, count = config.get(_LINEAR) or {}, config["num_hidden_layers"]
    said = {name: inner[key] for key, name in _OF_LINEAR.items() if key in inner}
    if any(key in inner for key in _KINDS):
        kinds: list[str | None] = [None] * count
        for key, kind in _KINDS.items():
            for layer in inner[key]:
                kinds[layer - 1] = kind
        said["layer_types"] = kinds
    for name, value in said.items():
        if config.get(name, value) not in (None, value):
            raise NotImplementedError(
                f"{name}={config[name]} and {_LINEAR} in config.json say different things; leave the one that the "
                "model was trained with"
            )
    sizes = s.Keys({**config, **said})
    kinds = sizes["layer_types"]
    if len(kinds) != count or not set(kinds) <= set(_KINDS.values()):
        raise ValueError(
            f"layer_types={kinds} in config.json must be linear_attention or full_attention for each of "
            f"num_hidden_layers={count}; correct it"
        )
    heads, width = sizes["linear_num_heads"], sizes["linear_head_dim"]
    return {
        "linear_attention_freq": [int(kind == "linear_attention") for kind in kinds],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": sizes["linear_conv_kernel_dim"],
    }


def _linear_to_config(arguments: s.Arguments) -> dict[str, Any]:
    name = "linear_attention_freq"
    is_linear = layer_pattern(name, arguments[name], arguments["num_layers"])
    if arguments["linear_key_head_dim"] != arguments["linear_value_head_dim"]:
        raise KeyError("linear_value_head_dim as linear_key_head_dim")
    return {
        _LINEAR: {
            "kda_layers": [i + 1 for i, linear in enumerate(is_linear) if linear],
            "full_attn_layers": [i + 1 for i, linear in enumerate(is_linear) if not linear],
            "head_dim": arguments["linear_key_head_dim"],
            "num_heads": arguments["linear_num_value_heads"],
            "short_conv_kernel_size": arguments["linear_conv_kernel_dim"],
        }
    }


_EXPERTS = "block_sparse_moe."
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    weights={
        "model": w.OUTER_ALONE,
        "layer": w.LATENT_ATTENTION,
        "linear layer": w.KIMI_DELTA_ATTENTION,
        "dense layer": w.DENSE_BEHIND_OWN_NORM,
        "expert layer": (
            *w.OWN_NORM_BEFORE_EXPERTS,
            *w.renamed((*w.DEEPSEEK_ROUTER, *w.SHARED_EXPERTS), "mlp.", _EXPERTS),
        ),
        "expert": w.MIXTRAL_EXPERTS,
    },
    words={
        "model_max_length": "max_position_embeddings",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob",
    },
    settings=(
        *s.LATENT_SIZES,
        s.TIED,
        s.Setting(
            keys=(_LINEAR, "layer_types", *_OF_LINEAR.values()),
            to_arguments=_linear_from_config,
            to_config=_linear_to_config,
        ),
        s.same("num_local_experts", "num_experts"),
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.NAMED_LAYERS_OR_COUNTED,
        experts.SHARED_WIDTH,
        experts.GROUPS,
        experts.ROUTED_SCALING,
    ),
    constants=LLAMA_LIKE
    | EXPERTS_BY_SIGMOID
    | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "experimental_attention_variant": "kimi_delta_attention",
        "position_embedding_type": "rope",
        "rope_type": "none",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "rotary_scaling_factor": 1.0,
    },
    only=PLAIN
    | NO_BIAS
    | {
        "norm_topk_prob": (True,),
        "moe_router_activation_func": ("sigmoid", None),
        "use_grouped_topk": (True, None),
        "mla_use_nope": (True, None),
        "moe_layer_freq": (1, None),
        "num_nextn_predict_layers": (0, None),
    },
    changes_nothing=frozenset({"rope_theta", "rope_scaling", "rope_parameters"}),
)
