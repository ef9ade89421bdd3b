"""The layers of a hybrid model, as Megatron-LM's --hybrid-layer-pattern writes them.

    M-M*-|MEM-/*E/*E

    M Mamba-2, * softmax attention, - an MLP, E experts
    | where the next pipeline stage begins
    / where the layers of a prediction begin: of the second token ahead, of the third, ...

Each letter is a layer with a norm and a residual of its own. Source: Megatron-Core's `hybrid_layer_allocation`.
"""

from __future__ import annotations

from typing import NamedTuple

MAMBA, ATTENTION, MLP, EXPERTS = "M", "*", "-", "E"

_NOT_SERVED = {
    "G": "a gated delta net; --experimental-attention-variant gated_delta_net trains those without a pattern",
    "D": "sparse attention, which is not served with context parallelism",
    "+": "latent attention; --multi-latent-attention trains it without a pattern",
}


class HybridPattern(NamedTuple):
    """What a pattern says."""

    stages: list[str]
    """Letters of the decoder by pipeline segment; one where there are no bars."""
    prediction: str
    """Letters of one prediction; all have the same. Empty where nothing further is predicted."""
    num_predictions: int

    @property
    def layers(self) -> str:
        """The letter of each layer of the decoder, in order."""
        return "".join(self.stages)

    @property
    def without_bars(self) -> str:
        """The pattern of the same model, whatever its stages."""
        return "/".join([self.layers, *[self.prediction] * self.num_predictions])


def hybrid_pattern(pattern: str) -> HybridPattern:
    """Returns what a pattern says.

    Raises ValueError for a letter that stands for no layer or for one that is not served, and for predictions that
    have no layers, differ, or have bars.
    """
    for letter in pattern:
        if letter in _NOT_SERVED:
            raise ValueError(f"{letter!r} is {_NOT_SERVED[letter]}")
        if letter not in (MAMBA, ATTENTION, MLP, EXPERTS, "|", "/"):
            raise ValueError(f"{letter!r} is none of M, *, -, E, | and /")
    decoder, *predictions = pattern.split("/")
    if not decoder.strip("|"):
        raise ValueError("it has no layer")
    if not all(predictions):
        raise ValueError("a / has no layer of a prediction behind it")
    if len(set(predictions)) > 1:
        raise ValueError(f"its predictions are {' and '.join(predictions)}; all must be alike")
    if "|" in "".join(predictions):
        raise ValueError("a | stands behind a /: predictions lie on the last pipeline stage")
    return HybridPattern(
        decoder.split("|"), predictions[0] if predictions else "", len(predictions)
    )


def hybrid_layers(pattern: str) -> str:
    """Returns the letter of each layer of the decoder, in order."""
    return hybrid_pattern(pattern).layers
