"""From where a run can go on: the checkpoints in its folder, as they are when the page is written."""

from __future__ import annotations

from pathlib import Path

from megatron_cp.report.draw.html import scrolling
from megatron_cp.report.draw.svg import Markup, escape, short_bytes, tag
from megatron_cp.report.run.record import LOSS, Run
from megatron_cp.training.checkpoint import files

MAX_POINTS = 12
COLUMNS = ("step", "loss", "held out", "size", "how to go on from it")


def resume_points(run: Run) -> Markup | None:
    """Returns the newest checkpoints with their losses and the flags that load them; None without any."""
    root = run.argument("save")
    if not isinstance(root, str) or not Path(root).is_dir():
        return None
    steps = list(files.iterations_before(root, None))
    if not steps:
        return None
    words = (
        f"Checkpoints in {root}, newest first; sizes are compared here, hashes when one is loaded."
    )
    if len(steps) > MAX_POINTS:
        words += f" {len(steps) - MAX_POINTS} older ones are not listed."
    *figures, flags = COLUMNS
    head = tag(
        "tr", *(tag("th", escape(word)) for word in figures), tag("th", escape(flags), class_="why")
    )
    rows = [_point(run, root, step) for step in steps[:MAX_POINTS]]
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag(
        "figure",
        tag("h3", Markup("Resume points")),
        tag("figcaption", escape(words)),
        scrolling(table, "Resume points"),
        class_="w12",
    )


def _point(run: Run, root: str, step: int) -> Markup:
    size, how = "", f"--load {root} --ckpt-step {step}"
    try:
        manifest = files.read_manifest(files.iteration_folder(root, step))
        if manifest is None:
            how = f"written by another program: {how}"
        else:
            size = short_bytes(sum(manifest["files"].values()))
    except ValueError as damage:
        how = f"cannot be loaded: {damage}"
    cells = (f"{step}", _value(run, LOSS, step), _value(run, run.held_out_loss, step), size)
    return tag(
        "tr", *(tag("td", escape(cell)) for cell in cells), tag("td", escape(how), class_="why")
    )


def _value(run: Run, key: str, step: int) -> str:
    """Returns a metric at a step, nothing where it was not logged there."""
    steps, values = run.column(key)
    return next((f"{v:.4f}" for s, v in zip(steps, values, strict=True) if s == step), "")
