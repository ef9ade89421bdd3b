"""Runs the pretrain_gpt.py of a Megatron-LM checkout, or MEGATRON_LM_PROGRAM, unchanged, on CPU ranks.

    MEGATRON_LM=<checkout> torchrun --nproc-per-node 2 tests/mcore/megatron_lm_on_cpu.py <its flags>

Megatron-LM has no CPU mode. Beside the stand-ins of `megatron_cp.mcore.cpu`, which answer for Megatron-Core, its own
start-up asks for CUDA in a few more places; they are answered here, for tests only.
"""

import collections
import functools
import multiprocessing
import os
import runpy
import sys
import types
import typing
from pathlib import Path

import torch
import torch.distributed as dist
import typing_extensions

from megatron_cp.mcore import cpu
from megatron_cp.mcore.checkpoint.fused_adam import install_fused_adam


def answer_device_queries() -> None:
    """Puts in place what Megatron-LM's log lines and checks ask of a device."""
    cuda = torch.cuda
    cuda.device_count = lambda: 1
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(int)
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
    cuda.get_device_name = lambda *args, **kwargs: "CPU"
    cuda.get_device_properties = lambda *args, **kwargs: types.SimpleNamespace(
        total_memory=1 << 34, multi_processor_count=1, major=9, minor=0, name="CPU"
    )
    cuda.utilization = cuda.temperature = cuda.power_draw = lambda *args, **kwargs: 0


@functools.cache
def queue_of_writers() -> object:
    """Returns the queue in which writers of a checkpoint say what they did; there is one, as in Megatron.

    A process that Megatron spawns for it would import the program anew, without these stand-ins.
    """
    return multiprocessing.get_context("fork").Manager().Queue()


def prepare_megatron() -> None:
    """Replaces what compiles or draws random numbers at start-up.

    The warm-up of fused functions draws a number of values that depends on the layout: on a CPU, which has one random
    stream, the runs that are compared would start from other weights.
    """
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils

    dataset_utils.compile_helpers = lambda: None
    if not hasattr(typing, "override"):  # newer checkouts are written for Python 3.12
        typing.override = typing_extensions.override
    for name in ("get_write_results_queue", "_get_write_results_queue"):  # since 0.17, and in 0.16
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, lambda *mode: queue_of_writers())
    # 0.16 asks for a function of Transformer Engine that it never imported.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    if "FUSED_ADAM" in os.environ:
        install_fused_adam()
    from megatron.training import initialize, training

    initialize._compile_dependencies = lambda *args, **kwargs: None

    initialize.set_jit_fusion_options = training.set_jit_fusion_options = lambda *args, **kwargs: (
        None
    )
    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )


def main() -> None:
    root = Path(os.environ["MEGATRON_LM"])
    sys.path.insert(0, str(root))
    cpu.install()
    answer_device_queries()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # Megatron-LM then skips the set-up of its device
    prepare_megatron()
    sys.argv[0] = str(root / os.environ.get("MEGATRON_LM_PROGRAM", "pretrain_gpt.py"))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
