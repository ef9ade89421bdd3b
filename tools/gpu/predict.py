"""What the kernel model expects of a timed case. Modelled, never measured; it stands beside the times in the page.

The model (`python -m tools.kernel_model --json`) says which share of the cycles a kernel's loop keeps the tensor cores
busy, under two sets of assumptions, and what a work item costs beyond its loop. From there to a speed:

    cycles = products of a work item / (4096 operations per cycle x share) + fixed cycles
    speed  = products of all items / (cycles of all items / multiprocessors / clock)

Left out: imbalance between multiprocessors, partly masked tiles, waiting for memory, power.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu.cases import Case

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS_PER_CYCLE = 4096  # of a multiprocessor of compute capability 9.0, dense 16-bit products
NUM_PRODUCTS = {"forward": 2, "backward": 5}


@dataclass(frozen=True)
class Part:
    """A kernel that a pass may have: its products, the rows of its tiles (variants.json), whether these are keys."""

    name: str
    products: int
    rows: int
    owns_keys: bool


# One kernel or, where the model has no such kernel, the next row's.
PARTS = {
    "forward": ((Part("fwd", 2, 128, False),),),
    "backward": (
        (Part("bwd", 5, 128, True),),
        (Part("dkdv", 4, 64, True), Part("dq", 3, 128, False)),
    ),
}
SECONDS = 300


@dataclass(frozen=True)
class Model:
    """The model's figures by kernel (`fwd_128`), and why there are none."""

    kernels: Mapping[str, Mapping[str, object]]
    reason: str = ""


@dataclass(frozen=True)
class Gpu:
    """What turns cycles into seconds."""

    num_sms: int
    clock_mhz: float


def load_model(
    folder: Path = ROOT / "tools" / "kernel_model", command: Sequence[str] | None = None
) -> Model:
    """Returns the model's figures, or none and why: a missing model is no fault of the GPU's."""
    if not folder.is_dir():
        return Model({}, "tools/kernel_model is not here")
    command = command or [sys.executable, "-m", "tools.kernel_model", "--json"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        run.check_returncode()
        found = json.loads(run.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Model({}, f"tools.kernel_model gave nothing: {' '.join(str(error).split())}")
    # The figures may stand under a heading of their own.
    while (
        isinstance(found, dict) and len(found) == 1 and "default" not in next(iter(found.values()))
    ):
        found = next(iter(found.values()))
    return Model(found)


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
            num_items = -(-case.num_tokens // part.rows) * heads
            cycles += own / (OPERATIONS_PER_CYCLE * float(str(kernel[share])))
            cycles += num_items * _fixed_cycles(kernel)
        speeds.append(operations / (cycles / gpu.num_sms) * gpu.clock_mhz * 1e6 / 1e12)
    return min(speeds), max(speeds)


def _has(model: Model, case: Case, parts: Sequence[Part]) -> bool:
    return all(f"{part.name}_{case.head_dim}" in model.kernels for part in parts)


def _fixed_cycles(kernel: Mapping[str, object]) -> float:
    """Returns the cycles of a work item outside its loop, those of 16-bit results where kinds are told apart."""
    fixed = kernel.get("fixed_cycles") or 0
    if isinstance(fixed, Mapping):
        return float(next((fixed[kind] for kind in ("16 bits", *fixed) if kind in fixed), 0))
    return float(str(fixed))
