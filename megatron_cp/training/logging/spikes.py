"""Gradient norms that stand out while a run goes on, by the rule of the report's verdict (report/run/health.py).

    norm > 5 times the median of the steps before       told, once ten steps have shown what is usual

The first tenth of a run is never told: gradients are large at the start, and nothing is wrong.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

MIN_STEPS = 10  # fewer say nothing about what is usual
SPIKE = 5.0  # times the median gradient norm: clipping hides smaller ones from the weights
KEPT = 1000  # norms whose median is usual: a norm that falls for a whole run must not hide a spike at its end


class GradientSpikes:
    """Remembers the last norms, in order of time and of size."""

    def __init__(self, num_steps: int) -> None:
        """`num_steps`: of the whole run; its first tenth is not judged."""
        self._from = num_steps // 10
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []

    def told(self, iteration: int, row: Mapping[str, Any]) -> str | None:
        """Returns what stands out in a row, in words; None where nothing does."""
        norm = row.get("grad-norm")
        if not isinstance(norm, (int, float)) or not math.isfinite(norm):
            return None
        usual = self._median()
        self._remember(float(norm))
        if usual is None or iteration <= self._from or norm <= SPIKE * usual:
            return None
        times = norm / max(usual, 1e-30)
        return (
            f"step {iteration}: gradient norm {norm:.4g}, {times:.3g} times the median {usual:.4g}"
        )

    def _median(self) -> float | None:
        count = len(self._by_size)
        return self._by_size[count // 2] if count >= MIN_STEPS else None

    def _remember(self, norm: float) -> None:
        self._by_time.append(norm)
        bisect.insort(self._by_size, norm)
        if len(self._by_time) > KEPT:
            oldest = self._by_time.popleft()
            del self._by_size[bisect.bisect_left(self._by_size, oldest)]
