"""The page of a dry run."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from megatron_cp.report.draw.html import PREDICTED, Tile, heading, page, row, strip
from megatron_cp.report.draw.svg import Markup, escape, short_tokens, tag
from megatron_cp.report.dry_run.study import DryRun, PlannerRow
from megatron_cp.report.figures.lengths import lengths_figure, shares_of_lengths
from megatron_cp.report.figures.packs import (
    area_words,
    balance_tile,
    communication_figure,
    dispatch_figure,
    mask_figure,
    volume_tile,
)
from megatron_cp.report.figures.view import PackView, kv_bytes, view_of_plan


def dry_run_page(run: DryRun, command: str) -> Markup:
    """Returns the page: headline, mask and dispatch, planners side by side, lengths, traffic."""
    packs = pack_views(run)
    first = packs[0]
    seq_length = first.mask.num_queries
    shares = shares_of_lengths(run.corpus.document_lengths, "before they are cut into packs,")
    lengths = lengths_figure(shares, seq_length, columns=5)
    sections = [
        strip(_tiles(run, packs)),
        row(mask_figure(first), dispatch_figure(first)),
        heading("Planners and lengths"),
        tag("section", planner_table(run), lengths.markup(), class_="row"),
    ]
    if first.ours.cp_size > 1:
        sections += [heading("Communication"), row(communication_figure(first))]
    config = run.config
    subtitle = (
        f"{run.corpus.source}; {short_tokens(seq_length)} tokens per pack on CP "
        f"{first.ours.cp_size}, {config.num_heads} query and {config.num_kv_heads} key heads of "
        f"{config.head_dim}"
    )
    foot = {
        "command": command,
        "planned": f"{len(packs)} packs; pictures show the first, figures are means over all",
        "plan digests": ", ".join(plan.digest()[:16] for plan in run.plans),
        "predicted": "times come from the cost model of this hardware row and were not measured; "
        "balance and bytes are counted from the plans",
        "machine": f"{platform.platform()}, Python {platform.python_version()}",
        "versions": f"megatron_cp {_version('megatron_cp')}, numpy {_version('numpy')}",
    }
    return page("Dry run · context-parallel plan", subtitle, sections, foot)


def pack_views(run: DryRun) -> list[PackView]:
    """Returns the packs as the figures draw them."""
    return [
        PackView(
            mask=pack.mask,
            document_lengths=pack.document_lengths,
            document_kinds=pack.document_kinds,
            ours=view_of_plan(ours),
            zigzag=view_of_plan(zigzag) if ours.cp_size > 1 else None,
            kv_row_bytes=kv_bytes(run.config),
        )
        for pack, ours, zigzag in zip(run.corpus.packs, run.plans, run.zigzag, strict=True)
    ]


def _tiles(run: DryRun, packs: list[PackView]) -> list[Tile]:
    rows = {one.planner: one for one in run.planners}
    mine, zigzag = rows[run.config.planner], rows["zigzag"]
    spent = mine.forward_ms + mine.backward_ms
    gain = (zigzag.forward_ms + zigzag.backward_ms) / spent if spent else 1.0
    topology = run.config.topology
    name = topology if isinstance(topology, str) else topology.name
    pack = packs[0]
    return [
        balance_tile(packs),
        volume_tile(packs),
        Tile(
            "Attention per layer",
            f"{spent:.3g} ms",
            f"on {name}; {gain:.2f} × faster than zigzag ring",
            predicted=True,
        ),
        Tile("Gap to bound", f"{mine.gap:.2f} ×", "1 = no plan can be predicted faster", True),
        Tile(
            "Area of a pack",
            area_words(pack),
            f"of a causal triangle; {len(pack.document_lengths)} documents in the first pack",
        ),
    ]


def planner_table(run: DryRun) -> Markup:
    """Returns the table of planners, fastest first, with a bar for the predicted time."""
    heads = (
        "planner", "balance", "volume, mean", "volume, max", "forward ms", "backward ms",
        "× bound", "",
    )  # fmt: skip
    slowest = max((one.forward_ms + one.backward_ms for one in run.planners), default=1.0) or 1.0
    rows = [_table_row(one, run.config.planner, slowest) for one in run.planners]
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", escape(head)) for head in heads))),
        tag("tbody", *rows),
    )
    caption = (
        "One layer, mean over the packs, fastest first. Balance: max / mean area. Volume: rows "
        "received, forward and backward, in units of a rank's query rows; both are counted. "
        "Milliseconds and the gap to the bound (no plan is predicted faster) come from the cost "
        "model, not from a measurement."
    )
    return tag(
        "figure",
        tag("h2", escape("Every planner on the same packs"), Markup(f" {PREDICTED}")),
        tag("figcaption", escape(caption)),
        tag("div", table, class_="scroll"),
        class_="w7",
    )


def _table_row(one: PlannerRow, chosen: str, slowest: float) -> Markup:
    name = tag("td", escape(one.planner))
    if one.refusal:
        return tag("tr", name, tag("td", escape(one.refusal), class_="why", colspan=7))
    spent = one.forward_ms + one.backward_ms
    cells = [
        f"{one.balance:.3f}", f"{one.volume_mean:.2f}", f"{one.volume_max:.2f}",
        f"{one.forward_ms:.3f}", f"{one.backward_ms:.3f}", f"{one.gap:.2f}",
    ]  # fmt: skip
    meter = tag("td", tag("span", tag("i", style=f"width:{spent / slowest:.1%}"), class_="meter"))
    written = [tag("td", escape(cell)) for cell in cells]
    return tag("tr", name, *written, meter, class_="chosen" if one.planner == chosen else None)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
