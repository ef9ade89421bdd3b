"""What a tracker shows of a finished run beside its numbers: the page, its pictures, and tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.style import style_sheet
from megatron_cp.report.draw.svg import Markup, tag
from megatron_cp.report.figures.packs import dispatch_figure, mask_figure
from megatron_cp.report.figures.workers import workers_figure
from megatron_cp.report.run.kept_packs import KeptPacks, plan_again
from megatron_cp.report.run.page import length_shares, run_page
from megatron_cp.report.run.record import Run, read_run
from megatron_cp.report.run.texts import texts_table
from megatron_cp.report.sources import quiet

PLANNER_COLUMNS = (
    "planner", "predicted ms", "simulated ms", "bound ms", "imbalance", "volume mean", "volume max", "planning ms",
)  # fmt: skip


@dataclass(frozen=True)
class RunMedia:
    """Pages and pictures as HTML that fetches nothing, and tables, by the key under which they are logged."""

    pages: dict[str, str]
    tables: dict[str, Table]


def run_media(folder: Path) -> RunMedia:
    """Returns the media of the run in `folder`. Raises ValueError, one line, as `read_run`."""
    run = read_run(folder)
    kept = plan_again(run, quiet)
    pages, tables = {"report/page": str(run_page(run, kept=kept))}, {}
    if kept.drawn is not None:
        figures = {
            "report/mask": mask_figure(kept.drawn),
            "report/dispatch": dispatch_figure(kept.drawn),
        }
        workers = workers_figure(kept.drawn)
        if workers is not None:
            figures["report/who_computes"] = workers
        pages |= {key: _alone(figure) for key, figure in figures.items()}
    if kept.outcomes:
        tables["report/planners"] = _planners(kept)
    lengths = _lengths(run)
    if lengths is not None:
        tables["report/document_lengths"] = lengths
    if run.texts:
        tables["report/text_samples"] = texts_table(run.texts)
    return RunMedia(pages, tables)


def _alone(figure: Figure) -> str:
    """Returns a figure as a page of its own."""
    return f"<!DOCTYPE html><meta charset='utf-8'>{tag('style', Markup(style_sheet()))}{figure.markup()}"


def _planners(kept: KeptPacks) -> Table:
    """Returns the planners that serve, ours first; means over the kept packs."""
    rows = [
        (
            one.planner,
            *(one.predicted_ms, one.simulated_ms, one.bound_ms, one.imbalance),
            *(one.volume_mean, one.volume_max, one.plan_ms),
        )
        for one in kept.outcomes
        if not one.refusal
    ]
    return Table(PLANNER_COLUMNS, rows)


def _lengths(run: Run) -> Table | None:
    shares = length_shares(run)
    if shares is None:
        return None
    columns = ("from tokens", "below", "share of documents", "share of tokens", "share of area")
    parts = zip(
        shares.edges[:-1],
        shares.edges[1:],
        shares.documents,
        shares.tokens,
        shares.area,
        strict=True,
    )
    return Table(columns, [(int(low), int(high), *map(float, rest)) for low, high, *rest in parts])
