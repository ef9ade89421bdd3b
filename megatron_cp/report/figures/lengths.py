"""Document lengths: what share of documents, of tokens and of attention each length has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.report.draw.charts import Axes, Series, line_chart
from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.svg import exact, short_tokens

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class LengthShares:
    """Documents in bins `[edges[i], edges[i+1])` of length; each share sums to 1."""

    edges: NDArray[np.int64]
    documents: FloatArray
    tokens: FloatArray
    area: FloatArray
    num_documents: int
    num_tokens: int
    source: str
    """Whose documents: goes behind their number."""


def shares_of_lengths(lengths: NDArray[np.int64], source: str = "") -> LengthShares:
    """Returns the shares of documents of these lengths, in bins of powers of two.

    The area of a document is that of its causal mask, n (n + 1) / 2. Empty documents are left out.
    Raises ValueError when no document has a token.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise ValueError("no document has a token; give at least one length above 0")
    edges = 2 ** np.arange(int(lengths.max()).bit_length() + 1)
    sizes = lengths.astype(np.float64)
    weights = (np.ones_like(sizes), sizes, sizes * (sizes + 1) / 2)
    counts = (np.histogram(lengths, edges, weights=w)[0] for w in weights)
    return shares_of_bins(edges, *counts, source=source)


def shares_of_bins(
    edges: NDArray[np.int64],
    documents: FloatArray,
    tokens: FloatArray,
    area: FloatArray,
    *,
    source: str = "",
) -> LengthShares:
    """Returns the shares of bins that were counted already; ValueError for bins that hold nothing."""
    edges = np.asarray(edges, dtype=np.int64)
    counts = [np.asarray(c, dtype=np.float64) for c in (documents, tokens, area)]
    if any(len(c) != len(edges) - 1 or c.sum() <= 0 or c.min() < 0 for c in counts):
        raise ValueError(
            f"length bins with {len(edges)} edges need {len(edges) - 1} counts each, none negative "
            "and not all zero; write the run's records again"
        )
    first = int(np.flatnonzero(counts[0])[0])
    edges, counts = edges[first:], [c[first:] for c in counts]
    in_documents, in_tokens, in_area = (c / c.sum() for c in counts)
    totals = int(counts[0].sum()), int(counts[1].sum())
    return LengthShares(edges, in_documents, in_tokens, in_area, *totals, source)


def lengths_figure(shares: LengthShares, seq_length: int | None) -> Figure:
    """Returns the histogram with its three curves."""
    middles = np.sqrt(shares.edges[:-1].astype(np.float64) * shares.edges[1:])
    curves = (
        ("documents", shares.documents, 3),
        ("tokens", shares.tokens, 4),
        ("attention area", shares.area, 1),
    )
    series = [
        Series(name, tuple(zip(middles.tolist(), share.tolist(), strict=True)), colour, "line+dots")
        for name, share, colour in curves
    ]
    axes = Axes(
        x_label="tokens in a document (bins of powers of two)",
        y_label="share",
        x_log2=True,
        y_low=0.0,
        x_text=short_tokens,
        y_text=lambda value: f"{value:.0%}",
        mark=None if seq_length is None else (float(seq_length), "a pack"),
    )
    rows = [
        (int(low), int(high), float(d), float(t), float(a))
        for low, high, d, t, a in zip(
            shares.edges[:-1], shares.edges[1:], shares.documents, shares.tokens, shares.area,
            strict=True,
        )
    ]  # fmt: skip
    return Figure(
        title="Document lengths",
        caption=f"{shares.num_documents:,} documents {shares.source} with "
        f"{exact(shares.num_tokens)} tokens. {_long_share(shares)} Area: each under a causal mask of "
        "its own.",
        picture=line_chart("shares by document length", series, axes),
        table=Table(("from", "to", "documents", "tokens", "area"), rows),
        columns=12,
    )


def _long_share(shares: LengthShares) -> str:
    """Returns the sentence that says why lengths matter: few documents hold most of the attention."""
    cumulative = np.cumsum(shares.area[::-1])[::-1]
    bins = np.flatnonzero(cumulative >= 0.5)
    start = int(bins[-1])
    return (
        f"The {shares.documents[start:].sum():.1%} of documents with "
        f"{short_tokens(shares.edges[start])} tokens or more hold {cumulative[start]:.0%} of the "
        "attention."
    )
