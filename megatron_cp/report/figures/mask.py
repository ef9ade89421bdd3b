"""The picture of a mask: which query sees which key, and which rank owns them.

        keys ->          band: rank that owns the key (and sends it to those who need it)
queries  #
   |     ###             band at the left: rank that owns the query
   v        #
            ##           documents in two tones; hatched where they look both ways
"""

from __future__ import annotations

import numpy as np

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.blocks import cell_areas, even_bounds
from megatron_cp.mask.draw import svg
from megatron_cp.mask.interval import IntArray, from_indices
from megatron_cp.report.draw.svg import Markup, Scale, join, picture, rect, short_tokens, tag, text
from megatron_cp.report.figures.view import PackView

SIZE = 330.0
LEFT, TOP = 44.0, 40.0
BAND = 12.0
FINEST = 660  # pieces of a band: half a pixel each
MAX_RANKS_NAMED = 8
CELLS = 110  # along each side of a mask that is not square: cells of 3 pixels


def mask_picture(pack: PackView) -> Markup:
    """Returns the mask with a band of owners along both axes."""
    mask, ours = pack.mask, pack.ours
    are_same = mask.num_queries == mask.num_keys
    parts = [rect(LEFT, TOP, SIZE, SIZE, "empty")]
    parts.append(_mask_drawing(mask) if are_same else _stretched_drawing(mask))
    sides = ((ours.tokens, mask.num_queries), (ours.key_tokens, mask.num_keys))
    for is_key, (tokens, count) in enumerate(sides):
        scale = Scale(0, count, 0, SIZE)
        owned = zip(_runs(tokens, count), (tokens < count).sum(axis=1).tolist(), strict=True)
        for rank, (runs, num_tokens) in enumerate(owned):
            band = (rank, ours.cp_size, num_tokens)
            parts += _bands(runs, band, scale, across=bool(is_key))
    size, words = f"{short_tokens(mask.num_queries)} tokens", f"{mask.num_queries} tokens"
    if not are_same:
        size = f"{short_tokens(mask.num_queries)} queries, {short_tokens(mask.num_keys)} keys"
        words = f"{mask.num_queries} queries and {mask.num_keys} keys"
    parts += _axes(size)
    parts += _legend(pack)
    label = f"attention mask of {words} with {len(pack.document_lengths)} documents"
    return picture(LEFT + SIZE + 8, TOP + SIZE + 44, label, *parts)


def _mask_drawing(mask: AttentionMask) -> Markup:
    """Returns the mask as `mask/draw.py` draws it, put in its place; style.py gives its documents two tones."""
    drawing = svg(mask, max_pixels=int(SIZE)).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return tag("g", Markup(drawing), transform=f"translate({LEFT:.0f} {TOP:.0f})", class_="mask")


def _stretched_drawing(mask: AttentionMask) -> Markup:
    """Returns a mask of unlike sides as a square of cells, each as dark as the share of its pairs."""
    q_bounds, k_bounds = (even_bounds(count, CELLS) for count in (mask.num_queries, mask.num_keys))
    share = cell_areas(mask, q_bounds, k_bounds) / np.outer(np.diff(q_bounds), np.diff(k_bounds))
    high, wide = (SIZE / count for count in share.shape)
    cells = [
        rect(LEFT + j * wide, TOP + i * high, wide, high, "s1", opacity=f"{share[i, j] * 0.9:.2f}")
        for i, j in np.argwhere(share > 0).tolist()
    ]
    return join(cells)


def rank_colour(rank: int, cp_size: int) -> dict[str, str]:
    """Returns how to fill what belongs to a rank: one of eight named colours, or a turn of hue."""
    if cp_size <= MAX_RANKS_NAMED:
        return {"class_": f"s{rank + 1}"}
    # neighbours far apart on the wheel
    hue = (rank * 137.508) % 360
    return {"class_": "", "fill": f"hsl({hue:.0f} 58% 55%)"}


def _runs(tokens: IntArray, count: int) -> list[IntArray]:
    """Returns the runs of tokens that each rank owns.

    Where they are more than could be seen, a cell of half a pixel belongs to the owner of its first token.
    """
    runs = [from_indices(ids[ids < count]) for ids in tokens]
    if sum(map(len, runs)) <= FINEST:
        return runs
    owner = np.empty(count, dtype=np.int64)
    for rank, ids in enumerate(tokens):
        owner[ids[ids < count]] = rank
    bounds = even_bounds(count, FINEST)
    of_cell = owner[bounds[:-1]]
    cells = (from_indices(np.flatnonzero(of_cell == rank)) for rank in range(len(tokens)))
    return [bounds[one] for one in cells]


def _bands(
    runs: IntArray, band: tuple[int, int, int], scale: Scale, *, across: bool
) -> list[Markup]:
    """Returns what a rank owns of the queries, at the left, or of the keys, `across` the top.

    `band`: the rank, how many there are, how many tokens it owns.
    """
    rank, cp_size, size = band
    colour = rank_colour(rank, cp_size)
    hint = f"rank {rank} owns {size} tokens"
    parts = []
    for start, stop in runs.tolist():
        at, long = scale(start), max(scale(stop) - scale(start), 0.4)
        x, y, wide, high = LEFT - BAND - 4, TOP + at, BAND, long
        if across:
            x, y, wide, high = LEFT + at, TOP - BAND - 4, long, BAND
        parts.append(rect(x, y, wide, high, hint=hint, **colour))
    return parts


def _axes(size: str) -> list[Markup]:
    parts = [
        text(LEFT, 12, "keys →", "muted"),
        text(LEFT + SIZE, 12, size, "muted", "end"),
    ]
    middle = TOP + SIZE / 2
    words = tag(
        "text",
        Markup("queries ↓"),
        x=14,
        y=middle,
        class_="muted",
        text_anchor="middle",
        transform=f"rotate(-90 14 {middle:.0f})",
    )
    return [*parts, words]


def _legend(pack: PackView) -> list[Markup]:
    at, parts, low = LEFT - BAND - 4, [], TOP + SIZE + 18
    parts.append(text(at, low, "owned by rank", "muted"))
    x = at + 88
    for rank in range(min(pack.ours.cp_size, MAX_RANKS_NAMED)):
        parts.append(rect(x, low - 9, 10, 10, rx=2, **rank_colour(rank, pack.ours.cp_size)))
        parts.append(text(x + 14, low, rank))
        x += 28
    if pack.ours.cp_size > MAX_RANKS_NAMED:
        parts.append(text(x, low, f"… {pack.ours.cp_size - 1}"))
    if set(pack.document_kinds) - {"causal"}:
        words = "darker: documents or prefixes that look both ways"
        parts.append(text(at, low + 18, words, "muted"))
    return [join(parts)]
