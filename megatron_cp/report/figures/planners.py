"""Planners side by side: the table in a terminal, on a page and as JSON, and the sentence that compares ours.

Two baselines are named wherever they were asked for: what a user of Megatron-LM runs otherwise (Transformer
Engine's split of every document, USUAL), and the best other scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan.explain import over_bound
from megatron_cp.plan.hardware.speeds import known_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.study.compare import Outcome, best_other
from megatron_cp.report.draw.html import PREDICTED, Tile, scrolling
from megatron_cp.report.draw.svg import Markup, aligned, escape, tag
from megatron_cp.report.draw.table import text_table
from megatron_cp.report.figures.view import USUAL, USUAL_WORDS

HEADER = (
    "  planner", "simulated ms", "predicted ms", "x bound", "imbalance", "volume mean", "max", "planning ms",
)  # fmt: skip
LEGEND = (
    "forward + backward of one layer; x bound: predicted over what no plan can beat; imbalance and volume "
    "(rows received, in a rank's query rows): forward"
)
FROM_BELOW = ">= : priced from below, the best that a scheme with a stage per rank can do"


def machine_words(config: CPConfig) -> str:
    """Returns heads and hardware of a prediction."""
    topology = get_topology(config.topology)
    return (
        f"one layer, {config.num_heads} query and {config.num_kv_heads} key heads of {config.head_dim} per "
        f"rank, on {topology.name} ({topology.forward_tflops:g} TFLOP/s, {links_words(topology)}){speed_words(config)}"
    )


def links_words(topology: Topology) -> str:
    """Returns the levels of a machine and what a rank moves on them."""
    words = (
        f"{topology.node_size} ranks per node, {topology.inner_gbytes_per_s:g} and {topology.outer_gbytes_per_s:g} "
        "GB/s inside and between nodes"
    )
    if topology.nics_per_node is not None:
        words += f" with {topology.nics_per_node} ports each"
    for level in topology.outer_levels:
        words += f", {level.gbytes_per_s:g} GB/s out of {level.size} ranks"
    return words


def speed_words(config: CPConfig) -> str:
    """Returns the speeds of ranks where they differ from 1, else nothing."""
    speeds = known_speeds(config)
    return f", rank speeds {', '.join(f'{one:g}' for one in speeds)}" if speeds else ""


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Returns one planner's means over several packs; its refusal where it refuses one of them."""
    refused = next((one for one in outcomes if one.refusal), None)
    if refused is not None:
        return Outcome(refused.planner, refusal=refused.refusal)

    def mean(name: str) -> float:
        return float(np.mean([getattr(one, name) for one in outcomes]))

    return Outcome(
        outcomes[0].planner,
        predicted_ms=mean("predicted_ms"),
        simulated_ms=mean("simulated_ms"),
        bound_ms=mean("bound_ms"),
        imbalance=mean("imbalance"),
        volume_mean=mean("volume_mean"),
        volume_max=mean("volume_max"),
        plan_ms=mean("plan_ms"),
        is_best_case=any(one.is_best_case for one in outcomes),
    )


def named(outcomes: Sequence[Outcome], planner: str) -> Outcome | None:
    """Returns the outcome of a planner that was asked for and can serve; else None."""
    return next((one for one in outcomes if one.planner == planner and not one.refusal), None)


def against(ours: Outcome, other: Outcome, times: str = "x") -> str:
    """Returns how our predicted time compares: `1.22 x faster than magi`, `1.07 x slower than usp`.

    The number is always at least 1: how often the faster fits into the slower. A price from below of the other
    makes a win `at least`, and a loss `at most`. `times`: × on a page, x where a terminal may not have it.
    """
    ratio = other.predicted_ms / ours.predicted_ms if ours.predicted_ms else 1.0
    name = f"{other.planner} ({USUAL_WORDS})" if other.planner == USUAL else other.planner
    if abs(ratio - 1) < 0.005:
        return f"as fast as {name}"
    if ratio > 1:
        return f"{'at least ' if other.is_best_case else ''}{ratio:.2f} {times} faster than {name}"
    return f"{'at most ' if other.is_best_case else ''}{1 / ratio:.2f} {times} slower than {name}"


def _times(ours: Outcome, other: Outcome) -> str:
    """Returns the number of `against` alone, for a tile whose words say faster or slower."""
    ratio = other.predicted_ms / ours.predicted_ms if ours.predicted_ms else 1.0
    sign = ("≥ " if ratio > 1 else "≤ ") if other.is_best_case else ""
    return f"{sign}{max(ratio, 1 / ratio):.2f} ×"


def comparison_tiles(ours: Outcome, outcomes: Sequence[Outcome]) -> list[Tile]:
    """Returns a tile for the usual scheme and one for the best of the others, where there are such."""
    baselines = (
        ("Against the usual scheme", named(outcomes, USUAL)),
        ("Against the best of the others", best_other(outcomes, ours.planner)),
    )
    return [
        Tile(label, _times(ours, other), f"{ours.planner}: {against(ours, other, '×')}", True)
        for label, other in baselines
        if other is not None and other is not ours
    ]


def bound_tile(ours: Outcome, topology: str | Topology) -> Tile:
    """Returns the tile of what no plan could save."""
    over = over_bound(ours.predicted_ms, ours.bound_ms, topology)
    said = "1 = no plan can be predicted faster"
    if over.endswith("ms"):
        said = "the bound is less than a message costs"
    return Tile("Over the bound", over.replace("x", "×"), said, True)


def comparisons(ours: Outcome, outcomes: Sequence[Outcome], times: str = "x") -> list[str]:
    """Returns the sentences of `against` for the best other scheme, then for the usual one."""
    if ours.refusal:
        return []
    best, usual = best_other(outcomes, ours.planner), named(outcomes, USUAL)
    found = [f"{against(ours, best, times)}, the best of the others"] if best is not None else []
    if usual is not None and usual not in (ours, best):
        found.append(against(ours, usual, times))
    return found


def planner_lines(ours: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the table of a terminal, fastest first, refusals last, then what it comes to."""
    served = sorted((one for one in outcomes if not one.refusal), key=lambda one: one.predicted_ms)
    lines = text_table(
        HEADER,
        [_figures(one, "* " if one.planner == ours.planner else "  ") for one in served],
        [(f"  {one.planner}", one.refusal) for one in outcomes if one.refusal],
    )
    said = comparisons(ours, outcomes)
    lines += [f"  {ours.planner} is predicted {'; '.join(said)}"] if said else []
    return lines + ([f"  {FROM_BELOW}"] if any(one.is_best_case for one in served) else [])


def _figures(one: Outcome, mark: str) -> list[str]:
    least = ">=" if one.is_best_case else ""
    return [
        f"{mark}{one.planner}",
        f"{least}{four_digits(one.simulated_ms)}",
        f"{least}{four_digits(one.predicted_ms)}",
        *_counted(one),
        _number(one.plan_ms, 1),
    ]


def _counted(one: Outcome) -> list[str]:
    return [
        _number(one.gap, 0 if one.gap >= 1e4 else 2),
        _number(one.imbalance, 3),
        _number(one.volume_mean, 2),
        _number(one.volume_max, 2),
    ]


def four_digits(value: float) -> str:
    """Returns a number that programs can read, with four digits or its whole part; "" for nan."""
    return f"{value:.4g}" if value < 1e4 else _number(value, 0)


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def outcome_values(one: Outcome) -> dict[str, object]:
    """Returns what is known of an outcome as JSON values, without its plan."""
    values = {name: value for name, value in vars(one).items() if name != "plan"}
    return {
        name: value
        for name, value in values.items()
        if value != "" and not (isinstance(value, float) and not math.isfinite(value))
    }


# ---------------------------------------------------------------------- on a page


def planner_table(ours: Outcome, outcomes: Sequence[Outcome], title: str) -> Markup:
    """Returns the figure of the table, fastest first, with a bar for the predicted time."""
    heads = (
        "planner",
        "predicted ms",
        "simulated ms",
        "× bound",
        "imbalance",
        "volume, mean",
        "volume, max",
        "",
    )
    served = sorted((one for one in outcomes if not one.refusal), key=lambda one: one.predicted_ms)
    slowest = max((one.predicted_ms for one in served), default=1.0) or 1.0
    predicted = aligned([one.predicted_ms for one in served])
    simulated = aligned([one.simulated_ms for one in served])
    rows = [
        _table_row(one, (ms, trial), one.planner == ours.planner, slowest)
        for one, ms, trial in zip(served, predicted, simulated, strict=True)
    ]
    rows += [
        tag(
            "tr",
            tag("th", escape(one.planner), scope="row"),
            tag("td", escape(one.refusal), class_="why", colspan=7),
        )
        for one in outcomes
        if one.refusal
    ]
    cells = (tag("th", escape(head), scope="col") if head else tag("td") for head in heads)
    table = tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *rows))
    said = "; ".join(comparisons(ours, outcomes, "×"))
    legend = LEGEND.replace("x bound", "× bound")
    caption = f"{ours.planner} is predicted {said}. " if said else ""
    caption += (
        f"Fastest first; {legend}. Counted: imbalance and volume. Predicted and simulated: times."
    )
    if any(one.is_best_case for one in served):
        caption += f" {FROM_BELOW[0].replace('>', '≥')}{FROM_BELOW[2:]}."
    return tag(
        "figure",
        tag("h3", escape(title), Markup(f" {PREDICTED}")),
        tag("figcaption", escape(caption)),
        scrolling(table, title),
        class_="w12",
    )


def _table_row(one: Outcome, times: tuple[str, str], is_chosen: bool, slowest: float) -> Markup:
    least = "≥ " if one.is_best_case else ""
    words = f"{one.planner} ({USUAL_WORDS})" if one.planner == USUAL else one.planner
    cells = [*(least + ms if ms else "" for ms in times), *_counted(one)]
    bar = tag("i", style=f"width:{one.predicted_ms / slowest:.1%}")
    meter = tag("td", tag("span", bar, class_="meter"), aria_hidden="true")
    written = [tag("td", escape(cell)) for cell in cells]
    name = tag("th", escape(words), scope="row")
    return tag("tr", name, *written, meter, class_="chosen" if is_chosen else None)
