"""Mirrors of `attn/params.h` and `rows/params.h` for ctypes: the bytes of the C++ structs (a test compares them)."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

TENSOR_MAP_BYTES = 128


class TensorMap(ctypes.Structure):
    """What `cuTensorMapEncodeTiled` writes."""

    _fields_ = (("opaque", ctypes.c_ubyte * TENSOR_MAP_BYTES),)


class DropoutParams(ctypes.Structure):
    """Which probabilities a kernel with dropout drops."""

    _fields_ = (
        ("row_words", c_void_p),
        ("key_words", c_void_p),
        ("padded_rows", c_int32),
        ("threshold", c_int32),
        ("scale", c_float),
    )


class FwdParams(ctypes.Structure):
    """Parameters of the forward kernel; the header says what each means."""

    _fields_ = (
        ("q_map", TensorMap),
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        ("tiles", c_void_p),
        ("segments", c_void_p),
        ("order", c_void_p),
        ("counters", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("sink", c_void_p),
        ("max_logits", c_void_p),
        ("earlier", c_void_p),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse_row_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("num_tiles", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("heads_per_section", c_int32),
        ("num_keys", c_int32),
        ("score_scale", c_float),
        ("cap", c_float),
        ("cap_scale", c_float),
        ("out_is_float", c_int32),
        ("score_per_lse", c_float),
        ("dropout", DropoutParams),
        ("padding", c_int32 * 4),  # the header's struct is aligned to 64 bytes
    )


class BwdPreprocessParams(ctypes.Structure):
    """Parameters of the kernel before the backward kernel."""

    _fields_ = (
        ("out", c_void_p),
        ("dout", c_void_p),
        ("lse", c_void_p),
        ("dlse", c_void_p),
        ("lse_2", c_void_p),
        ("delta", c_void_p),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("dout_row_stride", c_int64),
        ("dout_head_stride", c_int64),
        ("lse_row_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("num_rows", c_int32),
        ("padded_rows", c_int32),
        ("num_heads", c_int32),
        ("out_is_float", c_int32),
    )


STORE_16_BITS, STORE_FLOATS, ADD_FLOATS = range(3)  # how dk and dv are stored


class BwdParams(ctypes.Structure):
    """Parameters of the backward kernel."""

    _fields_ = (
        ("q_map", TensorMap),
        ("dout_map", TensorMap),
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        ("lse_map", TensorMap),
        ("delta_map", TensorMap),
        ("dq_map", TensorMap),
        ("tiles", c_void_p),
        ("segments", c_void_p),
        ("order", c_void_p),
        ("counters", c_void_p),
        ("dk", c_void_p),
        ("dv", c_void_p),
        ("dk_row_stride", c_int64),
        ("dk_head_stride", c_int64),
        ("dv_row_stride", c_int64),
        ("dv_head_stride", c_int64),
        ("num_tiles", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("heads_per_section", c_int32),
        ("heads_per_item", c_int32),
        ("items_per_group", c_int32),
        ("num_queries", c_int32),
        ("score_scale", c_float),
        ("cap", c_float),
        ("cap_scale", c_float),
        ("softmax_scale", c_float),
        ("store", c_int32),
        ("dropout", DropoutParams),
        ("padding", c_int32 * 8),  # the header's struct is aligned to 64 bytes
    )


class DqParams(ctypes.Structure):
    """Parameters of the kernel for dq alone."""

    _fields_ = (
        ("q_map", TensorMap),
        ("dout_map", TensorMap),
        ("k_map", TensorMap),
        ("v_map", TensorMap),
        ("tiles", c_void_p),
        ("segments", c_void_p),
        ("order", c_void_p),
        ("counters", c_void_p),
        ("lse_2", c_void_p),
        ("delta", c_void_p),
        ("dq", c_void_p),
        ("dq_row_stride", c_int64),
        ("dq_head_stride", c_int64),
        ("num_tiles", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("heads_per_section", c_int32),
        ("num_keys", c_int32),
        ("padded_rows", c_int32),
        ("score_scale", c_float),
        ("cap", c_float),
        ("cap_scale", c_float),
        ("factor", c_float),
        ("dq_is_float", c_int32),
        ("accumulate", c_int32),
        ("dropout", DropoutParams),
        ("padding", c_int32 * 10),  # the header's struct is aligned to 64 bytes
    )


class BwdPostprocessParams(ctypes.Structure):
    """Parameters of the kernel after the backward kernel."""

    _fields_ = (
        ("dq_sum", c_void_p),
        ("dq", c_void_p),
        ("sum_row_stride", c_int64),
        ("sum_head_stride", c_int64),
        ("dq_row_stride", c_int64),
        ("dq_head_stride", c_int64),
        ("num_rows", c_int32),
        ("num_heads", c_int32),
        ("softmax_scale", c_float),
        ("dq_is_float", c_int32),
    )


class Joins(ctypes.Structure):
    """Which parts each row gets."""

    _fields_ = (
        ("rows", c_void_p),
        ("begins", c_void_p),
        ("parts", c_void_p),
        ("num_rows", c_int64),
    )


class AddRowsParams(ctypes.Structure):
    """Parameters of the kernel that adds rows."""

    _fields_ = (
        ("joins", Joins),
        ("total", c_void_p),
        ("part", c_void_p),
        ("total_row_stride", c_int64),
        ("total_head_stride", c_int64),
        ("part_row_stride", c_int64),
        ("part_head_stride", c_int64),
        ("num_heads", c_int32),
        ("width", c_int32),
    )


class MergeRowsParams(ctypes.Structure):
    """Parameters of the kernel that merges rows of partial results."""

    _fields_ = (
        ("joins", Joins),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("part_out", c_void_p),
        ("part_lse", c_void_p),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse_row_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("part_out_row_stride", c_int64),
        ("part_out_head_stride", c_int64),
        ("part_lse_row_stride", c_int64),
        ("part_lse_head_stride", c_int64),
        ("num_heads", c_int32),
        ("width", c_int32),
    )
