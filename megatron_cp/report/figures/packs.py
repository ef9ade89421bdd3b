"""The figures of packs that every page shows: mask, dispatch, communication."""

from __future__ import annotations

import numpy as np

from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.svg import short, short_bytes, short_tokens
from megatron_cp.report.figures.mask import mask_picture
from megatron_cp.report.figures.plan import MAX_NUMBERS, FloatArray, byte_unit, heat_maps, matrices
from megatron_cp.report.figures.view import (
    PackView,
    PlanView,
    area_by_chunk,
    chunk_bounds,
    needed_bytes,
)


def mask_figure(pack: PackView) -> Figure:
    """Returns the mask with the bands of owners."""
    mask, lengths = pack.mask, pack.document_lengths
    kinds = [
        f"{pack.document_kinds.count(kind)} {kind}"
        for kind in ("causal", "prefix", "bidirectional")
        if kind in pack.document_kinds
    ] or [str(len(lengths))]
    caption = (
        f"{', '.join(kinds)} documents of {short_tokens(min(lengths))} to "
        f"{short_tokens(max(lengths))} tokens: {mask.density():.1%} of all pairs. Work is the "
        "coloured area; the bands say which rank owns which rows and keys."
    )
    if len(lengths) == 1:
        caption = (
            f"One mask over {short_tokens(mask.num_queries)} tokens: {mask.density():.1%} of all "
            "pairs. The bands say which rank owns which rows and keys."
        )
    if mask.num_queries != mask.num_keys:
        caption = (
            f"Cross attention of {short_tokens(mask.num_queries)} queries with {short_tokens(mask.num_keys)} keys: "
            f"{mask.density():.1%} of all pairs, both sides stretched to a square. The bands say which rank owns "
            "which queries and which keys."
        )
    rows = [(*slice_.tolist(), _document_of(pack, int(slice_[0]))) for slice_ in mask.array]
    columns = ("q_start", "q_end", "k_start", "k_end", "lo", "hi", "document")
    return Figure("Attention mask of a pack", caption, mask_picture(pack), Table(columns, rows), 4)


def _document_of(pack: PackView, row: int) -> int:
    return int(np.searchsorted(np.cumsum(pack.document_lengths), row, side="right"))


def dispatch_figure(pack: PackView) -> Figure:
    """Returns the heat maps of our plan and the baselines, one above the other."""
    bounds = chunk_bounds(pack.plans)
    maps: list[tuple[str, PlanView, FloatArray]] = []
    rows: list[tuple[object, ...]] = []
    for view in pack.plans:
        heat = area_by_chunk(view, pack.mask, bounds)
        whose = "This plan: " if view is pack.ours else ""
        title = f"{whose}{view.words}, busiest rank {view.balance:.2f} × mean"
        maps.append((title, view, heat))
        rows += [
            (view.planner, rank, int(bounds[c]), int(bounds[c + 1]), round(float(heat[rank, c])))
            for rank, c in np.argwhere(heat > 0).tolist()
        ]
    caption = (
        "Who computes how much of which part of the pack: the stronger a cell, the more keys its "
        f"rows look at. Bars beside it: {pack.ours.load_words} should end at the dashed mean on every rank, "
        "and the tokens are equal by construction."
    )
    table = Table(("planner", "rank", "first token", "end token", "pairs"), rows)
    return Figure("Dispatch: rank × chunk", caption, heat_maps(maps, bounds), table, 8)


def communication_figure(pack: PackView) -> Figure:
    """Returns who sends how much to whom in a forward pass, beside what is needed where that can be compared."""
    panels, rows = [], []
    for view in pack.plans:
        needed = None
        if view.computes_at_queries:
            needed = needed_bytes(view, pack.mask, pack.kv_row_bytes)
        whose = "This plan" if view is pack.ours else view.planner
        total = float(view.sent_bytes.sum())
        words = short_bytes(total)
        if needed is not None and total > 1.005 * needed.sum():
            words += f", {short_bytes(total - needed.sum())} of it not needed"
        panels.append((f"{whose}: sent", words, view.sent_bytes))
        if needed is not None:
            at = f"{short_bytes(needed.sum())} at its placement"
            panels.append((f"{whose}: needed", at, needed))
        rows += _traffic_rows(view, needed)
    unit = byte_unit(max(float(matrix.max()) for _, _, matrix in panels))[1]
    numbers = f"numbers in {unit}, " if pack.ours.cp_size <= MAX_NUMBERS else ""
    elsewhere = [view.planner for view in pack.plans if not view.computes_at_queries]
    caption = (
        "Bytes of one layer's forward pass alone, counted from the plans: row = sender, column = "
        f"receiver, {numbers}one colour scale. Needed: keys and values that the receiver's queries look at, "
        "each once."
    )
    if elsewhere:
        caption += (
            f" {', '.join(elsewhere)}: pairs are (or may be) computed where neither their queries live, so what is "
            "sent has no such least beside it."
        )
    table = Table(("planner", "from", "to", "bytes sent", "bytes needed"), rows)
    return Figure("Communication, forward", caption, matrices(panels), table, 12)


def _traffic_rows(view: PlanView, needed: FloatArray | None) -> list[tuple[object, ...]]:
    least = np.zeros_like(view.sent_bytes) if needed is None else needed
    return [
        (
            view.planner,
            src,
            dst,
            int(view.sent_bytes[src, dst]),
            "" if needed is None else int(least[src, dst]),
        )
        for src, dst in np.argwhere((view.sent_bytes > 0) | (least > 0)).tolist()
    ]


def volume_words(share: float) -> str:
    """Returns a share of bytes for people: 58%, 7.2%."""
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def area_words(pack: PackView) -> str:
    """Returns how much of a full causal triangle the pack's mask is."""
    tokens = pack.mask.num_queries
    return f"{short(pack.mask.area() / (tokens * (tokens + 1) / 2) * 100)}%"
