"""The Hopper backend on CPU tensors: a host 'device' in place of the driver, and what tests draw for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp.attn import device_arrays
from megatron_cp.attn.emulated import backend as emulated  # lets the operators take CPU tensors
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper import gpu, self_test
from megatron_cp.attn.hopper import launch as hopper_launch
from megatron_cp.device_memory import share
from megatron_cp.kernels import build
from tests.closeness import assert_within_budget
from tests.kernels.host_device import HostDevice
from tests.oracles.attention import dense_attention


@contextmanager
def host_device(driver: Any = None) -> Iterator[Any]:
    """CPU tensors pass for tensors of an H100 whose driver is `driver`, by default a HostDevice; yields it."""
    host = driver or HostDevice()
    on_gpu = torch.device("cuda", 0)
    check_supported = hopper_checks.check_supported

    def check_as_if_on_gpu(q, v, *rest):
        q = SimpleNamespace(shape=q.shape, dtype=q.dtype, device=on_gpu)
        return check_supported(q, v, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_checks, "check_supported", check_as_if_on_gpu)
        patch.setattr(hopper_checks, "_capability", lambda _: (9, 0))
        patch.setattr(build, "cubin", lambda name: name.encode())
        patch.setattr(gpu, "driver", lambda: host)
        patch.setattr(gpu, "current_device", lambda: 0)
        patch.setattr(gpu, "is_capturing", lambda: False)
        patch.setattr(gpu, "raw_stream", lambda _: 7)
        patch.setattr(gpu, "num_sms", lambda _: 132)
        zeros = share(torch.zeros(gpu.MAX_STREAMS * gpu.COUNTER_BYTES // 4, dtype=torch.int32))
        patch.setattr(gpu, "zeroed_counters", lambda _: zeros)
        patch.setattr(self_test, "find_verdict", lambda *_: None)
        hopper_launch.run_on("cpu", gpu.load_kernel)
        _forget()
        try:
            yield host
        finally:
            hopper_launch.run_on("cpu", emulated.load_kernel)
            _forget()


def _forget():
    hopper_checks._check_kind.cache_clear()
    hopper_checks.built_dims.cache_clear()
    hopper_launch._tensor_maps.clear()
    gpu.load_kernel.cache_clear()
    gpu._counter_pools.clear()
    gpu._counter_of_stream.clear()
    device_arrays._entries.clear()


def draw(num_queries, num_keys, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q, k = (num_queries, heads[0], dims[0]), (num_keys, heads[1], dims[0])
    shapes = (q, k, (num_keys, heads[1], dims[1]))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_attention(result, tensors, dense, **options):
    """Compares `(out, lse)` with float64; a result in 16 bits may be rounded once."""
    out, lse = result
    sink = options.pop("sink", None)
    exact, plain = (
        dense_attention(
            *(x.to(dtype) for x in tensors),
            dense,
            **options,
            **({} if sink is None else {"sink": sink.to(dtype)}),
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_within_budget(out, plain[0].to(out.dtype), exact[0], "out")
    assert_within_budget(lse, plain[1], exact[1], "lse")
