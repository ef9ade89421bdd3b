"""What ends a run on all ranks together is one line and loses no step before it; what is only looked at ends none."""

import json
import shlex

import numpy as np
import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from tests.faults.program import Launch, run_program
from tests.training.commands import MODEL, error_lines

SIZES = shlex.split(
    "--vocab-size 512 --seq-length 128 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --log-interval 1 "
    "--reset-attention-mask --reset-position-ids --cp-planner zigzag"
)
# Where it is not looked at, wandb mostly draws pictures of plans and reads which packages are installed.
ALONE = (*SIZES, "--no-wandb")
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Sixty documents: all good, and with a token that no vocabulary has in the 31st and in the 56th."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, odd in (("good", None), ("early", 30), ("late", 55)):
        with IndexedWriter(folder / name, dtype=np.int32) as writer:
            for document in range(60):
                writer.add_document(np.full(200, 4000 if document == odd else document))
            writer.finish()
    return folder


def ended(rank, code):
    """The one line with which a rank ended."""
    assert rank.code == code, rank.stdout[-2000:] + rank.stderr[-4000:]
    assert "Traceback" not in rank.stderr
    (line,) = error_lines(rank.stderr)
    return line


def newest(folder):
    return int((folder / TRACKER).read_text())


def test_steps_before_a_token_that_no_vocabulary_has_are_saved_in_the_background_too(
    tmp_path, corpora
):
    flags = [*MODEL, *ALONE, "--data-path", str(corpora / "early"), "--split", "100,0,0"]
    flags += ["--train-iters", "60", "--eval-iters", "0", "--save", str(tmp_path), "--async-save"]
    ((rank,),) = run_program([Launch((*flags, "--num-workers", "0"))])
    step = int(ended(rank, 1).partition(": step ")[2].partition(":")[0])
    assert step > 1
    assert newest(tmp_path) == step - 1


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["at once", "in the background"])
def test_a_save_before_a_bad_step_is_completed(tmp_path, corpora, more):
    flags = [*MODEL, *ALONE, "--data-path", str(corpora / "good"), "--split", "100,0,0"]
    flags += ["--train-iters", "9", "--eval-iters", "0", "--save", str(tmp_path), *more]
    flags += ["--lr", "1e30", "--clip-grad", "0", "--save-interval", "1", "--num-workers", "0"]
    ((rank,),) = run_program([Launch(tuple(flags))])
    step = int(ended(rank, 17).partition("step ")[2].partition(":")[0])
    assert newest(tmp_path) == step - 1


def test_a_token_that_ends_an_evaluation_is_one_line_after_a_save(tmp_path, corpora):
    flags = [*MODEL, *ALONE, "--data-path", str(corpora / "late"), "--split", "80,20,0"]
    flags += ["--train-iters", "20", "--eval-interval", "2", "--eval-iters", "9"]
    flags += ["--save", str(tmp_path), "--context-parallel-size", "2", "--num-workers", "0"]
    (ranks,) = run_program([Launch(tuple(flags), 2)])
    for rank in ranks:
        assert "evaluation batch" in ended(rank, 1)
        assert "token id 4000 at position" in rank.stderr
    assert newest(tmp_path) == 2


def test_a_worker_that_dies_is_one_line_after_a_save(tmp_path, corpora):
    flags = [*MODEL, *ALONE, "--data-path", str(corpora / "good"), "--split", "100,0,0"]
    flags += ["--train-iters", "20", "--eval-iters", "0", "--save", str(tmp_path)]
    launch = Launch((*flags, "--num-workers", "1"), plant="tests.faults.plants.a_worker_dies")
    ((rank,),) = run_program([launch])
    line = ended(rank, 1)
    assert "data worker 0 (pid " in line and "died, exit status -9 (SIGKILL)" in line
    assert newest(tmp_path) == 4


def test_records_that_a_disk_refuses_are_left_out_and_the_run_goes_on(tmp_path, corpora):
    flags = [*MODEL, *SIZES, "--data-path", str(corpora / "good"), "--split", "100,0,0"]
    flags += ["--train-iters", "8", "--eval-iters", "0", "--run-dir", str(tmp_path)]
    flags += ["--save", str(tmp_path / "ckpt"), "--log-progress", "--save-interval", "3"]
    plant = "tests.faults.plants.a_full_disk_for_records"
    ((rank,),) = run_program([Launch((*flags, "--num-workers", "0"), plant=plant)])
    assert rank.code == 0, rank.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = {row["iteration"] for row in rows if "lm loss" in row}
    assert {1, 2, 8} <= steps and not {3, 4, 5} & steps, steps
    assert newest(tmp_path / "ckpt") == 8
    warnings = [line for line in rank.stderr.splitlines() if line.startswith("WARNING")]
    records = [line for line in warnings if "the run's records" in line]
    assert len(records) == 1 and "No space left on device" in records[0]
    assert sum("progress.txt" in line for line in warnings) == 1
