"""What pages say of benchmarks, counted again from the files: losses as well as wins, and no file that nobody names."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLANS = json.loads((RESULTS / "plan_xeon_2026-11-27.json").read_text(encoding="utf-8"))
GRID = [one for one in PLANS["details"] if one["grid"] == "grid"]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def cells_that_others_win(key: str, *, from_below: bool) -> dict[str, list[float]]:
    """Cells in which another scheme's time, or price from below, stands under ours: the ratio of each such scheme."""
    found: dict[str, list[float]] = {}
    for one in GRID:
        ours, *others = one["outcomes"]
        for other in others:
            if other["is_best_case"] == from_below and (other.get(key) or 1e99) < ours[key]:
                found.setdefault(str(one["cell"]), []).append(ours[key] / other[key])
    return found


def test_losses_are_told_as_often_as_the_file_has_them():
    predicted, simulated = (
        cells_that_others_win(key, from_below=False) for key in ("predicted_ms", "simulated_ms")
    )
    opened, opened_simulated = (
        cells_that_others_win(key, from_below=True) for key in ("predicted_ms", "simulated_ms")
    )
    assert len(GRID) == 149
    assert f"In {len(predicted)} cells of 149 another scheme is predicted faster" in PAGE
    assert f"In {len(simulated)} cells another is faster when simulated" in PAGE
    most = max(max(one) for one in simulated.values())
    assert f"by up to {100 * (most - 1):.1f} %" in PAGE
    assert f"In {len(opened)} cells the answer is open" in PAGE
    assert f"Simulated, {len(opened_simulated)} cells are" in PAGE
    said = " ".join(README.split())
    assert (
        f"in {len(predicted)} of 149 cells another scheme is predicted faster, in {len(simulated)} simulated"
        in said.lower()
    )
    assert f"in {len(opened)} more" in said.lower()


def test_open_cells_have_their_times_on_the_page():
    rows = re.findall(
        r"^\| [^|]*: ([^|]*) \| ([\d,]+) \| ([\d:]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.M
    )
    told = set()
    for planners, ranks, heads, least, ours in rows:
        names = tuple(sorted(re.findall(r"`(\w+)`", planners)))
        told.add((names, *(word.replace(",", "") for word in (ranks, heads, least, ours))))
    counted = set()
    for one in GRID:
        ours, *others = one["outcomes"]
        below = [
            o for o in others if o["is_best_case"] and o["predicted_ms"] < ours["predicted_ms"]
        ]
        if below:
            least = min(o["predicted_ms"] for o in below)
            names = tuple(sorted(o["planner"] for o in below))
            cell = one["cell"]
            times = (f"{least:.0f}", f"{ours['predicted_ms']:.0f}")
            counted.add((names, str(cell["ranks"]), cell["heads"], *times))
    assert told == counted and counted


DRAWS = {
    "first": "plan_first_draw_epyc_2026-11-25",
    "second": "plan_drawn_epyc_2026-11-25",
    "third": "plan_xeon_2026-11-27",
}


@pytest.mark.parametrize("draw", DRAWS)
def test_drawn_cells_are_told_as_the_file_has_them(draw):
    tables = json.loads((RESULTS / f"{DRAWS[draw]}.json").read_text(encoding="utf-8"))["tables"]
    (summary,) = [one for one in tables if one["title"] == "Summary, drawn cells"]
    rows = {row[0]: row for row in summary["rows"]}
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f"| {draw} ("))
    said = [float(cell) for cell in line.strip("| ").split(" | ")[1:]]
    means = [rows[name][3] for name in ("dense", "documents", "sparse", "all")]
    assert said == [*(round(float(x), 2) for x in means), rows["all"][2], round(rows["all"][4], 2)]


def test_goals_that_were_missed_are_told():
    (goals,) = [one for one in PLANS["tables"] if one["title"] == "Goals"]
    verdicts = [row[-1] for row in goals["rows"]]
    missed, all_goals = verdicts.count("NO"), len(verdicts)
    assert f"Of {all_goals} goals {missed} are missed" in PAGE
    assert f"{missed} of {all_goals} goals are missed" in " ".join(README.split())


def test_every_result_file_is_named_by_a_page():
    pages = "".join(one.read_text(encoding="utf-8") for one in ROOT.glob("docs/*.md"))
    linked = set(re.findall(r"\]\(\.\./benchmarks/results/([\w.-]+\.md)", pages))
    assert {one.name for one in RESULTS.glob("*.md")} - linked == set()


def test_kills_are_those_of_the_newest_file():
    newest = max(RESULTS.glob("kills_*.json"), key=lambda one: one.stem.rpartition("_")[2])
    (table,) = json.loads(newest.read_text(encoding="utf-8"))["tables"]
    drawn, died, equal = (sum(column) for column in list(zip(*table["rows"], strict=True))[2:])
    (line,) = (line for line in PAGE.splitlines() if line.startswith("- [Kills]"))
    assert f"results/{newest.stem}.md): {drawn} drawn at random points" in line
    assert f"{died} ranks died" in line and f"{equal} runs were bitwise equal" in line


def test_processor_time_of_planning_is_told_alike_on_all_pages():
    newest = max(RESULTS.glob("solver_*.json"), key=lambda one: one.stem.rpartition("_")[2])
    rows = json.loads(newest.read_text(encoding="utf-8"))["tables"][0]["rows"]
    of = {ranks: [float(one) for one in row] for ranks, _, *row in rows}
    ours, theirs, ratio = of["all"][:3]
    many = f"{of['48'][2]:.2f}".lstrip("0")
    comparison = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert f"**{theirs:.0f} ms** (its solver alone)" in comparison
    assert f"{ours:.0f} ms: {ratio:.1f} times as much" in comparison
    assert f"on 48 {many} as much" in comparison
    assert (
        f"takes {ratio:.1f} times as long (geometric mean; medians {ours:.0f} and {theirs:.0f} ms"
        in PAGE
    )
    assert f"on 48 ranks {many}." in PAGE
    assert f"**{1 / ratio:.2f} of our processor time**".replace("0.", ".") in README


@pytest.mark.parametrize(("page", "column"), [(PAGE, 4), (README, 4)])
def test_means_of_planners_are_those_of_the_file(page, column):
    """Geometric means by kind of mask; names in the tables may carry words behind them."""
    (summary,) = [one for one in PLANS["tables"] if one["title"] == "Planners, grid"]
    means = {row[0]: row[2:5] for row in summary["rows"]}
    names = {"Transformer Engine, THD": "per_document_zigzag"}
    compared = 0
    for line in page.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        name = next(
            (ours for words, ours in names.items() if cells[0].startswith(words)),
            cells[0].split(" ")[0].strip("`"),
        )
        if len(cells) == column and name in means:
            assert [float(cell) for cell in cells[1:]] == [float(cell) for cell in means[name]], (
                line
            )
            compared += 1
    assert compared >= 4
