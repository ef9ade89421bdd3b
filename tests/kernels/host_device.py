"""A 'device' in float64 NumPy that does what the launch's parameters say, from raw addresses.

It shares no code with the kernels or with `attend`: it reads the parameter block as params.h defines it,
follows tiles, segments and order, and writes `out` and `lse` where the pointers say.
"""

import ctypes
import math

import numpy as np

from megatron_cp.kernels.driver import BFLOAT16, FLOAT16
from megatron_cp.kernels.params import FwdParams


class HostDevice:
    """Has the methods of `Driver`; tensor maps are numbers of remembered tensors."""

    def __init__(self, block_m: int, block_n: int):
        self.block_m, self.block_n = block_m, block_n
        self.maps: list[tuple] = []
        self.launches: list[tuple] = []

    def load_kernel(self, image: bytes, name: str, shared_bytes: int, device: int) -> int:
        assert image and name
        return 5

    def ensure_context(self, device: int) -> None:
        assert device == 0

    def encode_tensor_map(self, dtype, address, sizes, stride_bytes, box) -> bytes:
        assert address % 16 == 0 and all(stride % 16 == 0 for stride in stride_bytes)
        assert all(size >= 1 for size in sizes) and box[:2] == (64, 1) and 1 <= box[2] <= 256
        self.maps.append((dtype, address, sizes, stride_bytes, box[2]))
        return len(self.maps).to_bytes(128, "little")

    def launch(self, kernel, num_blocks, num_threads, shared_bytes, stream, params) -> None:
        self.launches.append((num_blocks, num_threads, shared_bytes, stream))
        block = FwdParams.from_buffer_copy(bytes(params))  # all that a kernel would see
        _run(block, *(self._tensor(m) for m in (block.q_map, block.k_map, block.v_map)), self)

    def _tensor(self, tensor_map) -> tuple[np.ndarray, int]:
        dtype, address, sizes, (head_stride, row_stride), box_rows = self.maps[
            int.from_bytes(bytes(tensor_map), "little") - 1
        ]
        self.last_dtype = dtype
        columns, heads, rows = sizes
        count = ((rows - 1) * row_stride + (heads - 1) * head_stride) // 2 + columns
        flat = _array(address, np.uint16, count)
        strides = (row_stride, head_stride, 2)
        bits = np.lib.stride_tricks.as_strided(flat, (rows, heads, columns), strides)
        if dtype == BFLOAT16:
            return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64), box_rows
        assert dtype == FLOAT16
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float64), box_rows


def _array(address: int, dtype, count: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def _run(p, query, key, value, device: HostDevice) -> None:
    (q, q_box), (k, k_box), (v, v_box) = query, key, value
    assert (q_box, k_box, v_box) == (device.block_m, device.block_n, device.block_n)
    assert q.shape[1] == p.num_heads and k.shape[1] == p.num_kv_heads
    assert k.shape[0] == v.shape[0] == p.num_keys
    assert 1 <= p.heads_per_section <= p.num_heads
    assert p.counters and p.counters % 8 == 0
    tiles = _array(p.tiles, np.int32, 4 * p.num_tiles).reshape(-1, 4)
    order = _array(p.order, np.int32, p.num_tiles)
    num_segs = int(tiles[-1, 2] + tiles[-1, 3])
    segs = _array(p.segments, np.int32, 8 * num_segs).reshape(-1, 8)
    assert p.tiles % 16 == p.segments % 16 == 0
    for tile in order:
        row0, rows, seg0, count = tiles[tile]
        for head in range(p.num_heads):
            kv_head = head // (p.num_heads // p.num_kv_heads)
            for row in range(row0, row0 + rows):
                keys = _keys_of(row, segs[seg0 : seg0 + count])
                out, lse = _attend_row(p, head, q[row, head], k[keys, kv_head], v[keys, kv_head])
                _write_row(p, row, head, out, lse, device.last_dtype)


def _keys_of(row: int, segs: np.ndarray) -> np.ndarray:
    ranges = [np.zeros(0, dtype=np.int64)]
    for k0, k1, lo, hi, q0, q1, _, _ in segs.tolist():
        if q0 <= row < q1:
            ranges.append(np.arange(max(k0, row + lo), min(k1, row + hi + 1)))
    return np.concatenate(ranges)


def _attend_row(p, head, q, k, v) -> tuple[np.ndarray, float]:
    scores = k @ q  # score_scale and cap_scale give exponents of 2
    if p.cap:
        scores = p.cap * np.tanh(scores * p.cap_scale / (2 * math.log2(math.e)))
    weights = np.exp2(scores * p.score_scale)
    sink = math.exp(_array(p.sink, np.float32, p.num_heads)[head]) if p.sink else 0.0
    total = weights.sum() + sink
    out = weights @ v / total if total else np.zeros(v.shape[1])
    return out, math.log(total) if total else -math.inf


def _write_row(p, row, head, out, lse, half_dtype) -> None:
    dtype = np.float32 if p.out_is_float else np.uint16
    width = np.dtype(dtype).itemsize
    at = width * (row * p.out_row_stride + head * p.out_head_stride)
    where = _array(p.out + at, dtype, len(out))
    lse_at = 4 * (row * p.lse_row_stride + head * p.lse_head_stride)
    lse_where = _array(p.lse + lse_at, np.float32, 1)
    if p.accumulate:
        merged = np.logaddexp(lse, lse_where[0])
        weight = 0.0 if lse == -math.inf else math.exp(lse - merged)
        before = 0.0 if lse_where[0] == -math.inf else math.exp(lse_where[0] - merged)
        out, lse = weight * out + before * where, merged
    if p.out_is_float:
        where[:] = out
    elif half_dtype == FLOAT16:
        where[:] = out.astype(np.float16).view(np.uint16)
    else:
        bits = out.astype(np.float32).view(np.uint32)
        where[:] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to even
    lse_where[0] = lse
