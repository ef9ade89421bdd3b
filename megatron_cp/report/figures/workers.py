"""Who computes which pair: the mask as a grid of cells, each in the colour of the rank that computes most of it.

        keys ->          this plan        the usual one
queries  #               0                0
   |     ##              0 1              1 0
   v     ###             2 1 0            0 1 0
"""

from __future__ import annotations

import numpy as np

from megatron_cp.mask.blocks import cell_areas, even_bounds
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.schema import SIDES
from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.svg import Markup, picture, rect, short, tag, text
from megatron_cp.report.figures.mask import MAX_RANKS_NAMED, rank_colour
from megatron_cp.report.figures.view import FloatArray, PackView, PlanView

CELLS = 48  # along each side: cells of 6 pixels, a few thousand at most
SIDE, TOP = 288.0, 40.0


def pairs_by_rank(plan: AttentionPlan, q_bounds: IntArray, k_bounds: IntArray) -> FloatArray:
    """Returns the pairs of a forward pass that each rank computes in each cell: `[P, cells, cells]`, (query, key).

    Under a head split each rank of a group computes every pair for a part of the heads, and counts that part.
    """
    pass_ = plan.forward
    queries, keys = (pass_.held_ids(side, pass_.own_ids(plan.tokens_of(side))) for side in SIDES)
    size = len(q_bounds) - 1, len(k_bounds) - 1
    found = np.zeros((plan.cp_size, *size))
    for stage, q_ids, k_ids in zip(pass_.stages, queries, keys, strict=True):
        for rank, work in enumerate(stage.work):
            if work.num_slices:
                rows, columns = _runs(q_ids[rank], q_bounds), _runs(k_ids[rank], k_bounds)
                areas = cell_areas(work, rows, columns)
                q_cell = np.searchsorted(q_bounds, q_ids[rank][rows[:-1]], side="right") - 1
                k_cell = np.searchsorted(k_bounds, k_ids[rank][columns[:-1]], side="right") - 1
                i, j = np.nonzero(areas)
                inside = (q_cell[i] < size[0]) & (k_cell[j] < size[1])
                i, j = i[inside], j[inside]
                np.add.at(found[rank], (q_cell[i], k_cell[j]), areas[i, j])
    return found / pass_.head_degree


def _runs(ids: IntArray, bounds: IntArray) -> IntArray:
    """Returns the places where held rows pass into another cell, with 0 and the number of rows."""
    cell = np.searchsorted(bounds, ids, side="right")
    return np.concatenate([[0], np.flatnonzero(np.diff(cell)) + 1, [len(ids)]])


def workers_figure(pack: PackView) -> Figure | None:
    """Returns our plan beside the baselines; None without a plan, or where ranks share pairs by heads."""
    views = [view for view in pack.plans if _is_drawn(view)]
    if not views or views[0] is not pack.ours:
        return None
    bounds = [even_bounds(count, CELLS) for count in (pack.mask.num_queries, pack.mask.num_keys)]
    panels, rows = [], []
    for view in views:
        assert view.computed is not None
        pairs = pairs_by_rank(view.computed, *bounds)
        panels.append(_panel(view, pairs))
        rows += [
            (
                view.planner,
                int(bounds[0][i]),
                int(bounds[1][j]),
                int(pairs[:, i, j].argmax()),
                float(pairs[:, i, j].max()),
            )
            for i, j in np.argwhere(pairs.sum(axis=0) > 0).tolist()
        ]
    caption = (
        "The mask of the pack, each cell in the colour of the rank that computes most of its pairs; queries down, keys "
        "to the right. Rows of one colour: pairs are computed where their queries live. Counted, forward."
    )
    table = Table(("planner", "first query", "first key", "rank", "its pairs"), rows)
    drawn = tag("div", *panels, class_="panels")
    return Figure("Who computes which pair", caption, drawn, table, 12)


def _is_drawn(view: PlanView) -> bool:
    return view.computed is not None and view.computed.forward.head_split is None


def _panel(view: PlanView, pairs: FloatArray) -> Markup:
    total = pairs.sum(axis=0)
    high, wide = (SIDE / count for count in total.shape)
    parts = [text(0, 14, view.planner, "strong"), rect(0, TOP - 14, SIDE, SIDE, "empty")]
    for i, j in np.argwhere(total > 0).tolist():
        rank = int(pairs[:, i, j].argmax())
        hint = f"rank {rank}: {short(pairs[rank, i, j])} of {short(total[i, j])} pairs"
        colour = rank_colour(rank, view.cp_size)
        parts.append(rect(j * wide, TOP - 14 + i * high, wide, high, hint=hint, **colour))
    parts.append(text(0, TOP + SIDE + 9, "rank", "muted"))
    for rank in range(min(view.cp_size, MAX_RANKS_NAMED)):
        at, low = 34.0 + rank * 30.0, TOP + SIDE
        parts.append(rect(at, low, 10, 10, rx=2, **rank_colour(rank, view.cp_size)))
        parts.append(text(at + 14, low + 9, rank))
    return picture(SIDE + 2, TOP + SIDE + 16, f"who computes which pair, {view.planner}", *parts)
