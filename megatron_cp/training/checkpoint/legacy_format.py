"""The format torch: one file for each tensor and pipeline rank, as `torch.save` writes it.

    mp_rank_00/model_optim_rng.pt     model or model0.., optimizer, opt_param_scheduler, rng_state, args, iteration
    mp_rank_00/distrib_optim.pt       the distributed optimizer's tensors, whole

Such a file fits the tensor and pipeline sizes that wrote it and no others. It is a pickle; `safe_load` reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, cast

import torch
from megatron.core import parallel_state

from megatron_cp.mcore.checkpoint.optimizer import parts_of
from megatron_cp.mcore.checkpoint.safe_load import load_trusted_types
from megatron_cp.training.checkpoint import content as contents
from megatron_cp.training.checkpoint import names
from megatron_cp.training.checkpoint.compare import (
    Differences,
    Shape,
    check_optimizer_kind,
    compare,
)
from megatron_cp.training.checkpoint.content import Content
from megatron_cp.training.checkpoint.formats import (
    LEGACY_MODEL,
    LEGACY_OPTIMIZER,
    legacy_folder,
)
from megatron_cp.training.checkpoint.integrity import HashedFile
from megatron_cp.training.checkpoint.state import (
    chunks_by_name,
    counters,
    of_this_replica,
    random_states,
)
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.run_state import RunState
from megatron_cp.training.together import gather, refused_together


def save(state: RunState, folder: Path) -> None:
    """Writes the run into an empty folder. Collective: every rank calls it.

    Raises OSError or RuntimeError on a rank that could not write its files; the caller tells the others.
    """
    config = state.config
    own = _own_folder(folder, config)
    random = [] if config.checkpoint.no_save_rng else random_states(config)
    problem: Exception | None = None
    try:
        if _is_first_replica():
            _save_entries(state, own, random)
    except (OSError, RuntimeError) as failure:
        problem = failure  # the others are in the collective below
    if config.parallel.use_distributed_optimizer and not config.checkpoint.no_save_optim:
        state.optimizer.save_parameter_state(str(own / LEGACY_OPTIMIZER))
    if problem is not None:
        raise problem


def _save_entries(state: RunState, own: Path, random: list[dict[str, Any]]) -> None:
    """Writes weights and what else a rank holds by itself."""
    config = state.config
    own.mkdir()
    parts = counters(state)
    for name, chunk in chunks_by_name(state).items():
        parts[name] = chunk.state_dict_for_save_checkpoint()
    if not config.checkpoint.no_save_optim:
        parts["optimizer"] = state.optimizer.state_dict()
        parts["opt_param_scheduler"] = state.scheduler.state_dict()
    if random:
        parts["rng_state"] = random
    with HashedFile(own / LEGACY_MODEL) as file:
        torch.save(parts, cast(IO[bytes], file))


def load(state: RunState, folder: Path) -> Content:
    """Returns what the run asked for, judged against what the checkpoint holds.

    Collective: every rank calls it. Raises ValueError on every rank alike, before anything changes.
    """
    with refused_together(ValueError):
        found = _read(_own_folder(folder, state.config) / LEGACY_MODEL)
        _check_chunks(folder, found, chunks_by_name(state))
    model, differences, extra, was_renamed = _compare_models(state, found)
    contents.judge(state, folder, differences, None, found.get("args"))
    optimizer = shards = None
    if state.config.checkpoint.wants_optimizer:
        with refused_together(ValueError):
            optimizer = _optimizer_entry(found, folder, was_renamed, differences)
            shards = _read_shards(state, folder, contents.arguments_of(found.get("args")))
    contents.note_what_stays(
        state,
        has_optimizer="optimizer" in found,
        has_rerun=bool(found.get("rerun_state_machine")),
        extra_states=extra,
    )
    random = None
    if state.config.checkpoint.wants_random_states:
        random = of_this_replica(state.config, found.get("rng_state"))
    return Content(model, found, optimizer, shards, random)


@torch.no_grad()  # main parameters are leaves that it writes into
def restore_shards(optimizer: Any, shards: Any) -> None:
    """Puts the distributed optimizer's tensors back. Collective: every rank calls it."""
    parts = parts_of(optimizer)
    for place, part in enumerate(parts):
        own = shards if len(parts) == 1 or shards is None else shards[place]
        part.load_parameter_state_from_dp_zero(own)


def _read(path: Path) -> dict[str, Any]:
    """Returns the entries of one file. Raises ValueError for a file that is none of a checkpoint."""
    found = load_trusted_types(path)
    if not isinstance(found, dict) or not any(str(name).startswith("model") for name in found):
        raise ValueError(
            f"{path} holds no checkpoint of Megatron-LM (no entry 'model'); give another --load"
        )
    return found


def _check_chunks(folder: Path, found: dict[str, Any], chunks: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint has another number of virtual stages."""
    saved = sorted(
        name for name in found if name == "model" or name.removeprefix("model").isdigit()
    )
    if saved != sorted(chunks):
        raise ValueError(
            f"{folder} has {len(saved)} model chunks a pipeline stage, this run {len(chunks)}; give "
            f"--num-virtual-stages-per-pipeline-rank {len(saved)}"
        )


def _compare_models(
    state: RunState, found: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], Differences, list[str], bool]:
    """Returns this rank's weights under the model's names, and how all ranks' differ.

    Also the `_extra_state` entries that hold nothing, and whether names were translated. Collective.
    """
    model: dict[str, dict[str, Any]] = {}
    wanted: dict[str, Shape] = {}
    saved: dict[str, Shape] = {}
    extra: set[str] = set()
    was_renamed = False
    for chunk, module in chunks_by_name(state).items():
        own = module.state_dict_for_save_checkpoint()
        tensors = found[chunk]
        fused, saved_fused = names.is_fused(own), names.is_fused(tensors)
        if fused is not None and saved_fused is not None and fused != saved_fused:
            tensors, was_renamed = names.renamed(tensors, to_fused=fused), True
        full = {
            name
            for name in tensors
            if names.is_extra_state(name) and names.holds_fp8_state(tensors[name])
        }
        extra |= {name for name in tensors if names.is_extra_state(name)} - full
        weights = {n: x for n, x in tensors.items() if not names.is_extra_state(n)}
        prefix = "" if chunk == "model" else f"{chunk}: "
        wanted |= {
            prefix + n: tuple(x.shape) for n, x in own.items() if not names.is_extra_state(n)
        }
        saved |= {prefix + n: tuple(x.shape) for n, x in weights.items()}
        saved |= {prefix + n: () for n in full}
        model[chunk] = {n: x for n, x in weights.items() if n in own}
    found_here = compare(wanted, saved)
    return model, _of_all_ranks(found_here), sorted(extra), was_renamed


def _of_all_ranks(own: Differences) -> Differences:
    """Returns the differences of all model-parallel ranks together; collective."""
    gathered = gather((own.missing, own.unexpected, own.reshaped))
    missing, unexpected, reshaped = (
        {name: value for part in parts for name, value in part.items()}
        for parts in zip(*gathered, strict=True)
    )
    return Differences(missing, unexpected, reshaped)


def _optimizer_entry(
    found: dict[str, Any], folder: Path, was_renamed: bool, model: Differences
) -> Any:
    """Returns the optimizer's entry. Raises ValueError where it cannot belong to this model."""
    advice = "give --no-load-optim to go on with a fresh one, or --finetune to begin at iteration 0"
    if "optimizer" not in found:
        raise ValueError(f"{folder} holds no optimizer state; {advice}")
    if was_renamed:
        raise ValueError(
            f"{folder} was saved by other layers (Transformer Engine's or Megatron's own); in the "
            f"format torch their optimizer state is ordered by those layers: {advice}"
        )
    if model:
        raise ValueError(f"{folder} holds the optimizer state of another model; {advice}")
    return found["optimizer"]


def _read_shards(state: RunState, folder: Path, saved: dict[str, Any]) -> Any:
    """Returns the distributed optimizer's tensors on the first data-parallel rank, None elsewhere.

    `saved` are the checkpoint's arguments. Raises ValueError if it and the run disagree on the kind of optimizer, or
    on the number of values in its buffers.
    """
    path = _own_folder(folder, state.config) / LEGACY_OPTIMIZER
    saved = {**saved, "use_distributed_optimizer": path.is_file()}
    check_optimizer_kind(folder, saved, state.config.arguments)
    if not path.is_file() or not _is_first_replica():
        return None
    shards = load_trusted_types(path)
    parts = parts_of(state.optimizer)
    for part, own in zip(parts, shards if len(parts) > 1 else [shards], strict=True):
        for place, buffer in enumerate(part.buffers):
            for saved in own.get(place, {"": {}}).values():
                if saved.get("numel_unpadded") != buffer.numel_unpadded:
                    raise ValueError(
                        f"{path} has {saved.get('numel_unpadded')} values in buffer {place}, this run "
                        f"{buffer.numel_unpadded}; give the arguments it was saved with, or "
                        "--no-load-optim"
                    )
    return shards


def _own_folder(folder: Path, config: TrainConfig) -> Path:
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return legacy_folder(
        folder, config, tensor_rank, parallel_state.get_pipeline_model_parallel_rank()
    )


def _is_first_replica() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
