"""Names of a layer's parameters: Megatron's own layers and Transformer Engine's.

Transformer Engine fuses a norm with the linear layer behind it, so the same weight has two names:

    local                        Transformer Engine
    input_layernorm.weight       self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight     mlp.linear_fc1.layer_norm_weight

In the format torch_dist both kinds of layers save under the names on the right; in the format torch
each saves under its own. Layers with experts and latent attention have two names in torch_dist too: local layers say
of the one that they fuse what Transformer Engine does not, and not of the other that it does. `_extra_state` holds what
fp8 needs, and nothing without fp8.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# Transformer Engine does not fuse the norm before experts; local layers of latent attention fuse no name.
_OF_TWO_NAMES = (
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    (".self_attention.linear_q_up_proj.layer_norm_", ".self_attention.q_layernorm."),
    (".self_attention.linear_kv_up_proj.layer_norm_", ".self_attention.kv_layernorm."),
)

_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
# State of Megatron-LM's rerun machine, which this loop has not.
_RERUN = "rerun_state_machine"


def kind(key: str) -> str:
    """Returns whose a key of the format torch_dist is: model, optimizer, random or rerun."""
    if _OPTIMIZER.match(key):
        return "optimizer"
    if key.startswith(_RERUN):
        return "rerun"
    return "random" if key == "rng_state" else "model"


def is_bucket(key: str) -> bool:
    """Whether a key is that of a bucket of the distributed optimizer."""
    return ".gbuf_idx_" in key


def is_extra_state(name: str) -> bool:
    """Whether a name is that of an `_extra_state`, also of one among several (`_extra_state2`)."""
    return name.rpartition(".")[2].rstrip("0123456789") == "_extra_state"


def is_fused(names: Iterable[str]) -> bool | None:
    """Whether these are Transformer Engine's names; None where nothing tells."""
    for name in names:
        for local, fused in _FUSED.items():
            if fused in name:
                return True
            if local in name:
                return False
    return None


def renamed(tensors: Mapping[str, Any], *, to_fused: bool) -> dict[str, Any]:
    """Returns the tensors under Transformer Engine's names, or under Megatron's own."""
    pairs = _FUSED.items() if to_fused else ((fused, local) for local, fused in _FUSED.items())
    table = list(pairs)

    def new_name(name: str) -> str:
        for old, new in table:
            name = name.replace(old, new)
        return name

    return {new_name(name): value for name, value in tensors.items()}


def of_other_layers(key: str) -> str | None:
    """Returns the key of the format torch_dist under which the other kind of layers saves this; None: the same."""
    for fused, local in _OF_TWO_NAMES:
        for own, other in ((fused, local), (local, fused)):
            if own in key:
                return key.replace(own, other)
    return None


def holds_fp8_state(value: Any) -> bool:
    """Returns whether an `_extra_state` holds anything; one that cannot be read counts as holding it.

    Transformer Engine writes nothing, an empty byte tensor, or (before 2.0) a saved None.
    """
    if value is None:
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() > 0
    if isinstance(value, io.BytesIO):
        if not value.getvalue():
            return False
        try:
            return torch.load(io.BytesIO(value.getvalue()), weights_only=True) is not None
        except Exception:  # a pickle of anything else: not executed
            return True
    return True


def extra_state_note(names: Iterable[str]) -> str:
    """Returns the one line about `_extra_state` entries that hold nothing; empty without any."""
    count = len(list(names))
    if not count:
        return ""
    return f"{count} _extra_state entries hold no fp8 state; they are not part of the weights"
