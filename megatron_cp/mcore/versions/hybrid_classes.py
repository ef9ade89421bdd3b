"""Megatron's classes of hybrid models under the names that the installed version has for them.

    0.16     MambaModel, MambaStack        hybrid_override_pattern, of the decoder alone
    0.17     MambaModel, MambaStack        hybrid_layer_pattern
    since    HybridModel, HybridStack      hybrid_layer_pattern

They are looked for, not told by a number.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple


class HybridParts(NamedTuple):
    """Megatron's classes of a model whose layers are Mamba-2, attention, MLPs and experts."""

    model: Any
    stack: Any
    submodules: Any
    module: Any
    """Where the stack is defined."""
    pattern: str
    """The model's argument that takes the pattern of layers."""
    spec: str
    """Its argument that takes the spec of the stack."""
    predicts: bool
    """Whether the model makes predictions of further tokens, of which its submodules then have a spec."""
    recomputes: bool
    """Whether the stack recomputes whole layers where that is asked for."""


def hybrid_parts() -> HybridParts:
    """Returns the classes under the names of the installed version."""
    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid import hybrid_model

        model = hybrid_model.HybridModel
        stack, submodules = block.HybridStack, block.HybridStackSubmodules
    except ImportError:
        from megatron.core.models.mamba import mamba_model
        from megatron.core.ssm import mamba_block as block

        model = mamba_model.MambaModel
        stack, submodules = block.MambaStack, block.MambaStackSubmodules
    known = inspect.signature(model.__init__).parameters
    names = ("hybrid_layer_pattern", "hybrid_override_pattern")
    return HybridParts(
        model=model,
        stack=stack,
        submodules=submodules,
        module=block,
        pattern=next((name for name in names if name in known), names[0]),
        spec=next((name for name in known if name.endswith("_stack_spec")), "hybrid_stack_spec"),
        predicts="mtp_block_spec" in submodules.__dataclass_fields__,
        recomputes=hasattr(block, "checkpointed_forward"),
    )


def pattern_of_ratios(num_layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Returns the pattern that Megatron-Core makes of a hybrid model's ratios."""
    try:
        from megatron.core.models.hybrid.hybrid_layer_allocation import pattern_from_ratios
    except ImportError:
        from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

        return "".join(allocate_layers(num_layers, attention_ratio, mlp_ratio))
    return str(pattern_from_ratios(num_layers, attention_ratio, mlp_ratio))
