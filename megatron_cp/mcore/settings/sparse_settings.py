"""Settings of DeepSeek's sparse attention (DSA), read once: Megatron's TransformerConfig or parsed arguments.

Both have the same names. Some are of versions of Megatron-Core after 0.16.1: arguments say them all the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

SPARSE = "dsa"
"""Megatron's name of the attention variant."""

NEEDED = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")

LATER = {
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_k_norm_epsilon": None,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0,
}
"""Settings that 0.16.1 has no fields for, with their defaults."""

# name -> what it must be, and what to do.
_NOT_SERVED: dict[str, tuple[Any, str]] = {
    "fp8": (None, "leave it out: up-projections of latent rows would stay in 16 bits"),
    "window_size": (None, "train a model without windows"),
    "softmax_type": ("vanilla", "train a model without attention sinks"),
    "qk_clip": (False, "leave it out (other steps)"),
    "log_max_attention_logit": (False, "leave it out"),
    "dsa_indexer_k_norm_fp32": (False, "leave it out (other rounding)"),
}


def is_sparse(settings: Any) -> bool:
    """Returns whether every layer attends to keys that an index picks."""
    return getattr(settings, "experimental_attention_variant", None) == SPARSE


def layers_that_pick(settings: Any) -> list[bool]:
    """Returns for each decoder layer whether its own index picks keys; others take those of the last one that does."""
    frequency = getattr(settings, "dsa_indexer_topk_freq", None) or 1
    first = max(getattr(settings, "dsa_indexer_skip_topk_offset", None) or 0, 1)
    return [max(i + 1 - first, 0) % frequency == 0 for i in range(settings.num_layers)]


def num_indexes(arguments: Mapping[str, Any]) -> int:
    """Returns in how many layers an index picks, those of predictions too."""
    return sum(layers_that_pick(Namespace(**arguments))) + (arguments.get("mtp_num_layers") or 0)


def planner_of(settings: Any, asked: str) -> str:
    """Returns the planner that is taken where `asked` is the one asked for.

    An index looks at pairs where the query's owner is. `auto` balances pairs that others may compute: the busiest of
    16 owners had 1.5 times the mean on documents of 131,072 tokens, with `magi`, whose owners compute, 1.003 times.
    """
    return "magi" if asked == "auto" and is_sparse(settings) else asked


def check_sparse(settings: Any) -> None:
    """Returns if the sparse attention that settings ask for can be built.

    Raises:
        NotImplementedError: for a setting that it does not honour.
        ValueError: for sizes that are missing or do not fit together.
    """
    if not getattr(settings, "multi_latent_attention", False):
        raise NotImplementedError(
            "experimental_attention_variant='dsa' without multi_latent_attention is not served: keys are picked among "
            "latent rows; give --multi-latent-attention"
        )
    if not settings.q_lora_rank:
        raise ValueError(
            "experimental_attention_variant='dsa' needs q_lora_rank: the index reads compressed queries; give it"
        )
    for name in NEEDED:
        value = getattr(settings, name, None)
        if value is None or value < 1:
            raise ValueError(f"{name}={value} must be positive with sparse attention; give it")
    turning, width = settings.qk_pos_emb_head_dim, settings.dsa_indexer_head_dim
    if width < turning:
        raise ValueError(
            f"dsa_indexer_head_dim={width} must be at least qk_pos_emb_head_dim={turning}: so many columns of the "
            "index rotate; give that"
        )
    _check_sharing(settings)
    for name, (wanted, advice) in _NOT_SERVED.items():
        value = getattr(settings, name, wanted)
        if (value or wanted) != wanted:
            raise NotImplementedError(
                f"{name}={value!r} with experimental_attention_variant='dsa' is not served: {advice}"
            )


def _check_sharing(settings: Any) -> None:
    for name, least in (("dsa_indexer_topk_freq", 1), ("dsa_indexer_skip_topk_offset", 0)):
        value = getattr(settings, name, None)
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}; correct it")
    num_predictions = getattr(settings, "mtp_num_layers", None) or 0
    if not all(layers_that_pick(settings)) and num_predictions > 1:
        raise NotImplementedError(
            f"mtp_num_layers={num_predictions} with dsa_indexer_topk_freq={settings.dsa_indexer_topk_freq} is not "
            "served: versions of Megatron-Core differ in which prediction has an index; predict one token more"
        )
