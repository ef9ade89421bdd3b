"""The Hopper backend from `attend` to its gradients, its launches run by the emulator: the kernels' own source.

What a GPU would get is here byte by byte: work lists, tensor maps, parameter blocks, launch order.
"""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.hopper.checks import find_variant, forward_variants
from megatron_cp.attn.options import AttendOptions
from tests.attn.on_host import draw, host_device
from tests.closeness import assert_within_budget
from tests.kernels.emulated_driver import EmulatedDriver
from tests.kernels.features import of_oracle, wishes, with_feature
from tests.oracles.attention import exact_attention, plain_attention

# Every kind of slice, one-token documents, lengths around a tile, rows and keys in no slice.
SLICES = [
    (0, 40, 0, 70, None, None),
    (40, 41, 40, 41, None, 0),
    (41, 140, 41, 140, None, 0),
    (140, 270, 100, 200, -60, None),
    (140, 270, 200, 230, -30, 40),
    (280, 290, 3, 9, None, None),
]
MASK = masks.from_slices(300, 280, SLICES)


def _backward_dims():
    return sorted(
        {
            (head_dim, value_dim)
            for dtype, head_dim, value_dim, feature in forward_variants()
            if _has_backward(head_dim, value_dim)
        }
    )


def _has_backward(head_dim, value_dim):
    try:
        find_variant("backward", torch.bfloat16, head_dim, value_dim, "")
    except NotImplementedError:
        return False
    return True


def _gradients(tensors, dout, driver, mask=MASK, **options):
    """Returns (out, lse, dq, dk, dv) of the Hopper backend on an emulated GPU."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    with host_device(driver):
        out, lse = attend(*leaves, mask, backend="hopper", **options)
        gradients = torch.autograd.grad(out, leaves, dout)
    return (out.detach(), lse.detach(), *gradients)


def _assert_within_budget(made, tensors, dout, mask=MASK, **options):
    exact = exact_attention(*tensors, mask.to_dense(), dout=dout, **options)
    plain = plain_attention(*tensors, mask.to_dense(), dout=dout, **options)
    for name, result in zip(("out", "lse", "dq", "dk", "dv"), made, strict=True):
        wanted = getattr(exact, name)
        finite = wanted[torch.isfinite(wanted)]
        size = max(1.0, finite.abs().max().item())
        assert_within_budget(result, getattr(plain, name), wanted, name, size=size)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", _backward_dims(), ids=str)
def test_both_passes_of_every_head_dim_are_within_budget(dims, deterministic):
    tensors = draw(300, 280, (4, 2), dims, torch.bfloat16)
    dout = torch.randn(300, 4, dims[1], generator=torch.Generator().manual_seed(5)).bfloat16()
    made = _gradients(tensors, dout, EmulatedDriver(seed=2), deterministic=deterministic)
    _assert_within_budget(made, tensors, dout)
    outside = ~torch.from_numpy(MASK.to_dense()).any(0)
    assert (made[3][outside] == 0).all() and (made[4][outside] == 0).all()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_deterministic_gradients_have_the_same_bits_on_any_grid_and_in_any_asynchrony(dims):
    mask = masks.causal(400)
    tensors = draw(400, 400, (2, 1), dims, torch.bfloat16)
    dout = torch.randn(400, 2, dims[1], generator=torch.Generator().manual_seed(6)).bfloat16()
    runs = [
        _gradients(tensors, dout, EmulatedDriver(seed, num_blocks), mask, deterministic=True)
        for seed, num_blocks in ((0, 1), (3, 2), (4, 4))
    ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
    _assert_within_budget(runs[0], tensors, dout, mask)


def test_softcap():
    tensors = draw(300, 280, (3, 3), (128, 128), torch.bfloat16)
    dout = torch.randn(300, 3, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
    made = _gradients(tensors, dout, EmulatedDriver(), softcap=2.0, softmax_scale=0.2)
    _assert_within_budget(made, tensors, dout, softcap=2.0, softmax_scale=0.2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout(head_dim, deterministic):
    tensors = draw(300, 280, (4, 2), (head_dim, head_dim), torch.bfloat16)
    dout = torch.randn(300, 4, head_dim, generator=torch.Generator().manual_seed(7)).bfloat16()
    options = {"deterministic": deterministic, **wishes("dropout")}
    made = _gradients(tensors, dout, EmulatedDriver(), **options)
    _assert_within_budget(made, tensors, dout, **of_oracle("dropout", *tensors[:2]))


def test_dropout_of_parts_of_the_keys_is_that_of_the_whole():
    """As stages call it: onto an earlier result, and onto earlier gradients."""
    q, k, v = draw(300, 280, (4, 2), (128, 128), torch.bfloat16)
    dout = torch.randn(300, 4, 128, generator=torch.Generator().manual_seed(7)).bfloat16()
    plain = AttendOptions(128**-0.5, 0.0, "hopper")
    known = of_oracle("dropout", q, k)
    exact = exact_attention(q, k, v, MASK.to_dense(), dout=dout, **known)
    lse, delta = exact.lse.float(), (dout.double() * exact.out).sum(-1).float()
    out = found_lse = dq = None
    dk, dv = [], []
    with host_device(EmulatedDriver()), torch.no_grad():
        for keys in (slice(0, 130), slice(130, 280)):
            options = with_feature(plain, "dropout", q, k, keys)
            asked = (k[keys], v[keys], MASK.crop(k=(keys.start, keys.stop)), options)
            if out is None:
                out, found_lse = hopper.forward(q, *asked)
            else:
                hopper.forward_onto_(out, found_lse, q, *asked)
            rows = (dout, q, k[keys], v[keys], lse, delta)
            dq, *of_keys = hopper.backward_onto_(dq, None, *rows, *asked[2:])
            dk.append(of_keys[0])
            dv.append(of_keys[1])
    made = (out, found_lse, dq * plain.softmax_scale, torch.cat(dk), torch.cat(dv))
    _assert_within_budget(made, (q, k, v), dout, **known)


def test_nan_in_rows_of_no_slice_reaches_no_result():
    clean = draw(300, 280, (2, 1))
    poisoned = [x.clone() for x in clean]
    dense = torch.from_numpy(MASK.to_dense())
    for x, outside in zip(poisoned, (~dense.any(1), ~dense.any(0), ~dense.any(0)), strict=True):
        x[outside] = torch.nan
    dout = torch.randn(300, 2, 64, generator=torch.Generator().manual_seed(8)).bfloat16()
    options = {"deterministic": True}
    expected, made = (_gradients(x, dout, EmulatedDriver(), **options) for x in (clean, poisoned))
    assert all(torch.equal(a, b) for a, b in zip(expected, made, strict=True))


def test_strided_inputs_and_an_expanded_gradient():
    packed = torch.randn(90, 8, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    tensors = [packed[:, :4], packed[:, 4:6], packed[:, 6:]]
    mask = masks.sliding_window(90, 30)
    dout = torch.ones(1, 1, 1).bfloat16().expand(90, 4, 64)
    made = _gradients(tensors, dout, EmulatedDriver(), mask)
    _assert_within_budget(made, tensors, dout.contiguous(), mask)
