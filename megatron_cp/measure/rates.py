"""Rates of attention on one device by the shape of a slice, and what transfers take from it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_cp import mask as masks
from megatron_cp.attn.attend import attend_backward, attend_forward
from megatron_cp.attn.options import resolve_options
from megatron_cp.mask import AttentionMask
from megatron_cp.measure.links import Start, waited
from megatron_cp.measure.stopwatch import Call, Stopwatch, Tick
from megatron_cp.plan.hardware.cost import BACKWARD_FLOPS
from megatron_cp.plan.schema import PassName

SHAPES = {"cpu": (64, 256, 1024), "cuda": (128, 512, 2048, 8192)}
"""Query rows, and mean keys per row, by device."""
MOST_LOST = 0.95  # contention is below 1: rows always move, if only after attention


@dataclass(frozen=True)
class Heads:
    """The shape of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def kernel_calls(heads: Heads, shapes: Sequence[int]) -> dict[Any, Call]:
    """Returns attention on boxes and slanted bands of every shape, by (rows, keys, "" or "slanted_", pass)."""
    calls: dict[Any, Call] = {}
    for rows, keys in itertools.product(shapes, shapes):
        band = masks.from_slices(rows, rows + keys, [(0, rows, 0, rows + keys, 1, keys)])
        for kind, mask in (("", masks.full(rows, keys)), ("slanted_", band)):
            for name, call in _passes(mask, heads).items():
                calls[rows, keys, kind, name] = call
    return calls


def _passes(mask: AttentionMask, heads: Heads) -> dict[PassName, Call]:
    generator = torch.Generator(heads.device).manual_seed(0)

    def rows(count: int, num_heads: int) -> torch.Tensor:
        shape = (count, num_heads, heads.head_dim)
        return torch.randn(shape, generator=generator, device=heads.device, dtype=heads.dtype)

    q = rows(mask.num_queries, heads.num_heads)
    k, v = (rows(mask.num_keys, heads.num_kv_heads) for _ in "kv")
    options = resolve_options(q, k, v)
    out, lse = attend_forward(q, k, v, mask, options)
    dout, delta = out.to(heads.dtype), (out * out).sum(-1, dtype=lse.dtype)
    return {
        "forward": lambda: attend_forward(q, k, v, mask, options),
        "backward": lambda: attend_backward(dout, q, k, v, lse, delta, mask, options),
    }


def rate_table(seconds: dict[Any, float], heads: Heads) -> list[dict[str, float]]:
    """Returns the `kernel` entry of a profile: TFLOP/s of each shape, kind and pass."""
    cells: dict[tuple[int, int], dict[str, float]] = {}
    for (rows, keys, kind, name), time in seconds.items():
        flops = 4.0 * rows * keys * heads.num_heads * heads.head_dim
        flops *= 1.0 if name == "forward" else BACKWARD_FLOPS
        cell = cells.setdefault((rows, keys), {"rows": rows, "keys": keys})
        cell[f"{kind}{name}_tflops"] = flops / time / 1e12
    return list(cells.values())


def lost_to_transfers(
    heads: Heads, rows: int, transfer: Start, stopwatch: Stopwatch, tick: Tick
) -> float:
    """Returns the share of a device's compute that is lost while rows move under it. Collective.

    Attention over `rows` queries and keys runs meanwhile, as often as takes longer than the transfer.
    """
    once = _passes(masks.full(rows, rows), heads)["forward"]
    calls: dict[str, Call] = {"attention": once, "transfer": waited(transfer)}
    single = stopwatch.least(calls, tick, "a transfer")
    count = 1 + int(single["transfer"] / single["attention"])

    def under() -> None:
        pending = transfer()
        for _ in range(count):
            once()
        pending.wait()

    calls = {"alone": lambda: [once() for _ in range(count)], "under": under}
    found = {**single, **stopwatch.least(calls, tick, "attention over a transfer")}
    lost = (found["under"] - found["alone"]) / found["transfer"]
    return min(MOST_LOST, max(0.0, lost))
