"""How a call behaves in the places where people put it: a CUDA graph, two streams, a compiled function, other backends.

Each check raises AssertionError, or returns what it found. One mask of packed documents, GQA 8:2, head dim 128, bf16,
forward and backward. They ran on an H100 (benchmarks/results/h100_calls_2026-11-23.md).
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_cp import mask as masks
from megatron_cp.attn import attend

NUM_TOKENS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2048, 8, 2, 128
ROUNDS = 10
# Relative norms: each backend rounds its results, and sums in another order.
MAX_DIFFERENCE = 1e-2
HOST_CALLS = 50


def checks() -> dict[str, Callable[[], str]]:
    """Returns the checks by what they are called in the report."""
    return {
        "a CUDA graph": check_graph,
        "two streams at once": check_streams,
        "torch.compile around attend": check_compiled,
        "hopper beside flash": check_flash,
        "host time": host_time,
    }


def check_graph() -> str:
    """Captures both passes, poisons the results and replays: the same bits as without a graph."""
    case = _Case()
    eager, side = case.both(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lists and counters of the stream are made before a capture
        case.both()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.both()
    for _ in range(ROUNDS):
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    _assert_same_bits(eager, captured)
    return f"the same bits in {ROUNDS} replays"


def check_streams() -> str:
    """Runs both passes in two streams that do not wait for each other: the same bits as alone."""
    case = _Case()
    alone, streams = case.both(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(ROUNDS):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(case.both())
    torch.cuda.synchronize()
    for result in found:
        _assert_same_bits(alone, result)
    return f"the same bits in {ROUNDS} rounds"


def check_compiled() -> str:
    """Compiles a function around `attend`; its gradients are those of plain calls."""
    case = _Case()
    compiled = torch.compile(lambda q, k, v: attend(q * 1.0, k, v, case.mask, backend="hopper")[0])
    leaves = case.leaves()
    out = compiled(*leaves)
    got = (out.detach(), *torch.autograd.grad(out, leaves, case.dout))
    plain = case.both()
    return _differences(got, (plain[0], *plain[2:]))


def check_flash() -> str:
    """Compares both passes with those of the flash backend."""
    case = _Case()
    return _differences(case.both(), case.both(backend="flash"))


def host_time() -> str:
    """Returns the host's microseconds of a call, the least of seven times fifty."""
    case = _Case()
    leaves = case.leaves()
    out, _ = attend(*leaves, case.mask, backend="hopper")

    def forward() -> None:
        with torch.no_grad():
            attend(case.q, case.k, case.v, case.mask, backend="hopper")

    def backward() -> None:
        torch.autograd.grad(out, leaves, case.dout, retain_graph=True)

    return f"forward {_host_us(forward):.0f} us, backward {_host_us(backward):.0f} us"


class _Case:
    """Documents, one of them of one token, and random tensors."""

    def __init__(self) -> None:
        self.mask = masks.documents([700, 1, 347, 1000], "causal")
        shapes = [
            (NUM_TOKENS, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        ]
        generator = torch.Generator("cuda").manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
            for shape in (*shapes, shapes[0])
        )

    def leaves(self) -> list[Tensor]:
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

    def both(self, backend: str = "hopper") -> tuple[Tensor, ...]:
        """Returns (out, lse, dq, dk, dv); the hopper backend's with the same bits every time."""
        leaves = self.leaves()
        out, lse = attend(*leaves, self.mask, backend=backend, deterministic=backend == "hopper")
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, self.dout)


def _assert_same_bits(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), one, other, strict=True):
        assert torch.equal(a, b), f"{name} differs"


def _differences(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> str:
    found = [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(got, wanted, strict=True)
    ]
    worst = torch.tensor(found).max().item()  # NaN if one is
    assert worst <= MAX_DIFFERENCE, f"results differ by {worst:.1e}, at most {MAX_DIFFERENCE:.0e}"
    return "relative differences " + ", ".join(f"{x:.1e}" for x in found)


def _host_us(call: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        best = min(best, (time.perf_counter() - started) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return best
