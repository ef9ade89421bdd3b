"""Floating-point operations of one training step.

With attention counted by the area of its mask.

Megatron-LM counts half of seq_length^2 whatever the mask; packed documents look at far fewer pairs,
so that count would claim work that nobody did. Here a pair (query, key) that the mask allows costs
4 x head size per head in forward (scores and weighted values, a multiplication and an addition
each), a parameter of a matrix 2 per real token, and backward twice as much as forward. Recomputed
activations, norms, softmax and embeddings' look-ups are not counted ("model FLOPs").

Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix, with the area of the mask in place of
s^2.
"""

from __future__ import annotations

from dataclasses import dataclass

_PASSES = 3  # forward, and backward with respect to the inputs and to the weights


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What the count needs to know of a model.

    Parameters that tokens multiply, and attention layers.
    """

    matrix_parameters: int
    """Parameters of all matrices that every token multiplies, output layer included.

    Embedding look-up excluded.
    """

    score_width: int
    """Query heads x (head size of queries + head size of values)."""

    num_layers: dict[str, int]
    """Layers per mask name, e.g. `{"full": 2, "window": 22}`."""

    def of_step(self, num_tokens: int, area: dict[str, int]) -> int:
        """Operations of forward and backward over `num_tokens` real tokens.

        `area` says how many pairs the mask of each name allows.
        """
        pairs = sum(area[name] * layers for name, layers in self.num_layers.items())
        return _PASSES * 2 * (num_tokens * self.matrix_parameters + pairs * self.score_width)


def gpt_flops(
    *,
    num_layers: dict[str, int],
    hidden_size: int,
    ffn_hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    gated_mlp: bool,
) -> ModelFlops:
    """The count for a GPT of this shape; `num_layers` by mask name, as in `ModelFlops`."""
    attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    mlp = hidden_size * ffn_hidden_size * (3 if gated_mlp else 2)
    return ModelFlops(
        matrix_parameters=sum(num_layers.values()) * (attention + mlp) + hidden_size * vocab_size,
        score_width=num_heads * 2 * head_dim,
        num_layers=num_layers,
    )
