"""What a run's books say at its start, and where they are kept: run.json, wandb, tensorboard."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_cp.training.agreement import versions
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import told_if_refused
from megatron_cp.training.logging.records import RunFiles
from megatron_cp.training.logging.tracking import Tracker, start_tensorboard
from megatron_cp.training.logging.wandb_run import start_wandb
from megatron_cp.training.run_state import RunState


def keeps_records(config: TrainConfig) -> bool:
    """Returns whether this run writes a run.json of its own.

    An evaluation of a run's checkpoint must not take the place of the run's own records.
    """
    run_dir = config.records.run_dir
    if run_dir is None:
        return False
    return not (config.steps.skip_train and (Path(run_dir) / "run.json").exists())


def open_tracker(state: RunState, described: dict[str, Any]) -> Tracker:
    """Returns the sinks that the arguments ask for."""
    config = state.config
    run_dir = None if config.records.run_dir is None else Path(config.records.run_dir)
    wandb_dir = Path(config.records.wandb_save_dir or (run_dir / "wandb" if run_dir else "wandb"))
    files = None
    if run_dir is not None and keeps_records(config):
        with told_if_refused("the run's records"):
            files = RunFiles(run_dir, _description(state, described))
    wandb_run = start_wandb(config, wandb_dir)
    if wandb_run is not None:
        wandb_run.tell_kept_steps(state.iteration)
    writer = start_tensorboard(config, state.iteration, state.consumed_samples)
    return Tracker(wandb_run=wandb_run, writer=writer, files=files)


def _description(state: RunState, described: dict[str, Any]) -> dict[str, Any]:
    """Returns what `run.json` says of the run at its start."""
    config = state.config
    return {
        "name": config.records.wandb_exp_name or Path(config.records.run_dir or "").name,
        "created": time.time(),
        "iteration": state.iteration,
        "command": list(sys.argv),
        "arguments": dict(config.arguments),
        "layout": {
            "world_size": config.parallel.world_size,
            "tensor": config.parallel.tensor_model_parallel_size,
            "pipeline": config.parallel.pipeline_model_parallel_size,
            "context": config.parallel.context_parallel_size,
            "data": config.parallel.data_parallel_size,
        },
        "num_parameters": state.num_parameters,
        **described,
        "versions": versions(),
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "device": device_name(),
        },
    }


def device_name() -> str:
    """Returns the GPU's name, or cpu."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
