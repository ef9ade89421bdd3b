"""A 'device' in float64 NumPy that does what the launch's parameters say, from raw addresses.

It shares no code with the kernels or with `attend`: it reads the parameter block as params.h defines it,
follows tiles, segments and order, and writes `out` and `lse` where the pointers say.
"""

import math

import numpy as np
import pytest

from megatron_cp.kernels import build
from megatron_cp.kernels.driver import BFLOAT16, FLOAT16, FLOAT32
from megatron_cp.kernels.params import FwdParams
from tests.kernels import host_backward
from tests.kernels.raw_memory import array_at, decoded, encoded


class HostDevice:
    """Has the methods of `Driver`; tensor maps are numbers of remembered tensors."""

    def __init__(self) -> None:
        self.maps: list[tuple] = []
        self.launches: list[tuple] = []
        self.entries: list[tuple[str, str]] = []  # entry point and variant of every loaded kernel

    def load_kernel(self, image: bytes, name: str, shared_bytes: int, device: int) -> int:
        assert image and name
        self.entries.append((name, image.decode()))
        return len(self.entries)  # not 0

    def ensure_context(self, device: int) -> None:
        assert device == 0

    def encode_tensor_map(self, dtype, address, sizes, stride_bytes, box, swizzled=True) -> bytes:
        assert address % 16 == 0 and all(s > 0 and s % 16 == 0 for s in stride_bytes)
        assert all(size >= 1 for size in sizes) and all(1 <= side <= 256 for side in box)
        assert box[0] * (4 if dtype == FLOAT32 else 2) == 128 or not swizzled
        self.maps.append((dtype, address, sizes, stride_bytes, box, swizzled))
        return len(self.maps).to_bytes(128, "little")

    def launch(self, kernel, num_blocks, num_threads, shared_bytes, stream, params) -> None:
        self.launches.append((num_blocks, num_threads, shared_bytes, stream))
        raw = bytes(params)  # all that a kernel would see
        entry, self.last_variant = self.entries[kernel - 1]
        self.last_dtype = BFLOAT16 if "bf16" in self.last_variant else FLOAT16
        if entry == "mcp_attention_forward":
            block = FwdParams.from_buffer_copy(raw)
            _run(block, *(self.tensor(m) for m in (block.q_map, block.k_map, block.v_map)), self)
        else:
            host_backward.RUN[entry](raw, self)

    def tensor(self, tensor_map) -> tuple[np.ndarray, int]:
        """Returns a described 16-bit tensor `[rows, heads, columns]` in float64, and the box's rows."""
        dtype, address, sizes, (head_stride, row_stride), box, swizzled = self.described(tensor_map)
        assert dtype == self.last_dtype and swizzled and box[:2] == (64, 1)
        columns, heads, rows = sizes
        count = ((rows - 1) * row_stride + (heads - 1) * head_stride) // 2 + columns
        flat = array_at(address, np.uint16, count)
        strides = (row_stride, head_stride, 2)
        bits = np.lib.stride_tricks.as_strided(flat, (rows, heads, columns), strides)
        return decoded(bits, dtype), box[2]

    def described(self, tensor_map) -> tuple:
        """Returns what a map was encoded from."""
        return self.maps[int.from_bytes(bytes(tensor_map), "little") - 1]


def _run(p, query, key, value, device: HostDevice) -> None:
    (q, q_box), (k, k_box), (v, v_box) = query, key, value
    defines = build.variants()[device.last_variant]
    tile = tuple(int(defines.value(f"MCP_BLOCK_{side}")) for side in "MN")
    assert (q_box, k_box, v_box) == (*tile, tile[1])
    assert q.shape[1] == p.num_heads and k.shape[1] == p.num_kv_heads
    assert k.shape[0] == v.shape[0] == p.num_keys
    assert 1 <= p.heads_per_section <= p.num_heads
    assert p.counters and p.counters % 8 == 0
    assert np.float32(p.score_per_lse) == pytest.approx(
        math.log2(math.e) / p.score_scale, rel=2**-23
    )
    order = array_at(p.order, np.int32, p.num_tiles)
    tiles = array_at(p.tiles, np.int32, 4 * (order.max() + 1)).reshape(-1, 4)
    num_segs = int((tiles[:, 2] + tiles[:, 3]).max())
    segs = array_at(p.segments, np.int32, 8 * num_segs).reshape(-1, 8)
    assert p.tiles % 16 == p.segments % 16 == 0
    for tile in order:
        row0, rows, seg0, count = tiles[tile]
        assert count or p.earlier != p.out  # nothing would be merged
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
    if p.max_logits:
        assert not p.earlier
        most = array_at(p.max_logits, np.float32, p.num_heads)
        most[head] = max(
            most[head], np.max(scores * p.score_scale / math.log2(math.e), initial=-math.inf)
        )
    sink = math.exp(array_at(p.sink, np.float32, p.num_heads)[head]) if p.sink else 0.0
    total = weights.sum() + sink
    out = weights @ v / total if total else np.zeros(v.shape[1])
    return out, math.log(total) if total else -math.inf


def _write_row(p, row, head, out, lse, half_dtype) -> None:
    dtype = np.float32 if p.out_is_float else np.uint16
    width = np.dtype(dtype).itemsize
    at = width * (row * p.out_row_stride + head * p.out_head_stride)
    where = array_at(p.out + at, dtype, len(out))
    lse_at = 4 * (row * p.lse_row_stride + head * p.lse_head_stride)
    lse_where = array_at(p.lse + lse_at, np.float32, 1)
    if p.earlier:
        held = array_at(
            p.earlier + 4 * (row * p.out_row_stride + head * p.out_head_stride),
            np.float32,
            len(out),
        )
        merged = np.logaddexp(lse, lse_where[0])
        weight = 0.0 if lse == -math.inf else math.exp(lse - merged)
        before = 0.0 if lse_where[0] == -math.inf else math.exp(lse_where[0] - merged)
        out, lse = weight * out + before * held, merged
    if p.out_is_float:
        where[:] = out
    else:
        where[:] = encoded(out, half_dtype)
    lse_where[0] = lse
