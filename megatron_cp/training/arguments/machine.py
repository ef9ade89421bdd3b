"""What a command line is judged for: the machine it is started on, or another one by its parts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from megatron_cp.mcore.versions import compat


@dataclass(frozen=True)
class Machine:
    """What decides whether a flag can be served, beside other flags."""

    has_cuda: bool
    has_transformer_engine: bool
    has_emerging_optimizers: bool
    has_einops: bool
    has_nvml: bool
    num_gpus: int | None = None  # None: as many as ranks


GPU_MACHINE = Machine(
    has_cuda=True,
    has_transformer_engine=True,
    has_emerging_optimizers=True,
    has_einops=True,
    has_nvml=True,
)
"""Where most published commands are made for."""


def this_machine() -> Machine:
    """Returns the machine of this process."""
    return Machine(
        torch.cuda.is_available(),
        compat.has_transformer_engine(),
        find_spec("emerging_optimizers") is not None,
        find_spec("einops") is not None,
        find_spec("pynvml") is not None,
        torch.cuda.device_count() or None,
    )


def check_devices(args: Namespace) -> Iterator[str]:
    """Whether every rank of a machine with GPUs has one, and a backend that sums gradients there."""
    machine: Machine = args.machine
    if not machine.has_cuda:
        return
    if machine.num_gpus is not None and args.local_world_size > machine.num_gpus:
        yield (
            f"{args.local_world_size} ranks on a machine that shows {machine.num_gpus} GPU(s); allowed: a GPU for each "
            f"rank; start with --nproc-per-node {machine.num_gpus}, or let CUDA_VISIBLE_DEVICES show more"
        )
    if args.distributed_backend == "gloo" and args.world_size > 1:
        yield (
            "--distributed-backend gloo sums no gradients on GPUs (torch's gloo has no coalesced all-reduce for them); "
            "allowed: nccl, the default there; drop the flag"
        )
