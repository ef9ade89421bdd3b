"""The backward kernels of the host device, row by row in float64, from the parameter blocks as params.h has them."""

import math

import numpy as np

from megatron_cp.kernels import build
from megatron_cp.kernels.driver import FLOAT32
from megatron_cp.kernels.params import (
    ADD_FLOATS,
    STORE_16_BITS,
    BwdParams,
    BwdPostprocessParams,
    BwdPreprocessParams,
    DqParams,
)
from tests.kernels.raw_memory import array_at, decoded, encoded


def _rows(address: int, width: int, row: int, head: int, strides: tuple[int, int], count: int):
    """Returns `count` values of a row and head as 16-bit patterns (width 2) or float32, writable."""
    at = address + width * (row * strides[0] + head * strides[1])
    return array_at(at, np.float32 if width == 4 else np.uint16, count)


def _value_dim(device, name: str) -> int:
    """Returns the columns that the variant of the last launch was compiled for."""
    return int(build.variants()[device.last_variant].value(name))


def _preprocess(raw: bytes, device) -> None:
    p = BwdPreprocessParams.from_buffer_copy(raw)
    columns = _value_dim(device, "MCP_VALUE_DIM")
    assert p.padded_rows % 4 == 0 and p.padded_rows >= p.num_rows
    for row in range(p.num_rows):
        for head in range(p.num_heads):
            strides = (p.out_row_stride, p.out_head_stride)
            out = _rows(p.out, 4 if p.out_is_float else 2, row, head, strides, columns)
            out = out.astype(np.float64) if p.out_is_float else decoded(out, device.last_dtype)
            strides = (p.dout_row_stride, p.dout_head_stride)
            dout = decoded(_rows(p.dout, 2, row, head, strides, columns), device.last_dtype)
            strides = (p.lse_row_stride, p.lse_head_stride)
            lse = _rows(p.lse, 4, row, head, strides, 1)[0]
            dlse = _rows(p.dlse, 4, row, head, strides, 1)[0] if p.dlse else 0.0
            empty = lse == -np.inf
            _set_stat(p, p.lse_2, row, head, np.inf if empty else lse * math.log2(math.e))
            _set_stat(p, p.delta, row, head, 0.0 if empty else out @ dout - dlse)


def _set_stat(p: BwdPreprocessParams, address: int, row: int, head: int, value: float) -> None:
    """Writes to the four copies: row r stands at r - c of copy c; what has no place there clears one at the end."""
    for copy in range(4):
        at = row - copy if row >= copy else row - copy + p.num_rows
        if at >= 0:
            line = copy * p.num_heads + head
            _rows(address, 4, at, line, (1, p.padded_rows), 1)[0] = value if row >= copy else 0.0


def _postprocess(raw: bytes, device) -> None:
    p = BwdPostprocessParams.from_buffer_copy(raw)
    columns = _value_dim(device, "MCP_HEAD_DIM")
    for row in range(p.num_rows):
        for head in range(p.num_heads):
            sums = _rows(p.dq_sum, 4, row, head, (p.sum_row_stride, p.sum_head_stride), columns)
            dq = sums.astype(np.float64) * p.softmax_scale
            strides = (p.dq_row_stride, p.dq_head_stride)
            to = _rows(p.dq, 4 if p.dq_is_float else 2, row, head, strides, columns)
            to[:] = dq if p.dq_is_float else encoded(dq, device.last_dtype)


def _main(raw: bytes, device) -> None:
    p = BwdParams.from_buffer_copy(raw)
    (q, q_box), (k, k_box), (v, v_box), (dout, dout_box) = (
        device.tensor(m) for m in (p.q_map, p.k_map, p.v_map, p.dout_map)
    )
    assert q_box == dout_box and k_box == v_box
    stats = [_row_stats(device, m, q.shape[:2], q_box) for m in (p.lse_map, p.delta_map)]
    adds_dq = build.variants()[device.last_variant].value("MCP_ADDS_DQ") == "true"
    dq = _dq(device, p.dq_map, q.shape, q_box) if adds_dq else np.zeros(q.shape)
    order = array_at(p.order, np.int32, p.num_tiles)
    tiles = array_at(p.tiles, np.int32, 4 * (order.max() + 1)).reshape(-1, 4)
    segs = array_at(p.segments, np.int32, 8 * int(tiles[:, 2:].sum(axis=1).max())).reshape(-1, 8)
    group = p.num_heads // p.num_kv_heads
    assert (q.shape[1], k.shape[1], q.shape[0]) == (p.num_heads, p.num_kv_heads, p.num_queries)
    assert p.heads_per_item * p.items_per_group == group
    assert 1 <= p.heads_per_section <= p.num_kv_heads * p.items_per_group and p.counters
    for tile in order:
        row0, rows, seg0, count = tiles[tile].tolist()
        assert count or p.store != ADD_FLOATS  # nothing would be added
        for key in range(row0, row0 + rows):
            queries = _queries_of(key, segs[seg0 : seg0 + count])
            for kv_head in range(p.num_kv_heads):
                heads = range(kv_head * group, (kv_head + 1) * group)
                grads = [np.zeros(k.shape[2]), np.zeros(v.shape[2])]
                for head in heads:
                    pair = (k[key, kv_head], v[key, kv_head])
                    rows_of = (q[queries, head], dout[queries, head])
                    lse, delta = (s[queries, head] for s in stats)
                    probability, ds = _slopes(p, *rows_of, *pair, lse, delta)
                    grads[0] += p.softmax_scale * ds @ rows_of[0]
                    grads[1] += probability @ rows_of[1]
                    dq[queries, head] += ds[:, None] * pair[0]
                _store_gradients(p, device, key, kv_head, grads)


def _slopes(p, q, dout, k, v, lse, delta) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probability of one key in each query row, and the gradient of its raw score."""
    scores, slope = q @ k, 1.0
    if p.cap:
        bounded = np.tanh(scores * p.cap_scale / (2 * math.log2(math.e)))
        scores, slope = p.cap * bounded, 1 - bounded**2
    probability = np.exp2(scores * p.score_scale - lse)
    return probability, probability * (dout @ v - delta) * slope


def _queries_of(key: int, segs: np.ndarray) -> np.ndarray:
    ranges = [np.zeros(0, dtype=np.int64)]
    for k0, k1, lo, hi, q0, q1, _, _ in segs.tolist():
        if q0 <= key < q1:
            ranges.append(np.arange(max(k0, key + lo), min(k1, key + hi + 1)))
    return np.concatenate(ranges)


def _dq_alone(raw: bytes, device) -> None:
    p = DqParams.from_buffer_copy(raw)
    (q, q_box), (k, k_box), (v, v_box), (dout, dout_box) = (
        device.tensor(m) for m in (p.q_map, p.k_map, p.v_map, p.dout_map)
    )
    assert q_box == dout_box and k_box == v_box and p.padded_rows >= len(q)
    assert (q.shape[1], k.shape[1], len(k)) == (p.num_heads, p.num_kv_heads, p.num_keys)
    assert p.tiles % 16 == p.segments % 16 == 0 and p.counters
    assert 1 <= p.heads_per_section <= p.num_heads
    order = array_at(p.order, np.int32, p.num_tiles)
    tiles = array_at(p.tiles, np.int32, 4 * (order.max() + 1)).reshape(-1, 4)
    segs = array_at(p.segments, np.int32, 8 * int(tiles[:, 2:].sum(axis=1).max())).reshape(-1, 8)
    for tile in order:
        row0, rows, seg0, count = tiles[tile].tolist()
        assert count or not p.accumulate  # nothing would be added
        for row in range(row0, row0 + rows):
            # Rows are queries here: the same look-up, of keys.
            keys = _queries_of(row, segs[seg0 : seg0 + count])
            for head in range(p.num_heads):
                lse, delta = (
                    array_at(a + 4 * (head * p.padded_rows + row), np.float32, 1)[0]
                    for a in (p.lse_2, p.delta)
                )
                kv_head = head // (p.num_heads // p.num_kv_heads)
                gradient = np.zeros(q.shape[2])
                for key in keys:
                    pair = k[key, kv_head], v[key, kv_head]
                    gradient += (
                        _slopes(p, q[row, head], dout[row, head], *pair, lse, delta)[1] * pair[0]
                    )
                _store_dq(p, device, row, head, p.factor * gradient)


def _store_dq(p: DqParams, device, row: int, head: int, gradient: np.ndarray) -> None:
    strides = (p.dq_row_stride, p.dq_head_stride)
    to = _rows(p.dq, 4 if p.dq_is_float else 2, row, head, strides, len(gradient))
    if p.accumulate:
        assert p.dq_is_float
        gradient = gradient + to
    to[:] = gradient if p.dq_is_float else encoded(gradient, device.last_dtype)


def _row_stats(device, tensor_map, shape, box_rows: int) -> np.ndarray:
    dtype, address, sizes, strides, box, swizzled = device.described(tensor_map)
    assert (dtype, sizes, box, swizzled) == (FLOAT32, (*shape, 4), (box_rows, 1, 1), False)
    flat = array_at(address, np.float32, strides[0] // 4 * (shape[1] - 1) + shape[0])
    return np.lib.stride_tricks.as_strided(flat, shape, (4, strides[0])).astype(np.float64)


def _dq(device, tensor_map, shape, box_rows: int) -> np.ndarray:
    dtype, address, sizes, strides, box, swizzled = device.described(tensor_map)
    assert (dtype, box, swizzled) == (FLOAT32, (32, 1, box_rows), True)
    assert sizes == shape[::-1] and strides == (4 * shape[2], 4 * shape[1] * shape[2])
    return array_at(address, np.float32, shape[0] * shape[1] * shape[2]).reshape(shape)


def _store_gradients(p, device, key: int, kv_head: int, grads: list[np.ndarray]) -> None:
    strides = (
        (p.dk, (p.dk_row_stride, p.dk_head_stride)),
        (p.dv, (p.dv_row_stride, p.dv_head_stride)),
    )
    width = 2 if p.store == STORE_16_BITS else 4
    for (address, stride), gradient in zip(strides, grads, strict=True):
        to = _rows(address, width, key, kv_head, stride, len(gradient))
        if p.store == ADD_FLOATS:  # this adds once what the kernel may add in parts
            to += gradient.astype(np.float32)
        else:
            assert p.items_per_group == 1
            to[:] = gradient if width == 4 else encoded(gradient, device.last_dtype)


RUN = {
    "mcp_attention_backward_preprocess": _preprocess,
    "mcp_attention_backward": _main,
    "mcp_attention_backward_dq": _dq_alone,
    "mcp_attention_backward_postprocess": _postprocess,
}
