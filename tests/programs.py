"""Programs that a reader starts by hand: started as a reader would, or in forks of a warm process."""

import os
import resource
import runpy
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tests.faults.program import ROOT, Launch, Outcome, run_program
from tests.processes import HANG_SECONDS


def run_by_hand(
    program: Path, folder: Path, num_ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder, under plain torchrun where it has several ranks, which leaves a folder there."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [sys.executable, *(torchrun if num_ranks > 1 else []), str(program)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def python_in_fork(*words: str | Path, environment: dict[str, str] | None = None) -> Outcome:
    """How `python words` ends, and what it says, in a fork of the warm process: its imports are there already."""
    plant = f"{__name__}.become_python"
    launch = Launch(tuple(map(str, words)), environment=environment or {}, plant=plant)
    ((outcome,),) = run_program([launch])
    return outcome


def become_python(rank: int) -> None:
    """Planted in a rank: runs the program that its words name, and nothing behind it; no launcher has started it.

    With `MAX_FILE_BYTES` in its environment it cannot write a longer file, as on a disk that is full.
    """
    if "MAX_FILE_BYTES" in os.environ:
        most = int(os.environ["MAX_FILE_BYTES"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    first, *words = sys.argv[1:]
    sys.argv = [first, *words]
    if first == "-c":
        sys.argv[1:] = words[1:]
        exec(words[0], {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")
    raise SystemExit(0)


# What stands on a script's PATH in place of `python` and `torchrun`: asks the test, and does as it is told.
_STAND_IN = """import sys
from multiprocessing.connection import Client
with Client({address!r}) as test:
    test.send([{name!r}, *sys.argv[1:]])
    code, stdout, stderr = test.recv()
sys.stdout.write(stdout)
sys.stderr.write(stderr)
sys.exit(code)
"""


def script_on_forks(
    script: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs a shell script from the root; each `python` and `torchrun` of it is forks of the warm process."""
    address = str(folder / "test")
    for name in ("python", "torchrun"):
        asks = [sys.executable, "-IS", "-c", _STAND_IN.format(address=address, name=name)]
        stand_in = folder / name
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(asks)} "$@"\n')  # a path may have blanks
        stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    run = {"env": {**environment, "PATH": path}, "cwd": ROOT, "timeout": HANG_SECONDS}
    with Listener(address) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(subprocess.run, script, capture_output=True, text=True, **run)
        done.add_done_callback(lambda _: Client(address).close())  # nobody will ask any more
        while True:
            with listener.accept() as asking:
                try:
                    words = asking.recv()
                except EOFError:
                    return done.result()
                asking.send(_done_in_forks(words, environment))


def _done_in_forks(words: list[str], environment: dict[str, str]) -> tuple[int | None, str, str]:
    """Returns the first exit code that is not 0, and what ranks said."""
    name, *words = words
    wandb = {"WANDB_MODE": environment["WANDB_MODE"]}
    if name == "python":
        ranks = [python_in_fork(*words, environment=wandb)]
    else:
        place = words.index("pretrain_gpt.py")
        launcher, flags = words[:place], words[place + 1 :]
        assert launcher[:2] == ["--standalone", "--nproc-per-node"]
        (ranks,) = run_program([Launch(tuple(flags), int(launcher[2]), environment=wandb)])
    code = next((rank.code for rank in ranks if rank.code != 0), 0)
    said = ("".join(part) for part in zip(*((r.stdout, r.stderr) for r in ranks), strict=True))
    return code, *said
