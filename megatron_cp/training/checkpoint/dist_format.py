"""The format torch_dist: one file set for all ranks, loaded by any layout.

Written and read by `megatron.core.dist_checkpointing` under Megatron-LM's keys, so either program loads
what the other saved. Before a load, torch's index says what the checkpoint holds, and every rank says what it
wants; the comparison is the same everywhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_cp.mcore.checkpoint import safe_load
from megatron_cp.mcore.checkpoint.checkpoint_objects import (
    COMMON_KEY,
    object_bytes,
    places_of_objects,
    read_common,
)
from megatron_cp.mcore.versions import compat
from megatron_cp.training.checkpoint import content, names
from megatron_cp.training.checkpoint.background import BackgroundWrite, Results
from megatron_cp.training.checkpoint.compare import Differences, Shape, compare
from megatron_cp.training.checkpoint.content import Content
from megatron_cp.training.checkpoint.optimizer_parts import (
    check_groups,
    in_parts_of,
    without_empty_places,
)
from megatron_cp.training.checkpoint.state import (
    chunks_by_name,
    counters,
    first_line,
    of_this_replica,
    random_states,
)
from megatron_cp.training.checkpoint.writer import saving_in_this_process
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.random_states import own_random_states
from megatron_cp.training.run_state import RunState
from megatron_cp.training.together import gather, refused_together

# A checkpoint that is damaged or of something else makes Megatron and torch raise nearly anything;
# torch's own CheckpointException is a BaseException.
_UNREADABLE = (CheckpointException, Exception)


def save(state: RunState, folder: Path) -> None:
    """Writes the run into an empty folder. Collective: every rank calls it.

    Raises CheckpointException on every rank if any writer failed, and OSError or RuntimeError on a rank
    that could not write a file of its own; the caller tells the others.
    """
    tensors, described = _to_save(state)
    failures: list[OSError | RuntimeError] = []
    with saving_in_this_process(failures=failures):
        dist_checkpointing.save(
            tensors, str(folder), _strategy(state.config), content_metadata=described
        )
    if failures:
        raise failures[0]


def save_in_background(state: RunState, folder: Path) -> BackgroundWrite:
    """Returns what writes the run, as it is now, into an empty folder; fails as `save` does. Collective."""
    tensors, described = _to_save(state)
    results, failures = Results(), list[OSError | RuntimeError]()
    with saving_in_this_process(results, failures):
        request = dist_checkpointing.save(
            tensors,
            str(folder),
            _strategy(state.config),
            async_sharded_save=True,
            content_metadata=described,
            **compat.background_options(dist_checkpointing.save),
        )
    if failures:
        raise failures[0]
    return BackgroundWrite(request, results)


def _strategy(config: TrainConfig) -> Any:
    """Returns who writes what: each replica its part, or the first of them everything."""
    strategy = get_default_save_sharded_strategy("torch_dist")
    if not config.checkpoint.ckpt_fully_parallel_save:
        return strategy
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(strategy, replicas)


def _to_save(state: RunState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is saved, and how Megatron cut it. Collective."""
    metadata = _sharding_metadata(state.config)
    described = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    tensors = _sharded_state(
        state,
        metadata,
        is_loading=False,
        with_optimizer=not state.config.checkpoint.no_save_optim,
        random=None if state.config.checkpoint.no_save_rng else random_states(state.config),
    )
    return tensors, described


def load(state: RunState, folder: Path) -> Content:
    """Returns what the run asked for, judged against what the checkpoint holds.

    Collective: every rank calls it. Raises ValueError on every rank alike, before any tensor is read
    unless a file is damaged.
    """
    index, entries = _read_index(folder)
    saved = _saved_shapes(index)
    saved_optimizer = _of_kind(saved, "optimizer")
    has_optimizer = bool(saved_optimizer) or "optimizer" in entries
    if state.config.checkpoint.wants_optimizer and not has_optimizer:
        raise ValueError(
            f"{folder} holds no optimizer state; give --no-load-optim to go on with a fresh one, or "
            "--finetune to begin at iteration 0"
        )
    empty = _extra_states(saved) - _extra_states_with_fp8(folder, index)
    metadata = _sharding_metadata(state.config, entries.get("content_metadata"))
    wanted = _ask(state, folder, metadata, with_random=_random_states_fit(state.config, saved))
    _drop(wanted, lambda item: isinstance(item, ShardedObject) and names.is_extra_state(item.key))
    _take_names_of(saved, wanted)
    asked, padded = _asked_of_all_ranks(wanted)
    saved_model = {n: s for n, s in _of_kind(saved, "model").items() if n not in empty}
    model = compare(_of_kind(asked, "model"), saved_model)
    model = _without_padding(model, padded, state.config.data.vocab_size or 0)
    optimizer = None
    if state.config.checkpoint.wants_optimizer:
        optimizer = compare(_of_kind(asked, "optimizer"), saved_optimizer)
    content.judge(state, folder, model, optimizer, entries.get("args"))
    content.note_what_stays(
        state,
        has_optimizer=has_optimizer,
        has_rerun=bool(_of_kind(saved, "rerun")),
        extra_states=empty,
    )
    _drop(wanted, lambda item: item.key in model.missing)
    return _read(wanted, folder, (index, entries), state)


def _ask(
    state: RunState, folder: Path, metadata: dict[str, Any], *, with_random: bool
) -> dict[str, Any]:
    """Returns what this rank wants, as Megatron-Core describes it. Collective."""
    with refused_together(ValueError):
        try:
            return _sharded_state(
                state,
                metadata,
                is_loading=True,
                with_optimizer=state.config.checkpoint.wants_optimizer,
                random=[own_random_states()] if with_random else None,  # what is there is replaced
            )
        except _UNREADABLE as failure:  # Megatron-Core asks for the state of Adam alone
            raise ValueError(
                f"{folder} cannot give --optimizer {state.config.optimizer.optimizer} its state "
                f"({type(failure).__name__}: {first_line(failure)}); give --no-load-optim to go on with a "
                "fresh one, or --finetune to begin at iteration 0"
            ) from failure


def _take_names_of(saved: dict[str, Shape], wanted: dict[str, Any]) -> None:
    """Asks for a tensor under the name that the other kind of layers saved it under, where that was so."""
    for item in nested_values(wanted):
        if isinstance(item, ShardedTensor) and item.key not in saved:
            other = names.of_other_layers(item.key)
            if other is not None and saved.get(other) == tuple(item.global_shape):
                item.key = other


def _read(
    wanted: dict[str, Any],
    folder: Path,
    known: tuple[Metadata, dict[str, Any]],
    state: RunState,
) -> Content:
    """Returns the wanted state, its tensors read from the files; `known` is what `_read_index` returned."""
    index, entries = known
    if "optimizer" in entries:
        entries = {**entries, "optimizer": without_empty_places(entries["optimizer"])}
    saved = entries.get("optimizer", {})
    with refused_together(ValueError):
        _check_objects(wanted, folder, index)
        if "optimizer" in wanted:
            check_groups(folder, state.optimizer, saved)
    with refused_together(ValueError):
        try:
            with compat.given_common_state(entries):
                loaded = dist_checkpointing.load(wanted, str(folder))
        except _UNREADABLE as failure:
            raise ValueError(
                f"{folder} cannot be loaded: {first_line(failure)}; a file of it is damaged, or it was saved "
                "by another version: load another checkpoint with --ckpt-step"
            ) from failure
    if "optimizer" in wanted:
        loaded["optimizer"] = in_parts_of(state.optimizer, loaded["optimizer"], saved, folder)
    has_random = "rng_state" in wanted
    return Content(
        model={
            name: loaded.get(name, {}) for name in chunks_by_name(state)
        },  # a stage may be empty
        entries=loaded,
        optimizer=loaded.get("optimizer") if "optimizer" in wanted else None,
        random=of_this_replica(state.config, loaded.get("rng_state")) if has_random else None,
    )


def _read_index(folder: Path) -> tuple[Metadata, dict[str, Any]]:
    """Returns torch's index and the entries that are equal on every rank; collective."""
    with refused_together(ValueError):
        index = safe_load.read_index(folder / ".metadata")
        return index, read_common(folder, index)


def _saved_shapes(index: Metadata) -> dict[str, Shape]:
    """Returns what a checkpoint holds: tensors with their shape, objects with their grid of shards."""
    shapes: dict[str, Shape] = {}
    for key, entry in index.state_dict_metadata.items():
        if key == COMMON_KEY:
            continue
        if isinstance(entry, TensorStorageMetadata):
            shapes[key] = tuple(entry.size)
        else:
            item = ShardedObject.empty_from_unique_key(key)
            shapes[item.key] = tuple(item.global_shape)
    return shapes


def _asked_of_all_ranks(wanted: dict[str, Any]) -> tuple[dict[str, Shape], set[str]]:
    """Returns what all ranks want together, and which of it may have rows of padding; collective."""
    prepared, _, _ = load_preprocess(wanted)
    sharded, _ = extract_sharded_base(prepared)
    own = {
        (item.key, tuple(item.global_shape), getattr(item, "allow_shape_mismatch", False))
        for item in nested_values(sharded)
    }
    together = set().union(*gather(own))
    return {key: shape for key, shape, _ in together}, {key for key, _, free in together if free}


def _of_kind(shapes: dict[str, Shape], kind: str) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if names.kind(name) == kind}


def _extra_states(shapes: dict[str, Shape]) -> set[str]:
    return {name for name in shapes if names.is_extra_state(name)}


def _without_padding(found: Differences, padded: set[str], vocab_size: int) -> Differences:
    """Returns the differences without those that are rows behind the vocabulary."""

    def is_padding(name: str) -> bool:
        saved, wanted = found.reshaped[name]
        rows = min(saved[0], wanted[0])
        return name in padded and saved[1:] == wanted[1:] and rows >= vocab_size

    reshaped = {name: pair for name, pair in found.reshaped.items() if not is_padding(name)}
    for name in sorted(found.reshaped.keys() - reshaped.keys()):
        saved, wanted = found.reshaped[name]
        print_rank_0(
            f" note: {name} has {saved[0]} rows in the checkpoint and {wanted[0]} in the model; the "
            f"vocabulary of {vocab_size} is in both, the rest is padding"
        )
    return Differences(found.missing, found.unexpected, reshaped)


def _drop(wanted: dict[str, Any], is_dropped: Any) -> None:
    """Removes from the models' state dicts what is not to be asked for."""
    for name, part in wanted.items():
        if re.fullmatch(r"model\d*", name):
            for key in [key for key, item in part.items() if is_dropped(item)]:
                del part[key]


def _extra_states_with_fp8(folder: Path, index: Metadata) -> set[str]:
    """Returns the `_extra_state` keys that hold fp8 state, as rank 0 read them; collective."""
    told: list[set[str]] = [set()]
    with refused_together(ValueError):
        if dist.get_rank() == 0:
            told = [_read_extra_states(folder, index)]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _read_extra_states(folder: Path, index: Metadata) -> set[str]:
    """Returns the `_extra_state` keys that hold fp8 state. Raises ValueError for one that cannot be read."""
    found: set[str] = set()
    for key, place in places_of_objects(index).items():
        name = key.rpartition("/")[0]
        if not names.is_extra_state(name):
            continue
        try:
            entry = safe_load.load_trusted_types(object_bytes(folder, place), f"{folder}: {name}")
        except ValueError as failure:
            raise ValueError(f"{folder} cannot be loaded: {failure}") from failure
        # Megatron-Core wraps every object in a list of one.
        if any(map(names.holds_fp8_state, entry if isinstance(entry, list) else [entry])):
            found.add(name)
    return found


def _check_objects(wanted: dict[str, Any], folder: Path, index: Metadata) -> None:
    """Raises ValueError if an object that is asked for holds a type that is not allowed.

    torch reads these without any check of its own.
    """
    prepared, _, _ = load_preprocess(wanted)
    places = places_of_objects(index)
    for item in nested_values(prepared):
        if isinstance(item, ShardedObject) and item.unique_key in places:
            raw = object_bytes(folder, places[item.unique_key])
            safe_load.load_trusted_types(raw, f"{folder}: {item.key}")


def _random_states_fit(config: TrainConfig, saved: dict[str, Shape]) -> bool:
    """Whether the checkpoint holds a random state for each tensor and pipeline rank of this run."""
    if not config.checkpoint.wants_random_states:
        return False
    grid = (
        config.parallel.pipeline_model_parallel_size,
        config.parallel.tensor_model_parallel_size,
    )
    found = saved.get("rng_state")
    if found == grid:
        return True
    reason = "the checkpoint holds none"
    if found is not None:
        reason = (
            f"the checkpoint has them for sizes (pipeline, tensor, ...) {list(found)}, this run has "
            f"{list(grid)}"
        )
    print_rank_0(f" random states are not loaded: {reason}; dropout goes on from --seed")
    return False


def _sharding_metadata(config: TrainConfig, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns Megatron's description of how optimizer state is cut: the checkpoint's, or ours."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if config.parallel.use_distributed_optimizer:
        full = config.checkpoint.dist_ckpt_optim_fully_reshardable
        metadata["distrib_optim_sharding_type"] = "fully_reshardable" if full else "dp_reshardable"
        if full:
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    if saved is not None:
        metadata = {**metadata, **saved}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def _sharded_state(
    state: RunState,
    metadata: dict[str, Any],
    *,
    is_loading: bool,
    with_optimizer: bool,
    random: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    """Returns Megatron-LM's state dict: the same keys, every tensor with its place in the global one."""
    parts = counters(state)
    for name, chunk in chunks_by_name(state).items():
        parts[name] = chunk.sharded_state_dict(metadata=metadata)
    if with_optimizer:
        parts["optimizer"] = state.optimizer.sharded_state_dict(
            parts, is_loading=is_loading, metadata=metadata
        )
        parts["opt_param_scheduler"] = state.scheduler.state_dict()
    if random is not None:
        pp = parallel_state.get_pipeline_model_parallel_group()
        tp = parallel_state.get_tensor_model_parallel_group()
        # Context ranks share the state of their tensor and pipeline rank.
        parts["rng_state"] = ShardedObject(
            "rng_state",
            random,
            (pp.size(), tp.size()),
            (pp.rank(), tp.rank()),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
    return parts
