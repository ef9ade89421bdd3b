"""The picture of a mask: which query sees which key, and which rank owns them.

        keys ->          band: rank that owns the key (and sends it to those who need it)
queries  #
   |     ###             band at the left: rank that owns the query
   v        #
            ##           documents in two tones; hatched where they look both ways
"""

from __future__ import annotations

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.draw import svg
from megatron_cp.mask.interval import IntArray, from_indices
from megatron_cp.report.draw.svg import Markup, Scale, join, picture, rect, short_tokens, tag, text
from megatron_cp.report.figures.view import PackView

SIZE = 330.0
LEFT, TOP = 44.0, 40.0
BAND = 12.0
MAX_RANKS_NAMED = 8


def mask_picture(pack: PackView) -> Markup:
    """Returns the mask with a band of owners along both axes."""
    scale = Scale(0, pack.mask.num_queries, 0, SIZE)
    parts = [rect(LEFT, TOP, SIZE, SIZE, "empty"), _mask_drawing(pack.mask)]
    for rank, ids in enumerate(pack.ours.tokens):
        parts += _bands(ids[ids < pack.mask.num_queries], rank, pack.ours.cp_size, scale)
    parts += _axes(pack.mask.num_queries, scale)
    parts += _legend(pack)
    label = f"attention mask of {pack.mask.num_queries} tokens with {len(pack.document_lengths)} documents"
    return picture(LEFT + SIZE + 8, TOP + SIZE + 44, label, *parts)


def _mask_drawing(mask: AttentionMask) -> Markup:
    """Returns the mask as `mask/draw.py` draws it, put in its place; style.py gives its documents two tones."""
    drawing = svg(mask, max_pixels=int(SIZE)).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return tag("g", Markup(drawing), transform=f"translate({LEFT:.0f} {TOP:.0f})", class_="mask")


def rank_colour(rank: int, cp_size: int) -> dict[str, str]:
    """Returns how to fill what belongs to a rank: one of eight named colours, or a turn of hue."""
    if cp_size <= MAX_RANKS_NAMED:
        return {"class_": f"s{rank + 1}"}
    # neighbours far apart on the wheel
    hue = (rank * 137.508) % 360
    return {"class_": "", "fill": f"hsl({hue:.0f} 58% 55%)"}


def _bands(ids: IntArray, rank: int, cp_size: int, scale: Scale) -> list[Markup]:
    colour = rank_colour(rank, cp_size)
    hint = f"rank {rank} owns {len(ids)} tokens"
    parts = []
    for start, stop in from_indices(ids).tolist():
        at, size = scale(start), max(scale(stop) - scale(start), 0.4)
        parts.append(rect(LEFT - BAND - 4, TOP + at, BAND, size, hint=hint, **colour))
        parts.append(rect(LEFT + at, TOP - BAND - 4, size, BAND, hint=hint, **colour))
    return parts


def _axes(num_tokens: int, scale: Scale) -> list[Markup]:
    parts = [
        text(LEFT, 12, "keys →", "muted"),
        text(LEFT + SIZE, 12, f"{short_tokens(num_tokens)} tokens", "muted", "end"),
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
