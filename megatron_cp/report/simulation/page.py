"""The page of a simulation: time against ranks, then ours beside the baselines at the fewest ranks."""

from __future__ import annotations

import platform

from megatron_cp.config import Topology
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.hardware.play import Simulation
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PASSES
from megatron_cp.report.draw.charts import Axes, Series, line_chart
from megatron_cp.report.draw.html import Figure, Section, Table, Tile, note, page, row, strip
from megatron_cp.report.draw.style import style_sheet
from megatron_cp.report.draw.svg import Markup, plain, short_tokens, tag
from megatron_cp.report.figures.packs import communication_figure
from megatron_cp.report.figures.plan import heat_maps
from megatron_cp.report.figures.planners import (
    bound_tile,
    comparison_tiles,
    links_words,
    planner_table,
    speed_words,
)
from megatron_cp.report.figures.timeline import (
    MAX_RANKS_DRAWN,
    chrome_trace,
    timeline_drawing,
    timeline_picture,
)
from megatron_cp.report.figures.view import (
    MAX_RANKS_PICTURED,
    USUAL,
    area_by_chunk,
    chunk_bounds,
    view_of_pack,
    view_of_plan,
)
from megatron_cp.report.simulation.study import Step, Study

MAX_LINES = 8


def simulation_page(study: Study, command: str) -> Markup:
    """Returns the page; pictures are those of the smallest number of ranks."""
    step = min(study.steps, key=lambda one: one.cp_size)
    refused = (
        f"Planner {step.ours.planner} has no plan on {step.cp_size} ranks: {step.ours.refusal}"
    )
    overview = note(refused) if step.ours.refusal else strip(_tiles(step, study.config.topology))
    sections = [Section("overview", "Overview", [overview])]
    if len(study.steps) > 1:
        sections.append(Section("scaling", "Time against ranks", [row(_scaling(study))]))
    size = f"{step.cp_size} ranks, {short_tokens(step.mask.num_queries)} tokens"
    table = planner_table(step.ours, step.outcomes, f"Planners on {size}")
    sections.append(Section("planners", "Planners", [row(table)]))
    plans = _pictured(step)
    if plans:
        drawn = [row(_timeline(plans, step)), row(_heat(plans, step))]
        drawn += [row(_traffic(plans, step))] if step.cp_size > 1 else []
        sections.append(Section("pictures", f"On {size}", drawn))
    config, topology = study.config, get_topology(study.config.topology)
    subtitle = (
        f"{study.source.words}; mask {study.mask_name}; {config.num_heads} query and "
        f"{config.num_kv_heads} key heads of {config.head_dim}"
    )
    foot = {
        "command": command,
        "simulated": f"every time comes from a model of {topology.name} and was measured nowhere; "
        "balance and bytes are counted from plans",
        "topology": f"{topology.forward_tflops:g} and {topology.backward_tflops:g} TFLOP/s forward and "
        f"backward, {links_words(topology)}, {topology.latency_us:g} us{speed_words(config)}",
        "machine": f"{platform.platform()}, Python {platform.python_version()}",
    }
    return page("Simulation · context-parallel plans", subtitle, sections, foot)


def trace_of(study: Study) -> dict[str, object]:
    """Returns a Chrome trace of our plan at the smallest number of ranks, forward then backward."""
    step = min(study.steps, key=lambda one: one.cp_size)
    plan = step.ours.plan
    if plan is None:
        raise ValueError(
            f"planner {step.ours.planner!r} has no plan at {step.cp_size} ranks to draw; "
            f"{step.ours.refusal or 'ask for fewer ranks'}"
        )
    runs: dict[str, Simulation] = {
        name: simulate_pass(plan, name, num_traced=min(plan.cp_size, MAX_RANKS_PICTURED))
        for name in PASSES
    }
    return chrome_trace(runs, f"{study.mask_name}, {study.source.words}, planner {plan.planner}")


def timeline_file(study: Study) -> Markup:
    """Returns the timeline of ours beside the baselines as an SVG file that stands alone."""
    step = min(study.steps, key=lambda one: one.cp_size)
    plans = _pictured(step)
    if not plans:
        raise ValueError(
            f"there is no plan at {step.cp_size} ranks to draw; ask for at most {MAX_RANKS_PICTURED} ranks and "
            "a planner that serves them"
        )
    drawing = timeline_drawing([panel for plan in plans for panel in _panels(plan)])
    style = tag("style", Markup(style_sheet()))
    opened = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return Markup(opened.replace(">", f">{style}", 1) + "\n")


def _panels(plan: AttentionPlan) -> list[tuple[str, Simulation]]:
    return [
        (f"{plan.planner}, {name}", simulate_pass(plan, name, num_traced=MAX_RANKS_DRAWN))
        for name in PASSES
    ]


def _pictured(step: Step) -> list[AttentionPlan]:
    """Ours and the baselines whose plans were built, where pictures of so many ranks can be read."""
    if step.cp_size > MAX_RANKS_PICTURED:
        return []
    shown = {one.planner: one.plan for one in (step.ours, step.best_other, step.usual) if one}
    return [plan for plan in shown.values() if plan is not None]


def _tiles(step: Step, topology: str | Topology) -> list[Tile]:
    ours = step.ours
    return [
        Tile(
            "Attention per layer",
            f"{plain(ours.predicted_ms, 4)} ms",
            f"{step.cp_size} ranks, forward + backward",
            True,
        ),
        *comparison_tiles(ours, step.outcomes),
        bound_tile(ours, topology),
        Tile("Balance", f"{ours.imbalance:.3f}", "largest over mean area"),
        Tile("Volume", f"{ours.volume_mean:.2f}", "mean inbound, a rank's query rows, forward"),
    ]


def _scaling(study: Study) -> Figure:
    """Returns the bound over the predicted time of every planner, at each number of ranks."""
    planners = [one.planner for one in study.steps[0].outcomes]
    series, rows = [], []
    for planner in planners:
        points = []
        for step in study.steps:
            one = next(one for one in step.outcomes if one.planner == planner)
            if not one.refusal:
                points.append((float(step.cp_size), 1 / one.gap))
                rows.append(
                    (step.cp_size, planner, one.predicted_ms, one.simulated_ms, one.bound_ms)
                )
        series.append((planner, tuple(sorted(points))))
    always = (study.steps[0].ours.planner, USUAL)
    drawn = sorted(
        (one for one in series if one[1]),
        key=lambda one: (one[0] not in always, -min(y for _, y in one[1])),
    )[:MAX_LINES]
    chart = line_chart(
        "bound over time against ranks",
        [
            Series(name, points, index + 1, "line+dots")
            for index, (name, points) in enumerate(drawn)
        ],
        Axes(
            x_label="ranks",
            y_label="bound / time",
            width=900,
            x_log2=True,
            y_low=0.0,
            y_high=1.05,
            x_text=lambda ranks: f"{ranks:.0f}",
            level=1.0,
        ),
    )
    caption = "The bound over the predicted time: higher is better, 1 cannot be beaten. "
    caption += "Ours, the usual one and the best of the others."
    table = Table(("ranks", "planner", "predicted ms", "simulated ms", "bound ms"), rows)
    return Figure("Every planner", caption, chart, table, columns=12, predicted=True)


def _timeline(plans: list[AttentionPlan], step: Step) -> Figure:
    panels = [panel for plan in plans for panel in _panels(plan)]
    rows = [
        (title, rank, float(run.computing[rank]) * 1e3, float(run.finished[rank]) * 1e3)
        for title, run in panels
        for rank in range(step.cp_size)
    ]
    caption = (
        "What each rank does; white is waiting. Dashed: the last rank is done. "
        f"The first {min(step.cp_size, MAX_RANKS_DRAWN)} of {step.cp_size} ranks."
    )
    table = Table(("plan", "rank", "computing ms", "finished ms"), rows)
    return Figure("Timeline", caption, timeline_picture(panels), table, columns=12, predicted=True)


def _heat(plans: list[AttentionPlan], step: Step) -> Figure:
    views = [view_of_plan(plan) for plan in plans]
    bounds = chunk_bounds(views)
    named = [(view.words, view, area_by_chunk(view, step.mask, bounds)) for view in views]
    rows = [
        (view.planner, rank, area, len(view.tokens[rank]))
        for view in views
        for rank, area in enumerate(view.area.tolist())
    ]
    caption = (
        "Who computes how much of which part of the pack, forward. "
        f"Bars: {views[0].load_words} over the mean, and tokens."
    )
    table = Table(("planner", "rank", "pairs", "tokens"), rows)
    return Figure("Work by rank and chunk", caption, heat_maps(named, bounds), table, columns=12)


def _traffic(plans: list[AttentionPlan], step: Step) -> Figure:
    return communication_figure(view_of_pack(plans, step.lengths.tolist()))
