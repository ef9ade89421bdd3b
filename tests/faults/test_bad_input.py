"""Bad input is one line that says what was received and what is allowed; the same on every rank."""

from pathlib import Path

import pytest
import torch

import megatron_cp as mcp
from megatron_cp import mask as masks
from tests.faults.bad_files import write_corpora
from tests.faults.bad_inputs import (
    BASE,
    LIBRARY,
    PAGE,
    PROGRAM,
    LibraryCase,
    ProgramCase,
    answer_of,
    page,
)
from tests.faults.program import Launch, Outcome, run_program

pytestmark = pytest.mark.timeout(1800)

CP2 = ("--context-parallel-size", "2")
MASKS = "--reset-attention-mask"
DISAGREE = {  # the ranks of one replica are started differently
    "other documents": (("--data-path", "good", MASKS), ("--data-path", "other", MASKS)),
    "another length": (("--data-path", "good"), ("--data-path", "good", "--seq-length", "96")),
    "another planner": (("--data-path", "good"), ("--data-path", "good", "--cp-planner", "ring")),
    "other tokens": (("--data-path", "good"), ("--data-path", "other")),
    "another seed": (("--data-path", "good"), ("--data-path", "good", "--seed", "7")),
    "another learning rate": (("--data-path", "good"), ("--data-path", "good", "--lr", "2e-3")),
    "fewer steps": (("--data-path", "good"), ("--data-path", "good", "--train-iters", "2")),
}


@pytest.mark.parametrize("case", LIBRARY, ids=lambda case: f"{case.group}: {case.input}")
def test_the_library_refuses_with_one_line_of_value_and_advice(case: LibraryCase, tmp_path: Path):
    answer = answer_of(case, tmp_path)
    assert "\n" not in answer
    assert len(answer) < 500
    for part in case.says:
        assert part in answer


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    return folder


@pytest.fixture(scope="module")
def outcomes(corpora: Path) -> dict[str, list[list[Outcome]]]:
    """Every launch of this module, from one warm process: the table, then ranks that disagree."""
    refused = [case.launch(corpora) for case in PROGRAM]
    differing = [
        Launch((*BASE, *CP2), 2, tuple(_in_folder(corpora, words) for words in per_rank))
        for per_rank in DISAGREE.values()
    ]
    done = run_program([*refused, *differing])
    return {"table": done[: len(refused)], "differing": done[len(refused) :]}


def _in_folder(corpora: Path, words: tuple[str, ...]) -> tuple[str, ...]:
    """The words, with the name after --data-path made a path."""
    return tuple(
        str(corpora / word) if place and words[place - 1] == "--data-path" else word
        for place, word in enumerate(words)
    )


@pytest.mark.parametrize(
    "place",
    range(len(PROGRAM)),
    ids=lambda place: f"{PROGRAM[place].input} ({PROGRAM[place].data or 'no data'})",
)
def test_every_rank_of_the_program_refuses_with_the_same_line_before_any_collective(
    outcomes, place: int
):
    case: ProgramCase = PROGRAM[place]
    ranks = outcomes["table"][place]
    assert len(ranks) == case.world_size
    for rank in ranks:
        assert rank.code == 2, rank.stderr[-1500:]
        assert rank.stdout == "", "a process group or a model was being built"
        assert rank.stderr == ranks[0].stderr
    (line,) = ranks[0].stderr.splitlines()
    assert line.startswith("pretrain_gpt.py: error: ")
    for part in case.says:
        assert part in line


def test_refused_runs_leave_nothing_behind(outcomes, corpora: Path):
    assert [c.input for c in PROGRAM if c.saved(corpora).exists()] == []
    names = {
        path.name.split(".")[0] for path in corpora.iterdir() if not path.name.startswith("run")
    }
    kept = {
        "good",
        "other",
        "of-another-tokenizer",
        "large-ids",
        "single-tokens",
        "empty",
        "short",
        "checkpoints",
    }
    assert names == kept


@pytest.mark.parametrize(
    "place", [pytest.param(place, id=name) for place, name in enumerate(DISAGREE)]
)
def test_ranks_of_one_replica_that_disagree_all_stop(outcomes, place: int):
    ranks = outcomes["differing"][place]
    for rank in ranks:
        assert rank.code not in (0, None), "it hung"
        assert "PlanMismatchError" in rank.stderr or "error: " in rank.stderr


def test_the_published_table_holds_these_answers(outcomes, corpora: Path, tmp_path: Path):
    library = []
    for number, case in enumerate(LIBRARY):
        own = tmp_path / str(number)
        own.mkdir()
        library.append(answer_of(case, own).replace(f"{own}/", ""))
    expected = page(library, outcomes["table"], corpora)
    assert PAGE.read_text() == expected, "run: python -m tests.faults.bad_inputs"


def test_rows_without_keys_are_legal_and_give_zero_and_no_gradient():
    mask = masks.from_slices(6, 6, [(1, 3, 0, 2), (4, 5, 4, 6)])
    blind = ~mask.to_dense().any(axis=1)
    q, k, v = (torch.randn(6, 2, 8, requires_grad=True) for _ in range(3))
    out, lse = mcp.attend(q, k, v, mask)
    out.sum().backward()
    assert blind.tolist() == [True, False, False, True, False, True]
    assert torch.equal(out[blind], torch.zeros(3, 2, 8))
    assert torch.equal(lse[blind], torch.full((3, 2), -torch.inf))
    assert torch.equal(q.grad[blind], torch.zeros(3, 2, 8))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
