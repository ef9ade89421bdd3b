"""However a run ends: `torchrun ... | tee log` ends, no process of it runs, and nothing of it stays in temporary files.

The fixtures of `tests/conftest.py` look for processes and shared memory after every test.
"""

import multiprocessing
import os
import signal
import subprocess
from multiprocessing.synchronize import SemLock
from pathlib import Path

import pytest

from megatron_cp.training import leftovers
from tests.processes import HANG_SECONDS, check_nothing_stays_in, left_running, temporary_folders
from tests.training.commands import RUN_WITH_WANDB, command_line, environment

LONG = (
    "--train-iters", "100000", "--lr-decay-iters", "100000", "--eval-iters", "0", "--num-workers", "1",
    "--save-interval", "2", "--async-save",
)  # fmt: skip


def rank_zero() -> int:
    """The process id of the run's first rank: what it forks has its environment and command line too."""
    ranks = {
        pid
        for pid in left_running()
        if b"RANK=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        and b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in ranks}
    (first,) = (pid for pid in ranks if parents[pid] not in ranks)
    return first


def one_of(command: str) -> int:
    return next(pid for pid, own in left_running().items() if command in own)


# How a run of so many ranks ends.
ENDS = {
    "a killed rank": (2, lambda launcher: os.kill(rank_zero(), signal.SIGKILL)),
    "a killed launcher": (2, lambda launcher: os.kill(launcher, signal.SIGKILL)),
    "a killed loader worker": (1, lambda launcher: os.kill(one_of("data.worker"), signal.SIGKILL)),
    "SIGTERM": (1, lambda launcher: os.kill(launcher, signal.SIGTERM)),
}


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_run_that_writes_checkpoints(tmp_path: Path, end: str):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ranks, kill = ENDS[end]
    flags = [
        *RUN_WITH_WANDB,
        *LONG,
        "--save",
        str(tmp_path / "run"),
        "--context-parallel-size",
        str(ranks),
    ]
    run = subprocess.Popen(
        command_line(ranks, *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(str(temporary)),
    )
    tee = subprocess.Popen(["cat"], stdin=run.stdout, stdout=subprocess.PIPE, text=True)
    run.stdout.close()  # the reader is the only one
    said = []
    for line in tee.stdout:
        said.append(line)
        if "successfully saved checkpoint from iteration       4" in line:
            assert temporary_folders(temporary), "nothing to look for"
            kill(run.pid)
            break
    else:
        raise AssertionError("".join(said)[-3000:])
    tee.communicate(timeout=HANG_SECONDS)  # until nobody holds the pipe open
    assert tee.returncode == 0
    assert run.wait(timeout=HANG_SECONDS) != 0
    check_nothing_stays_in(temporary)


def test_logs_that_a_user_asked_for_stay(tmp_path: Path):
    folder = tmp_path / "torchelastic_x"
    for name in ("run/attempt_0/0", "run/attempt_0/1"):
        (folder / name).mkdir(parents=True)
    log = folder / "run" / "attempt_0" / "1" / "stdout.log"
    log.write_text("said")
    leftovers.remove_empty_folders(folder)
    assert [p for p in folder.rglob("*") if p.is_file()] == [log]
    assert not (folder / "run" / "attempt_0" / "0").exists()
    log.unlink()
    leftovers.remove_empty_folders(folder)
    assert not folder.exists()


def test_only_own_folders_of_the_very_run_are_removed(tmp_path: Path):
    names = ("megatron_cp_7_1_a", "megatron_cp_7_1_b", "megatron_cp_7_12_a", "megatron_cp_70_1_a")
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "megatron_cp_7_1_link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "megatron_cp_7_1_a" / "file").write_text("")
    leftovers.remove_own_folders(tmp_path, "megatron_cp_7_1_")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["elsewhere", "megatron_cp_70_1_a", "megatron_cp_7_12_a", "megatron_cp_7_1_link"]


def test_semaphores_have_the_name_of_the_run_and_go_with_it(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "semprefix", "/mp")
    leftovers.name_semaphores("megatron_cp_7_1_")
    name = SemLock._make_name()
    assert name.startswith("/megatron_cp_7_1_")
    left = tmp_path / f"sem.{name[1:]}"
    left.write_text("")
    (tmp_path / "sem.Ab3dEf").hardlink_to(left)  # killed in the middle of sem_open
    others = ("sem.megatron_cp_7_12_a", "sem.mp-abc", "sem.Gh4iJk", "megatron_cp_7_1_a")
    for other in others:
        (tmp_path / other).write_text("")
    leftovers.remove_own_semaphores(tmp_path, "megatron_cp_7_1_")
    assert {path.name for path in tmp_path.iterdir()} == set(others)


def test_what_belongs_to_another_user_stays(tmp_path: Path, monkeypatch):
    """Names can be guessed, and the temporary folder and shared memory are everybody's."""
    (tmp_path / "megatron_cp_7_1_theirs").mkdir()
    (tmp_path / "megatron_cp_7_1_theirs" / "file").write_text("")
    (tmp_path / "sem.megatron_cp_7_1_theirs").write_text("")
    (tmp_path / "sem.Ab3dEf").hardlink_to(tmp_path / "sem.megatron_cp_7_1_theirs")
    before = sorted(tmp_path.rglob("*"))
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    leftovers.remove_own_folders(tmp_path, "megatron_cp_7_1_")
    leftovers.remove_own_semaphores(tmp_path, "megatron_cp_7_1_")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_others_remove_at_the_same_time_is_no_error(tmp_path, monkeypatch):
    """Ranks and resource trackers end, and tidy up, while this goes on."""
    kept = tmp_path / "sem.megatron_cp_7_1_kept"
    kept.write_text("")
    plain = Path.glob

    def glob_before_others(path, pattern):
        found = [
            *plain(path, pattern),
            path / "sem.megatron_cp_7_1_gone",
            path / "megatron_cp_7_1_gone",
        ]
        return iter(sorted(found))

    monkeypatch.setattr(Path, "glob", glob_before_others)
    leftovers.remove_own_semaphores(tmp_path, "megatron_cp_7_1_")
    leftovers.remove_own_folders(tmp_path, "megatron_cp_7_1_")
    assert not kept.exists()


def test_without_torchrun_nothing_is_started(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    leftovers.end_with_torchrun({"RANK": "0", "LOCAL_RANK": "0"})
