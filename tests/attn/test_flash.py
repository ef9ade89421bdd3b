"""The flash backend over operators made of float64 formulas: every mask, both passes, parts of the keys."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_cp import mask as masks
from megatron_cp.attn import (
    attend,
    device_arrays,
    resolve_options,
)
from megatron_cp.attn.flash import backend, checks, grouping, passes
from megatron_cp.attn.flash.passes import delta_as_out, device_calls
from tests.attn.flash_on_host import on_host
from tests.attn.formula import assert_attention, random_case
from tests.attn.in_parts import assert_silent_rows_get_and_give_zeros, attend_in_parts
from tests.strategies import attention_masks

HEADS = ((2, 2), (4, 2), (3, 1))


@pytest.fixture(autouse=True)
def calls():
    with on_host() as made:
        yield made


def _attend_with_gradients(inputs, mask, arguments, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sink = arguments.get("sink")
    if sink is not None:
        sink = sink.detach().clone().requires_grad_()
        leaves.append(sink)
    out, lse = attend(*leaves[:3], mask, sink=sink, backend="flash", **options)
    dlse = arguments["dlse"].to(lse.dtype)
    finite_lse = lse.masked_fill(~torch.isfinite(lse), 0.0)
    loss = (out * arguments["dout"]).sum(dtype=lse.dtype) + (finite_lse * dlse).sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))


@given(
    case=attention_masks(),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float64)),
    softmax_scale=st.sampled_from((None, 0.3)),
    sink=st.booleans(),
    seed=st.integers(0, 3),
)
def test_attention_over_any_disjoint_slices_equals_float64(
    case, heads, dtype, softmax_scale, sink, seed
):
    mask, dense = case
    sizes = (mask.num_queries, mask.num_keys)
    inputs, arguments = random_case(*sizes, heads, (16, 16), dtype, seed=seed, sink=sink)
    actual = _attend_with_gradients(inputs, mask, arguments, softmax_scale=softmax_scale)
    assert_attention(
        actual, inputs, dense, plain_dtype=dtype, softmax_scale=softmax_scale, **arguments
    )


@given(
    case=attention_masks(),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float64)),
)
def test_parts_of_the_keys_add_up_to_attention_over_all(case, cuts, heads, dtype):
    mask, dense = case
    cuts = [round(cut * mask.num_keys) for cut in cuts]
    inputs, arguments = random_case(mask.num_queries, mask.num_keys, heads, (16, 16), dtype)
    actual = attend_in_parts(inputs, mask, arguments, cuts, "flash")
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(x.dtype == accumulated for x in actual)
    assert_attention(actual, inputs, dense, plain_dtype=dtype, **arguments)


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_does_not_grow_with_the_number_of_parts(num_parts, dtype):
    mask = masks.causal(256)
    inputs, arguments = random_case(256, 256, (2, 2), (16, 16), dtype)
    cuts = [256 * i // num_parts for i in range(1, num_parts)]
    actual = attend_in_parts(inputs, mask, arguments, cuts, "flash")
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=dtype, **arguments)


def test_rows_outside_every_slice_influence_nothing_even_as_nan():
    mask = masks.from_slices(64, 80, [(3, 40, 5, 45, None, 0), (50, 60, 60, 70, None, None)])
    dense = torch.as_tensor(mask.to_dense())
    inputs, arguments = random_case(64, 80, (2, 2), (8, 8), torch.bfloat16)
    clean = _attend_with_gradients(inputs, mask, arguments)
    q, k, v = inputs
    q[~dense.any(1)], k[~dense.any(0)], v[~dense.any(0)] = torch.nan, torch.nan, torch.nan
    for a, b in zip(clean, _attend_with_gradients(inputs, mask, arguments), strict=True):
        assert torch.equal(a, b)


def test_rows_whose_global_lse_is_minus_infinity_get_and_give_exact_zeros():
    assert_silent_rows_get_and_give_zeros("flash", torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.bfloat16, 2.0**-40), (torch.float16, 2.0**-14)]
)
@pytest.mark.parametrize("through", ["out", "lse"])
def test_gradient_through_one_result_alone_equals_float64(dtype, share, through):
    mask = masks.causal(70)
    inputs, arguments = random_case(70, 70, (4, 2), (16, 16), dtype, sink=True)
    other = "dlse" if through == "out" else "dout"
    arguments[other] = torch.zeros_like(arguments[other])
    out, lse, dq, dk, dv, dsink = _attend_with_gradients(inputs, mask, arguments)
    if through == "lse":  # v has no gradient but for the tiny numbers that carry delta
        assert dv.abs().max() <= 70 * share * arguments["dlse"].abs().max()
        dv = torch.zeros_like(dv)
    dense = torch.as_tensor(mask.to_dense())
    actual = (out, lse, dq, dk, dv, dsink)
    assert_attention(actual, inputs, dense, plain_dtype=dtype, **arguments)


@pytest.mark.parametrize(
    ("dtype", "share", "smallest", "scales"),
    [  # squares of less than 1e-19 are none in float32; fp16 ends at 6e-8
        (torch.bfloat16, 2.0**-40, 1e-18, (0.0, 1e-25, 1e-19, 1e-12, 1.0, 1e12, 1e17)),
        (torch.float16, 2.0**-14, 6e-8, (0.0, 1e-6, 1e-4, 1.0, 1e3)),
    ],
    ids=str,
)
def test_delta_survives_any_size_of_dout(dtype, share, smallest, scales):
    """Summed as the operators do it, delta is off by a rounding of its own, or of the smallest number times dout."""
    for dout_scale, delta_scale in itertools.product(scales, (0.0, 1e-3, 1.0)):
        dout = (torch.randn(50, 3, 64) * dout_scale).to(dtype)
        dout[::7] = 0
        delta = torch.randn(50, 3) * delta_scale
        no_keys = torch.zeros(50, 3, dtype=torch.bool)
        new_dout, stand_in = delta_as_out(dout, delta, no_keys)
        assert torch.equal(new_dout, dout) or delta_scale
        actual = (new_dout.double() * stand_in.double()).sum(-1)
        finite, size = torch.finfo(dtype), new_dout.double().abs().sum(dim=-1)
        below = finite.smallest_normal * finite.eps * size
        assert ((actual - delta).abs() <= finite.eps * delta.abs() + below).all()
        changed = (new_dout.double() - dout.double()).abs().amax(-1)
        assert (changed <= 2.01 * share * delta.abs() + smallest).all()


def test_overflow_in_dout_reaches_the_gradients():
    dout = torch.ones(4, 1, 8, dtype=torch.float16)
    dout[1, 0, 3], dout[2, 0, 3] = torch.inf, torch.nan
    delta = (dout.float() * 0.5).sum(-1)
    new_dout, stand_in = delta_as_out(dout, delta, torch.zeros(4, 1, dtype=torch.bool))
    finite = torch.isfinite(new_dout.float() * stand_in.float()).all(-1)[:, 0]
    assert finite.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("dims", "built"),
    [((192, 128), (192, 192)), ((100, 100), (104, 104)), ((24, 40), (40, 40)), ((40, 40), None)],
    ids=str,
)
def test_head_dims_that_no_operator_has_run_on_the_next_that_one_has(dims, built):
    """As latent attention's 192 and 128 on a GPU without flash-attn 3; the scale is that of the dims asked for."""
    mask = masks.shared_question([9, 8, 7])
    inputs, arguments = random_case(24, 24, (4, 2), dims, torch.float64)
    options = resolve_options(*inputs, backend="flash")
    assert options.wide_dims == built
    assert options.softmax_scale == pytest.approx(dims[0] ** -0.5)
    actual = _attend_with_gradients(inputs, mask, arguments)
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=torch.float64, **arguments)
    *_, largest = attend(*inputs, mask, backend="flash", return_max_logits=True)
    scores = torch.einsum("qnh,knh->nqk", inputs[0], inputs[1].repeat_interleave(2, dim=1))
    expected = scores.masked_fill(~dense, -torch.inf).amax(dim=(1, 2)) * dims[0] ** -0.5
    torch.testing.assert_close(largest.double(), expected, rtol=1e-3, atol=1e-3)


def test_a_mask_is_grouped_and_copied_once(calls, monkeypatch):
    grouped = []

    def group_calls(mask):
        grouped.append(mask.num_slices)
        return grouping.group_calls(mask)

    monkeypatch.setattr(passes, "group_calls", group_calls)
    inputs, arguments = random_case(40, 40, (2, 2), (8, 8), torch.bfloat16)
    mask = masks.documents([10, 30], "causal")
    for _ in range(3):
        _attend_with_gradients(inputs, mask, arguments)
    assert grouped == [2]
    assert [name for name, *_ in calls] == ["forward", "backward"] * 3
    assert device_arrays.num_cached() == 1
    del mask
    assert device_arrays.num_cached() == 0


def test_a_mask_of_many_calls_is_told_with_what_may_be_faster(caplog):
    mask = masks.dilated(160, 140, 0, 4)
    device_calls(mask, torch.device("cpu"))
    (said,) = caplog.messages
    assert re.match(r"backend 'flash' takes 36 calls for a mask of 36 slices .* 20 times on", said)
    device_calls(masks.shared_question([9, 8, 7]), torch.device("cpu"))
    assert len(caplog.messages) == 1


def test_an_lse_in_the_layout_of_older_versions_is_refused(monkeypatch):
    (q, k, v), _ = random_case(40, 40, (4, 2), (16, 16), torch.bfloat16)
    options = resolve_options(q, k, v, backend="flash")
    operator = checks.operator_for(q, v, options, needs_grad=False)

    def forward(*arguments):
        out, lse = operator.forward(*arguments)
        return out, lse.unflatten(1, (2, 20)).transpose(0, 1)

    old = dataclasses.replace(operator, forward=forward)
    monkeypatch.setattr(backend, "operator_for", lambda *_, **__: old)
    with pytest.raises(
        RuntimeError, match=r"lse of torch has shape \(2, 4, 20\), allowed is .*install"
    ):
        attend(q, k, v, masks.documents([20, 20]), backend="flash")


def test_one_run_of_rows_is_read_where_it_lies():
    mask = masks.documents([10, 30], "causal")
    (call,) = device_calls(mask, torch.device("cpu"))
    x = torch.zeros(40, 2, 8, dtype=torch.bfloat16)
    assert call.queries.read(x).data_ptr() == x.data_ptr()
    odd = torch.zeros(2, 40, 12, dtype=torch.bfloat16).transpose(0, 1)[..., :8]
    assert call.queries.read(odd).is_contiguous()
    shared = torch.zeros(40, 1, 8, dtype=torch.bfloat16).expand(40, 2, 8)
    assert call.queries.read(shared).is_contiguous()


def _check_shapes(mask, device, monkeypatch):
    monkeypatch.setattr(checks, "find_fault", lambda *_: None)  # nothing to be compared
    of_device = {"dtype": torch.bfloat16, "device": device}
    q, dout = (torch.zeros(mask.num_queries, 4, 64, **of_device) for _ in range(2))
    k, v = (torch.zeros(mask.num_keys, 2, 64, **of_device) for _ in range(2))
    options = resolve_options(q, k, v, backend="flash")
    out, lse = backend.forward(q, k, v, mask, options)
    gradients = backend.backward(dout, q, k, v, lse, lse, mask, options)
    for tensor, like in ((out, q), *zip(gradients, (q, k, v), strict=True)):
        assert (tensor.shape, tensor.dtype) == (like.shape, torch.float32)
        assert tensor.device.type == device
    assert (lse.shape, lse.dtype) == ((mask.num_queries, 4), torch.float32)


def test_torch_s_own_operators_take_a_call_on_tensors_of_a_gpu_without_data(monkeypatch):
    """FakeTensor runs the operators' published shape functions, and refuses mixed devices."""
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    with FakeTensorMode(allow_non_fake_inputs=True):
        _check_shapes(masks.documents([10, 30], "causal"), "cuda", monkeypatch)


@pytest.mark.parametrize("mask", [masks.shared_question([9, 8, 7]), masks.full(40, 0)], ids=str)
def test_torch_s_own_operators_take_several_calls_on_tensors_without_data(mask, monkeypatch):
    monkeypatch.setattr(checks, "ON_DEVICES", ("meta",))
    _check_shapes(mask, "meta", monkeypatch)
