"""LongRoPE in a GPTModel: each frequency of RoPE divided by a factor of its own, cosines and sines scaled.

Megatron-Core has neither. The angles follow from the frequencies that its rotary module keeps; cosines and sines it
scales for YaRN, whatever the module is, by what the configuration says of YaRN.

Source: arXiv 2402.13753, section 3; `_compute_longrope_parameters` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_cp.mcore.settings.longrope_settings import factors_of


def scale_angles(config: Any, arguments: Mapping[str, Any]) -> None:
    """Makes attention scale cosines and sines: YaRN's scale is 1 + mscale / 10 x ln(its factor)."""
    scale = arguments.get("longrope_attention_factor")
    if scale is not None:
        config.yarn_rotary_scaling_factor = math.e
        config.yarn_mscale = 10 * (scale - 1)
        config.yarn_mscale_all_dim = 0.0


def divide_frequencies(model: Any, arguments: Mapping[str, Any]) -> None:
    """Divides the frequencies of a model's rotary embedding by the factors of the run, if there are any.

    Raises ValueError for another number of factors than of frequencies.
    """
    factors = factors_of(arguments)
    if factors is None:
        return
    old = model.rotary_pos_emb.inv_freq
    if len(factors) != old.numel():
        raise ValueError(
            f"LongRoPE has {len(factors)} factors; the model has {old.numel()} frequencies, half of what rotates of a "
            "head; give one for each"
        )
    # In the order of transformers' operations, so that both round alike.
    exponents = torch.arange(0, 2 * old.numel(), 2, dtype=torch.int64).float() / (2 * old.numel())
    powers = arguments.get("rotary_base", 10000) ** exponents
    model.rotary_pos_emb.inv_freq = (1.0 / (torch.tensor(factors) * powers)).to(old)
