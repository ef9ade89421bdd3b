"""Masks: which query may look at which key. NumPy only; see `slice.py` for the one shape they have."""

from megatron_cp.mask.mask import AttentionMask, concat, from_slices
from megatron_cp.mask.slice import MaskSlice

__all__ = ["AttentionMask", "MaskSlice", "concat", "from_slices"]
