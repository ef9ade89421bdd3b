"""tools/loss_compare.py: what it reads, what it says, how it exits."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.training.commands import ROOT

spec = importlib.util.spec_from_file_location("loss_compare", ROOT / "tools" / "loss_compare.py")
loss_compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loss_compare)

LINE = " [2026-11-20 18:52:28.793548] iteration {:8d}/      50 | lm loss: {:.6E} | grad norm: 1.0 |"


def write_metrics(folder, losses: dict[int, float | None]):
    folder.mkdir()
    rows = [json.dumps({"iteration": i, "lm loss": loss}) for i, loss in losses.items()]
    rows.append(json.dumps({"iteration": 2, "lm loss validation": 9.0}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + '\n{"iteration": 9, "lm')
    return folder


def test_equal_runs_are_equal(tmp_path, capsys):
    a = write_metrics(tmp_path / "a", {1: 3.0, 2: 2.5})
    b = write_metrics(tmp_path / "b", {1: 3.0, 2: 2.5, 3: 2.0})
    assert loss_compare.main([str(a), str(b), "--assert-equal"]) == 0
    out = capsys.readouterr().out
    assert "2 losses in common, of 2 and 3" in out
    assert "largest difference 0.000E+00, within" in out


def test_the_largest_difference_decides_and_is_shown(tmp_path, capsys):
    a = write_metrics(tmp_path / "a", dict.fromkeys(range(1, 101), 1.0))
    b = write_metrics(tmp_path / "b", {i: 1.0 + (0.25 if i == 37 else 0.0) for i in range(1, 101)})
    assert loss_compare.main([str(a), str(b), "--tolerance", "0.25"]) == 0
    assert loss_compare.main([str(a), str(b), "--tolerance", "0.2", "--max-rows", "3"]) == 1
    worst = next(line for line in capsys.readouterr().out.splitlines() if "<- largest" in line)
    assert worst.split()[0] == "37"


LOSSES = {1: 3.0, 2: 2.0, 3: 2.5, 4: 1.5, 5: 1.0, 6: 0.5, 7: 4.0}
BEGINS = "[before the start of training step] datetime: 2026-11-20 18:52:28"
LOADED = "  successfully loaded checkpoint from runs/a at iteration 4"
NO_LOSS = (
    " [2026-11-20 18:52:28] iteration {:8d}/      50 | loss scale: 8.0 | tokens per second: 1471 |"
)


def write_log(path, *lines: tuple[int, float] | str, tail: str = ""):
    path.write_text("\n".join(x if isinstance(x, str) else LINE.format(*x) + tail for x in lines))
    return path


OURS = " tokens per second: 1471 |"
LOGS = {
    # what Megatron-LM prints: the first step, and again in the mean of the first line that is due
    "every step": ("", [BEGINS, (1, 3.0), (2, 2.5), (3, 2.5), (4, 1.5)], 4),
    "every second step": ("", [BEGINS, (1, 3.0), (2, 2.5), (4, 2.0), (6, 0.75)], 4),
    "gone on": ("", [LOADED, BEGINS, (5, 1.0), (6, 0.75), (7, 4.0)], 3),
    "both": ("", [BEGINS, (1, 3.0), (3, 2.5), LOADED, BEGINS, (5, 1.0), (6, 0.75)], 4),
    # ours prints what is due
    "ours, every step": (OURS, [BEGINS, (1, 3.0), (2, 2.0), (3, 2.5)], 3),
    "ours, every third step": (OURS, [BEGINS, (3, 2.5), (6, 1.0)], 2),
    "ours, gone on": (OURS, [LOADED, BEGINS, (6, 0.75), (7, 4.0)], 2),
    "without its beginning": ("", [(1, 3.0), (2, 2.5), (3, 2.5)], 3),
    "every third step, of versions that print no first one": ("", [BEGINS, (3, 2.5), (6, 1.0)], 2),
    "the end": ("", [(4, 1.75), (5, 1.0), (6, 0.5), (7, 4.0)], 2),
    "ours, the end": (OURS, [(4, 2.0), (6, 0.75), (7, 4.0)], 2),
    "a loss behind another rank's words": (
        " [rank1]: UserWarning",
        [(1, 3.0), (2, 2.5), (3, 2.5)],
        3,
    ),
    "two jobs without their beginnings": (
        "",
        [(1, 9.0), (2, 9.0), (3, 9.0), (1, 3.0), (2, 2.5)],
        2,
    ),
    # the second job goes on from step 4: what the first had behind it is no part of the run
    "done again": (
        "",
        [
            BEGINS,
            (1, 3.0),
            (2, 2.5),
            (4, 2.0),
            (6, 9.0),
            (7, 9.0),
            LOADED,
            BEGINS,
            (5, 1.0),
            (6, 0.75),
        ],
        5,
    ),
    # what is printed while the loss scale falls has no loss
    "ours, skipped": (OURS, [BEGINS, NO_LOSS.format(1), (2, 2.0), (3, 2.5)], 2),
}


@pytest.mark.parametrize("kind", LOGS)
def test_a_line_of_a_log_is_compared_with_the_mean_of_its_steps(tmp_path, capsys, kind):
    tail, lines, count = LOGS[kind]
    log = write_log(tmp_path / "a.log", "noise", *lines, "iteration x", tail=tail)
    folder = write_metrics(tmp_path / "a", LOSSES)
    assert loss_compare.main([str(log), str(folder), "--assert-equal"]) == 0
    assert loss_compare.main([str(folder), str(log), "--assert-equal"]) == 0
    assert loss_compare.main([str(log), str(log), "--assert-equal"]) == 0
    assert f"{count} losses in common, of {count} and {len(LOSSES)}" in capsys.readouterr().out
    other = write_metrics(tmp_path / "b", {step: loss + 1 for step, loss in LOSSES.items()})
    assert loss_compare.main([str(log), str(other), "--tolerance", "0.99"]) == 1


def test_steps_without_a_row_or_skipped_leave_their_line_out(tmp_path, capsys):
    log = write_log(tmp_path / "a.log", BEGINS, (2, 2.5), (4, 2.0), (6, 0.75), tail=OURS)
    folder = write_metrics(tmp_path / "a", {step: LOSSES[step] for step in (1, 2, 4, 5, 6)})
    with (folder / "metrics.jsonl").open("a") as rows:
        rows.write("\n" + json.dumps({"iteration": 3, "lm loss": 99.0, "grad/skipped": 1.0}) + "\n")
    assert loss_compare.main([str(log), str(folder), "--assert-equal"]) == 0
    said = capsys.readouterr().out
    assert "2 losses in common, of 3 and 5" in said and "1 to 2" in said and "3 to 4" not in said


@pytest.mark.parametrize(("other", "code"), [(None, 0), (2.5, 1)])
def test_nan_equals_nan_and_nothing_else(tmp_path, other, code: int):
    a = write_metrics(tmp_path / "a", {1: 3.0, 2: None})
    b = write_metrics(tmp_path / "b", {1: 3.0, 2: other})
    assert loss_compare.main([str(a), str(b)]) == code


def test_a_verdict_that_nobody_could_read_is_no_success(tmp_path):
    losses = dict.fromkeys(range(2000), 3.0)
    paths = [
        write_metrics(tmp_path / name, {**losses, 1: value})
        for name, value in (("a", 3.0), ("b", 4.0))
    ]
    words = [
        sys.executable,
        str(ROOT / "tools" / "loss_compare.py"),
        *map(str, paths),
        "--max-rows",
        "2000",
    ]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_nothing_to_compare_is_an_error_of_its_own(tmp_path, capsys):
    a = write_metrics(tmp_path / "a", {1: 3.0})
    (tmp_path / "empty.log").write_text("nothing here")
    other = write_metrics(tmp_path / "b", {5: 3.0})
    for path in (tmp_path / "missing", other, tmp_path / "empty.log"):
        with pytest.raises(SystemExit, match="2"):
            loss_compare.main([str(a), str(path)])
    assert capsys.readouterr().err.count("error: ") == 3
