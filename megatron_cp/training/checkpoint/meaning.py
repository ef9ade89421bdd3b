"""Arguments under which the same tensors compute something else: told where a run goes on with others.

Some are changed on purpose (--rotary-base for longer contexts), so they are no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
    "yarn_original_max_position_embeddings": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
    "yarn_correction_range_round_to_int": None,
    "moe_router_topk": None,
    "moe_router_score_function": None,
    "moe_router_pre_softmax": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_apply_probs_on_input": None,
}


def meaning_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a manifest keeps of these arguments."""
    return {name: arguments[name] for name in _ARGUMENTS}


def changes_of_meaning(saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Returns a line for each argument that a manifest has otherwise; what it does not have is not asked."""
    lines = []
    for name, flag in _ARGUMENTS.items():
        now = json.loads(json.dumps(arguments[name]))  # as a manifest has it
        if name in saved and saved[name] != now:
            said = flag or "--" + name.replace("_", "-")
            lines.append(f"{said} was {saved[name]}, and is {now} from here on")
    return lines
