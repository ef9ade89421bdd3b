"""Attention on one device over a mask's slices: `attend`, its raw passes, the merge of partial results."""

from megatron_cp.attn.attend import (
    attend,
    attend_backward,
    attend_backward_onto_,
    attend_forward,
    attend_forward_onto_,
    dq_factor,
)
from megatron_cp.attn.merge import apply_sink, merge_partials, merge_rows_, sink_gradient
from megatron_cp.attn.options import AttendOptions, resolve_options

__all__ = [
    "AttendOptions",
    "apply_sink",
    "attend",
    "attend_backward",
    "attend_backward_onto_",
    "attend_forward",
    "attend_forward_onto_",
    "dq_factor",
    "merge_partials",
    "merge_rows_",
    "resolve_options",
    "sink_gradient",
]
