"""Times on a GPU: interleaved, cold cache, medians, with the clocks beside them."""

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tools.gpu.predict import Gpu

FLUSH_BYTES = 256 << 20  # several times the second-level cache
WARMUP = 3
MIN_ROUNDS, MAX_ROUNDS = 7, 20
HEAD_START_CYCLES = 10_000_000  # of the GPU, some 5 ms
CASE_SECONDS = 3.0  # what the rounds of one case may take together before they become fewer


@dataclass(frozen=True)
class Times:
    """Milliseconds over the counted rounds."""

    median_ms: float
    low_ms: float
    high_ms: float


def num_rounds(seconds_per_round: float) -> int:
    """Returns how often to measure a case of which one round takes so long."""
    affordable = int(CASE_SECONDS / max(seconds_per_round, 1e-6))
    return max(MIN_ROUNDS, min(MAX_ROUNDS, affordable))


def interleaved(calls: Mapping[str, Callable[[], object]]) -> dict[str, Times]:
    """Returns the GPU's times of each call: every round runs each once, after writing over the cache.

    Each round begins with another call: who comes first finds a cooler GPU, worth 3 % (H100, 2026-11-22). The GPU
    sleeps while the host begins a round: otherwise the first call, for which the GPU waits, pays for Python.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    current, rounds = 0, MAX_ROUNDS
    while current < WARMUP + rounds:
        began = time.monotonic()
        torch.cuda._sleep(HEAD_START_CYCLES)
        first = current % len(calls)
        for name, call in (*list(calls.items())[first:], *list(calls.items())[:first]):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            stop.record()
            if current >= WARMUP:
                events[name].append((start, stop))
        torch.cuda.synchronize()  # a round at a time: the host must not run far ahead
        current += 1
        if current == WARMUP:
            rounds = num_rounds(time.monotonic() - began)
    return {name: summary([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def summary(milliseconds: list[float]) -> Times:
    """Returns median and the second and eighth tenth."""
    ordered = sorted(milliseconds)
    fifth = len(ordered) // 5
    return Times(statistics.median(ordered), ordered[fifth], ordered[-1 - fifth])


def clocks() -> dict[str, str]:
    """Returns what nvidia-smi says of the first GPU now; empty where it says nothing."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in run.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def gpu() -> Gpu:
    """Returns the GPU's multiprocessors and its clock under a large product, 0 where nvidia-smi is silent."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(50):
        a @ b
    clock = clocks().get("clocks.sm", "0")  # asked while the products still run
    torch.cuda.synchronize()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Gpu(num_sms, float(clock.split()[0]))


def ceilings() -> dict[str, float]:
    """Returns this GPU's own limits now: bf16 TFLOP/s of a large product, TB/s of a copy (read + written)."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    times = interleaved(calls)
    return {
        "bf16 product 8192^3, TFLOP/s": 2 * size**3 / times["product"].median_ms / 1e9,
        "copy, TB/s": 2 * source.nbytes / times["copy"].median_ms / 1e9,
    }
