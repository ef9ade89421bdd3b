"""How many packs a step takes, by how many were consumed before it.

    0 .. 999 packs consumed: 16 a step | 1000 .. : 32 a step | ...

A pure function of the packs consumed, so a resumed run goes on with the size that it would have had.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchSchedule:
    """Pairs (packs consumed, packs per step from there on), the first from 0, increasing."""

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.steps]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ValueError(
                f"batch sizes {self.steps} must begin at 0 and go on at increasing numbers of packs"
            )
        if min(size for _, size in self.steps) < 1:
            raise ValueError(f"batch sizes {self.steps} must be at least 1")

    def size_at(self, consumed: int) -> int:
        """Returns the packs of the step before which `consumed` packs were taken."""
        return self.steps[bisect.bisect_right(self.steps, consumed, key=lambda step: step[0]) - 1][
            1
        ]

    def sizes(self) -> list[int]:
        """Returns every size that a step may have."""
        return sorted({size for _, size in self.steps})

    def num_steps(self, num_packs: int, consumed: int = 0) -> int:
        """Returns how many whole steps `num_packs` packs give, `consumed` of them taken before."""
        count = 0
        ends = [*(start for start, _ in self.steps[1:]), num_packs]
        for end, (_, size) in zip(ends, self.steps, strict=True):
            # The step that crosses into the next size still has this one.
            wanted = max(0, -(-(min(end, num_packs) - consumed) // size))
            taken = min(wanted, max(0, num_packs - consumed) // size)
            count, consumed = count + taken, consumed + taken * size
            if taken < wanted:
                break  # too few packs are left for a step of this size
        return count


def constant(size: int) -> BatchSchedule:
    """Returns the schedule of one size."""
    return BatchSchedule(((0, size),))


def ramp(start: int, increment: int, num_packs: int, final: int) -> BatchSchedule:
    """Returns sizes that grow from `start` to `final` by `increment`, evenly over `num_packs` packs.

    Raises ValueError for a final size that is no whole number of increments away.
    Source: the meaning of Megatron-LM's --rampup-batch-size.
    """
    if min(start, increment) < 1 or num_packs < 0 or final < start or (final - start) % increment:
        raise ValueError(
            f"a ramp from {start} by {increment} over {num_packs} packs does not reach {final}; "
            "start + a whole number of increments must be the global batch size"
        )
    count = (final - start) // increment
    if count == 0 or num_packs == 0:
        return constant(final)
    # Size k holds from k x num_packs / count packs on, rounded up.
    starts = [-(-k * num_packs // count) for k in range(count + 1)]
    sizes = {begin: start + k * increment for k, begin in enumerate(starts)}  # the largest wins
    return BatchSchedule(tuple(sorted(sizes.items())))


def parse_steps(text: str, seq_length: int) -> BatchSchedule:
    """Returns the schedule of a text such as `0:384 200B:768`: tokens consumed and size.

    K, M, B and T are 10^3 to 10^12. Raises ValueError for anything else.
    Source: the meaning of Megatron-LM's --step-batch-size-schedule.
    """
    pairs: list[tuple[int, int]] = []
    for entry in text.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry!r} must be TOKENS:SIZE, as in 0:384 200B:768")
        pairs.append((_number(tokens) // seq_length, _number(size)))
    return BatchSchedule(tuple(sorted(pairs)))


def _number(text: str) -> int:
    """Returns the value of `250B` or `768`."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    try:
        return int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no number; K, M, B and T may follow one") from None


def as_schedule(sizes: int | BatchSchedule) -> BatchSchedule:
    """Returns a schedule of what may be one size."""
    return constant(sizes) if isinstance(sizes, int) else sizes
