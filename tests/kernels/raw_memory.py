"""Memory at an address, and 16-bit floating formats as patterns, both ways."""

import ctypes

import numpy as np

from megatron_cp.kernels.driver import BFLOAT16, FLOAT16


def decoded(bits: np.ndarray, dtype: int) -> np.ndarray:
    """Returns 16-bit patterns as float64."""
    if dtype == BFLOAT16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float64)


def encoded(values: np.ndarray, dtype: int) -> np.ndarray:
    """Returns float64 rounded to 16-bit patterns, to the nearest, ties to even."""
    if dtype == FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def array_at(address: int, dtype, count: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
