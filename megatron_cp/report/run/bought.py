"""What context parallelism bought, and what limits the run now.

Means over all steps of the run where it logged the figures; what was planned for the kept packs alone says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_cp.report.draw.html import PREDICTED, Tile, scrolling
from megatron_cp.report.draw.svg import Markup, escape, join, plain, short_bytes, short_tokens, tag
from megatron_cp.report.figures.packs import volume_words
from megatron_cp.report.figures.planners import comparisons
from megatron_cp.report.figures.view import USUAL_WORDS
from megatron_cp.report.run.kept_packs import KeptPacks
from megatron_cp.report.run.record import Run

OURS_MS, BOUND_MS = "cp/predicted_ms", "cp/bound_ms"
SENT, RING = "cp/comm_bytes_sent", "cp/ring_bytes_sent"
BALANCE, ZIGZAG_BALANCE = "cp/area_max_over_mean", "cp/zigzag_area_max_over_mean"


@dataclass(frozen=True)
class Mean:
    """A mean over the steps that logged a figure; None of no step."""

    value: float | None
    steps: int

    @property
    def over(self) -> str:
        """Returns the sample in words."""
        return f"mean of all {self.steps} steps logged"


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
    label = "Balance, max / mean area"
    if balance.value is None:
        value = float(np.mean([pack.ours.balance for pack in kept.packs]))
        return Tile(label, f"{value:.3f}", f"mean of {len(kept.packs)} kept packs")
    words = f"{balance.over}, worst micro-batch"
    if zigzag.value is not None:
        words += f"; zigzag {zigzag.value:.3f} on the same"
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
    words = f"one layer, both passes, mean of {len(kept.packs)} kept packs"
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
                f"All layers, both passes, means over all {mean_of(run, OURS_MS).steps} steps logged. Milliseconds are "
                "predicted by the cost model and measured nowhere; the rings' are priced from below (≥). Balance and "
                "bytes are counted; a split of every document is balanced by construction. No plan is below the bound."
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
    per_document = mean_of(run, "cp/per_document_predicted_ms").value or math.nan
    zigzag = mean_of(run, "cp/zigzag_predicted_ms").value or math.nan
    bound = mean_of(run, BOUND_MS).value or math.nan
    balance, zigzag_balance = mean_of(run, BALANCE).value, mean_of(run, ZIGZAG_BALANCE).value
    sent = mean_of(run, SENT).value or 0.0
    per_document_words = f"per document ({USUAL_WORDS})"
    return [
        ("this run", plain(ours, 4), "", _balance(balance), short_bytes(sent)),
        (
            per_document_words,
            *_at_least(per_document, ours),
            "1",
            short_bytes(ring),
        ),
        ("zigzag ring", *_at_least(zigzag, ours), _balance(zigzag_balance), short_bytes(ring)),
        ("bound", plain(bound, 4), f"{bound / ours:.2f} ×", "", ""),
    ]


def _balance(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _at_least(value: float, ours: float) -> tuple[str, str]:
    """Returns a price from below, and how often ours fits into it."""
    return f"≥ {plain(value, 4)}", f"≥ {value / ours:.2f} ×"


def _sentences(run: Run, kept: KeptPacks, other: Run | None) -> list[str]:
    """Returns what the table does not hold: one rank, the best other scheme, memory, and what was measured."""
    found = []
    ours = kept.ours
    sample = f"on the {len(kept.packs)} kept packs"
    if ours is not None and ours.predicted_ms and kept.drawn is not None:
        pack = kept.drawn.ours
        ratio = kept.one_rank_ms / ours.predicted_ms
        found.append(
            f"one rank: {plain(kept.one_rank_ms)} ms per layer predicted, {pack.cp_size} ranks "
            f"{plain(ours.predicted_ms)} ms, {ratio:.2f} x as fast ({sample})"
        )
        found.append(f"{sample}: {'; '.join(comparisons(ours, kept.outcomes))} (predicted)")
        received = max(pack.stats[name].get("received_mb_max", 0.0) for name in pack.stats)
        peak = max(pack.stats[name].get("peak_mb_max", 0.0) for name in pack.stats)
        found.append(
            f"memory: a rank holds {short_tokens(pack.tokens.shape[1])} of {short_tokens(kept.drawn.mask.num_queries)} "
            f"tokens, at most {plain(received)} MB of received rows at once, and allocates at most {plain(peak)} MB "
            "per layer and pass (pack drawn; counted)"
        )
    if other is not None:
        found.append(_measured(run, other))
    else:
        found.append("measured against one rank: train it too and give --compare its folder")
    return found


def _measured(run: Run, other: Run) -> str:
    seconds = [np.median(one.column("iteration-time")[1] or [math.nan]) for one in (run, other)]
    ranks = [one.section("layout").get("context", "?") for one in (run, other)]
    here, there = (plain(one) for one in seconds)
    return (
        f"measured: the median step takes {here} s here ({ranks[0]} context ranks) and {there} s in "
        f"{other.name} ({ranks[1]} context ranks)"
    )


# ---------------------------------------------------------------------- what limits now


def limits_figure(run: Run, kept: KeptPacks) -> Markup:
    """Returns where the time of a step goes, the largest part first."""
    parts = _measured_shares(run)
    items = [
        tag(
            "li",
            tag(
                "span",
                tag("i", style=f"width:{share:.1%}"),
                class_="meter long",
                aria_hidden="true",
            ),
            escape(f" {share:.1%} {words}"),
        )
        for words, share in sorted(parts, key=lambda part: -part[1])
    ]
    remark = _attention_words(kept)
    limit = max(parts, key=lambda part: part[1])[0] if parts else "unknown: no step time was logged"
    return tag(
        "figure",
        tag("h3", Markup("What limits now")),
        tag(
            "figcaption",
            escape(
                f"Most of a step: {limit}. Measured on the last rank, mean over all steps logged."
            ),
        ),
        tag("ul", *items, class_="facts bars"),
        join([tag("p", Markup(f"{PREDICTED} "), escape(remark))] if remark else []),
        class_="w4",
    )


def _measured_shares(run: Run) -> list[tuple[str, float]]:
    """Returns (what, share of the steps' time); checkpoints stand beside the steps, the rest is compute and links."""
    _, seconds = run.column("iteration-time")
    total = float(np.sum(seconds))
    if not total:
        return []
    waited = float(np.sum(run.column("data/wait_s")[1]))
    blocked = float(np.sum(run.column("ckpt/blocked_s")[1]))
    whole = total + blocked
    rest = max(0.0, total - waited)
    shares = [("compute and communication of the model", rest / whole)]
    if run.column("data/wait_s")[0]:
        shares.append(("waiting for the loader", waited / whole))
    if run.column("ckpt/blocked_s")[0]:
        shares.append(("waiting for checkpoints", blocked / whole))
    return shares


def _attention_words(kept: KeptPacks) -> str:
    """Returns how the attention of the kept packs divides into pairs and what comes on top."""
    stats = [pack.ours.stats[name] for pack in kept.packs for name in ("forward", "backward")]
    spent = sum(one.get("makespan_ms", 0.0) for one in stats)
    even = sum(one.get("load_bound_ms", 0.0) for one in stats)
    if not spent or kept.ours is None:
        return ""
    return (
        f"Attention of the {len(kept.packs)} kept packs: {even / spent:.0%} is pairs spread evenly, "
        f"{1 - even / spent:.0%} imbalance and transfers that are not hidden."
    )
