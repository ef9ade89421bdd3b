"""The page of a training run."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np

from megatron_cp.report.draw.html import Figure, Section, note, page, row, strip, write_page
from megatron_cp.report.draw.svg import Markup, count_of, short, short_tokens
from megatron_cp.report.figures.lengths import (
    LengthShares,
    lengths_figure,
    shares_of_bins,
    shares_of_lengths,
)
from megatron_cp.report.figures.packs import communication_figure, dispatch_figure, mask_figure
from megatron_cp.report.figures.planners import planner_table
from megatron_cp.report.figures.timeline import stages_figure
from megatron_cp.report.figures.view import PackView
from megatron_cp.report.figures.workers import workers_figure
from megatron_cp.report.run.bought import bought_table, bought_tiles
from megatron_cp.report.run.curves import (
    balance_figure,
    comparison_figures,
    gradient_figure,
    loss_figure,
    step_time_figure,
)
from megatron_cp.report.run.health import verdict_of
from megatron_cp.report.run.kept_packs import KeptPacks, kept_words, plan_again
from megatron_cp.report.run.limits import limits_figure
from megatron_cp.report.run.record import Run, read_run
from megatron_cp.report.run.resume import resume_points
from megatron_cp.report.run.texts import texts_parts
from megatron_cp.report.run.trace import MeasuredStages, measured_stages
from megatron_cp.report.run.trained import trained_tiles
from megatron_cp.report.sources import Tell, quiet


def write_run_report(
    folder: Path, output: Path | None = None, compare: Path | None = None, *, tell: Tell = quiet
) -> Path:
    """Writes the page of the run in `folder` and returns where: `report.html` in it by default.

    Raises ValueError, one line, for records that are missing or damaged.
    """
    run = read_run(folder)
    if compare is not None and compare.resolve() == folder.resolve():
        raise ValueError(f"--compare {compare} is the run itself; give the folder of another")
    other = None if compare is None else read_run(compare)
    output = folder / "report.html" if output is None else output
    write_page(output, run_page(run, other, tell=tell))
    return output


def run_page(
    run: Run, other: Run | None = None, *, kept: KeptPacks | None = None, tell: Tell = quiet
) -> Markup:
    """Returns the page: verdict and headline, what context parallelism bought, the plan, curves, data, traffic.

    `kept`: the kept packs, where somebody has planned them again already.
    """
    kept = plan_again(run, tell) if kept is None else kept
    traced = measured_stages(run)
    pack = kept.drawn
    tiles = [*trained_tiles(run), *bought_tiles(run, kept)]
    overview = [verdict_of(run).markup(), strip(tiles)]
    if pack is None or pack.ours.cp_size > 1:
        overview.append(row(bought_table(run, kept, other), limits_figure(run, kept, traced)))
    else:
        overview.append(row(limits_figure(run, kept, traced)))
    sections = [Section("overview", "Overview", overview), _plan_section(kept, traced)]
    curves = row(loss_figure(run), gradient_figure(run))
    sections.append(
        Section("training", "Training", [curves, row(balance_figure(run), step_time_figure(run))])
    )
    texts = texts_parts(run.texts, run.section("text_samples"))
    if texts:
        sections.append(Section("texts", "What it writes", texts))
    shares = length_shares(run)
    if shares is not None:
        seq_length = run.argument("seq_length")
        figure = lengths_figure(shares, seq_length if isinstance(seq_length, int) else None)
        sections.append(Section("data", "Data", [row(figure)]))
    if other is not None:
        compared = row(*comparison_figures(run, other))
        sections.append(Section("comparison", "Against another run", [compared]))
    points = resume_points(run)
    if points is not None:
        sections.append(Section("checkpoints", "Where it can go on", [row(points)]))
    if pack is not None and pack.ours.cp_size > 1:
        traffic = row(communication_figure(pack))
        sections.append(Section("communication", "Communication", [traffic]))
    return page(f"{run.name} · training report", _subtitle(run), sections, _foot(run, other, kept))


def _plan_section(kept: KeptPacks, traced: MeasuredStages | None) -> Section:
    pack = kept.drawn
    if pack is None:
        words = "The run kept no packs (plan.json is missing), so no plan can be drawn."
        return Section("plan", "Plan", [note(words)])
    parts = [row(mask_figure(pack), dispatch_figure(pack))]
    workers = workers_figure(pack)
    if workers is not None and pack.ours.cp_size > 1:
        parts.append(row(workers))
    stages = _stages(traced, pack)
    if stages is not None:
        parts.append(row(stages))
    if kept.ours is not None:
        title = f"Planners on {kept_words(kept)}"
        parts.append(row(planner_table(kept.ours, kept.outcomes, title)))
    if not kept.is_rebuilt:
        parts.insert(
            0,
            note(
                "This version plans the kept packs differently than the run did: pictures show what the run recorded, "
                "ranks being drawn as if they computed the rows that they own."
            ),
        )
    return Section("plan", "Plan of a kept pack", parts)


def _stages(measured: MeasuredStages | None, pack: PackView) -> Figure | None:
    """Returns the stages of a pass: those of the run's trace where it wrote one, and those of the plans."""
    if measured is None:
        return stages_figure(pack)
    panels = [
        (f"measured {name} (call {one.number} of {one.num_calls})", one)
        for name, one in measured.passes.items()
    ]
    if not panels:
        return stages_figure(pack, words=f"Nothing measured: {measured.problem}.")
    clock = "device" if measured.on_device else "host"
    words = (
        f"Above: one layer of this run, measured in steps {measured.steps} (--profile), the call of median duration of "
        f"each pass; {clock} time of the ranks that wrote a trace, by their machines' clocks. It is not the pack drawn."
    )
    return stages_figure(pack, panels, words)


def length_shares(run: Run) -> LengthShares | None:
    """Returns the shares of the training documents, or of the kept packs' pieces; None without."""
    train = run.section("data").get("train")
    names = ("length_edges", "documents_by_length", "tokens_by_length", "area_by_length")
    if isinstance(train, dict) and all(_are_counts(train.get(name)) for name in names):
        counts = (np.asarray(train[name]) for name in names)
        return shares_of_bins(*counts, source="of the training split")
    lengths = [length for pack in run.packs for length in pack.document_lengths]
    source = f"of {count_of(len(run.packs), 'kept pack')}, cut where a pack ends"
    return shares_of_lengths(np.array(lengths), source) if lengths else None


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, int) for v in values)


def _subtitle(run: Run) -> str:
    layout = run.section("layout")
    sizes = (("CP", "context"), ("TP", "tensor"), ("PP", "pipeline"), ("DP", "data"))
    split = " × ".join(f"{name} {layout[key]}" for name, key in sizes if key in layout)
    parts = [f"GPT of {short(run.description.get('num_parameters') or float('nan'))} parameters"]
    seq_length = run.argument("seq_length")
    if isinstance(seq_length, int) and seq_length:
        parts.append(f"{short_tokens(seq_length)} tokens per pack")
    state = "" if run.description.get("finished") else " (not finished)"
    return ", ".join([*parts, split, f"{count_of(run.num_steps, 'step')}{state}"])


def _foot(run: Run, other: Run | None, kept: KeptPacks) -> dict[str, object]:
    command = run.description.get("command") or []
    machine = run.section("machine")
    foot: dict[str, object] = {
        "run": f"{run.folder}, begun {_date(run.description.get('created'))}",
        "command": " ".join(str(word) for word in command),
        "machine": ", ".join(str(value) for value in machine.values()),
        "versions": ", ".join(f"{k} {v}" for k, v in run.section("versions").items()),
        "seed": run.argument("seed", "unknown"),
        "pack drawn": f"of {len(kept.packs)} kept (the first of the run), that with the most documents",
        "this page": f"python -m megatron_cp report {run.folder}",
        "labels": "predicted: by the cost model, measured nowhere; counted: from the plans; all else is measured",
    }
    if other is not None:
        foot["compared with"] = f"{other.name} in {other.folder}"
    return foot


def _date(seconds: object) -> str:
    if not isinstance(seconds, (int, float)):
        return "at an unknown time"
    moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    return f"{moment:%Y-%m-%d %H:%M} UTC"
