"""The page of a dry run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from megatron_cp.report.draw.html import Section, Tile, page, row, strip
from megatron_cp.report.draw.svg import Markup, plain, short_bytes, short_tokens
from megatron_cp.report.dry_run.study import DryRun
from megatron_cp.report.figures.lengths import lengths_figure, shares_of_lengths
from megatron_cp.report.figures.packs import (
    area_words,
    communication_figure,
    dispatch_figure,
    mask_figure,
    volume_words,
)
from megatron_cp.report.figures.planners import (
    bound_tile,
    comparison_tiles,
    machine_words,
    planner_table,
)
from megatron_cp.report.figures.view import USUAL, PackView, view_of_pack
from megatron_cp.report.figures.workers import workers_figure


def dry_run_page(run: DryRun, command: str) -> Markup:
    """Returns the page: headline, mask and dispatch, planners side by side, lengths, traffic."""
    packs = pack_views(run)
    first = packs[0]
    seq_length = first.mask.num_queries
    shares = shares_of_lengths(run.corpus.document_lengths, "before they are cut into packs,")
    table = planner_table(run.ours, run.outcomes, "Planners on the same packs")
    sections = [
        Section("overview", "Overview", [strip(_tiles(run, packs))]),
        Section("plan", "The first pack", _plan_parts(first)),
        Section("planners", "Planners", [row(table)]),
        Section("lengths", "Lengths", [row(lengths_figure(shares, seq_length))]),
    ]
    if first.ours.cp_size > 1:
        traffic = row(communication_figure(first))
        sections.append(Section("communication", "Communication", [traffic]))
    subtitle = (
        f"{run.corpus.source}; {short_tokens(seq_length)} tokens per pack on CP {first.ours.cp_size}; "
        "times are predicted, nothing was measured"
    )
    foot = {
        "command": command,
        "planned": f"{len(packs)} packs; pictures show the first, figures are means over all",
        "plan digests": ", ".join(plan.digest()[:16] for plan in run.plans[run.ours.planner]),
        "predicted": f"by the cost model for {machine_words(run.config)}; balance and bytes are counted "
        "from the plans",
        "machine": f"{platform.platform()}, Python {platform.python_version()}",
        "versions": f"megatron_cp {_version('megatron_cp')}, numpy {_version('numpy')}",
    }
    return page("Dry run · context-parallel plan", subtitle, sections, foot)


def _plan_parts(first: PackView) -> list[Markup]:
    parts = [row(mask_figure(first), dispatch_figure(first))]
    workers = workers_figure(first)
    return [*parts, row(workers)] if workers is not None and first.ours.cp_size > 1 else parts


def pack_views(run: DryRun) -> list[PackView]:
    """Returns the packs as the figures draw them."""
    views = []
    for number, pack in enumerate(run.corpus.packs):
        plans = [made[number] for made in run.plans.values()]
        views.append(view_of_pack(plans, pack.document_lengths, pack.document_kinds))
    return views


def _tiles(run: DryRun, packs: list[PackView]) -> list[Tile]:
    mine = run.ours
    over = f"mean over {len(packs)} packs"
    return [
        Tile(
            "Attention per layer",
            f"{plain(mine.predicted_ms)} ms",
            f"{machine_name(run)}, {over}",
            True,
        ),
        *comparison_tiles(mine, run.outcomes),
        bound_tile(mine, run.config.topology),
        Tile("Balance, max / mean area", f"{mine.imbalance:.3f}", over),
        _volume_tile(packs),
        Tile(
            "Area of a pack",
            area_words(packs[0]),
            f"of a causal triangle; {len(packs[0].document_lengths)} documents in the first pack",
        ),
    ]


def machine_name(run: DryRun) -> str:
    """Returns the name of the hardware row."""
    topology = run.config.topology
    return topology if isinstance(topology, str) else topology.name


def _volume_tile(packs: list[PackView]) -> Tile:
    """Returns the bytes of forward and backward beside the usual ring's."""
    ours = float(np.mean([pack.ours.all_bytes for pack in packs]))
    theirs = [v.all_bytes for pack in packs for v in pack.others if v.planner == USUAL]
    words = "one layer, forward + backward, all ranks"
    usual = float(np.mean(theirs)) if theirs else 0.0
    if usual:
        words += f"; {volume_words(ours / usual)} of the {short_bytes(usual)} of {USUAL}"
    return Tile("Bytes sent", short_bytes(ours), words)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
