"""The training runs of the GPU check, without a GPU: that they are commands, how they are judged, what is said."""

import dataclasses
import threading
import time

import pytest

from megatron_cp.training.arguments.machine import GPU_MACHINE
from megatron_cp.training.arguments.parse import judge_arguments
from tests.processes import HANG_SECONDS
from tools.gpu import training
from tools.gpu.training import JOBS, Job

LOSSES = dict.fromkeys(range(1, training.STEPS + 1), 5.0)


@pytest.mark.parametrize("name", JOBS)
def test_each_run_is_a_command_that_one_gpu_without_transformer_engine_accepts(name, tmp_path):
    machine = dataclasses.replace(GPU_MACHINE, has_transformer_engine=False, num_gpus=1)
    ranks = {"WORLD_SIZE": str(JOBS[name].ranks), "RANK": "0"}
    ranks |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    draft, reasons = judge_arguments(training.flags_of(name, tmp_path), ranks, machine)
    assert not reasons
    assert draft.train_iters == training.STEPS


def test_a_run_says_its_own_flags_once_and_lies_beside_the_others(tmp_path):
    flags = training.flags_of("dropout of attention, CP 2", tmp_path)
    assert flags.count("--attention-dropout") == 1
    assert flags[flags.index("--attention-dropout") + 1] == "0.1"
    flags = training.flags_of("resumed at CP 2, saved in the background", tmp_path)
    assert flags[flags.index("--load") + 1] == str(training.folder_of("one rank", tmp_path))
    assert len({training.folder_of(name, tmp_path) for name in JOBS}) == len(JOBS)


def test_every_run_repeats_one_that_has_less_of_a_layout():
    for name, job in JOBS.items():
        assert not job.like or (job.like in JOBS and not JOBS[job.like].like), name
        assert not job.like or JOBS[job.like].ranks <= job.ranks, name


def test_named_runs_bring_those_that_they_need():
    assert training._with_needed(["PP 2, CP 2"]) == ["PP 2", "PP 2, CP 2"]
    assert training._with_needed(["resumed at CP 2, saved in the background"])[0] == "one rank"
    assert training._with_needed([]) == list(JOBS)


def _judged(losses, norm=1.0, of_other=LOSSES, wrong=""):
    def rows(losses, norm):
        return {step: {"lm loss": loss, "grad-norm": norm} for step, loss in losses.items()}

    found = {"CP 2": rows(losses, norm), "one rank": rows(of_other, 1.0)}
    return training._verdict("CP 2", wrong, found)


def test_a_run_whose_losses_are_those_of_one_rank_is_right():
    verdict, words = _judged(LOSSES | {8: 5.001})
    assert verdict == "ok"
    assert "loss 5.0000 at step 1, 5.0010 at step 8, within 1.0e-03 of 'one rank'" in words


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"losses": LOSSES | {5: 5.003}}, "within 3.0e-03 of 'one rank' (at most 2e-03)"),
        ({"losses": LOSSES | {1: 5.001}}, "first lm loss 1.0e-03 (at most 4e-04)"),
        ({"losses": LOSSES, "norm": 1.1}, "first grad-norm 1.0e-01 (at most 1e-02)"),
        ({"losses": LOSSES | {3: float("nan")}}, "losses {1: 5.0, 2: 5.0, 3: nan"),
        ({"losses": {1: 5.0}}, "losses were written of steps [1] alone"),
        ({"losses": LOSSES, "of_other": {}}, "'one rank' has no steps [1, 2, 3"),
        ({"losses": LOSSES, "wrong": "did not end: x"}, "did not end: x"),
    ],
)
def test_a_run_that_is_not_right_says_what(case, words):
    verdict, found = _judged(**case)
    assert verdict == "FAILED"
    assert words in found


def test_small_runs_on_cpu_ranks_end_and_a_failed_one_is_told_with_its_words(tmp_path, monkeypatch):
    bad = Job(2, "--context-parallel-size 3")
    monkeypatch.setattr(training, "JOBS", {**JOBS, "bad": bad})
    found = training.run_all(tmp_path, 240.0, ("CP 2", "bad"), small=True)
    assert {name: verdict for name, (verdict, _) in found.items()} == {
        "one rank": "ok", "CP 2": "ok", "bad": "FAILED"
    }  # fmt: skip
    assert "of 'one rank'" in found["CP 2"][1]
    assert "rank 0 ended with 2: pretrain_gpt.py: error: " in found["bad"][1]


def test_a_run_that_does_not_end_is_told_with_its_last_line_and_where_each_rank_was(
    tmp_path, monkeypatch
):
    waits = """import time
def wait(seconds):
    time.sleep(seconds)
print("waiting for a friend", flush=True)
wait(3600)
"""
    (tmp_path / "pretrain_gpt.py").write_text(waits)
    monkeypatch.setattr(training, "ROOT", tmp_path)
    monkeypatch.setattr(training, "JOBS", {"two": Job(2, "")})
    found = training.run_all(tmp_path / "runs", 5.0)
    place = "pretrain_gpt.py:3 wait < pretrain_gpt.py:5 <module>"
    words = f"did not end: waiting for a friend; rank 0 in {place}; rank 1 in {place}"
    assert found["two"] == ("FAILED", words)


def test_a_large_run_is_not_overtaken_by_small_ones_that_came_later():
    room, begun, gates = training._Room(2), [], [threading.Event() for _ in range(4)]

    def run(index, ranks):
        with room.for_ranks(ranks):
            begun.append(index)
            gates[index].wait(HANG_SECONDS)

    threads = []
    for index, ranks in enumerate((1, 2, 1, 1)):
        threads.append(threading.Thread(target=run, args=(index, ranks)))
        threads[-1].start()
        while index not in begun and len(room._waiting) < index:
            time.sleep(0.001)
    assert begun == [0]  # one rank is free, and the next wants two
    gates[0].set()
    while begun != [0, 1]:
        time.sleep(0.001)
    for gate in gates:
        gate.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert sorted(begun[2:]) == [2, 3]
