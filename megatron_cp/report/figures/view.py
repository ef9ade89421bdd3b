"""What the pictures of a pack need, counted from a plan, or from what a run wrote down about one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, from_indices, to_indices
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.hardware.makespan import stage_areas
from megatron_cp.plan.hardware.rows import row_size as row_bytes
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.plan.schema import PassName
from megatron_cp.plan.stats import sent_bytes

FloatArray = NDArray[np.float64]
MAX_CHUNKS_SHOWN = 128
MAX_RANKS_PICTURED = 64
USUAL = "per_document_zigzag"  # what a user of Megatron-LM runs otherwise
USUAL_WORDS = "Transformer Engine, THD"


@dataclass(frozen=True)
class PlanView:
    """One plan of a pack, as the pictures show it. P ranks."""

    planner: str
    tokens: IntArray
    """int64 `[P, T]`: global token ids of each rank; ids >= num_tokens are padding."""
    area: FloatArray
    """`[P]`: pairs that each rank computes in a forward pass."""
    sent_bytes: FloatArray
    """`[src, dst]`: bytes sent in a forward pass of one layer."""
    all_bytes: float
    """Bytes of all ranks, forward and backward, one layer."""
    stats: dict[str, dict[str, float]]
    """The planner's figures by pass, for what is predicted."""
    speeds: FloatArray
    """`[P]`: how fast each rank is; 1 where all are alike."""
    computed: AttentionPlan | None = None
    """The plan itself where it is at hand; else ranks compute the rows they own."""

    @property
    def key_tokens(self) -> IntArray:
        """Returns the keys of each rank, `[P, S]`: other tokens in cross attention only."""
        return self.tokens if self.computed is None else self.computed.tokens_of("k")

    @property
    def words(self) -> str:
        """Returns the planner's name, and whose scheme it is where a user knows it by another name."""
        return f"{self.planner} ({USUAL_WORDS})" if self.planner == USUAL else self.planner

    @property
    def computes_at_queries(self) -> bool:
        """Returns whether it is known that every pair is computed where its query lives, on keys that come there.

        Only then can what is sent be held against `needed_bytes`.
        """
        if self.computed is None or self.computed.forward.head_split is not None:
            return False
        return all(stage.q_cast is None for stage in self.computed.forward.stages)

    @property
    def cp_size(self) -> int:
        """Returns the number of ranks."""
        return len(self.tokens)

    @property
    def load(self) -> FloatArray:
        """Returns `[P]`: the area of each rank over its speed, beside the mean; its largest is `balance`."""
        return self.area / self.speeds / max(self.area.sum() / self.speeds.sum(), 1.0)

    @property
    def load_words(self) -> str:
        """Returns what `load` counts."""
        return "area" if (self.speeds == self.speeds[0]).all() else "area / speed"

    @property
    def balance(self) -> float:
        """Returns the largest area of a rank over the mean, by speed, 1 where there is no work."""
        return self.stats["forward"]["imbalance"]


@dataclass(frozen=True)
class PackView:
    """A pack: its mask, its documents, its plan and the baselines that are drawn beside it."""

    mask: AttentionMask
    document_lengths: tuple[int, ...]
    document_kinds: tuple[str, ...]
    ours: PlanView
    others: tuple[PlanView, ...]
    kv_row_bytes: int
    """Bytes of one key row plus one value row, all heads."""
    digest: str = ""
    """Of our plan, where it was read from a record."""

    @property
    def plans(self) -> tuple[PlanView, ...]:
        """Returns our plan, then the baselines."""
        return self.ours, *self.others


def view_of_plan(plan: AttentionPlan) -> PlanView:
    """Returns the view of a plan; every figure is counted from it."""
    passes: tuple[PassName, ...] = ("forward", "backward")
    sent = {name: sent_bytes(plan, name) for name in passes}
    return PlanView(
        planner=plan.planner,
        tokens=plan.global_from_local,
        area=stage_areas(plan, "forward").sum(axis=0),
        sent_bytes=sent["forward"],
        all_bytes=float(sum(matrix.sum() for matrix in sent.values())),
        stats={name: plan.stats(name) for name in passes},
        speeds=rank_speeds(plan.config, plan.cp_size),
        computed=plan,
    )


def view_of_pack(
    plans: Sequence[AttentionPlan], lengths: Sequence[int] = (), kinds: Sequence[str] = ()
) -> PackView:
    """Returns the view of what these plans are for: ours first, then the baselines.

    `lengths`, `kinds`: the documents of the pack; one without a kind where nothing is said.
    """
    ours, *others = [view_of_plan(plan) for plan in plans]
    return PackView(
        mask=plans[0].mask,
        document_lengths=tuple(lengths) or (plans[0].num_tokens,),
        document_kinds=tuple(kinds),
        ours=ours,
        others=tuple(others) if ours.cp_size > 1 else (),
        kv_row_bytes=kv_bytes(plans[0].config),
    )


def kv_bytes(config: CPConfig) -> int:
    """Returns the bytes of one key row plus one value row as they travel forward."""
    return row_bytes(config, "forward", "k").there


# ---------------------------------------------------------------------- the heat map


def chunk_bounds(views: Sequence[PlanView]) -> IntArray:
    """Returns where the columns of a heat map begin, and the end: at most MAX_CHUNKS_SHOWN columns.

    A column is a whole number of the plans' own chunks where that can be.
    """
    total = max(view.tokens.size for view in views)
    runs = [from_indices(ids) for view in views for ids in view.tokens]
    chunk = int(np.gcd.reduce(np.concatenate([*runs, [[0, total]]]), axis=None))
    width = chunk * -(-total // (chunk * MAX_CHUNKS_SHOWN))
    if total / width < 16:  # few large pieces: finer columns show the slope inside a piece
        width = -(-total // 64)
    return np.append(np.arange(0, total, width), total)


def area_by_chunk(view: PlanView, mask: AttentionMask, bounds: IntArray) -> FloatArray:
    """Returns the pairs that each rank computes for the queries of each chunk: `[P, chunks]`."""
    heat = np.zeros((view.cp_size, len(bounds) - 1))
    if view.computed is None:
        for rank, ids in enumerate(view.tokens):
            runs = _cut_runs(ids[ids < mask.num_queries], bounds)
            _add_rows(heat[rank], mask, runs, bounds, in_order=False)
        return heat
    pass_ = view.computed.forward
    degree = pass_.head_degree
    queries = pass_.held_ids("q", pass_.own_ids(view.tokens))
    for stage, held in zip(pass_.stages, queries, strict=True):
        for rank, work in enumerate(stage.work):
            if work.num_slices:
                _add_rows(heat[rank], work, _cut_runs(held[rank], bounds), bounds, in_order=True)
    return heat / degree


def _cut_runs(ids: IntArray, bounds: IntArray) -> IntArray:
    """Returns first and last+1 id of every run of consecutive ids, cut at the bounds: `[n, 2]`."""
    if not len(ids):
        return np.zeros((0, 2), dtype=np.int64)
    column = np.searchsorted(bounds, ids, side="right")
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(column) != 0)) + 1
    starts, stops = np.append(0, breaks), np.append(breaks, len(ids)) - 1
    return np.stack([ids[starts], ids[stops] + 1], axis=1)


def _add_rows(
    heat: FloatArray, mask: AttentionMask, runs: IntArray, bounds: IntArray, *, in_order: bool
) -> None:
    """Adds the area of every run to its column.

    `in_order`: the mask's rows are those of the runs, one after the other; else they are global.
    """
    sizes = runs[:, 1] - runs[:, 0]
    if in_order:
        areas = mask.area_of_rows(np.append(0, np.cumsum(sizes)))
    else:
        order = np.argsort(runs[:, 0])
        runs, edges = runs[order], runs[order].reshape(-1)
        areas = mask.area_of_rows(edges)[::2]
    column = np.searchsorted(bounds, runs[:, 0], side="right") - 1
    inside = column < len(heat)
    np.add.at(heat, column[inside], areas[inside])


# ---------------------------------------------------------------------- communication


def needed_bytes(view: PlanView, mask: AttentionMask, kv_row_bytes: int) -> FloatArray:
    """Returns the least that this placement must move in a forward pass: bytes `[src, dst]`.

    Key and value rows that queries of rank dst look at and rank src owns, each once; for plans that
    compute where the queries live.
    """
    owner = np.full(view.key_tokens.size, -1, dtype=np.int64)
    for rank, ids in enumerate(view.key_tokens):
        owner[ids] = rank
    needed = np.zeros((view.cp_size, view.cp_size))
    for rank, ids in enumerate(view.tokens):
        ids = ids[ids < mask.num_queries]
        keys = to_indices(mask.needed_keys(from_indices(ids)))
        needed[:, rank] = np.bincount(owner[keys], minlength=view.cp_size)
    np.fill_diagonal(needed, 0.0)
    return needed * kv_row_bytes
