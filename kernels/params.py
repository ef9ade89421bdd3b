"""Mirrors of `attn/params.h` for ctypes: the same bytes as the C++ structs (a test compiles and compares)."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

TENSOR_MAP_BYTES = 128


class TensorMap(ctypes.Structure):
    """What `cuTensorMapEncodeTiled` writes."""

    _fields_ = (("opaque", ctypes.c_ubyte * TENSOR_MAP_BYTES),)


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
        ("accumulate", c_int32),
    )
