"""Writes a checkpoint aside and puts it in its place: complete, or not there."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from megatron_cp.training.checkpoint import dist_format, files, legacy_format
from megatron_cp.training.checkpoint.state import RunState, manifest_of
from megatron_cp.training.logging.lines import print_rank_0

_SAVE = {"torch_dist": dist_format.save, "torch": legacy_format.save}


def save_checkpoint(state: RunState) -> float:
    """Returns the seconds that it took to write `<save>/iter_N` and then point the tracker at it.

    Written aside and renamed: whenever it is killed, the tracker names a complete checkpoint, or
    none. Collective: every rank calls it.
    """
    start = time.perf_counter()
    options = state.config.checkpoint
    assert options.save is not None
    root = Path(options.save)
    folder = files.unfinished_folder(root, state.iteration)
    print_rank_0(
        f"saving checkpoint at iteration {state.iteration:7d} to {root} in {options.ckpt_format} format"
    )
    is_first = dist.get_rank() == 0
    if is_first:
        files.remove_folder(folder)  # a save that was killed half-way leaves parts behind
        folder.mkdir(parents=True)
    dist.barrier()
    _SAVE[options.ckpt_format](state, folder)
    dist.barrier()
    if is_first:
        previous = files.latest_iteration(root)
        files.write_manifest(folder, manifest_of(state))
        files.publish(root, state.iteration)
        files.remove_replaced(root, previous, state.iteration, options.save_retain_interval)
    dist.barrier()
    layout = state.config.parallel
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    print_rank_0(
        f"  successfully saved checkpoint from iteration {state.iteration:7d} to {root} [ t "
        f"1/{tp}, p 1/{pp} ]"
    )
    return time.perf_counter() - start
