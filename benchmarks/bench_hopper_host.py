"""Host time of one call of the Hopper backend with a cached plan, the driver's calls stubbed. No GPU needed.

python benchmarks/bench_hopper_host.py --output benchmarks/results/hopper_host_<hardware>_<date>

CPU tensors stand for CUDA tensors, and a compiled library that only remembers its arguments for libcuda, so the
figures hold everything that Python does per call (checks, list and map look-ups, parameters, ctypes) and none of
what the real driver and allocator add. Measured are the raw pass that the distributed runtime calls, and the
public `attend` with its operator. A new mask and new addresses are timed too: what a cache miss costs.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import Table, environment, interleaved, publish

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_cp import mask as masks
from megatron_cp.attn import attend, device_arrays
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper import gpu, operators, self_test
from megatron_cp.attn.hopper import launch as hopper_launch
from megatron_cp.attn.options import AttendOptions
from megatron_cp.device_memory import share
from megatron_cp.kernels import build
from megatron_cp.kernels.driver import Driver
from tests.kernels import fake_cuda

CALLS = 500  # per measured round
ALLOWED_US = 15.0


def stub_the_device() -> None:
    """Makes CPU tensors pass for CUDA tensors, and the stand-in for the driver."""
    driver = Driver(fake_cuda.load())
    size = gpu.MAX_STREAMS * gpu.COUNTER_BYTES // 4
    counters = share(torch.zeros(size, dtype=torch.int32))
    operators.implement_operators("CPU")
    hopper_launch.run_on("cpu", gpu.gpu(0))
    gpu.driver = lambda: driver
    gpu.current_device = lambda: 0
    gpu.num_sms = lambda device: 132
    gpu.raw_stream = lambda device: 7
    gpu.zeroed_counters = lambda device: counters
    gpu.is_capturing = lambda: False
    self_test.find_verdict = lambda kind, device: self_test.Verdict(True, "", 0.0, 1.0)
    hopper_checks.check_capability = lambda device: None
    hopper_checks.ON_DEVICES = ("cpu", "cuda")
    build.cubin = lambda name: name.encode()


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that calls `CALLS` times."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def calls(num_tokens: int) -> dict[str, Callable[[], object]]:
    """Returns what is timed, by name."""
    q, k, v = (torch.randn(256, heads, 128).bfloat16() for heads in (8, 1, 1))
    mask = masks.causal(256)
    options = AttendOptions(0.1, backend="hopper")
    sink = torch.zeros(8)
    many = (torch.randn(num_tokens, heads, 128).bfloat16() for heads in (8, 1, 1))
    long_q, long_k, long_v = many
    long_mask = masks.causal(num_tokens)

    dout, lse = torch.randn_like(q), torch.zeros(256, 8)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def with_gradient() -> None:
        out, _ = attend(*leaves, mask, backend="hopper")
        torch.autograd.grad(out, leaves, dout)

    def with_new_addresses() -> None:
        hopper_launch._tensor_maps.clear()
        hopper.forward(q, k, v, mask, options)

    def with_new_mask() -> None:
        device_arrays._entries.clear()
        hopper.forward(long_q, long_k, long_v, long_mask, options)

    return {
        "raw pass, as the runtime calls it": lambda: hopper.forward(q, k, v, mask, options),
        "attend": lambda: attend(q, k, v, mask, backend="hopper"),
        "attend with sink and softcap": lambda: attend(
            q, k, v, mask, backend="hopper", sink=sink, softcap=30.0
        ),
        "raw pass, three new addresses": with_new_addresses,
        f"raw pass, new causal mask of {num_tokens} tokens": with_new_mask,
        "two outputs of torch.empty alone": lambda: hopper.empty_results(q, v, q.dtype),
        "raw backward pass": lambda: hopper.backward(dout, q, k, v, lse, lse, mask, options),
        "attend and its gradient": with_gradient,
    }


def main() -> None:
    """Prints the table and writes it when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help="path without suffix")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stub_the_device()
    named = calls(4096)
    times = interleaved({name: repeated(call) for name, call in named.items()}, arguments.rounds)
    rows = [
        (name, t.wall_ms * 1e3 / CALLS, t.best_ms * 1e3 / CALLS, t.cpu_ms * 1e3 / CALLS)
        for name, t in times.items()
    ]
    facts = {
        "what": "microseconds of host time per forward call, driver and GPU stubbed",
        **environment(("numpy", "torch")),
        "protocol": f"{arguments.rounds} interleaved rounds of {CALLS} calls after two warm-up rounds",
        "allowed": f"{ALLOWED_US:.0f} us per call with a cached plan",
        "command": "python benchmarks/bench_hopper_host.py",
    }
    columns = ("call", "clock us, median", "clock us, best", "processor us, median")
    note = "Not a GPU measurement: the real driver's launch and PyTorch's CUDA allocator are not in it."
    table = Table("Host time per call", columns, rows, note)
    publish("Host time of the Hopper launch", facts, [table], arguments.output)


if __name__ == "__main__":
    main()
