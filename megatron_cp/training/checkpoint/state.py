"""What of a run's state goes into a checkpoint, whatever the format: chunks by name, counters, random states."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.training.checkpoint import files
from megatron_cp.training.checkpoint.meaning import meaning_of
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.random_states import own_random_states
from megatron_cp.training.run_state import RunState
from megatron_cp.training.together import gather

_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "world_size",
)


def chunks_by_name(state: RunState) -> dict[str, Any]:
    """Returns this rank's model chunks under Megatron-LM's names: `model`, or `model0`, `model1`, ..."""
    chunks = unwrap_model(state.model)
    names = ["model"] if len(chunks) == 1 else [f"model{place}" for place in range(len(chunks))]
    return dict(zip(names, chunks, strict=True))


def counters(state: RunState) -> dict[str, Any]:
    """Returns the entries of a checkpoint that are equal on every rank."""
    return {
        "args": _shared_arguments(state),
        "checkpoint_version": 3.0,
        "iteration": state.iteration,
        "num_floating_point_operations_so_far": state.flops,
    }


def restore_counters(state: RunState, loaded: dict[str, Any]) -> None:
    """Puts the run where the checkpoint was saved."""
    saved = loaded.get("args")
    state.iteration = int(loaded["iteration"])
    state.flops = int(loaded.get("num_floating_point_operations_so_far", 0))
    state.consumed_samples = int(getattr(saved, "consumed_train_samples", 0))
    state.consumed_valid_samples = int(getattr(saved, "consumed_valid_samples", 0))


def _shared_arguments(state: RunState) -> Namespace:
    """Returns the arguments as every rank has them, with the counters that Megatron-LM keeps there."""
    shared = state.config.namespace()
    shared.iteration = state.iteration
    shared.consumed_train_samples = state.consumed_samples
    shared.consumed_valid_samples = state.consumed_valid_samples
    return shared


def random_states(config: TrainConfig) -> list[dict[str, Any]]:
    """Returns the random states of all replicas: one where they are equal, else by data-parallel rank.

    Collective: every rank calls it.
    """
    own = own_random_states()
    if not config.steps.data_parallel_random_init:
        return [own]
    return gather(own, parallel_state.get_data_parallel_group())


def of_this_replica(config: TrainConfig, saved: list[dict[str, Any]] | None) -> Any:
    """Returns the saved random states that this rank goes on with; None, and a note, where none fit."""
    group = parallel_state.get_data_parallel_group()
    differ = config.steps.data_parallel_random_init
    if saved and not differ:
        return saved[0]
    if saved and len(saved) == group.size():
        return saved[group.rank()]
    reason = "the checkpoint holds none"
    if saved:
        reason = (
            f"the checkpoint has those of {len(saved)} replicas, this run has {group.size()} "
            "(--data-parallel-random-init)"
        )
    print_rank_0(f" random states are not loaded: {reason}; dropout goes on from --seed")
    return None


def manifest_of(state: RunState) -> dict[str, Any]:
    """Returns what our manifest says of a checkpoint beside its tensors."""
    arguments = state.config.arguments
    return {
        "iteration": state.iteration,
        "shape": files.shape_of(arguments),
        "meaning": meaning_of(arguments),
        "layout": {name: arguments[name] for name in _LAYOUT},
        "data": state.data,
        "restarts": state.restarts,
    }


def first_line(problem: BaseException) -> str:
    """Returns what a problem says, in at most one line; of torch's collected ones, the first rank's."""
    if isinstance(problem, CheckpointException) and problem.failures:
        problem = next(iter(problem.failures.values()))[0]
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:300]
