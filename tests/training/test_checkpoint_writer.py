"""Megatron-Core's writer leaves no process of a save that the rank waits for, and still saves in the background."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from megatron_cp.training.checkpoint.writer import saving_in_this_process
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.processes import is_running, left_running, wait_until
from tests.ranks import run_on_ranks


def save_twice_and_once_in_the_background(rank, world_size, folder):
    """Saves two tensors, waited for, and then one behind the scenes; returns what is read back."""
    with parallel_state(Case()):
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        from megatron_cp.mcore.versions.compat import background_options

        def sharded(number):
            value = torch.full((3,), float(number))
            return {"x": ShardedTensor.from_rank_offsets("x", value, replica_id=rank)}

        # Another test may have started the session's own, which this process inherits and must not end.
        tracker = resource_tracker._resource_tracker._pid
        multiprocessing.current_process()._config["daemon"] = False  # its writers are children
        for number in (1, 2):
            Path(folder, str(number)).mkdir(exist_ok=True)
            with saving_in_this_process():
                dist_checkpointing.save(sharded(number), str(Path(folder, str(number))))
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        Path(folder, "3").mkdir(exist_ok=True)
        saves = AsyncCallsQueue()
        saves.schedule_async_request(
            dist_checkpointing.save(
                sharded(3),
                str(Path(folder, "3")),
                async_sharded_save=True,
                **background_options(dist_checkpointing.save),
            )
        )
        saves.maybe_finalize_async_calls(blocking=True)
        filesystem_async._results_queue._manager.shutdown()  # Megatron-Core's own, which it keeps
        filesystem_async._results_queue = None
        if resource_tracker._resource_tracker._pid != tracker:
            resource_tracker._resource_tracker._stop()
        found = [
            dist_checkpointing.load(sharded(0), str(Path(folder, str(number))))["x"].tolist()
            for number in (1, 2, 3)
        ]
    return children, found


def test_a_save_leaves_no_process_and_a_background_save_works_after_it(tmp_path):
    ((children, found),) = run_on_ranks(1, save_twice_and_once_in_the_background, str(tmp_path))
    assert children == ""
    assert found == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_a_writer_ends_with_a_rank_that_is_killed_while_it_saves():
    program = (
        "import os, signal, sys, time\n"
        "from megatron_cp.mcore import cpu\n"
        "from megatron_cp.mcore.versions import compat\n"
        "compat.silence_known_warnings(); cpu.install()\n"
        "from megatron_cp.training.checkpoint.writer import saving_in_this_process\n"
        "with saving_in_this_process():\n"
        "    writer = os.fork()\n"
        "    if writer == 0:\n"
        "        time.sleep(3600)\n"
        "    print(writer, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    writer = int(done.stdout)
    wait_until(lambda: not is_running(writer), "the writer outlived its rank")
    assert writer not in left_running()
