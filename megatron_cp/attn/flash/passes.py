"""Both passes over a mask's calls with one variable-length operator, whichever it is.

The operators return `out` and gradients rounded to 16 bits; what several calls say of a row is merged, and
gradients are added, in float32. A call whose rows lie one behind the other reads them where they are; others
gather them, each row at most once.

The backward pass has `lse` and `delta` of the result merged over all keys, of which its own are a part. The
operators take `lse` as it is, but form `delta = rowsum(dout * out)` themselves: `delta_as_out` gives them
what to put in the place of `out`.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn import device_arrays
from megatron_cp.attn.flash.grouping import VarlenCall, group_calls
from megatron_cp.attn.flash.operators import Operator, Sequences
from megatron_cp.attn.merge import merge_rows_, merge_span_
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, to_indices

# An lse under which every probability is 0: infinities would meet those of masked scores.
NOTHING_LEFT = 1e30
# What stands in for `out` may be so large: well inside each dtype, and beyond its precision beside 1.
LARGEST = {torch.float16: 2.0**14}
LARGEST_ELSE = 2.0**40
SMALLEST_NORM = 1e-18
MANY_CALLS = 32  # masks that people train with take 1 to 21 (docs/flash.md)
_log = logging.getLogger("megatron_cp")


class Rows(NamedTuple):
    """Rows that a call packs: a run of them, or an int32 index of any."""

    run: tuple[int, int] | None  # first row, number of rows
    places: Tensor | None

    def pick(self, x: Tensor) -> Tensor:
        """Returns these rows."""
        if self.run is not None:
            return x.narrow(0, *self.run)
        assert self.places is not None
        return x.index_select(0, self.places)

    def read(self, x: Tensor) -> Tensor:
        """Returns these rows in a layout that the operators read."""
        return _readable(self.pick(x))

    def added(self, total: Tensor | None, part: Tensor, like: Tensor) -> Tensor:
        """Returns a total in the shape of `like` with the part added to these rows; None: the first part.

        No row stands twice in a call, so that every run gives the same bits.
        """
        dtype = accumulation_dtype(like.dtype)
        if total is None and self.run == (0, like.shape[0]):
            return part.to(dtype)
        if total is None:
            total = torch.zeros(like.shape, dtype=dtype, device=like.device)
        if self.run is not None:
            total.narrow(0, *self.run).add_(part)
        else:
            assert self.places is not None
            total.index_add_(0, self.places, part.to(dtype))
        return total


class DeviceCall(NamedTuple):
    """A `VarlenCall` on the device; `is_first`: no call before has any of its query rows."""

    queries: Rows
    keys: Rows
    sequences: Sequences
    is_first: bool


def forward_by(
    operator: Operator,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, (0, -inf) without keys."""
    num_rows, dtype = q_QNH.shape[0], accumulation_dtype(q_QNH.dtype)
    result: tuple[Tensor, Tensor] | None = None
    for queries, keys, sequences, is_first in device_calls(mask, q_QNH.device):
        inputs = (queries.read(q_QNH), keys.read(k_KGH), keys.read(v_KGH))
        out, lse_NQ = operator.forward(*inputs, sequences, options)
        _check_lse(lse_NQ, inputs[0], operator)
        if result is None and queries.run == (0, num_rows):
            result = out.to(dtype), _turned(lse_NQ)
            continue
        if result is None:
            result = _nothing(q_QNH, v_KGH)
        _merge(result, queries, (out, lse_NQ.t()), overwrite=is_first)
    return _nothing(q_QNH, v_KGH) if result is None else result


def backward_by(  # noqa: PLR0913  the raw backward pass, and by whom
    operator: Operator,
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in the accumulation dtype for a given global `lse` and `delta`."""
    no_keys = lse_QN == -torch.inf
    lse = lse_QN.masked_fill(no_keys, NOTHING_LEFT)
    dout, stand_in = delta_as_out(dout_QNH.to(q_QNH.dtype), delta_QN, no_keys)
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    for queries, keys, sequences, _ in device_calls(mask, q_QNH.device):
        inputs = (queries.read(q_QNH), keys.read(k_KGH), keys.read(v_KGH))
        results = (queries.read(stand_in), _turned(queries.pick(lse)))
        parts = operator.backward(queries.read(dout), *inputs, *results, sequences, options)
        dq = queries.added(dq, parts[0], q_QNH)
        dk, dv = keys.added(dk, parts[1], k_KGH), keys.added(dv, parts[2], v_KGH)
    if dq is None or dk is None or dv is None:
        dtype = accumulation_dtype(q_QNH.dtype)
        dq, dk, dv = (
            torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_QNH, k_KGH, v_KGH)
        )
    return dq, dk, dv


def delta_as_out(dout_QNH: Tensor, delta_QN: Tensor, no_keys_QN: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(dout, stand_in)` in the dtype of dout, whose products sum up to `delta` in each row.

        stand_in = dout * delta / |dout|^2

    The products have one sign, so that rounding them costs at most one rounding of delta, and far less on
    average (docs/flash.md). A row whose delta is too large for it, as where only `lse` has a gradient, gets
    another dout, too: tiny numbers in two columns, below what 16 bits resolve beside that delta; the
    stand-in has delta divided by them. Rows without keys become 0.
    """
    finite, dtype = torch.finfo(dout_QNH.dtype), accumulation_dtype(dout_QNH.dtype)
    largest = LARGEST.get(dout_QNH.dtype, LARGEST_ELSE)
    delta = delta_QN.to(dtype).masked_fill(no_keys_QN, 0.0)
    norm = torch.linalg.vector_norm(dout_QNH, dim=-1, dtype=dtype).masked_fill(no_keys_QN, 0.0)
    # A norm whose square float32 cannot hold counts as none.
    too_large = delta.abs() > norm.masked_fill(norm < SMALLEST_NORM, 0.0) * largest
    # A norm beyond float32 makes its row NaN: the 0 that it would be otherwise hides a gradient.
    ratio = (delta / norm / norm + (norm - norm)).masked_fill(too_large | (delta == 0), 0.0)
    dout = dout_QNH.masked_fill((too_large | no_keys_QN).unsqueeze(-1), 0.0)
    stand_in = torch.mul(dout, ratio.unsqueeze(-1), out=torch.empty_like(dout))

    tiny = (delta.abs() / largest).clamp(min=finite.smallest_normal * finite.eps)
    tiny = tiny.to(dout.dtype)
    quotient = torch.where(too_large, delta / tiny.to(dtype), 0.0)
    tiny = torch.where(too_large, tiny, 0.0)
    high = quotient.to(dout.dtype)
    low = (quotient - high.to(dtype)).to(dout.dtype)
    for column, part in ((0, high), (1, low)):
        dout.select(-1, column).add_(tiny)
        stand_in.select(-1, column).add_(part)
    return dout, stand_in


def _check_lse(lse_NQ: Tensor, q_QNH: Tensor, operator: Operator) -> None:
    """Raises RuntimeError for an lse of another layout: versions before ours pad it by sequence."""
    num_rows, num_heads, _ = q_QNH.shape
    if lse_NQ.shape != (num_heads, num_rows):
        raise RuntimeError(
            f"lse of {operator.name} has shape {tuple(lse_NQ.shape)}, allowed is [heads, rows] = ({num_heads}, "
            f"{num_rows}); install torch 2.8 or newer, flash-attn 2.7 or newer, or use backend='flex'"
        )


def _merge(
    result: tuple[Tensor, Tensor], rows: Rows, part: tuple[Tensor, Tensor], *, overwrite: bool
) -> None:
    """Merges what a call says of its rows into `(out, lse)`, or writes it where nothing was said before."""
    if rows.run is not None:
        out, lse = (x.narrow(0, *rows.run) for x in result)
        if overwrite:
            out.copy_(part[0])
            lse.copy_(part[1])
        else:
            merge_span_(out, lse, *part)
        return
    assert rows.places is not None
    places = rows.places.long()
    if overwrite:
        for whole, x in zip(result, part, strict=True):
            whole.index_copy_(0, places, x.to(whole.dtype))
    else:
        merge_rows_(*result, places, *part)


def _nothing(q_QNH: Tensor, v_KGH: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result of rows without keys."""
    dtype, shape = accumulation_dtype(q_QNH.dtype), (*q_QNH.shape[:2], v_KGH.shape[-1])
    return q_QNH.new_zeros(shape, dtype=dtype), q_QNH.new_full(shape[:2], -torch.inf, dtype=dtype)


def device_calls(mask: AttentionMask, device: torch.device) -> tuple[DeviceCall, ...]:
    """Returns the calls of a mask on a device, made once and copied once as long as the mask lives."""
    calls: tuple[DeviceCall, ...] = device_arrays.for_mask(mask, "flash", device, _prepare)
    return calls


def _prepare(mask: AttentionMask) -> device_arrays.Prepared:
    """Returns the arrays of all calls, and what makes the calls of their tensors."""
    calls = group_calls(mask)
    if len(calls) > MANY_CALLS:
        _tell_of_many(mask, calls)
    arrays: list[device_arrays.Int32Array] = []
    for call in calls:
        arrays += [call.cu_seqlens_q, call.cu_seqlens_k]
        arrays += [_index(rows) for rows in (call.q_rows, call.k_rows) if len(rows) > 1]

    is_said = np.zeros(mask.num_queries, dtype=np.bool_)
    firsts = []
    for call in calls:
        rows = to_indices(call.q_rows)
        firsts.append(not is_said[rows].any())
        is_said[rows] = True

    def finish(tensors: list[Tensor]) -> tuple[DeviceCall, ...]:
        given = iter(tensors)
        return tuple(_on_device(*pair, given) for pair in zip(calls, firsts, strict=True))

    return arrays, finish


def _tell_of_many(mask: AttentionMask, calls: Sequence[VarlenCall]) -> None:
    """Says in the log that a mask is slow here: every call reads its rows again."""
    times = sum(int(call.cu_seqlens_k[-1]) for call in calls) / mask.num_keys
    _log.warning(
        "backend 'flash' takes %d calls for a mask of %d slices and reads every key %.0f times on average; "
        "backend='flex' takes one kernel: measure both",
        len(calls), mask.num_slices, times,
    )  # fmt: skip


def _on_device(call: VarlenCall, is_first: bool, given: Iterator[Tensor]) -> DeviceCall:
    sequences = Sequences(next(given), next(given), call.max_q, call.max_k, call.left, call.right)
    queries, keys = (_rows(rows, given) for rows in (call.q_rows, call.k_rows))
    return DeviceCall(queries, keys, sequences, is_first)


def _rows(rows: IntArray, given: Iterator[Tensor]) -> Rows:
    if len(rows) > 1:
        return Rows(None, next(given))
    start, end = rows[0].tolist()
    return Rows((start, end - start), None)


def _index(rows: IntArray) -> device_arrays.Int32Array:
    return to_indices(rows).astype("int32")


def _turned(x: Tensor) -> Tensor:
    """Returns a matrix with rows and columns exchanged, laid out anew."""
    return x.t().clone(memory_format=torch.contiguous_format)


def _readable(x: Tensor) -> Tensor:
    """Returns `x`, copied unless the operators can read it: columns side by side, 16-byte steps, nothing shared."""
    step = 16 // x.element_size()
    outer = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    fits = x.stride(-1) == 1 and x.storage_offset() % step == 0
    fits = fits and all(stride > 0 and stride % step == 0 for stride in outer)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
