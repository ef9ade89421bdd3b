"""Masks: which query may look at which key. NumPy only; `slice.py` has the one shape of all."""

from megatron_cp.mask.builders import (
    causal,
    chunked_causal,
    dilated,
    full,
    global_sliding_window,
    image_spans,
    prefix_lm,
    sliding_window,
)
from megatron_cp.mask.forms import from_dense, from_ranges
from megatron_cp.mask.mask import AttentionMask, concat, from_slices
from megatron_cp.mask.packed import (
    block_causal_documents,
    causal_blockwise,
    documents,
    from_cu_seqlens,
    prefix_lm_documents,
    prefix_tree,
    shared_question,
)
from megatron_cp.mask.slice import MaskSlice

__all__ = [
    "AttentionMask",
    "MaskSlice",
    "block_causal_documents",
    "causal",
    "causal_blockwise",
    "chunked_causal",
    "concat",
    "dilated",
    "documents",
    "from_cu_seqlens",
    "from_dense",
    "from_ranges",
    "from_slices",
    "full",
    "global_sliding_window",
    "image_spans",
    "prefix_lm",
    "prefix_lm_documents",
    "prefix_tree",
    "shared_question",
    "sliding_window",
]
