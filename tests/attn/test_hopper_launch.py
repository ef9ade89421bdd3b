"""What a Hopper launch leaves to others, and what it makes of tensors that show one element twice."""

import ctypes
from dataclasses import replace

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import (
    attend,
    attend_backward,
    attend_backward_onto_,
    attend_forward,
    attend_forward_onto_,
    dq_factor,
)
from megatron_cp.attn.hopper import gpu
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels.params import FwdParams
from tests.attn.on_host import assert_attention, draw, host_device

OPTIONS = AttendOptions(0.25, backend="hopper")
CTAS = 0  # place of the number of CTAs in a launch that the host device noted


@pytest.fixture
def device():
    with host_device() as host:
        yield host


@pytest.mark.parametrize(("share", "left"), [(0.0, 0), (0.1, 14), (4 / 132, 4), (0.5, 66)])
def test_a_stage_leaves_its_share_of_132_multiprocessors_to_transfers(device, share, left):
    q, k, v = draw(130, 130, (136, 8))  # many heads of few tokens: more work than multiprocessors
    mask, options = masks.causal(130), replace(OPTIONS, sm_share=share)
    out, lse = attend_forward(q, k, v, mask, options)
    attend_forward_onto_((out, lse), q, k, v, mask, options)
    attend_backward(torch.ones_like(q), q, k, v, lse, torch.zeros_like(lse), mask, options)
    forward, onto, _row_statistics, backward = (x[CTAS] for x in device.launches[:4])
    # 2 key tiles of 8 kv heads would keep 16 busy: the query heads of a group are worked on side by side.
    assert forward == onto == backward == 132 - left


def test_heads_that_are_expanded_are_copied_before_a_tensor_map_is_made(device):
    q, k, v = draw(70, 70, (4, 4))
    wide = [x[:, :1].expand(-1, 4, -1) for x in (k, v)]
    mask = masks.causal(70)
    result = attend(q, *wide, mask, backend="hopper")
    assert_attention(result, [q, *(x.contiguous() for x in wide)], mask.to_dense())


def test_a_gradient_that_is_one_number_everywhere_is_copied_too(device):
    tensors = [x.requires_grad_() for x in draw(70, 70)]
    mask = masks.causal(70)
    attend(*tensors, mask, backend="hopper")[0].sum().backward()  # sum() gives a dout of strides 0
    plain = [x.detach().clone().requires_grad_() for x in tensors]
    attend(*plain, mask, backend="cpu")[0].sum().backward()
    for x, y in zip(tensors, plain, strict=True):
        assert torch.allclose(x.grad.float(), y.grad.float(), atol=0.05, rtol=0.05)


def test_every_launch_that_a_graph_records_has_counters_of_its_own(device, monkeypatch):
    """Graphs are all captured on one stream and may be replayed side by side."""
    used, launch, zeros = [], device.launch, torch.zeros

    def noting(kernel, num_blocks, num_threads, shared_bytes, stream, params):
        used.append(FwdParams.from_buffer_copy(bytes(params)).counters)
        assert (ctypes.c_int32 * 2).from_address(used[-1])[:] == [0, 0]
        launch(kernel, num_blocks, num_threads, shared_bytes, stream, params)

    def on_cpu(*size, device, **more):
        return zeros(*size, **more)

    monkeypatch.setattr(device, "launch", noting)
    tensors, mask = draw(64, 64), masks.causal(64)
    attend(*tensors, mask, backend="hopper")
    attend(*tensors, mask, backend="hopper")
    monkeypatch.setattr(gpu, "is_capturing", lambda: True)
    monkeypatch.setattr(torch, "zeros", on_cpu)
    recorded = [gpu.counters(0, 7) for _ in range(2)]  # kept, as a graph keeps its memory
    attend(*tensors, mask, backend="hopper")
    assert used[0] == used[1]
    assert len({used[0], used[2], *(pair.address for pair in recorded)}) == 4


def test_sums_over_parts_of_the_keys_are_the_gradients_over_all_of_them(device):
    """As stages of a context-parallel pass add them: dq in one buffer, scaled once."""
    (q, k, v), options = draw(150, 150), OPTIONS
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    mask = masks.causal(150)
    _, lse = attend_forward(q, k, v, mask, options)
    delta = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2)).float()
    whole = attend_backward(dout, q, k, v, lse, delta, mask, options)
    dq, dks, dvs = None, [], []
    for keys in (slice(0, 64), slice(64, 150)):
        part = mask.crop(k=(keys.start, keys.stop))
        given = (dout, q, k[keys], v[keys], lse, delta, part, options)
        dq, dk, dv = attend_backward_onto_(dq, None, *given)
        dks.append(dk)
        dvs.append(dv)
    summed = [dq * dq_factor(options), torch.cat(dks), torch.cat(dvs)]
    for x, y in zip(summed, whole, strict=True):
        assert torch.allclose(x, y, rtol=1e-4, atol=1e-4)
    assert dq_factor(replace(OPTIONS, backend="cpu")) == 1.0
