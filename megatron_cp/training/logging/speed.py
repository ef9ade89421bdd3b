"""How fast a run is: tokens per second, share of the device's peak, time to the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta

# Dense bf16 TFLOP/s without sparsity, from the makers' data sheets; the first name that the device's holds.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "B200": 2250.0,
}


def peak_tflops(device_name: str, *, bf16: bool) -> float | None:
    """Returns the peak of a known GPU; None for others, and for what is not trained in bf16."""
    known = (peak for name, peak in _PEAK_TFLOPS.items() if name in device_name)
    return next(known, None) if bf16 else None


@dataclass
class Clock:
    """Time and work of the steps since it was started; what is not a step starts it anew."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: int = 0
    """Real tokens of the whole job, padding excluded."""
    flops: float = 0.0
    waited_s: float = 0.0
    """So long this rank waited for batches."""
    seconds: float = 0.0
    """Mean of a step, up to the end of the last one."""

    def step(self, tokens: int, flops: float, waited_s: float) -> None:
        """Counts a step that has just ended."""
        self.steps += 1
        self.tokens += tokens
        self.flops += flops
        self.waited_s += waited_s
        self.seconds = (time.perf_counter() - self.started) / self.steps

    def tflops(self, world_size: int) -> float:
        """Returns TFLOP/s per rank."""
        return self.flops / (self.steps * self.seconds * 1e12 * world_size)

    def tokens_per_s(self) -> float:
        """Returns real tokens of the whole job over time."""
        return self.tokens / (self.steps * self.seconds)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Means over some steps."""

    tokens_per_s: float
    """Real tokens of the whole job, padding excluded."""
    world_size: int
    mfu: float | None
    """Operations of the model over the device's peak; None where that is not known."""
    remaining_s: float
    hybrid_steps: int | None = None
    """So many of them had all replicas' packs on all their ranks; None where none may."""

    def row(self) -> dict[str, float]:
        """Returns the metrics."""
        row = {
            "tokens-per-second": self.tokens_per_s,
            "tokens-per-second-per-device": self.tokens_per_s / self.world_size,
            "remaining-seconds": self.remaining_s,
        }
        return row if self.mfu is None else {**row, "mfu": self.mfu}

    def fields(self) -> str:
        """Returns the fields of the log line."""
        parts = [
            f" tokens per second: {self.tokens_per_s:.0f}",
            f" tokens per second per device: {self.tokens_per_s / self.world_size:.0f}",
        ]
        if self.mfu is not None:
            parts.append(f" MFU: {100 * self.mfu:.1f}%")
        if self.hybrid_steps is not None:
            parts.append(f" hybrid steps: {self.hybrid_steps}")
        parts.append(f" remaining: {timedelta(seconds=round(self.remaining_s))}")
        return " |".join(parts) + " |"
