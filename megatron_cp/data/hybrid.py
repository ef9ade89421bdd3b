"""One micro-batch of all replicas, planned as one over all their ranks, and beside it replica by replica.

    fixed     pack 0 on ranks 0 .. c-1  |  pack 1 on ranks c .. 2c-1  |  ...     the dearest pack keeps all waiting
    hybrid    pack 0, pack 1, ... as one mask on all d x c ranks                 documents never see one another

Planner "auto" puts whole documents on as few ranks as they fit and long ones on more, so the hybrid layout is what
Zeppelin, FlexSP, ByteScale and Megatron's BalancedCPScheduler do with groups of several sizes, with equal tokens on
every rank. Both layouts hold the same tokens: sums of losses and gradients over all ranks are equal to rounding.

A step is hybrid where no plan of the fixed layout can be predicted faster (`choose_layout`), so it is never
predicted, nor simulated, slower than fixed. Every rank comes to the same choice from the packs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_cp.data.batch import (
    BatchConfig,
    PackedBatch,
    PlannedBatch,
    PlanRequest,
    build_batch,
    join_batches,
    plan_batch,
)
from megatron_cp.data.document_set import Documents
from megatron_cp.data.pack_cost import comparable
from megatron_cp.data.packing import Pack
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.bounds.bounds import time_bound
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PASSES


@dataclass(frozen=True)
class BothLayouts:
    """A micro-batch of all replicas in both layouts; `fixed` is the part of one replica."""

    hybrid: PlannedBatch | None
    """None where the planner cannot place the joined packs."""
    fixed: PlannedBatch
    hybrid_seconds: float
    """Of attention in all layers, both passes: the larger of predicted and simulated; infinite without a plan."""
    fixed_seconds: tuple[float, ...]
    """Of each replica's part on its own ranks: what no plan of it is predicted or simulated below."""


@dataclass(frozen=True)
class HybridBuilder:
    """What turns the packs of all replicas' micro-batches, replica after replica, into both layouts.

    `request` is that of the fixed layout. A pure function that can be sent to a process.
    """

    documents: Documents
    config: BatchConfig
    request: PlanRequest
    dp_rank: int
    dp_size: int

    def __call__(self, packs: tuple[Pack, ...]) -> BothLayouts:
        """Returns both layouts of these packs, as many for each replica."""
        each = len(packs) // self.dp_size
        parts = [
            build_batch(self.documents, packs[first : first + each], self.config)
            for first in range(0, len(packs), each)
        ]
        return self.layouts(parts)

    def layouts(self, parts: Sequence[PackedBatch]) -> BothLayouts:
        """Returns both layouts of the replicas' parts of a micro-batch."""
        request = hybrid_request(self.request, self.dp_size)
        hybrid, hybrid_seconds = None, math.inf
        # A scheme, or a limit of memory, may fit each pack alone.
        with suppress(ValueError, NotImplementedError):
            hybrid = replace(plan_batch(join_batches(parts), request), spans_replicas=True)
            hybrid_seconds = seconds_of(hybrid, request)
        return BothLayouts(
            hybrid,
            plan_batch(parts[self.dp_rank], self.request),
            hybrid_seconds,
            tuple(self._fixed_seconds(part) for part in parts),
        )

    def _fixed_seconds(self, part: PackedBatch) -> float:
        """Returns a bound, which takes a millisecond; where kernels were measured, its plan's time.

        Bounds know the peak of measured kernels alone.
        """
        if get_topology(self.request.config.topology).kernels is None:
            return bound_seconds(part.mask, self.request)
        return seconds_of(plan_batch(part, self.request), self.request)


def hybrid_request(request: PlanRequest, dp_size: int) -> PlanRequest:
    """Returns which plans the hybrid layout needs: those of the fixed one on the ranks of all replicas."""
    return replace(request, cp_size=request.cp_size * dp_size)


def choose_layout(step: Sequence[BothLayouts]) -> list[PlannedBatch]:
    """Returns the micro-batches of a step, all hybrid or all fixed, hybrid where that is sure to be faster.

    In the fixed layout replicas meet at the end of the step alone, so the slowest one counts; in the hybrid layout
    all ranks meet in every micro-batch. Equal on all ranks, but for whose part `fixed` is.
    """
    is_hybrid = is_hybrid_faster(
        [both.hybrid_seconds for both in step], [both.fixed_seconds for both in step]
    )
    return [both.hybrid if is_hybrid and both.hybrid else both.fixed for both in step]


def is_hybrid_faster(hybrid_M: Sequence[float], fixed_MR: Sequence[Sequence[float]]) -> bool:
    """Returns whether a step of M micro-batches on R replicas is sure to be faster in the hybrid layout.

    `hybrid_M`: seconds of each micro-batch; `fixed_MR`: what each replica's part takes at least.
    """
    slowest = max(map(sum, zip(*fixed_MR, strict=True)))
    return comparable(sum(hybrid_M)) < comparable(slowest)


def seconds_of(batch: PlannedBatch, request: PlanRequest) -> float:
    """Returns the seconds of attention in all layers, both passes: the larger of predicted and simulated."""
    return sum(_layers_of(request, kind) * _plan_seconds(p) for kind, p in batch.plans.items())


def _plan_seconds(plan: AttentionPlan) -> float:
    predicted = layer_seconds(plan)
    return max(predicted, sum(simulate_pass(plan, name).seconds for name in PASSES))


def bound_seconds(mask: AttentionMask, request: PlanRequest) -> float:
    """Returns the seconds of attention in all layers, both passes, that no plan of the mask is below."""
    return sum(
        _layers_of(request, kind) * time_bound(one, request.cp_size, request.config, name)
        for kind, one in request.masks(mask).items()
        for name in PASSES
    )


def _layers_of(request: PlanRequest, kind: str) -> int:
    return request.num_window_layers if kind == "window" else request.num_full_layers
