"""Pictures of masks: text for terminals and documents, SVG for reports.

    ascii(mask)    # . . .      `#` all pairs, `+` some, `.` none; large masks are drawn by cells
    svg(mask)      slices as shapes, so that the size of the picture follows the slices, not the tokens

Queries run downwards, keys to the right. In the SVG every document of a pack has a colour; boxes are
solid, slices cut by a diagonal are lighter.
"""

from itertools import pairwise

import numpy as np

from megatron_cp.mask.blocks import cell_areas, even_bounds
from megatron_cp.mask.checks import as_count
from megatron_cp.mask.interval import IntArray, columns, islands
from megatron_cp.mask.mask import AttentionMask
from megatron_cp.mask.slice import HI, K_END, K_START, LO, Q_END, Q_START

# Okabe and Ito's colours: distinct for colour-blind readers, on white and on black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7ae6", "#7f8c8d")
BAND = 10  # pixels of the rank bands beside the picture
GAP = 4
STAIRS = 64  # up to so many tokens a side, diagonals are drawn as the stairs that they are


def ascii(mask: AttentionMask, max_size: int = 64) -> str:
    """Returns the mask as text, at most `max_size` cells a side: `#` all, `+` some, `.` no pairs."""
    max_size = as_count("max_size", max_size, minimum=1)
    q_bounds, k_bounds = (even_bounds(n, max_size) for n in (mask.num_queries, mask.num_keys))
    areas = cell_areas(mask, q_bounds, k_bounds)
    sizes = np.diff(q_bounds)[:, None] * np.diff(k_bounds)[None]
    marks = np.where(areas == 0, ".", np.where(areas == sizes, "#", "+"))
    return "\n".join(" ".join(row) for row in marks.tolist())


def svg(
    mask: AttentionMask,
    rank_of_token: IntArray | None = None,
    *,
    max_pixels: int = 640,
    title: str = "attention mask",
) -> str:
    """Returns the mask as a stand-alone SVG element, `max_pixels` on its longer side.

    `rank_of_token` int `[num_tokens]` draws who owns the queries (left band) and the keys (top
    band); negative ranks are blank. Slices smaller than a pixel are drawn as the pixels that they
    touch, so 10^4 documents in 1M tokens take milliseconds and some ten kilobytes. Lines use the
    colour of the text around (`currentColor`), so the picture fits dark and light pages.
    """
    max_pixels = as_count("max_pixels", max_pixels, minimum=16)
    scale = max_pixels / max(1, mask.num_queries, mask.num_keys)
    width, height = mask.num_keys * scale, mask.num_queries * scale
    body = _shapes(mask, scale)
    margin = 0
    if rank_of_token is not None:
        ranks = np.asarray(rank_of_token, dtype=np.int64)
        if ranks.shape != (mask.num_queries,) or mask.num_queries != mask.num_keys:
            raise ValueError(
                f"rank_of_token has shape {ranks.shape} and the mask is {mask.num_queries} x "
                f"{mask.num_keys}; ranks need a square mask and one number per token: leave them "
                "out"
            )
        margin = BAND + GAP
        body += _rank_bands(ranks, max_pixels)
    label = _escaped(
        f"{title}: {mask.num_queries} queries, {mask.num_keys} keys, "
        f"{mask.num_slices} slices, density {mask.density():.3g}"
    )
    box = f"{-margin} {-margin} {_short(width + margin + 1)} {_short(height + margin + 1)}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
            f'width="{_short(width + margin + 1)}" height="{_short(height + margin + 1)}">',
            f"<title>{label}</title>",
            *body,
            f'<rect width="{_short(width)}" height="{_short(height)}" fill="none" '
            'stroke="currentColor" stroke-opacity="0.4"/>',
            "</svg>",
        ]
    )


# ---------------------------------------------------------------------- parts


def _shapes(mask: AttentionMask, scale: float) -> list[str]:
    """Returns one path per colour and kind: large slices as polygons, small ones as pixels."""
    rows = mask.array
    colour = (_groups(rows) - 1) % len(COLOURS)
    extent = np.maximum(rows[:, Q_END] - rows[:, Q_START], rows[:, K_END] - rows[:, K_START])
    large = extent * scale >= 1
    is_box = (rows[:, LO] <= rows[:, K_START] - rows[:, Q_END] + 1) & (
        rows[:, HI] >= rows[:, K_END] - 1 - rows[:, Q_START]
    )
    exact = max(mask.num_queries, mask.num_keys) <= STAIRS
    result = []
    for index, fill in enumerate(COLOURS):
        for box in (True, False):
            chosen = rows[large & (colour == index) & (is_box == box)]
            if len(chosen):
                outline = _stairs(chosen, scale) if exact else _polygons(chosen, scale)
                opacity = 0.9 if box else 0.6
                result.append(f'<path fill="{fill}" fill-opacity="{opacity}" d="{outline}"/>')
    small = rows[~large]
    if len(small):
        pixels = np.unique((small[:, [K_START, Q_START]] * scale).astype(np.int64), axis=0)
        outline = "".join(f"M{x} {y}h1v1h-1z" for x, y in pixels.tolist())
        result.append(f'<path fill="{COLOURS[0]}" fill-opacity="0.75" d="{outline}"/>')
    return result


def _groups(rows: IntArray) -> IntArray:
    """Returns a number per slice, equal for the slices of one document of a pack.

    Slices that touch the diagonal span an interval of tokens; overlapping intervals are one group.
    A slice off the diagonal (an answer that looks at its question) is in the group of its queries.
    """
    q0, q1, k0, k1, _, _ = rows.T
    spans = columns(np.minimum(q0, k0), np.maximum(q1, k1))
    on_diagonal = np.maximum(q0, k0) < np.minimum(q1, k1)
    starts = islands(spans.compress(on_diagonal, axis=0))[:, 0]
    return np.searchsorted(starts, q0, side="right").astype(np.int64)


def _polygons(rows: IntArray, scale: float) -> str:
    """Returns the outlines of slices with straight diagonals, two bends a side at most."""
    q0, q1, k0, k1, lo, hi = rows.T
    # Clockwise: along the last keys downwards, then along the first keys upwards.
    bend_right, bend_left = np.clip(k1 - hi, q0, q1), np.clip(k0 - lo, q0, q1)
    points = [
        (np.minimum(k1, q0 + hi + 1), q0),
        (np.minimum(k1, bend_right + hi + 1), bend_right),
        (k1, q1),
        (np.maximum(k0, q1 - 1 + lo), q1),
        (k0, bend_left),
        (k0, q0),
    ]
    corners = np.stack([np.stack(point, axis=1) for point in points], axis=1) * scale
    return "".join(_path(outline) for outline in corners.tolist())


def _stairs(rows: IntArray, scale: float) -> str:
    """Returns the outlines of slices cell by cell."""
    outlines = []
    for q0, q1, k0, k1, lo, hi in rows.tolist():
        right = [(min(k1, q + hi + 1), y) for q in range(q0, q1) for y in (q, q + 1)]
        left = [(max(k0, q + lo), y) for q in reversed(range(q0, q1)) for y in (q + 1, q)]
        outlines.append(_path([[x * scale, y * scale] for x, y in right + left]))
    return "".join(outlines)


def _rank_bands(ranks: IntArray, num_pixels: int) -> list[str]:
    """Returns the bands of owners left of the picture and above it, one rectangle per run of pixels."""
    if not len(ranks):
        return []
    # A pixel shows the owner of the token in its middle; runs shorter than a pixel cannot be seen.
    pixels = min(num_pixels, len(ranks))
    size = num_pixels / pixels
    shown = ranks[((np.arange(pixels) + 0.5) * len(ranks) / pixels).astype(np.int64)]
    edges = np.r_[0, np.flatnonzero(np.diff(shown)) + 1, pixels]
    result = []
    for start, end in pairwise(edges.tolist()):
        rank = int(shown[start])
        if rank < 0:
            continue
        fill, offset = COLOURS[rank % len(COLOURS)], -(BAND + GAP)
        begin, span = _short(start * size), _short((end - start) * size)
        tooltip = f"<title>rank {rank}</title>"
        result += [
            f'<rect x="{offset}" y="{begin}" width="{BAND}" height="{span}" fill="{fill}">'
            f"{tooltip}</rect>",
            f'<rect x="{begin}" y="{offset}" width="{span}" height="{BAND}" fill="{fill}">'
            f"{tooltip}</rect>",
        ]
    return result


def _path(points: list[list[float]]) -> str:
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points) + "z"


def _short(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
