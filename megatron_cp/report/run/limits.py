"""What limits a run now: where the time of a step goes, measured, and how predicted attention divides."""

from __future__ import annotations

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


def _counted(run: Run, key: str) -> list[float]:
    """Returns values of all rows behind the first that logged a time: its first step makes and fills caches."""
    timed, _ = run.column(SECONDS)
    left_out = timed[0] if len(timed) > 1 else -1
    return [value for step, value in zip(*run.column(key), strict=True) if step > left_out]


def _sample(run: Run) -> str:
    rows, size = len(_counted(run, SECONDS)), run.interval
    without = f" but the first{f' {size}' if size > 1 else ''}"
    is_all = rows == len(run.column(SECONDS)[0])
    return f"all {count_of(rows * size, 'step')} logged{'' if is_all else without}"


def measured_shares(run: Run, traced: MeasuredStages | None) -> list[Share]:
    """Returns (what, share of the steps' time); checkpoints stand beside the steps.

    The model's part is divided where the run traced steps: attention that computes, and waiting for rows of others.
    """
    waits, saves = _counted(run, LOADER), _counted(run, SAVING)
    total = run.interval * sum(_counted(run, SECONDS))  # a row holds the mean of its steps
    waited, blocked = run.interval * sum(waits), sum(saves)
    if not total:
        return []
    whole = total + blocked
    shares = _divided(max(0.0, total - waited) / whole, total / whole, traced)
    if waits:
        shares.append(("waiting for the loader", waited / whole))
    if saves:
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
