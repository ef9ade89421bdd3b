"""The layers of a hybrid model, as Megatron-LM's --hybrid-layer-pattern writes them.

    M-M*-|MEM-         M Mamba-2, * softmax attention, - an MLP, E experts; | where the next pipeline stage begins

Each letter is a layer with a norm and a residual of its own. Source: Megatron-Core's `hybrid_layer_allocation`.
"""

from __future__ import annotations

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"

_NOT_SERVED = {
    "G": "a gated delta net; --experimental-attention-variant gated_delta_net trains those without a pattern",
    "D": "sparse attention, which is not served with context parallelism",
    "+": "latent attention; --multi-latent-attention trains it without a pattern",
    "/": "where layers of a prediction begin; a hybrid model is trained here without multi-token prediction",
}


def hybrid_stages(pattern: str) -> list[str]:
    """Returns the letters of each pipeline segment; one where the pattern has no bars.

    Raises ValueError for a letter that stands for no layer, or for one that is not served.
    """
    for letter in pattern:
        if letter in _NOT_SERVED:
            raise ValueError(f"{letter!r} is {_NOT_SERVED[letter]}")
        if letter not in (MAMBA, ATTENTION, MLP, EXPERTS, "|"):
            raise ValueError(f"{letter!r} is none of M, *, -, E and |")
    if not pattern.strip("|"):
        raise ValueError("it has no layer")
    return pattern.split("|")


def hybrid_layers(pattern: str) -> str:
    """Returns the letter of each layer, in order."""
    return "".join(hybrid_stages(pattern))
