"""Rows, or heads, more than 2^31 elements apart, as in a million rows of 64 heads: offsets of all kernels.

The tensors lie in memory that is reserved and hardly touched. A 32-bit offset would leave them, or hit another row.
"""

import math
import mmap
from dataclasses import replace

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn.emulated import backend
from megatron_cp.attn.options import AttendOptions

NUM_ROWS, NUM_HEADS = 200, 2  # two tiles of every kernel
FAR = 1 << 31
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE
LAYOUTS = {"rows": (FAR // 64 + 1024, 256), "heads": (256, FAR + 1024)}


def placed(x, layout):
    """Returns `x` with its rows or heads far apart."""
    strides = (*LAYOUTS[layout], 1)
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, extent * x.element_size(), flags=flags)
    far = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
    return far.copy_(x)


def results(q, k, v, dout, place, deterministic):
    """Returns what all kernels make of tensors that `place` puts somewhere."""
    mask = masks.causal(NUM_ROWS)
    options = AttendOptions(1 / math.sqrt(q.shape[2]), 0.0, "emulated")
    q, k, v, dout = map(place, (q, k, v, dout))
    lse = torch.empty(NUM_ROWS, NUM_HEADS)
    rounded, out = place(torch.empty(v.shape, dtype=v.dtype)), place(torch.empty(v.shape))
    for into in (rounded, out):
        backend.run_forward(q, k, v, mask, options, into=(into, lse))
    stats = backend.stats_of_result(dout, out, lse, None)
    rows = (dout, q, k, v, lse, stats.delta_of_rows(NUM_ROWS).contiguous(), mask)
    sums = [place(torch.zeros(x.shape)) for x in (q, k, v)]
    asked = replace(options, deterministic=deterministic)
    backend.backward_onto_(sums[0], (sums[1], sums[2]), *rows, asked, stats)
    merged, merged_lse = place(out), lse.clone()
    backend.merge_parts_(merged, merged_lse, place(out * 2), lse + 1.0)
    return rounded, out, lse, rows[5], *sums, merged, merged_lse


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_rows_far_apart_give_the_bits_of_rows_side_by_side(dims, layout, deterministic):
    generator = torch.Generator().manual_seed(3)
    widths = (dims[0], dims[0], dims[1], dims[1])
    tensors = [
        torch.randn(NUM_ROWS, NUM_HEADS, width, generator=generator).bfloat16() for width in widths
    ]
    with backend.running(backend.Settings(host_threads=1)):  # sums in one order
        near = results(*tensors, torch.Tensor.clone, deterministic)
        far = results(*tensors, lambda x: placed(x, layout), deterministic)
    for made, expected in zip(far, near, strict=True):
        assert torch.equal(made, expected)
