"""The page of a training run."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np

from megatron_cp.report.draw.html import Figure, Tile, heading, note, page, row, strip, write_page
from megatron_cp.report.draw.svg import Markup, short
from megatron_cp.report.figures.lengths import (
    LengthShares,
    lengths_figure,
    shares_of_bins,
    shares_of_lengths,
)
from megatron_cp.report.figures.packs import (
    balance_tile,
    communication_figure,
    dispatch_figure,
    mask_figure,
    volume_tile,
)
from megatron_cp.report.figures.view import PackView
from megatron_cp.report.run.curves import (
    balance_figure,
    comparison_figures,
    loss_figure,
    step_time_figure,
)
from megatron_cp.report.run.record import HELD_OUT_LOSS, LOSS, Run, read_run


def write_run_report(folder: Path, output: Path | None = None, compare: Path | None = None) -> Path:
    """Writes the page of the run in `folder` and returns where: `report.html` in it by default.

    Raises ValueError, one line, for records that are missing or damaged.
    """
    run = read_run(folder)
    other = None if compare is None else read_run(compare)
    output = folder / "report.html" if output is None else output
    write_page(output, run_page(run, other))
    return output


def run_page(run: Run, other: Run | None = None) -> Markup:
    """Returns the page: headline, mask and dispatch on the first screen, then the rest."""
    sections = [strip(_tiles(run))]
    pack = pack_drawn(run)
    if pack is not None:
        sections += [row(mask_figure(pack), dispatch_figure(pack))]
    else:
        sections += [note("The run kept no packs (plan.json is missing), so no plan can be drawn.")]
    sections += [heading("Training"), row(loss_figure(run), balance_figure(run))]
    data: list[Figure] = []
    shares = length_shares(run)
    if shares is not None:
        seq_length = run.argument("seq_length")
        data.append(lengths_figure(shares, seq_length if isinstance(seq_length, int) else None))
    sections += [row(step_time_figure(run), *data)]
    if other is not None:
        sections += [heading("Against another run"), row(*comparison_figures(run, other))]
    if pack is not None and pack.ours.cp_size > 1:
        sections += [heading("Communication"), row(communication_figure(pack))]
    return page(f"{run.name} · training report", _subtitle(run), sections, _foot(run, other))


def pack_drawn(run: Run) -> PackView | None:
    """Returns the kept pack with the most documents, the first of equals: it shows most."""
    return max(run.packs, key=lambda pack: len(pack.document_lengths), default=None)


def length_shares(run: Run) -> LengthShares | None:
    """Returns the shares of the training documents, or of the kept packs' pieces; None without."""
    train = run.section("data").get("train")
    names = ("length_edges", "documents_by_length", "tokens_by_length", "area_by_length")
    if isinstance(train, dict) and all(_are_counts(train.get(name)) for name in names):
        counts = (np.asarray(train[name]) for name in names)
        return shares_of_bins(*counts, source="of the training split")
    lengths = [length for pack in run.packs for length in pack.document_lengths]
    source = f"of {len(run.packs)} kept packs, cut where a pack ends"
    return shares_of_lengths(np.array(lengths), source) if lengths else None


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, int) for v in values)


def _tiles(run: Run) -> list[Tile]:
    tiles = [_speed_tile(run)]
    if run.packs:
        tiles += [balance_tile(run.packs), volume_tile(run.packs)]
    _, losses = run.column(LOSS)
    _, held_out = run.column(HELD_OUT_LOSS)
    if losses:
        last = losses[-max(1, len(losses) // 25) :]
        steps = "the last step" if len(last) == 1 else f"mean of the last {len(last)} steps"
        words = f"from {losses[0]:.2f}; {steps}"
        tiles.append(Tile("Training loss", f"{np.mean(last):.3f}", words))
    if held_out:
        best = f"best {min(held_out):.3f}, from {held_out[0]:.2f}"
        tiles.append(Tile("Held-out loss", f"{held_out[-1]:.3f}", best))
    return tiles


def _speed_tile(run: Run) -> Tile:
    """Tokens per second over the median step: packs are full, so a step's tokens are known."""
    _, seconds = run.column("iteration-time")
    batch, seq_length = run.argument("global_batch_size"), run.argument("seq_length")
    if not seconds or not isinstance(batch, int) or not isinstance(seq_length, int):
        return Tile("Tokens per second", "n/a", "no step time logged")
    middle = float(np.median(seconds))
    detail = f"median step {middle:.3g} s, {short(batch * seq_length)} tokens; {_ranks(run)}"
    return Tile("Tokens per second", short(batch * seq_length / max(middle, 1e-9)), detail)


def _ranks(run: Run) -> str:
    world = run.section("layout").get("world_size")
    return f"{world} rank{'' if world == 1 else 's'}"


def _subtitle(run: Run) -> str:
    layout = run.section("layout")
    sizes = (("CP", "context"), ("TP", "tensor"), ("PP", "pipeline"), ("DP", "data"))
    split = " × ".join(f"{name} {layout[key]}" for name, key in sizes if key in layout)
    steps = int(run.rows[-1]["iteration"]) if run.rows else 0
    parts = [f"GPT of {short(run.description.get('num_parameters') or float('nan'))} parameters"]
    if run.argument("seq_length"):
        parts.append(f"{run.argument('seq_length')} tokens per pack")
    state = "" if run.description.get("finished") else " (not finished)"
    return ", ".join([*parts, split, f"{steps} steps{state}"])


def _foot(run: Run, other: Run | None) -> dict[str, object]:
    command = run.description.get("command") or []
    machine = run.section("machine")
    foot: dict[str, object] = {
        "run": f"{run.folder}, begun {_date(run.description.get('created'))}",
        "command": " ".join(str(word) for word in command),
        "machine": ", ".join(str(value) for value in machine.values()),
        "versions": ", ".join(f"{k} {v}" for k, v in run.section("versions").items()),
        "seed": run.argument("seed", "unknown"),
        "packs drawn": f"of {len(run.packs)} kept, that with the most documents; headline figures are means over all",
        "this page": f"python -m megatron_cp report {run.folder}",
        "counted": "areas and bytes come from the plans; times are measured",
    }
    if other is not None:
        foot["compared with"] = f"{other.name} in {other.folder}"
    return foot


def _date(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "at an unknown time"
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
