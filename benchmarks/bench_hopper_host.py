"""Host time of the Hopper backend with cached plans, the driver's calls stubbed. No GPU needed.

python benchmarks/bench_hopper_host.py --output benchmarks/results/hopper_host_<hardware>_<date>

CPU tensors of a few rows, in which torch computes next to nothing, stand for CUDA tensors; a compiled library that
only remembers its arguments for libcuda; and torch's fake process group, whose collectives move nothing, for NCCL. So
the figures hold everything that Python and torch's dispatcher do per call (checks, list and map look-ups, parameters,
ctypes, autograd) and none of what the real driver, allocator, streams and collectives add. Counts beside the times say
what a time is made of, on any processor. Measured are the raw passes that the distributed runtime calls, the public
`attend`, and whole passes of `cp_attention`. A new mask and new addresses are timed too: what a cache miss costs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from timing import Cell, Table, argument_parser, environment, interleaved, publish
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_cp as mcp
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
from megatron_cp.runtime import session
from tests.kernels import fake_cuda

CALLS = 200  # per measured round
ALLOWED_US = 15.0
ROWS, HEADS, HEAD_DIM = 8, (8, 1, 1), 128  # of q, k and v
NUM_RANKS = 4
Call = Callable[[], object]


class Counts(NamedTuple):
    """What one call does, besides taking time."""

    python_calls: int
    """Of functions written in Python, torch's own among them."""
    operators: int
    """Of torch that are asked for by Python or autograd, not by other operators of torch."""
    allocations: int
    launches: int


def stub_the_device() -> None:
    """Makes CPU tensors pass for CUDA tensors, the stand-in for the driver, and this process for rank 0 of a group."""
    driver = Driver(fake_cuda.load())
    size = gpu.MAX_STREAMS * gpu.COUNTER_BYTES // 4
    counters = share(torch.zeros(size, dtype=torch.int32))
    operators.implement_operators("CPU")
    hopper_launch.run_on("cpu", gpu.load_kernel)
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
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    session._agree = lambda *_: None  # the fake group brings no digests of others


def draw(num_rows: int) -> list[torch.Tensor]:
    """Returns q, k and v."""
    return [torch.randn(num_rows, heads, HEAD_DIM).bfloat16() for heads in HEADS]


def raw_passes() -> dict[str, Call]:
    """Returns the passes that the runtime calls stage by stage."""
    q, k, v = draw(ROWS)
    mask, options = masks.causal(ROWS), AttendOptions(0.1, backend="hopper")
    dout, lse, delta = torch.randn_like(q), torch.zeros(ROWS, 8), torch.zeros(ROWS, 8)
    out, out_lse = hopper.forward(q, k, v, mask, options)
    sums = hopper.backward(dout, q, k, v, lse, delta, mask, options)
    asked = (mask, options)
    rows = (dout, q, k, v, lse, delta, *asked)
    return {
        "raw forward": lambda: hopper.forward(q, k, v, *asked),
        "raw forward onto a result": lambda: hopper.forward_onto_(out, out_lse, q, k, v, *asked),
        "raw forward, the last": lambda: hopper.forward_last((out, out_lse), q, k, v, *asked, None),
        "raw backward": lambda: hopper.backward(*rows, rounded=True),
        "raw backward onto sums": lambda: hopper.backward_onto_(sums[0], sums[1:], *rows),
        "row statistics of a result": lambda: hopper.stats_of_result(dout, out, lse, None),
        "merge of rows": lambda: hopper.merge_parts_(out, out_lse, out, out_lse),
        "two outputs of torch.empty alone": lambda: hopper.empty_results(q, v, q.dtype),
    }


def misses(num_tokens: int) -> dict[str, Call]:
    """Returns raw passes that find nothing."""
    q, k, v = draw(ROWS)
    many = draw(num_tokens)
    mask, long_mask = masks.causal(ROWS), masks.causal(num_tokens)
    options = AttendOptions(0.1, backend="hopper")

    def with_new_addresses() -> None:
        hopper_launch._tensor_maps.clear()
        hopper.forward(q, k, v, mask, options)

    def with_new_mask() -> None:
        device_arrays._entries.clear()
        hopper.forward(*many, long_mask, options)

    return {
        "raw forward, three new addresses": with_new_addresses,
        f"raw forward, new causal mask of {num_tokens} tokens": with_new_mask,
    }


def public_calls() -> dict[str, Call]:
    """Returns calls of `attend` on one device, and of `cp_attention` on one of several ranks."""
    q, k, v = draw(ROWS)
    mask, dout, sink = masks.causal(ROWS), torch.randn_like(q), torch.zeros(8)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    config = mcp.CPConfig(planner="ring", num_heads=HEADS[0], chunk_size=ROWS)
    ring = mcp.make_plan(masks.full(ROWS * NUM_RANKS), NUM_RANKS, config=config)
    alone = mcp.make_plan(mask, 1)
    stages = f"{len(ring.forward.stages)} stages"

    def gradients(out: torch.Tensor) -> object:
        return torch.autograd.grad(out, leaves, dout)

    def on_one_device(*tensors: torch.Tensor) -> torch.Tensor:
        return attend(*tensors, mask, backend="hopper")[0]

    def on_one_rank(*tensors: torch.Tensor) -> torch.Tensor:
        return mcp.cp_attention(*tensors, alone, None, backend="hopper")[0]

    def on_ranks(*tensors: torch.Tensor) -> torch.Tensor:
        return mcp.cp_attention(*tensors, ring, dist.group.WORLD, backend="hopper")[0]

    return {
        "attend": lambda: on_one_device(q, k, v),
        "attend with sink and softcap": lambda: attend(
            q, k, v, mask, backend="hopper", sink=sink, softcap=30.0
        ),
        "attend, to be differentiated": lambda: on_one_device(*leaves),
        "attend and its gradient": lambda: gradients(on_one_device(*leaves)),
        "cp_attention, one rank": lambda: on_one_rank(q, k, v),
        "cp_attention, one rank, and its gradient": lambda: gradients(on_one_rank(*leaves)),
        f"cp_attention, {stages}": lambda: on_ranks(q, k, v),
        f"cp_attention, {stages}, and its gradient": lambda: gradients(on_ranks(*leaves)),
    }


def counted(call: Call) -> Counts:
    """Returns what one call does."""
    num_python = 0

    def see(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_python
        num_python += event == "call"

    call()
    sys.setprofile(see)
    call()
    sys.setprofile(None)
    launched = fake_cuda.number("fake_num_launched")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    launched = fake_cuda.number("fake_num_launched") - launched
    found = [event for event in seen.events() if event.name.startswith("aten::")]
    asked = [x for x in found if x.cpu_parent is None or not x.cpu_parent.name.startswith("aten::")]
    made = [x for x in found if x.name in ("aten::empty", "aten::empty_strided")]
    return Counts(num_python - 1, len(asked), len(made), launched)


def repeated(call: Call) -> Call:
    """Returns a function that calls `CALLS` times."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    return run


def main() -> None:
    """Prints the table and writes it when asked to."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stub_the_device()
    named = raw_passes() | misses(4096) | public_calls()
    times = interleaved({name: repeated(call) for name, call in named.items()}, arguments.rounds)
    rows: list[tuple[Cell, ...]] = [
        (name, t.cpu_ms * 1e3 / CALLS, t.best_ms * 1e3 / CALLS, *counted(named[name]))
        for name, t in times.items()
    ]
    facts = {
        "what": "microseconds of host time per call on a CPU, driver, GPU and collectives stubbed",
        **environment(("numpy", "torch")),
        "protocol": f"{arguments.rounds} interleaved rounds of {CALLS} calls after two warm-up rounds",
        "allowed": f"{ALLOWED_US:.0f} us per raw forward call with a cached plan",
        "command": "python benchmarks/bench_hopper_host.py",
    }
    columns = ("call", "processor us, median", "clock us, best")
    columns += ("Python calls", "torch operators", "allocations", "launches")
    note = (
        "Not a GPU measurement: the real driver's launch, PyTorch's CUDA allocator, streams and collectives are not "
        "in it."
    )
    table = Table("Host time per call", columns, rows, note)
    publish("Host time of the Hopper launch", facts, [table], arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
