"""What context parallelism bought.

Means over all steps of the run where it logged the figures; what was planned for the kept packs alone says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_cp.report.draw.html import PREDICTED, Tile, scrolling
from megatron_cp.report.draw.svg import (
    Markup,
    aligned,
    count_of,
    escape,
    plain,
    short_bytes,
    short_tokens,
    tag,
)
from megatron_cp.report.figures.packs import volume_words
from megatron_cp.report.figures.planners import comparisons
from megatron_cp.report.figures.view import USUAL_WORDS, PlanView
from megatron_cp.report.run.kept_packs import KeptPacks, kept_words
from megatron_cp.report.run.record import Run

OURS_MS, BOUND_MS = "cp/predicted_ms", "cp/bound_ms"
SENT, RING = "cp/comm_bytes_sent", "cp/ring_bytes_sent"
BALANCE, ZIGZAG_BALANCE = "cp/area_max_over_mean", "cp/zigzag_area_max_over_mean"
DOCUMENTS_BALANCE = "cp/per_document_area_max_over_mean"


@dataclass(frozen=True)
class Mean:
    """A mean over the steps that logged a figure; None of no step."""

    value: float | None
    steps: int

    @property
    def over(self) -> str:
        """Returns the sample in words."""
        return f"mean of all {count_of(self.steps, 'step')} logged"


def mean_of(run: Run, key: str) -> Mean:
    """Returns the mean of a metric over all rows of the run."""
    _, values = run.column(key)
    return Mean(float(np.mean(values)) if values else None, len(values))


def bought_tiles(run: Run, kept: KeptPacks) -> list[Tile]:
    """Returns balance and bytes, over all steps, or over the kept packs where steps did not log them."""
    if not run.packs and mean_of(run, BALANCE).value is None:
        return []
    cp_size = run.packs[0].ours.cp_size if run.packs else run.section("layout").get("context")
    if cp_size == 1:
        return [Tile("Context ranks", "1", "one rank owns every token: nothing is sent")]
    return [_balance_tile(run, kept), _volume_tile(run, kept)]


def _balance_tile(run: Run, kept: KeptPacks) -> Tile:
    balance, zigzag = mean_of(run, BALANCE), mean_of(run, ZIGZAG_BALANCE)
    split = mean_of(run, DOCUMENTS_BALANCE)
    label = "Balance, max / mean area"
    if balance.value is None:
        value = float(np.mean([pack.ours.balance for pack in kept.packs]))
        return Tile(label, f"{value:.3f}", f"mean of {count_of(len(kept.packs), 'kept pack')}")
    words = f"{balance.over}, worst micro-batch"
    others = [("zigzag", zigzag), ("Transformer Engine (THD)", split)]
    said = [
        f"{name} {one.value:.3f}"
        for name, one in others
        if one.value is not None and one.steps == balance.steps
    ]
    if said:
        words += f"; on the same packs: {', '.join(said)}"
    return Tile(label, f"{balance.value:.3f}", words)


def _volume_tile(run: Run, kept: KeptPacks) -> Tile:
    sent, ring = mean_of(run, SENT), mean_of(run, RING)
    if sent.value is not None and ring.value:
        words = (
            f"{volume_words(sent.value / ring.value)} of the {short_bytes(ring.value)} of a ring (zigzag or "
            f"{USUAL_WORDS}); all layers, both passes, {sent.over}"
        )
        return Tile("Bytes sent per step", short_bytes(sent.value), words)
    value = float(np.mean([pack.ours.all_bytes for pack in kept.packs])) if kept.packs else math.nan
    words = f"one layer, both passes, mean of {count_of(len(kept.packs), 'kept pack')}"
    return Tile("Bytes sent per pack", short_bytes(value), words)


# ---------------------------------------------------------------------- the table


def bought_table(run: Run, kept: KeptPacks, other: Run | None) -> Markup:
    """Returns the figure that sets this run beside one rank and the baselines."""
    rows = _step_rows(run)
    heads = ("attention of a step", "ms", "ours = 1", "balance", "bytes sent")
    body = []
    for name, *figures in rows:
        cells = (tag("td", escape(figure)) for figure in figures)
        chosen = "chosen" if name == rows[0][0] else None
        body.append(tag("tr", tag("th", escape(name), scope="row"), *cells, class_=chosen))
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", escape(head), scope="col") for head in heads))),
        tag("tbody", *body),
    )
    parts = [scrolling(table, "Against one rank and the baselines")] if rows else []
    items = [tag("li", escape(words)) for words in _sentences(run, kept, other)]
    return tag(
        "figure",
        tag("h3", Markup("What context parallelism bought"), Markup(f" {PREDICTED}")),
        tag(
            "figcaption",
            escape(
                f"All layers, both passes, means over all {count_of(mean_of(run, OURS_MS).steps, 'step')} logged. "
                "Milliseconds are predicted by the cost model and measured nowhere; the rings' are priced from below "
                f"(≥). Balance and bytes are counted. No plan is below the bound.{_not_counted(run)}"
                if rows
                else "This run logged no baselines; train again with this version to have them for every step."
            ),
        ),
        *parts,
        tag("ul", *items, class_="facts"),
        class_="w8",
    )


def _step_rows(run: Run) -> list[tuple[str, ...]]:
    """Returns name, time, ratio, balance, bytes of ours, the rings and the bound."""
    ours, ring = mean_of(run, OURS_MS).value, mean_of(run, RING).value
    if ours is None or not ours or not ring:
        return []
    keys = (OURS_MS, "cp/per_document_predicted_ms", "cp/zigzag_predicted_ms", BOUND_MS)
    times = [mean_of(run, key).value or math.nan for key in keys]
    names = ("this run", f"per document ({USUAL_WORDS})", "zigzag ring", "bound")
    least = ("", "≥ ", "≥ ", "")
    ratios = [
        "",
        *(f"{sign}{ms / ours:.2f} ×" for sign, ms in zip(least[1:], times[1:], strict=True)),
    ]
    milliseconds = [sign + ms for sign, ms in zip(least, aligned(times), strict=True)]
    sent = mean_of(run, SENT).value or 0.0
    volumes = (short_bytes(sent), short_bytes(ring), short_bytes(ring), "")
    return list(zip(names, milliseconds, ratios, [*_balances(run), ""], volumes, strict=True))


def _balances(run: Run) -> list[str]:
    """Returns the counted balance of ours, the split of documents and zigzag; "" where not all steps have it."""
    found = [mean_of(run, key) for key in (BALANCE, DOCUMENTS_BALANCE, ZIGZAG_BALANCE)]
    return [
        f"{one.value:.3f}" if one.value is not None and one.steps == found[0].steps else ""
        for one in found
    ]


def _not_counted(run: Run) -> str:
    if _balances(run)[1]:
        return ""
    return (
        " The balance of a split of every document was not logged in every step, so it is left out."
    )


def _sentences(run: Run, kept: KeptPacks, other: Run | None) -> list[str]:
    """Returns what the table does not hold: one rank, the best other scheme, memory, and what was measured."""
    found = []
    ours = kept.ours
    sample = f"on {kept_words(kept)}"
    if ours is not None and ours.predicted_ms and kept.drawn is not None:
        pack = kept.drawn.ours
        ratio = kept.one_rank_ms / ours.predicted_ms
        found.append(
            f"one rank: {plain(kept.one_rank_ms)} ms per layer predicted, {pack.cp_size} ranks "
            f"{plain(ours.predicted_ms)} ms, {ratio:.2f} × as fast ({sample})"
        )
        found.append(
            f"plans built {sample}, one layer, predicted: {'; '.join(comparisons(ours, kept.outcomes, times='×'))}. "
            "The table above prices from below, over all steps logged"
        )
        found.append(_memory(kept, pack))
    if other is not None:
        found.append(_measured(run, other))
    else:
        found.append("measured against one rank: train it too and give --compare its folder")
    return found


def _memory(kept: KeptPacks, pack: PlanView) -> str:
    """Returns what a rank holds and allocates, beside one rank that has the whole pack."""
    assert kept.drawn is not None
    received, peak = (
        max(pack.stats[name].get(key, 0.0) for name in pack.stats)
        for key in ("received_mb_max", "peak_mb_max")
    )
    whole = short_tokens(kept.drawn.mask.num_queries)
    words = (
        f"memory of attention, one layer and pass, counted for the pack drawn: a rank holds "
        f"{short_tokens(pack.tokens.shape[1])} of {whole} tokens, at most {plain(received)} MB of received rows at "
        f"once, and allocates at most {plain(peak)} MB"
    )
    if not math.isnan(kept.one_rank_mb):
        words += f"; one rank would hold all {whole} and allocate {plain(kept.one_rank_mb)} MB (predicted)"
    return words


def _measured(run: Run, other: Run) -> str:
    seconds = [np.median(one.column("iteration-time")[1] or [math.nan]) for one in (run, other)]
    ranks = [one.section("layout").get("context", "?") for one in (run, other)]
    here, there = (plain(one) for one in seconds)
    words = (
        f"measured: a step takes {here} s here ({ranks[0]} context ranks) and {there} s in "
        f"{other.name} ({ranks[1]} context ranks), medians of what was logged"
    )
    sizes = [
        [one.argument(name) for name in ("global_batch_size", "seq_length")] for one in (run, other)
    ]
    if sizes[0] != sizes[1]:
        here, there = (f"{packs} packs of {tokens} tokens" for packs, tokens in sizes)
        words += f"; these are other steps: {here} here, {there} there"
    return words
