"""Two live runs never write into one folder; what a dead run left refuses nobody."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from megatron_cp.training import held_folders
from tests.faults.program import Launch, run_program
from tests.training.commands import SMALL_RUN, error_lines

RUN = (*SMALL_RUN, "--context-parallel-size", "2")


@contextlib.contextmanager
def held_by_another(folder: Path):
    """Another process holds the folder, and has a child that outlives it to the end of the block; gives its number."""
    says, told = os.pipe(), os.pipe()
    holder = os.fork()
    if not holder:
        try:
            held_folders.hold("--save", folder)
            if os.fork():
                os.write(says[1], b"held")
                signal.pause()
            os.close(told[1])
            os.read(told[0], 1)
        finally:
            os._exit(0)
    try:
        assert os.read(says[0], 4) == b"held"
        yield holder
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)
        for end in (*says, *told):
            os.close(end)


def killed(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--save", "--run-dir"])
def test_a_live_run_refuses_a_second_but_no_evaluation_and_a_dead_one_nobody(
    tmp_path: Path, flag: str
):
    folder = tmp_path / "run"
    folder.mkdir()
    run = Launch((*RUN, flag, str(folder)), 2)
    without = Launch(run.flags, 2, plant="tests.faults.plants.without_locks")
    evaluation = Launch((*run.flags, "--load", str(folder), "--skip-train"), 2)
    with held_by_another(folder) as holder:
        (refused,) = run_program([run])
        for rank in refused:
            (line,) = error_lines(rank.stderr)
            assert rank.code == 2 and f"{flag} {folder} is in use by another run" in line
            assert f"process {holder} on " in line
        assert [path.name for path in folder.iterdir()] == [held_folders.NAME]
        for ranks in run_program([without, evaluation]):
            assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
        killed(holder)
        for ranks in run_program([run]):
            assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr
    assert (folder / held_folders.NAME).read_text().split()[1] != str(holder)


def test_the_lock_of_another_machine_is_waited_for(tmp_path: Path, monkeypatch, capsys):
    with held_by_another(tmp_path) as holder:
        monkeypatch.setattr(held_folders.socket, "gethostname", lambda: "another")
        with monkeypatch.context() as impatient:
            impatient.setattr(held_folders, "_LEASE_S", -1.0)
            with pytest.raises(ValueError, match=f"process {holder} on .*remove {tmp_path}"):
                held_folders.hold("--save", tmp_path)
        capsys.readouterr()
        monkeypatch.setattr(held_folders.time, "sleep", lambda seconds: killed(holder))
        os.close(held_folders.hold("--save", tmp_path))
        assert capsys.readouterr().out.count("waiting for its end") == 1
    assert (tmp_path / held_folders.NAME).read_text() == f"another {os.getpid()}"
