"""Runs of pretrain_gpt.py's loop in forked processes: Megatron is imported once, not once a rank and run.

    python -m tools.recipes.start < job.json > done.json

An import costs four to ten seconds of a core, a small run two. A job is `{"argv": [...], "world_size": 2, "folder":
..., "dense": false}`, one a line; the answer is its exit code, one a line. Output of the ranks goes into the folder.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 180.0
_GRACE_SECONDS = 20.0


def run_page(argv: Sequence[str], *, dense: bool) -> None:
    """Runs pretrain_gpt.py; with `dense` the same loop with Megatron's own attention."""
    if not dense:
        import pretrain_gpt

        sys.argv = ["pretrain_gpt.py", *argv]
        pretrain_gpt.main()
        return
    from megatron_cp.training.arguments import parse_arguments
    from megatron_cp.training.gpt import flops_provider
    from megatron_cp.training.pretrain import pretrain
    from tools.recipes.dense import forward_step, model_provider

    pretrain(
        parse_arguments(argv),
        model_provider=model_provider,
        forward_step=forward_step,
        flops_provider=flops_provider,
    )


def run_ranks(argv: Sequence[str], world_size: int, folder: Path, *, dense: bool = False) -> int:
    """Forks the ranks of one run, waits for them, and returns the first exit code that is not 0.

    Ranks that wait for one that failed are ended after a grace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = {}
    for rank in range(world_size):
        process = os.fork()
        if not process:
            _be_rank(rank, world_size, port, argv, folder, dense=dense)
        running[process] = rank
    return _wait(running)


def _be_rank(
    rank: int, world_size: int, port: int, argv: Sequence[str], folder: Path, *, dense: bool
) -> None:
    """Runs one rank in this forked process, and ends it."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # This process ends without the handlers that remove temporary folders; those of a run go with its folder.
    tempfile.tempdir = str(folder)
    code = 1
    output = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        run_page(argv, dense=dense)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # the process ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(running: dict[int, int]) -> int:
    """Returns the first exit code that is not 0, when all ranks have ended."""
    failed, end = 0, time.monotonic() + _SECONDS
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            del running[process]
            code = os.waitstatus_to_exitcode(status)
            if code and not failed:
                failed, end = code, min(end, time.monotonic() + _GRACE_SECONDS)
            continue
        if time.monotonic() > end:
            failed = failed or 124
            for left in running:
                os.kill(left, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.02)
    return failed


def main() -> int:
    """Runs the jobs of standard input in turn."""
    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    compat.silence_known_warnings()
    cpu.install()
    import torch
    import torch._dynamo  # by the first optimizer, as below: the ranks inherit it

    torch.set_num_threads(1)
    from megatron_cp.report.run import media  # noqa: F401
    from megatron_cp.training import gpt, pretrain  # noqa: F401
    from tools.recipes import dense  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection in a rank would copy every page

    for line in sys.stdin:
        job = json.loads(line)
        code = run_ranks(
            job["argv"], job["world_size"], Path(job["folder"]), dense=job.get("dense", False)
        )
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
