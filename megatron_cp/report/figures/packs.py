"""The figures of packs that every page shows: mask, dispatch, communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_cp.report.draw.html import Figure, Table, Tile
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

_KIND_WORDS = {"causal": "causal", "prefix": "prefix", "bidirectional": "bidirectional"}


def mask_figure(pack: PackView) -> Figure:
    """Returns the mask with the bands of owners."""
    mask, lengths = pack.mask, pack.document_lengths
    kinds = [
        f"{pack.document_kinds.count(kind)} {words}"
        for kind, words in _KIND_WORDS.items()
        if kind in pack.document_kinds
    ]
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
    rows = [(*slice_.tolist(), _document_of(pack, int(slice_[0]))) for slice_ in mask.array]
    columns = ("q_start", "q_end", "k_start", "k_end", "lo", "hi", "document")
    return Figure("Attention mask of a pack", caption, mask_picture(pack), Table(columns, rows), 4)


def _document_of(pack: PackView, row: int) -> int:
    return int(np.searchsorted(np.cumsum(pack.document_lengths), row, side="right"))


def dispatch_figure(pack: PackView) -> Figure:
    """Returns the twin heat map: our plan and zigzag's."""
    bounds = chunk_bounds(pack.plans)
    maps: list[tuple[str, PlanView, FloatArray]] = []
    rows: list[tuple[object, ...]] = []
    for view in pack.plans:
        heat = area_by_chunk(view, pack.mask, bounds)
        whose = "This plan" if view is pack.ours else "Zigzag ring"
        title = f"{whose} ({view.planner}): busiest rank {view.balance:.2f} × mean"
        maps.append((title, view, heat))
        rows += [
            (view.planner, rank, int(bounds[c]), int(bounds[c + 1]), round(float(heat[rank, c])))
            for rank, c in np.argwhere(heat > 0).tolist()
        ]
    caption = (
        "Who computes how much of which part of the pack: the stronger a cell, the more keys its "
        "rows look at. Bars at the right: the area should end at the dashed mean on every rank, and the "
        "tokens are equal by construction."
    )
    table = Table(("planner", "rank", "first token", "end token", "pairs"), rows)
    return Figure("Dispatch: rank × chunk", caption, heat_maps(maps, bounds), table, 8)


def communication_figure(pack: PackView) -> Figure:
    """Returns who sends how much to whom in a forward pass, beside what the mask needs."""
    panels, rows = [], []
    for view in reversed(pack.plans):
        needed = needed_bytes(view, pack.mask, pack.kv_row_bytes)
        whose = "This plan" if view is pack.ours else "Zigzag ring"
        spare = view.sent_bytes.sum() - needed.sum()
        beyond = f", {short_bytes(spare)} of it not needed" if spare > 0.005 * needed.sum() else ""
        panels += [
            (f"{whose}: sent", f"{short_bytes(view.sent_bytes.sum())}{beyond}", view.sent_bytes),
            (f"{whose}: needed", f"{short_bytes(needed.sum())} at its placement", needed),
        ]
        rows += [
            (view.planner, src, dst, int(view.sent_bytes[src, dst]), int(needed[src, dst]))
            for src in range(view.cp_size)
            for dst in range(view.cp_size)
            if view.sent_bytes[src, dst] or needed[src, dst]
        ]
    unit = byte_unit(max(float(matrix.max()) for _, _, matrix in panels))[1]
    numbers = f"numbers in {unit}, " if pack.ours.cp_size <= MAX_NUMBERS else ""
    caption = (
        "Bytes of one layer's forward pass, counted from the plans: row = sender, column = "
        f"receiver, {numbers}one colour scale. Needed: keys and values that the receiver's "
        "queries look at, each once."
    )
    table = Table(("planner", "from", "to", "bytes sent", "bytes needed"), rows)
    return Figure("Communication: sent and needed", caption, matrices(panels), table, 12)


def balance_tile(packs: Sequence[PackView]) -> Tile:
    """Returns the balance over these packs beside zigzag's."""
    ours = float(np.mean([pack.ours.balance for pack in packs]))
    theirs = [pack.zigzag.balance for pack in packs if pack.zigzag is not None]
    detail = f"zigzag {np.mean(theirs):.2f} on the same packs" if theirs else "one rank"
    return Tile("Balance, max / mean area", f"{ours:.3f}", detail)


def volume_tile(packs: Sequence[PackView]) -> Tile:
    """Returns the communication volume as a share of the zigzag ring's."""
    ours = float(np.mean([pack.ours.all_bytes for pack in packs]))
    theirs = [pack.zigzag.all_bytes for pack in packs if pack.zigzag is not None]
    if not theirs or not np.mean(theirs):
        return Tile("Bytes sent", "none", "one rank owns every token")
    share = ours / float(np.mean(theirs))
    value = f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"
    detail = (
        f"{short_bytes(ours)} against {short_bytes(float(np.mean(theirs)))}; per layer and pack"
    )
    return Tile("Bytes sent vs zigzag ring", value, detail)


def area_words(pack: PackView) -> str:
    """Returns how much of a full causal triangle the pack's mask is."""
    tokens = pack.mask.num_queries
    return f"{short(pack.mask.area() / (tokens * (tokens + 1) / 2) * 100)}%"
