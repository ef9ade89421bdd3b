"""The dated result files of a GPU check: one Markdown page and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.gpu.cases import Case
from tools.gpu.measure import Times


@dataclass(frozen=True)
class Timed:
    """One case and pass: the times of all contenders, ours under `hopper`."""

    case: Case
    kernel_pass: str
    area: int
    times: Mapping[str, Times]
    modelled: tuple[float, float] | None = (
        None  # TFLOP/s that the kernel model expects, never measured
    )

    def tflops(self, name: str) -> float | None:
        """Returns TFLOP/s of a contender that ran; counted are the mask's own pairs."""
        times = self.times.get(name)
        return (
            None
            if times is None
            else self.case.tflop(self.kernel_pass, self.area) / times.median_ms * 1e3
        )

    def verdict(self) -> str:
        """Returns what is behind: a bar, a peer of the same run, or nothing."""
        ours = self.tflops("hopper")
        if ours is None:
            return "not run"
        behind = []
        bar = self.case.bar(self.kernel_pass)
        if bar is not None and ours < bar:
            behind.append(f"bar {bar:.0f}")
        for name in self.times:
            theirs = self.tflops(name)
            if not name.startswith("hopper") and theirs is not None and theirs > ours:
                behind.append(f"{name} +{(theirs / ours - 1) * 100:.0f} %")
        return "behind " + ", ".join(behind) if behind else "ok"


@dataclass
class Report:
    """All that one invocation found. `stopped` says why it ended early, empty if it did not."""

    title: str
    facts: dict[str, str]
    checks: list[tuple[str, str, str]] = field(default_factory=list)  # (what, verdict, detail)
    timed: list[Timed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    def page(self) -> str:
        """Returns the Markdown page."""
        parts = [f"# {self.title}", "\n".join(f"- {k}: {v}" for k, v in self.facts.items())]
        if self.stopped:
            parts.append(f"**Stopped early: {self.stopped}**")
        if self.checks:
            failed = sum(verdict == "FAILED" for _, verdict, _ in self.checks)
            parts.append(f"## Checks\n\n{len(self.checks)} checks, {failed} failed.")
            parts.append(_table(("check", "verdict", "detail"), self.checks))
        for kernel_pass in ("forward", "backward"):
            rows = [one for one in self.timed if one.kernel_pass == kernel_pass]
            if rows:
                parts += [f"## {kernel_pass.capitalize()}, TFLOP/s", _speeds(rows)]
        parts += [f"- {note}" for note in self.notes]
        return "\n\n".join(parts) + "\n"

    def write(self, path: Path) -> None:
        """Writes `<path>.md` and `<path>.json`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".md").write_text(self.page())
        values = asdict(self)
        for one, raw in zip(self.timed, values["timed"], strict=True):
            raw["tflops"] = {name: one.tflops(name) for name in one.times}
        path.with_name(path.name + ".json").write_text(json.dumps(values, indent=1) + "\n")


def _speeds(rows: Sequence[Timed]) -> str:
    names = list(dict.fromkeys(name for one in rows for name in one.times))
    names.sort(key=lambda name: (not name.startswith("hopper"), name))
    lines = []
    for one in rows:
        bar = one.case.bar(one.kernel_pass)
        speeds = [one.tflops(name) for name in names]
        cells = ["" if speed is None else f"{speed:.0f}" for speed in speeds]
        ours = one.times.get("hopper")
        ms = "" if ours is None else f"{ours.median_ms:.3f}"
        modelled = "" if one.modelled is None else "{:.0f} to {:.0f}".format(*one.modelled)
        limit = "" if bar is None else f"{bar:.0f}"
        lines.append((one.case.name, *cells, ms, modelled, limit, one.verdict()))
    columns = ("hopper ms", "hopper by the model, not measured", "bar", "verdict")
    return _table(("case", *names, *columns), lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(str(c).replace("|", "/") for c in row) + " |" for row in rows]
    return "\n".join(lines)
