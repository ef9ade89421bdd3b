"""What limits a run now: where the time of a step goes, measured, and how predicted attention divides."""

from __future__ import annotations

import numpy as np

from megatron_cp.report.draw.html import PREDICTED
from megatron_cp.report.draw.svg import Markup, count_of, escape, join, tag
from megatron_cp.report.run.kept_packs import KeptPacks, kept_words
from megatron_cp.report.run.record import Run
from megatron_cp.report.run.trace import MeasuredStages

SECONDS, LOADER, SAVING = "iteration-time", "data/wait_s", "ckpt/blocked_s"
Share = tuple[str, float]


def limits_figure(run: Run, kept: KeptPacks, traced: MeasuredStages | None = None) -> Markup:
    """Returns where the time of a step goes, the largest part first; `traced`: what the run's traces show."""
    parts = measured_shares(run, traced)
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
    remark = attention_words(kept)
    limit = max(parts, key=lambda part: part[1])[0] if parts else "unknown: no step time was logged"
    words = f"Most of a step: {limit}. Measured on the last rank, mean over {_sample(run)}."
    if traced is not None and traced.shares:
        words += (
            f" Attention and its waiting: mean over the ranks that traced steps {traced.steps}."
        )
    return tag(
        "figure",
        tag("h3", Markup("What limits now")),
        tag("figcaption", escape(words)),
        tag("ul", *items, class_="facts bars"),
        join([tag("p", Markup(f"{PREDICTED} "), escape(remark))] if remark else []),
        class_="w4",
    )


def _counted_steps(run: Run) -> list[float]:
    """Returns the steps that count: all that logged a time but the first, which makes and fills caches."""
    steps, _ = run.column(SECONDS)
    return steps[1:] if len(steps) > 1 else steps


def _sample(run: Run) -> str:
    steps = _counted_steps(run)
    without = " but the first" if len(run.column(SECONDS)[0]) > len(steps) else ""
    return f"all {count_of(len(steps), 'step')} logged{without}"


def measured_shares(run: Run, traced: MeasuredStages | None) -> list[Share]:
    """Returns (what, share of the steps' time); checkpoints stand beside the steps.

    The model's part is divided where the run traced steps: attention that computes, and waiting for rows of others.
    """
    counted = set(_counted_steps(run))

    def seconds(key: str) -> float | None:
        steps, values = run.column(key)
        kept = [value for step, value in zip(steps, values, strict=True) if step in counted]
        return float(np.sum(kept)) if kept else None

    total = seconds(SECONDS)
    if not total:
        return []
    waited, blocked = seconds(LOADER), seconds(SAVING)
    whole = total + (blocked or 0.0)
    shares = _divided(max(0.0, total - (waited or 0.0)) / whole, total / whole, traced)
    if waited is not None:
        shares.append(("waiting for the loader", waited / whole))
    if blocked is not None:
        shares.append(("waiting for checkpoints", blocked / whole))
    return shares


def _divided(model: float, steps: float, traced: MeasuredStages | None) -> list[Share]:
    """Returns the parts of the model's share; `steps`: the share of all steps, which a trace covers whole."""
    if traced is None or not traced.shares:
        return [("compute and communication of the model (--profile divides them)", model)]
    found = [
        ("attention, computing", traced.shares["attend"] * steps),
        ("attention, waiting for rows", traced.shares["wait"] * steps),
    ]
    rest = model - sum(share for _, share in found)
    return [*found, ("the rest of the model, and sending", max(0.0, rest))]


def attention_words(kept: KeptPacks) -> str:
    """Returns how much of the kept packs' attention would stay if all pairs were even and all transfers hidden."""
    stats = [pack.ours.stats[name] for pack in kept.packs for name in ("forward", "backward")]
    spent = sum(one.get("makespan_ms", 0.0) for one in stats)
    even = sum(one.get("load_bound_ms", 0.0) for one in stats)
    if not spent or kept.ours is None:
        return ""
    return (
        f"Attention of {kept_words(kept)}: {even / spent:.0%} of this time would remain with perfect balance and "
        "hidden transfers."
    )
