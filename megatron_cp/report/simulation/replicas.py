"""A step of several replicas, on paper: packs on one replica each, or on all ranks of all of them.

    fixed, by area     packs are dealt to replicas and micro-batches by the area of their masks
    fixed, by time     by the least time that their attention takes, as the loader deals them
    hybrid             the packs that replicas compute at the same time are one mask on all ranks
    chosen             what --hybrid-context-parallel takes: hybrid where that is sure to be faster, else fixed

Attention of one layer, forward and backward, in all micro-batches of a step. In the fixed layout replicas meet at the
end of the step, in the hybrid one all ranks meet in every micro-batch. Nothing here is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.data.balance import assign_packs
from megatron_cp.data.batch import PlanRequest
from megatron_cp.data.hybrid import bound_seconds, is_hybrid_faster
from megatron_cp.mask import AttentionMask, concat
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PASSES
from megatron_cp.report.draw.table import text_table
from megatron_cp.report.figures.planners import four_digits, machine_words
from megatron_cp.report.sources import MaskChoice, Source, Tell, check_ranks, quiet

# M micro-batches, R replicas, P ranks
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LayoutTimes:
    """How a step goes in one layout; milliseconds of one layer."""

    layout: str
    predicted_ms: float
    simulated_ms: float
    busiest_ms: float
    """The rank that computes longest."""
    mean_ms: float


@dataclass(frozen=True)
class ReplicaStudy:
    """A step of `dp_size` replicas in every layout."""

    source: Source
    mask_name: str
    config: CPConfig
    seed: int
    cp_size: int
    dp_size: int
    num_tokens: int
    """Of a pack."""
    num_microbatches: int
    layouts: tuple[LayoutTimes, ...]
    """Fixed by area, fixed by time, hybrid, chosen."""

    @property
    def speedup(self) -> float:
        """Returns the simulated time of fixed by area over that of the chosen layout."""
        return self.layouts[0].simulated_ms / self.layouts[-1].simulated_ms


@dataclass(frozen=True)
class _Timing:
    """A plan's seconds, and those that each of its ranks computes."""

    predicted: float
    simulated: float
    computing: FloatArray

    @property
    def longer(self) -> float:
        """Returns the larger of both, by which layouts are compared."""
        return max(self.predicted, self.simulated)


def study_replicas(
    source: Source,
    choice: MaskChoice,
    shape: tuple[int, int, int, int],
    config: CPConfig,
    *,
    seed: int = 0,
    tell: Tell = quiet,
) -> ReplicaStudy:
    """Returns a step in every layout; `shape` is (context ranks, replicas, tokens of a pack, packs of the step).

    Raises ValueError for packs that replicas do not divide, more ranks than tokens, and what no plan serves.
    """
    cp_size, dp_size, num_tokens, num_packs = shape
    check_ranks(cp_size, num_tokens)
    masks = [
        choice.build(num_tokens, choice.documents(num_tokens, lengths), seed + number)
        for number, lengths in enumerate(packs_of(source, num_tokens, num_packs, seed))
    ]
    by_area = _dealt([float(mask.area()) for mask in masks], dp_size)
    request = PlanRequest(cp_size=cp_size, config=config)
    tell(f"{num_packs} packs on {cp_size} ranks each")
    bounds = [bound_seconds(mask, request) for mask in masks]
    alone = [_timed(mask, cp_size, config) for mask in masks]
    by_time = _dealt(bounds, dp_size)
    together = []
    for number, packs in enumerate(by_time, 1):
        tell(f"micro-batch {number} of {len(by_time)} on {cp_size * dp_size} ranks")
        whole = concat([masks[i] for i in packs])
        together.append(_timed(whole, cp_size * dp_size, config))
    # Of measured kernels a bound knows the peak alone, so there a pack counts with the time of its own plan.
    has_rates = get_topology(config.topology).kernels is not None
    seconds_alone = [one.longer for one in alone] if has_rates else bounds
    is_hybrid = is_hybrid_faster(
        [one.longer for one in together], [[seconds_alone[i] for i in packs] for packs in by_time]
    )
    fixed = _fixed("fixed, by time", alone, by_time)
    hybrid = _layout("hybrid", [together])
    layouts = (
        _fixed("fixed, by area", alone, by_area),
        fixed,
        hybrid,
        replace(hybrid if is_hybrid else fixed, layout="chosen"),
    )
    return ReplicaStudy(
        choice.seen_of(source),
        choice.words,
        config,
        seed,
        cp_size,
        dp_size,
        num_tokens,
        len(by_time),
        layouts,
    )


def packs_of(source: Source, num_tokens: int, num_packs: int, seed: int) -> list[NDArray[np.int64]]:
    """Returns the document lengths of each pack: drawn for each, or a stream of given ones, cut."""
    if source.lengths is None:
        return [source.documents(num_tokens, seed + number) for number in range(num_packs)]
    ends = np.cumsum(source.documents(num_tokens * num_packs, seed))
    cuts = num_tokens * np.arange(1, num_packs + 1)
    lengths = np.diff(np.union1d(ends, cuts), prepend=0)
    which = np.searchsorted(cuts, np.cumsum(lengths))
    return [lengths[which == number] for number in range(num_packs)]


def _dealt(costs: Sequence[float], dp_size: int) -> list[list[int]]:
    """Returns the packs `[M][R]` that replicas compute at the same time."""
    dealt = assign_packs(costs, dp_size=dp_size, micro_batch_size=1)
    return [[packs[0] for packs in together] for together in zip(*dealt, strict=True)]


def _timed(mask: AttentionMask, num_ranks: int, config: CPConfig) -> _Timing:
    plan = make_plan(mask, num_ranks, config)
    played = [simulate_pass(plan, name) for name in PASSES]
    predicted = layer_seconds(plan)
    computing = np.sum([one.computing for one in played], axis=0)
    return _Timing(predicted, sum(one.seconds for one in played), computing)


def _fixed(name: str, alone: Sequence[_Timing], packs_MR: Sequence[Sequence[int]]) -> LayoutTimes:
    return _layout(name, [[alone[i] for i in mine] for mine in zip(*packs_MR, strict=True)])


def _layout(name: str, timings: Sequence[Sequence[_Timing]]) -> LayoutTimes:
    """Returns the times of groups of ranks that meet at the end of the step alone, each with its micro-batches."""
    computing = np.concatenate(
        [np.sum([one.computing for one in mine], axis=0) for mine in timings]
    )
    return LayoutTimes(
        name,
        predicted_ms=1e3 * max(sum(one.predicted for one in mine) for mine in timings),
        simulated_ms=1e3 * max(sum(one.simulated for one in mine) for mine in timings),
        busiest_ms=1e3 * float(computing.max()),
        mean_ms=1e3 * float(computing.mean()),
    )


def replicas_text(studies: Sequence[ReplicaStudy]) -> str:
    """Returns what the command prints: a table for each number of context ranks."""
    first = studies[0]
    lines = [
        f"SIMULATED, not measured: {machine_words(first.config)}",
        f"data: {first.source.words}; mask {first.mask_name}; seed {first.seed}",
        "attention of one layer, forward + backward, in all micro-batches of a step; busiest, mean: a rank computes",
    ]
    for study in studies:
        step = f"{study.num_microbatches} micro-batch" + "es" * (study.num_microbatches > 1)
        lines += [
            "",
            f"{study.cp_size} context ranks x {study.dp_size} replicas = {study.cp_size * study.dp_size} ranks, "
            f"packs of {study.num_tokens:,} tokens, {step} a step",
            *_table(study),
            f"--hybrid-context-parallel: {study.speedup:.2f} x fixed, by area (simulated)",
        ]
    return "\n".join(lines)


def _table(study: ReplicaStudy) -> list[str]:
    columns = ("layout", "predicted ms", "simulated ms", "busiest ms", "mean ms")
    rows = [
        (one.layout, *(four_digits(ms) for ms in
                       (one.predicted_ms, one.simulated_ms, one.busiest_ms, one.mean_ms)))
        for one in study.layouts
    ]  # fmt: skip
    return text_table(columns, rows)


def replicas_values(studies: Sequence[ReplicaStudy]) -> dict[str, object]:
    """Returns the studies as JSON values."""
    first = studies[0]
    return {
        "simulated": "times come from a model; nothing was measured",
        "data": first.source.words,
        "mask": first.mask_name,
        "seed": first.seed,
        "topology": asdict(get_topology(first.config.topology)),
        "heads": [first.config.num_heads, first.config.num_kv_heads, first.config.head_dim],
        "steps": [
            {
                "context ranks": study.cp_size,
                "replicas": study.dp_size,
                "tokens": study.num_tokens,
                "micro-batches": study.num_microbatches,
                "layouts": [asdict(one) for one in study.layouts],
            }
            for study in studies
        ],
    }
