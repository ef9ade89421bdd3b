"""Loads a checkpoint into a run: checks first, then weights, then what a resumed run goes on with.

before any process group    folder, format, manifest, model shape      choose.py
before any tensor is read   SHA-256 of every file                      choose.py
before anything changes     names and shapes of all tensors            dist_format, legacy_format
last                        values must be finite, and the optimizer's weights the model's
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.mcore.checkpoint.optimizer import adopt_parameter_steps
from megatron_cp.mcore.checkpoint.parameter_groups import RATES, groups_found_at_any_rate
from megatron_cp.mcore.checkpoint.safe_load import parsing_each_index_once, reading_safely
from megatron_cp.training.checkpoint import dist_format, files, formats, legacy_format
from megatron_cp.training.checkpoint.choose import choose_checkpoint
from megatron_cp.training.checkpoint.compare import another_optimizer
from megatron_cp.training.checkpoint.content import Content, arguments_of, put_into_model
from megatron_cp.training.checkpoint.main_weights import check_copies, float_copies
from megatron_cp.training.checkpoint.meaning import (
    another_model,
    changes_of_meaning,
    foreign_meaning,
)
from megatron_cp.training.checkpoint.state import chunks_by_name, first_line, restore_counters
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.random_states import restore_random_states
from megatron_cp.training.run_state import RunState
from megatron_cp.training.together import gather, refused_together

_LOAD = {"torch_dist": dist_format.load, "torch": legacy_format.load}


def follow_release(config: TrainConfig) -> TrainConfig:
    """Returns the configuration with `--finetune` where `--load` names a release, and a note of it."""
    if config.checkpoint.load is None or config.checkpoint.finetune:
        return config
    if not files.is_release(config.checkpoint.load) or config.checkpoint.ckpt_step is not None:
        return config
    folder = Path(config.checkpoint.load) / files.RELEASE
    return config.with_arguments(finetune=True).with_note(
        f"{folder} is a release: its weights are loaded and training begins at iteration 0, as "
        "with --finetune"
    )


def begin_with_pretrained(config: TrainConfig) -> TrainConfig:
    """Returns the configuration that loads the pretrained checkpoint, for finetuning, where `--load` has none yet.

    Needs no process group. Raises ValueError where neither holds a checkpoint.
    """
    options = config.checkpoint
    first = options.pretrained_checkpoint
    if first is None or (options.load is not None and files.names_a_checkpoint(options.load)):
        return config
    if not files.names_a_checkpoint(first):
        nor = "" if options.load is None else f", and nor does --load {options.load}"
        raise ValueError(
            f"--pretrained-checkpoint {first} holds no checkpoint{nor}; give the folder with the tracker "
            f"{files.TRACKER} of the weights to begin with"
        )
    return config.with_arguments(load=first, finetune=True).with_note(
        f"training begins at iteration 0 with the weights of --pretrained-checkpoint {first}"
        + ("" if options.load is None else f", as --load {options.load} holds no checkpoint yet")
    )


@parsing_each_index_once()
def load_checkpoint(state: RunState) -> bool:
    """Returns whether a checkpoint was found in `--load`; `state` then stands where it was saved.

    Collective: every rank calls it. Raises ValueError, on every rank alike, for a checkpoint that
    is damaged, of another model, or not finite.
    """
    config, options = state.config, state.config.checkpoint
    chosen = choose_checkpoint(config)
    if chosen is None:
        print_rank_0(f"WARNING: could not find the metadata file {options.load}/{files.TRACKER}")
        print_rank_0("    will not load any checkpoints and will start from random")
        return False
    folder, manifest = chosen
    kind = formats.detect(folder)
    infix = "distributed " if kind == "torch_dist" else ""
    print_rank_0(f" loading {infix}checkpoint from {options.load} ({folder.name})")
    if kind != options.ckpt_format:
        print_rank_0(
            f" note: {folder} is in the format {kind} and is read as such; --ckpt-format "
            f"{options.ckpt_format} is how this run saves"
        )
    with reading_safely():
        content = _LOAD[kind](state, folder)
    if not options.finetune and not isinstance(content.entries.get("iteration"), int):
        raise ValueError(
            f"{folder} says no iteration number; give --finetune to take its weights alone"
        )
    if manifest is None:
        state.foreign_arguments = arguments_of(content.entries.get("args"))
        _compare_with_its_arguments(folder, state.foreign_arguments, config)
    put_into_model(state, content, chunks_by_name(state))
    _check_finite(state.model, folder)
    if options.finetune:
        # The optimizer's fp32 copies still hold the initial weights; they would overwrite the loaded ones.
        state.optimizer.reload_model_params()
    else:
        restore_counters(state, content.entries)
        if manifest is not None:
            state.data = manifest["data"]
            state.restarts = int(manifest["restarts"]) + 1
        _restore_optimizer(state, content, folder)
        if content.random is not None:
            restore_random_states(content.random)
    print_rank_0(
        f"  successfully loaded checkpoint from {options.load} at iteration {state.iteration}"
    )
    dist.barrier()
    return True


def _compare_with_its_arguments(folder: Path, saved: dict[str, Any], config: TrainConfig) -> None:
    """Raises ValueError if Megatron-LM saved another model there; says what the weights now compute otherwise."""
    another_model(folder, saved, config.arguments)
    for change in changes_of_meaning(foreign_meaning(saved), config.arguments):
        print_rank_0(f"note: {change}: the weights of {folder} compute something else")


def _restore_optimizer(state: RunState, content: Content, folder: Path) -> None:
    """Puts back moments, main copies and the schedule; without them, main copies follow the weights.

    Raises ValueError for the state of another optimizer, of other weights, or for another schedule.
    """
    if content.optimizer is None:
        state.optimizer.reload_model_params()
        return
    wanted = [{name: group.get(name) for name in RATES} for group in state.optimizer.param_groups]
    flags, before = _settings(state.optimizer), float_copies(state.optimizer)
    with refused_together(ValueError):
        try:
            with groups_found_at_any_rate(state.optimizer, content.optimizer):
                state.optimizer.load_state_dict(content.optimizer)
            adopt_parameter_steps(state.optimizer)
        # A foreign state raises nearly anything; CheckpointException is no Exception.
        except (CheckpointException, Exception) as failure:
            raise another_optimizer(folder, first_line(failure)) from failure
    for name, value in _settings(state.optimizer).items():
        if flags.get(name) != value:
            print_rank_0(
                f"note: {name} stays {value}, as {folder} has it: flags say {flags.get(name)}"
            )
    if state.config.parallel.use_distributed_optimizer and formats.detect(folder) == "torch":
        legacy_format.restore_shards(state.optimizer, content.shards)
    with refused_together(ValueError):
        check_copies(state.model, state.optimizer, before, folder)
    try:
        _settle_rates(state, wanted)
        state.scheduler.load_state_dict(content.entries["opt_param_scheduler"])
    except (AssertionError, KeyError) as failure:
        raise ValueError(
            f"{folder} was saved with another schedule: {first_line(failure)}; give its values, "
            "or --override-opt-param-scheduler (these flags win) or "
            "--use-checkpoint-opt-param-scheduler (the checkpoint wins)"
        ) from failure


_SETTINGS = {
    "betas": "--adam-beta1, --adam-beta2",
    "eps": "--adam-eps",
    "momentum": "--sgd-momentum",
}


def _settings(optimizer: Any) -> dict[str, Any]:
    """Returns the settings of the update rule that an optimizer's state brings along, by their flags."""
    groups = optimizer.param_groups
    return {flag: group[key] for group in groups for key, flag in _SETTINGS.items() if key in group}


def _settle_rates(state: RunState, wanted: list[dict[str, float | None]]) -> None:
    """Lets the rates win that the user said shall, those of the flags or of the checkpoint.

    Raises AssertionError where they differ and nothing was said, as the schedule does.
    """
    options = state.config.optimizer
    if options.use_checkpoint_opt_param_scheduler:
        return
    for group, rates in zip(state.optimizer.param_groups, wanted, strict=True):
        for name, rate in rates.items():
            saved = group.get(name)
            if options.override_opt_param_scheduler:
                group[name] = rate
            elif None not in (rate, saved) and rate != saved:
                raise AssertionError(
                    f"{name} of a group of parameters was {saved}, and is {rate} now"
                )


def _check_finite(model: list[Any], folder: Path) -> None:
    """Raises ValueError, on every rank alike, for weights that are not finite; names the first."""
    bad = None
    for chunk in unwrap_model(model):
        for name, parameter in chunk.named_parameters():
            if bad is None and not torch.isfinite(parameter).all():
                bad = name
    for rank, name in enumerate(gather(bad)):
        if name is not None:
            raise ValueError(
                f"{folder} holds values that are not finite: {name} on rank {rank}; give an "
                "earlier --ckpt-step"
            )
