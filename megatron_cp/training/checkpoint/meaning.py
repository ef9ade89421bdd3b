"""Arguments under which the same tensors compute something else: told where a run goes on with others.

Some are changed on purpose (--rotary-base for longer contexts), so they are no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cp.mcore.settings.layer_patterns import PATTERNS, layer_pattern
from megatron_cp.mcore.settings.longrope_settings import LONGROPE
from megatron_cp.mcore.settings.mixers import DELTA, KDA, MAMBA, layer_mixers_of

# Argument -> its flag, where that is not the name with dashes.
_ARGUMENTS = {
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "qk_l2_norm": None,
    "quick_geglu": None,
    "glu_linear_offset": None,
    "activation_func_clamp_value": None,
    "window_size": None,
    "window_attn_skip_freq": None,
    "rotary_base": None,
    "rotary_percent": None,
    "rotary_interleaved": None,
    "no_rope_freq": None,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": None,
    "rope_scaling_factor": None,
    "rope_type": None,
    "rotary_scaling_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
    "llama_4_scaling_beta": None,
    **dict.fromkeys(LONGROPE),
    "beta_fast": None,
    "beta_slow": None,
    "original_max_position_embeddings": None,
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": None,
    "dsa_indexer_topk": None,
    "dsa_indexer_rope_interleaved": None,
    "dsa_indexer_scoring_relu": "--no-dsa-indexer-scoring-relu",
    "dsa_indexer_k_norm_epsilon": None,
    "moe_router_topk": None,
    "moe_router_score_function": None,
    "moe_router_pre_softmax": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_apply_probs_on_input": None,
    "moe_router_load_balancing_type": None,
    "moe_expert_capacity_factor": None,
    "moe_pad_expert_input_to_capacity": None,
    "moe_token_drop_policy": None,
    "reset_attention_mask": None,
    "reset_position_ids": None,
}
# What a manifest of ours says of the model's shape, where another value is refused.
_OF_SHAPE = ("position_embedding_type", "softmax_type", "swiglu", "squared_relu")
# Of these Megatron-LM's arguments say reliably that they are off, and so do those of a converted checkpoint.
_SAID_WHERE_OFF = (
    "layernorm_zero_centered_gamma",
    "window_size",
    "rotary_interleaved",
    "no_rope_freq",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "moe_router_pre_softmax",
    "moe_expert_capacity_factor",
    "reset_attention_mask",
    "reset_position_ids",
)


# What no flag of this program asks for: the same tensors, and another model.
_NOT_BUILT = (
    "apply_residual_connection_post_layernorm",
    "use_mup",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
)
# Of what Megatron-LM's own checkpoints say of their model: with others the same tensors are cut into other heads.
_OF_HEADS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
}
_OF_DELTA_RULE = {
    "linear_num_key_heads": "--linear-num-key-heads",
    "linear_key_head_dim": "--linear-key-head-dim",
}
# The same of recurrent layers; their other sizes show in the shapes of tensors.
_OF_STATES = {
    MAMBA: {
        "mamba_num_groups": "--mamba-num-groups",
        "mamba_state_dim": "--mamba-state-dim",
    },
    DELTA: _OF_DELTA_RULE,
    KDA: _OF_DELTA_RULE,
}


def another_model(folder: Path, saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raises ValueError where a checkpoint's own arguments say other layers or heads, or what is not built here.

    What it lacks is not asked.
    """
    for name in _NOT_BUILT:
        if saved.get(name):
            raise ValueError(
                f"{folder} was saved with --{name.replace('_', '-')}, with which the same weights are another model; "
                "it is not served here: give another --load, or train on with Megatron-LM"
            )
    was, now = _with_groups(saved), _with_groups(arguments)
    mixers, compared = layer_mixers_of(arguments), dict(_OF_HEADS)
    for mixer, sizes in _OF_STATES.items():
        compared |= sizes if mixer in mixers else {}
    for name, flag in compared.items():
        if None not in (was.get(name), now.get(name)) and was[name] != now[name]:
            raise ValueError(
                f"{folder} was saved with {flag} {was[name]}, this run has {now[name]}; give the checkpoint's value, "
                "or another --load"
            )


def _with_groups(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with as many groups as heads where keys are not shared: Megatron-LM then keeps 1."""
    found = dict(arguments)
    if found.get("multi_latent_attention"):
        return found | {"num_query_groups": None, "kv_channels": None}
    if not found.get("group_query_attention", True):
        found["num_query_groups"] = found.get("num_attention_heads")
    return found


def foreign_meaning(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what Megatron-LM's arguments say of these, as a manifest has it; what is off is not said."""
    named = {
        **saved,
        "layernorm_epsilon": saved.get("norm_epsilon", saved.get("layernorm_epsilon")),
    }
    if "apply_layernorm_1p" in saved:
        named.setdefault("layernorm_zero_centered_gamma", saved["apply_layernorm_1p"])
    return {
        name: json.loads(json.dumps(named[name], default=str))
        for name in (*_ARGUMENTS, *_OF_SHAPE)
        if named.get(name) or (name in named and name in _SAID_WHERE_OFF)
    }


def meaning_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a manifest keeps of these arguments."""
    return {name: arguments[name] for name in _ARGUMENTS}


def changes_of_meaning(saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Returns a line for each argument that a manifest has otherwise; what it does not have is not asked."""
    lines = []
    for name, flag in (_ARGUMENTS | dict.fromkeys(_OF_SHAPE)).items():
        if name not in saved:
            continue
        # RoPE counts through the sample, or turns by distances inside a document: either way by no restart.
        if (
            name == "reset_position_ids"
            and arguments["position_embedding_type"] != "learned_absolute"
        ):
            continue
        was, now = saved[name], json.loads(json.dumps(arguments[name]))  # as a manifest has it
        one, other = (_by_layer(name, value, arguments["num_layers"]) for value in (was, now))
        if one != other:
            said = flag or "--" + name.replace("_", "-")
            lines.append(f"{said} was {was}, and is {now} from here on")
    return lines


def _by_layer(name: str, value: Any, num_layers: int | None) -> Any:
    """Returns the flags of all layers where a number or a list says them; other values as they are."""
    if name in PATTERNS and value and num_layers and isinstance(value, (int, list)):
        return layer_pattern(name, value, num_layers)
    return value
