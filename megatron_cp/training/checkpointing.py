"""Saves and loads a run: weights, optimizer, schedule, random states and the place in the data.

The tensors go through ``megatron.core.dist_checkpointing`` in Megatron-LM's layout and under its
keys, so either program loads what the other saved, with another tensor-, pipeline-, data- or
context-parallel size too (context parallelism adds no parameter). What follows in one run and what
follows after a resume is the same, bit for bit on a CPU.

The entry script needs ``if __name__ == "__main__":``: the writer starts a process that imports it
again.
"""

from __future__ import annotations

import copy
import random
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.training.checkpoint import files
from megatron_cp.training.checkpoint.writer import saving_in_this_process
from megatron_cp.training.log import print_rank_0

_RANK_ARGUMENTS = ("rank", "local_rank", "notes")
# A checkpoint that is damaged or of something else makes Megatron and torch raise nearly anything;
# torch's own CheckpointException is a BaseException.
_UNREADABLE = (CheckpointException, Exception)


@dataclass
class RunState:
    """What a run is made of, and where it stands. The loop advances it, a checkpoint keeps it."""

    args: Namespace
    model: list[Any]
    optimizer: Any
    scheduler: Any
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    flops: int = 0
    restarts: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    """State of the training loader after ``iteration`` steps (JSON)."""


def save_checkpoint(state: RunState) -> float:
    """Seconds that it took to write ``<save>/iter_N`` completely and then point the tracker at it.

    Written aside and renamed: whenever it is killed, the tracker names a complete checkpoint, or
    none. Collective: every rank calls it.
    """
    start = time.perf_counter()
    args, root = state.args, Path(state.args.save)
    folder = files.unfinished_folder(root, state.iteration)
    print_rank_0(
        f"saving checkpoint at iteration {state.iteration:7d} to {root} in torch_dist format"
    )
    is_first = dist.get_rank() == 0
    if is_first:
        files.remove_folder(folder)  # a save that was killed half-way leaves parts behind
        folder.mkdir(parents=True)
    dist.barrier()
    metadata = _sharding_metadata(args)
    content = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    tensors = _sharded_state(state, metadata, is_loading=False, with_random=not args.no_save_rng)
    with saving_in_this_process():
        dist_checkpointing.save(tensors, str(folder), content_metadata=content)
    if is_first:
        previous = files.latest_iteration(root)
        files.write_manifest(folder, _manifest(state))
        files.publish(root, state.iteration)
        files.remove_replaced(root, previous, state.iteration, args.save_retain_interval)
    dist.barrier()
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    print_rank_0(
        f"  successfully saved checkpoint from iteration {state.iteration:7d} to {root} [ t "
        f"1/{tp}, p 1/{pp} ]"
    )
    return time.perf_counter() - start


def load_checkpoint(state: RunState) -> bool:
    """Whether a checkpoint was found in ``--load`` and ``state`` now stands where it was saved.

    Collective: every rank calls it. Raises ValueError, on every rank alike, for a checkpoint that
    is damaged, of another model, or not finite.
    """
    args = state.args
    iteration = args.ckpt_step if args.ckpt_step is not None else files.latest_iteration(args.load)
    if iteration is None:
        print_rank_0(f"WARNING: could not find the metadata file {Path(args.load) / files.TRACKER}")
        print_rank_0("    will not load any checkpoints and will start from random")
        return False
    folder = files.iteration_folder(args.load, iteration)
    manifest = check_checkpoint(args)
    print_rank_0(f" loading distributed checkpoint from {args.load} at iteration {iteration}")
    with_random = _random_states_fit(args, manifest)
    loaded = _load_tensors(state, folder, with_random=with_random)
    _restore_model(state, loaded)
    _check_finite(state.model, folder)
    if not args.finetune:
        state.iteration = int(loaded["iteration"])
        state.flops = int(loaded.get("num_floating_point_operations_so_far", 0))
        saved = loaded.get("args")
        state.consumed_samples = int(getattr(saved, "consumed_train_samples", 0))
        state.consumed_valid_samples = int(getattr(saved, "consumed_valid_samples", 0))
        if manifest is not None:
            state.data = manifest["data"]
            state.restarts = int(manifest["restarts"]) + 1
        _restore_optimizer(state, loaded, folder)
        _restore_random(state, loaded)
    else:
        # The optimizer's fp32 copies still hold the initial weights; they would overwrite the loaded ones.
        state.optimizer.reload_model_params()
    print_rank_0(
        f"  successfully loaded checkpoint from {args.load} at iteration {state.iteration}"
    )
    dist.barrier()
    return True


def check_checkpoint(args: Namespace) -> dict[str, Any] | None:
    """The manifest of the checkpoint that ``--load`` names.

    After checks that need no process group; None without one.

    Raises ValueError for a missing, damaged or foreign checkpoint.
    """
    iteration = args.ckpt_step if args.ckpt_step is not None else files.latest_iteration(args.load)
    if iteration is None:
        if args.exit_on_missing_checkpoint:
            raise ValueError(
                f"--load {args.load} holds no checkpoint and --exit-on-missing-checkpoint was given"
            )
        return None
    folder = files.iteration_folder(args.load, iteration)
    if not (folder / "metadata.json").is_file():
        raise ValueError(
            f"{folder} is not a complete checkpoint (no metadata.json); give another --ckpt-step "
            "or --load"
        )
    manifest = files.read_manifest(folder)
    if manifest is not None:
        files.check_shape(folder, manifest["shape"], vars(args))
    return manifest


def _random_states_fit(args: Namespace, manifest: dict[str, Any] | None) -> bool:
    """Whether the checkpoint holds a random state for each tensor and pipeline rank of this run."""
    if args.finetune or args.no_load_rng or manifest is None:
        return not (args.finetune or args.no_load_rng)
    saved = manifest.get("layout", {})
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if saved.get(name) != vars(args)[name]:
            print_rank_0(
                f" random states are not loaded: the checkpoint has --{name.replace('_', '-')} "
                f"{saved.get(name)}, this run {vars(args)[name]}; dropout goes on from --seed"
            )
            return False
    return True


def _sharding_metadata(args: Namespace) -> dict[str, Any]:
    """Megatron's description of how optimizer state is cut into shards."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:
        full = args.dist_ckpt_optim_fully_reshardable
        metadata["distrib_optim_sharding_type"] = "fully_reshardable" if full else "dp_reshardable"
        if full:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def _sharded_state(
    state: RunState, metadata: dict[str, Any], *, is_loading: bool, with_random: bool
) -> dict[str, Any]:
    """Megatron-LM's state dict: the same keys, every tensor with its place in the global one."""
    args = state.args
    content: dict[str, Any] = {
        "args": _shared_arguments(state),
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.flops,
    }
    chunks = unwrap_model(state.model)
    for place, chunk in enumerate(chunks):
        name = "model" if len(chunks) == 1 else f"model{place}"
        content[name] = chunk.sharded_state_dict(metadata=metadata)
    with_optimizer = (
        not (args.finetune or args.no_load_optim) if is_loading else not args.no_save_optim
    )
    if with_optimizer:
        content["optimizer"] = state.optimizer.sharded_state_dict(
            content, is_loading=is_loading, metadata=metadata
        )
        content["opt_param_scheduler"] = state.scheduler.state_dict()
    if with_random:
        content["rng_state"] = _random_state()
    return content


def _shared_arguments(state: RunState) -> Namespace:
    """The arguments as every rank has them, with the counters that Megatron-LM keeps among them."""
    shared = copy.copy(state.args)
    for name in _RANK_ARGUMENTS:
        vars(shared).pop(name, None)
    shared.iteration = state.iteration
    shared.consumed_train_samples = state.consumed_samples
    shared.consumed_valid_samples = state.consumed_valid_samples
    return shared


def _random_state() -> ShardedObject:
    """Every random state of this rank.

    One per tensor and pipeline rank is kept, as context ranks share theirs.
    """
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    pp, tp = (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    shape, place = (pp.size(), tp.size()), (pp.rank(), tp.rank())
    return ShardedObject("rng_state", [states], shape, place, replica_id=replica)


def _manifest(state: RunState) -> dict[str, Any]:
    """What our manifest says of a checkpoint beside its tensors."""
    args = vars(state.args)
    layout = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "world_size",
    )
    return {
        "format": 1,
        "iteration": state.iteration,
        "shape": {name: args[name] for name in files.SHAPE_ARGUMENTS},
        "layout": {name: args[name] for name in layout},
        "data": state.data,
        "restarts": state.restarts,
    }


def _load_tensors(state: RunState, folder: Path, *, with_random: bool) -> dict[str, Any]:
    """The loaded state dict.

    Raises ValueError with the checkpoint's name where tensors are missing or of other shapes.
    """
    metadata = _sharding_metadata(state.args)
    try:
        wanted = _sharded_state(state, metadata, is_loading=True, with_random=with_random)
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except _UNREADABLE as problem:
        raise ValueError(
            f"{folder} cannot be loaded into this model: {_first_line(problem)}; give the "
            "arguments it was saved with, or --finetune, --no-load-optim, --no-load-rng to leave "
            "parts out"
        ) from problem
    return loaded


def _first_line(problem: BaseException) -> str:
    """What a problem says, in at most one line."""
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:300]


def _restore_model(state: RunState, loaded: dict[str, Any]) -> None:
    """Puts the weights into the model's chunks."""
    chunks = unwrap_model(state.model)
    for place, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{place}"], strict=True)


def _restore_optimizer(state: RunState, loaded: dict[str, Any], folder: Path) -> None:
    """Puts back moments, main copies and the schedule.

    Without them, main copies follow the loaded weights. Raises ValueError for the state of another
    optimizer or schedule.
    """
    if "optimizer" not in loaded or state.args.no_load_optim:
        state.optimizer.reload_model_params()
        return
    try:
        state.optimizer.load_state_dict(loaded["optimizer"])
    except _UNREADABLE as problem:
        raise ValueError(
            f"{folder} holds the state of another optimizer: {_first_line(problem)}; give the "
            "arguments it was saved with, or --no-load-optim"
        ) from problem
    try:
        state.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    except (AssertionError, KeyError) as problem:
        raise ValueError(
            f"{folder} was saved with another schedule: {_first_line(problem)}; give its values, "
            "or --override-opt-param-scheduler (these flags win) or "
            "--use-checkpoint-opt-param-scheduler (the checkpoint wins)"
        ) from problem


def _restore_random(state: RunState, loaded: dict[str, Any]) -> None:
    """Puts back every random state of this rank."""
    if state.args.no_load_rng or "rng_state" not in loaded:
        return
    states = loaded["rng_state"][0]
    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])


def _check_finite(model: list[Any], folder: Path) -> None:
    """Refuses weights that are not finite, on every rank alike.

    Naming the first bad one of the first bad rank.
    """
    bad = None
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            if bad is None and not torch.isfinite(parameter).all():
                bad = name
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, bad)
    for rank, name in enumerate(found):
        if name is not None:
            raise ValueError(
                f"{folder} holds values that are not finite: {name} on rank {rank}; give an "
                "earlier --ckpt-step"
            )
