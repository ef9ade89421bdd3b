"""The `emulated` backend: the Hopper kernels' own source on the CPU, instructions emulated; g++ only.

For tests and for looking into a kernel, not for speed: a 512-token forward takes a fraction of a second, training
is out of the question. The emulator keeps to the documented semantics and raises EmulatorError where a kernel does
what hardware leaves undefined (docs/emulator.md). Values say nothing about any GPU beyond those semantics.

    mask -> work list   q, k, v -> tensor maps   parameters   launches      the `hopper` backend, for CPU tensors
    kernels/attn/*.cu compiled with g++, CTAs on host threads               instead of cubins and a driver

`Settings` and `running` choose seed, grid and host threads.
"""

from megatron_cp.attn.emulated.machine import Settings, load_kernel, running
from megatron_cp.attn.hopper import launch
from megatron_cp.attn.hopper.backend import (
    add_parts_,
    attend,
    backward,
    backward_onto_,
    forward,
    forward_last,
    forward_onto_,
    merge_parts_,
    row_stats,
    run_forward,
    stats_of_result,
)
from megatron_cp.attn.hopper.operators import implement_operators

__all__ = [
    "Settings",
    "add_parts_",
    "attend",
    "backward",
    "backward_onto_",
    "forward",
    "forward_last",
    "forward_onto_",
    "merge_parts_",
    "row_stats",
    "run_forward",
    "running",
    "stats_of_result",
]

launch.run_on("cpu", load_kernel)
implement_operators("CPU")
