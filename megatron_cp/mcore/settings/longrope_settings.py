"""LongRoPE's four settings, and which of its two lists of factors a run takes.

One list was found for sequences as long as those of pretraining, the other for longer ones. A run takes one, by its
longest sequence, for every token: a short document in a long run is rotated as the long ones. So does a server that is
started for long sequences (vLLM); transformers chooses anew in every call, by the longest sequence in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

LONGROPE = (
    "longrope_short_factors",
    "longrope_long_factors",
    "longrope_original_max_position_embeddings",
    "longrope_attention_factor",
)
"""Names of the settings: both lists, the longest sequence of the first, and the scale of cosines and sines."""


def is_long(arguments: Mapping[str, Any]) -> bool:
    """Returns whether a run takes the long factors; where it says no length, by all positions of the model."""
    longest = arguments.get("seq_length") or arguments["max_position_embeddings"]
    return bool(longest > arguments["longrope_original_max_position_embeddings"])


def are_factors(values: Sequence[float], num_frequencies: int) -> bool:
    """Returns whether these are positive numbers, one for each frequency."""
    return len(values) == num_frequencies and all(0 < one < math.inf for one in values)


def factors_of(arguments: Mapping[str, Any]) -> list[float] | None:
    """Returns what the frequencies of a run are divided by; None of a model without LongRoPE."""
    if arguments.get("longrope_long_factors") is None:
        return None
    kind = "long" if is_long(arguments) else "short"
    return list(arguments[f"longrope_{kind}_factors"])
