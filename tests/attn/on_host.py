"""The Hopper backend on CPU tensors: a host 'device' in place of the driver, and what tests draw for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp.attn import device_arrays
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.hopper import backward as hopper_backward
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper import launch as hopper_launch
from megatron_cp.attn.hopper import self_test
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
        patch.setattr(hopper_launch, "driver", lambda: host)
        patch.setattr(hopper_launch, "current_device", lambda: 0)
        patch.setattr(hopper_launch, "is_capturing", lambda: False)
        patch.setattr(self_test, "find_verdict", lambda *_: None)
        for module in (hopper, hopper_launch, hopper_backward):
            patch.setattr(module, "raw_stream", lambda _: 7)
        patch.setattr(hopper_launch, "num_sms", lambda _: 132)
        size = hopper_launch.MAX_STREAMS * hopper_launch.COUNTER_BYTES // 4
        zeros = share(torch.zeros(size, dtype=torch.int32))
        patch.setattr(hopper_launch, "zeroed_counters", lambda _: zeros)
        _forget()
        try:
            yield host
        finally:
            _forget()


def _forget():
    hopper_checks._check_kind.cache_clear()
    hopper_checks.built_dims.cache_clear()
    hopper_launch.load_kernel.cache_clear()
    hopper_launch._tensor_maps.clear()
    hopper_launch._counter_pools.clear()
    hopper_launch._counter_of_stream.clear()
    device_arrays._entries.clear()


@contextmanager
def operators_on_cpu() -> Iterator[None]:
    """The operators' CUDA implementations are those for CPU tensors too."""
    library = torch.library.Library("megatron_cp", "IMPL")
    library.impl("attention_forward", hopper._forward, "CPU")
    library.impl("attention_backward", hopper._backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


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
