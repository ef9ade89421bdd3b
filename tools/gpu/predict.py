"""What the kernel model expects of a timed case. Modelled, never measured; it stands beside the times in the page.

The model (`tools/kernel_model`, its figures in record.json) says which share of the cycles a kernel's loop keeps the
tensor cores busy, under two sets of assumptions, and what a work item costs beyond its loop. From there to a speed:

    cycles = products of a work item / (4096 operations per cycle x share) + fixed cycles
    speed  = products of all items / (cycles of all items / multiprocessors / clock)

Left out: imbalance between multiprocessors, partly masked tiles, waiting for memory, power.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.gpu.cases import Case
from tools.kernel_model import record
from tools.kernel_model.__main__ import known_variants

OPERATIONS_PER_CYCLE = 4096  # of a multiprocessor of compute capability 9.0, dense 16-bit products
NUM_PRODUCTS = {"forward": 2, "backward": 5}


@dataclass(frozen=True)
class Part:
    """A kernel that a pass may have: its products, and whether its work items own keys."""

    name: str
    products: int
    owns_keys: bool


# One kernel or, where the model has no such kernel, the next row's.
PARTS = {
    "forward": ((Part("fwd", 2, False),),),
    "backward": (
        (Part("bwd", 5, True),),
        (Part("dkdv", 4, True), Part("dq", 3, False)),
    ),
}


@dataclass(frozen=True)
class Model:
    """The model's figures by kernel (`fwd_128`), and why there are none."""

    kernels: Mapping[str, Mapping[str, Any]]
    reason: str = ""


@dataclass(frozen=True)
class Gpu:
    """What turns cycles into seconds."""

    num_sms: int
    clock_mhz: float


def load_model() -> Model:
    """Returns the recorded figures of today's kernels, and which are left out because they changed since."""
    figures, variants = record.read(), known_variants()
    stale = record.stale(figures, variants)
    reason = f"changed since the model saw them: {', '.join(sorted(stale))}" if stale else ""
    return Model({name: one for name, one in figures.items() if name not in stale}, reason)


def predicted_tflops(
    model: Model, case: Case, kernel_pass: str, area: int, gpu: Gpu
) -> tuple[float, float] | None:
    """Returns the speeds (tight, default assumptions) in TFLOP/s, None where the model has no such kernel."""
    parts = next((row for row in PARTS[kernel_pass] if _has(model, case, row)), None)
    if parts is None or case.head_dim != case.value_dim:
        return None
    operations = case.tflop(kernel_pass, area) * 1e12
    speeds = []
    for share in ("tight", "default"):
        cycles = 0.0
        for part in parts:
            kernel = model.kernels[f"{part.name}_{case.head_dim}"]
            own = operations * part.products / NUM_PRODUCTS[kernel_pass]
            heads = case.num_kv_heads if part.owns_keys else case.num_heads
            num_items = -(-case.num_tokens // kernel["rows"]) * heads
            cycles += own / (OPERATIONS_PER_CYCLE * kernel[share])
            cycles += num_items * kernel["fixed_cycles"].get("16 bits", 0)
        speeds.append(operations / (cycles / gpu.num_sms) * gpu.clock_mhz * 1e6 / 1e12)
    return min(speeds), max(speeds)


def _has(model: Model, case: Case, parts: Sequence[Part]) -> bool:
    return all(f"{part.name}_{case.head_dim}" in model.kernels for part in parts)
