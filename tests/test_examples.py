"""The examples as a reader runs them: each proves what it says, writes its picture and names what comes next."""

import contextlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.faults.program import Launch, run_program
from tests.programs import run_by_hand

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RANKS = {
    "attention_on_four_ranks.py": 4,
    "packed_documents.py": 2,
    "cross_attention.py": 4,
    "your_own_mask.py": 3,
    "train_tiny_gpt.py": 2,
    "inside_megatron_core.py": 2,
    "mask_gallery.py": 1,
}


def test_every_example_in_python_is_run_here():
    assert set(RANKS) == {path.name for path in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", RANKS)
def test_an_example_ends_with_a_picture_and_what_comes_next(name, tmp_path):
    """One under torchrun, as a reader starts it, the others on forks of a warm process."""
    if name == "inside_megatron_core.py":
        run = run_by_hand(EXAMPLES / name, tmp_path, RANKS[name])
        codes, said, problem = [run.returncode], run.stdout, run.stderr
    else:
        where = {"SCRIPT": str(EXAMPLES / name), "FOLDER": str(tmp_path)}
        plant = f"{__name__}.run_script"
        (ranks,) = run_program([Launch((), RANKS[name], environment=where, plant=plant)])
        codes, said = [rank.code for rank in ranks], "".join(rank.stdout for rank in ranks)
        problem = "".join(rank.stderr for rank in ranks)
    assert not any(codes), problem
    page = tmp_path / re.search(r"(?:picture: |wrote )(runs/\w+\.html)", said)[1]
    assert "<svg" in page.read_text(encoding="utf-8")
    if (
        name == "attention_on_four_ranks.py"
    ):  # the first of README's reading list shows what balance is
        shares = re.findall(r"^ +\d+ +\d+ +([\d.]+) ", said, re.MULTILINE)
        assert len(shares) == 8 and all(0.99 <= float(share) <= 1.01 for share in shares)
    following = re.search(r"next: (.+)", said)[1]
    assert all(Path(EXAMPLES.parent, word).is_file() for word in re.findall(r"\S+\.py", following))


def test_the_tiny_gpt_has_one_curve_where_ranks_do_not_divide_its_tokens(tmp_path):
    where = {"SCRIPT": str(EXAMPLES / "train_tiny_gpt.py"), "FOLDER": str(tmp_path)}
    plant = f"{__name__}.run_script"
    runs = run_program([Launch((), size, environment=where, plant=plant) for size in (1, 3)])
    assert not any(rank.code for ranks in runs for rank in ranks), runs[1][2].stderr
    one, three = (
        [float(loss) for loss in re.findall(r"loss ([\d.]+)", ranks[0].stdout)] for ranks in runs
    )
    assert len(one) == 8 and three == pytest.approx(one, abs=2e-4)


def run_script(rank: int) -> None:
    """Planted in a rank: runs the program `SCRIPT` in `FOLDER`, and nothing behind it."""
    os.chdir(os.environ["FOLDER"])
    sys.argv = [os.environ["SCRIPT"]]
    runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
    raise SystemExit(0)


def test_the_notebook_runs_from_top_to_bottom_and_shows_its_pictures(tmp_path, capsys):
    notebook = json.loads((EXAMPLES / "from_mask_to_attention.ipynb").read_text(encoding="utf-8"))
    names, shown = {}, []
    with contextlib.chdir(tmp_path) if sys.version_info >= (3, 11) else contextlib.nullcontext():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []  # what is kept would grow old
                shown.append(_run("".join(cell["source"]), names))
    assert [hasattr(x, "_repr_svg_") for x in shown].count(True) == 2
    assert "<iframe" in shown[-2]._repr_html_()
    assert shown[-1].startswith("equal to the dense formula within")
    assert "planner" in capsys.readouterr().out


def _run(source, names):
    """Runs a cell and returns the value of its last line, as a notebook shows it."""
    *lines, last = source.splitlines()
    try:
        value = compile(last, "cell", "eval")
    except SyntaxError:
        exec(source, names)
        return None
    exec("\n".join(lines), names)
    return eval(value, names)
