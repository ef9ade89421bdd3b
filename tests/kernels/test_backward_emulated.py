"""The backward kernels' own source, run by the emulator through the host code of the GPU path, against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from megatron_cp import mask as masks
from megatron_cp.attn import (
    attend,
    attend_backward,
    attend_backward_onto_,
    dq_factor,
    resolve_options,
)
from megatron_cp.attn.emulated.backend import Settings, running
from megatron_cp.attn.hopper import gradients
from megatron_cp.attn.hopper.checks import feature_of_variant
from megatron_cp.attn.hopper.gradients import BackwardCall
from megatron_cp.kernels import build
from tests.attn.formula import assert_attention, random_case
from tests.kernels.features import RATE, of_oracle, wishes
from tests.kernels.masks import MIXED, dense_mask
from tests.oracles.attention import exact_attention
from tests.oracles.dropout import dropout_factors
from tests.strategies import disjoint_slices

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAIN_PASSES = ("backward", "backward_dkdv")
VARIANTS = [v for v in build.variants().values() if v.kernel_pass in MAIN_PASSES]


def _gradients(inputs, mask, arguments, *, seed=1, num_blocks=3, **options):
    """Returns (out, lse, dq, dk, dv[, dsink]) of the emulated backend."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sink = arguments.get("sink")
    if sink is not None:
        sink = sink.detach().clone().requires_grad_()
        leaves.append(sink)
    with running(Settings(seed=seed, num_blocks=num_blocks)):
        out, lse = attend(*leaves[:3], mask, sink=sink, backend="emulated", **options)
        finite_lse = lse.masked_fill(~torch.isfinite(lse), 0.0)
        dlse = arguments["dlse"].to(lse.dtype)
        loss = (out * arguments["dout"]).sum(dtype=lse.dtype) + (finite_lse * dlse).sum()
        return (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))


def _check(slices, size, heads, head_dims, dtype, *, sink=False, seed=1, feature="", **options):
    mask = masks.from_slices(*size, slices)
    inputs, arguments = random_case(*size, heads, head_dims, dtype, seed=seed, sink=sink)
    actual = _gradients(inputs, mask, arguments, seed=seed, **wishes(feature), **options)
    wanted = {**of_oracle(feature, *inputs[:2]), **arguments}
    assert_attention(actual, inputs, dense_mask(*size, slices), plain_dtype=dtype, **wanted)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_variant_differentiates_all_kinds_of_slices_in_one_call(variant):
    head_dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    feature, dtype = feature_of_variant(variant), DTYPES[variant.value("MCP_TYPE")]
    apart = variant.kernel_pass == "backward_dkdv"  # then dq comes from a kernel of its own
    _check(MIXED, (300, 300), (2, 1), head_dims, dtype, feature=feature, deterministic=apart)


@pytest.mark.parametrize(
    ("dim", "lengths"),
    [
        (64, (1, 63, 64, 65, 79, 81, 159, 160, 161, 321)),
        (192, (1, 63, 95, 96, 97, 193)),
        (256, (1, 79, 80, 81, 161)),
    ],
    ids=str,
)
@pytest.mark.parametrize("hi", [0, None])
def test_lengths_around_the_tiles(dim, lengths, hi):
    for length in lengths:
        slices = ((0, length, 0, length, None, hi),)
        _check(slices, (length, length), (1, 1), (dim, dim), torch.bfloat16, seed=length)


@st.composite
def _random_cases(draw):
    num_queries, num_keys = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    return num_queries, num_keys, draw(disjoint_slices(num_queries, num_keys))


@settings(max_examples=15)
@given(
    case=_random_cases(),
    heads=st.sampled_from(((1, 1), (4, 2), (3, 1))),
    dtype=st.sampled_from((torch.bfloat16, torch.float16)),
    kernel=st.sampled_from(((64, ""), (128, ""), (192, ""), (64, "dropout"), (128, "dropout"))),
    deterministic=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_slices_under_random_asynchrony(case, heads, dtype, kernel, deterministic, seed):
    num_queries, num_keys, slices = case
    head_dim, feature = kernel
    size, head_dims = (num_queries, num_keys), (head_dim, head_dim)
    asked = {"seed": seed, "feature": feature, "deterministic": deterministic}
    _check(slices, size, heads, head_dims, dtype, **asked)


@pytest.mark.parametrize(
    "variant",
    [
        "bwd_bf16_64",
        "bwd_bf16_128",
        "bwd_bf16_192_128",
        "bwd_dkdv_bf16_192_128_softcap",
        "bwd_dkdv_bf16_64_softcap",
        "bwd_bf16_128_dropout",
        "bwd_dkdv_bf16_64_dropout",
    ],
)
@pytest.mark.parametrize("heads_per_item", [1, 3])
def test_query_heads_of_a_group_worked_on_side_by_side_add_to_one_sum(
    variant, heads_per_item, monkeypatch
):
    monkeypatch.setattr(BackwardCall, "heads_per_item", lambda *_: heads_per_item)
    found = build.variants()[variant]
    head_dims = int(found.value("MCP_HEAD_DIM")), int(found.value("MCP_VALUE_DIM"))
    feature = feature_of_variant(found)
    _check(MIXED, (300, 300), (6, 2), head_dims, torch.bfloat16, feature=feature)


@pytest.mark.parametrize(
    ("head_dims", "feature"),
    [((64, 64), ""), ((192, 128), ""), ((64, 64), "softcap"), ((128, 128), "dropout")],
)
def test_sums_of_query_heads_apart_are_those_of_the_group_in_every_run(
    head_dims, feature, monkeypatch
):
    monkeypatch.setattr(gradients, "_heads_that_end_sooner", lambda *_: 1)
    mask = masks.from_slices(300, 300, MIXED)
    inputs, arguments = random_case(300, 300, (6, 2), head_dims, torch.bfloat16)
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]  # heads first
    options = wishes(feature) | {"deterministic": True}
    runs = [
        _gradients(inputs, mask, arguments, seed=seed, num_blocks=blocks, **options)
        for seed, blocks in ((1, 3), (2, 5))
    ]
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    wanted = {**of_oracle(feature, *inputs[:2]), **arguments}
    allowed = dense_mask(300, 300, MIXED)
    assert_attention(runs[0], inputs, allowed, plain_dtype=torch.bfloat16, **wanted)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_dropped_probability_of_one_is_no_other_row_s(head_dim, deterministic):
    """Query 40 looks at key 0 alone, with logit 0, so its probability is 1 to the bit: it is marked as -1."""
    size, query = (128, 128), 40
    mask = masks.full(*size)
    (q, k, v), arguments = random_case(*size, (1, 1), (head_dim, head_dim), torch.bfloat16)
    q[:, 0, 0], k[:, 0, 0] = 0.0, -k[:, 0, 0].abs() - 60
    q[query], k[0] = 0.0, 0.0
    q[query, 0, 0] = 20.0
    allowed = torch.ones(size, dtype=torch.bool)
    for seed in range(6):
        factors = dropout_factors(seed, 1, range(128), range(128), RATE)
        asked = {"dropout_p": RATE, "dropout_seed": torch.tensor([seed])}
        asked["deterministic"] = deterministic
        _, _, _, dk, _ = _gradients((q, k, v), mask, arguments, **asked)
        exact = exact_attention(q, k, v, allowed, factors=factors, **arguments)
        assert (dk[0] - exact.dk[0]).norm() <= 0.05 * exact.dk[0].norm(), factors[query, 0, 0]


def test_sinks_softcap_and_dropout_have_gradients():
    size, heads = (300, 300), (4, 2)
    for feature in ("softcap", "dropout"):
        _check(MIXED, size, heads, (128, 128), torch.bfloat16, sink=True, feature=feature)
    _check(MIXED, size, heads, (64, 64), torch.float16, sink=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_deterministic_mode_gives_the_same_bits_under_every_seed_and_grid(head_dim):
    mask = masks.from_slices(300, 300, MIXED)
    inputs, arguments = random_case(300, 300, (2, 1), (head_dim, head_dim), torch.bfloat16)
    first = None
    for seed, num_blocks in ((0, 1), (3, 4), (4, 3)):
        got = _gradients(
            inputs, mask, arguments, seed=seed, num_blocks=num_blocks, deterministic=True
        )
        first = got if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), f"seed {seed}"


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gradients_of_keys_have_the_same_bits_under_every_seed_and_grid(head_dim):
    mask = masks.from_slices(300, 300, MIXED)
    inputs, arguments = random_case(300, 300, (2, 2), (head_dim, head_dim), torch.bfloat16)
    found = [
        _gradients(inputs, mask, arguments, seed=seed, num_blocks=num_blocks)[3:]
        for seed, num_blocks in ((0, 1), (3, 4), (4, 3))
    ]
    for dk, dv in found[1:]:
        assert torch.equal(dk, found[0][0]) and torch.equal(dv, found[0][1])


def test_gradients_of_a_part_of_the_keys_come_in_float32():
    """What the distributed runtime asks for: lse and delta of the whole, gradients of one part."""
    slices = ((0, 150, 0, 300, None, 90), (170, 200, 60, 220, None, None))
    inputs, arguments = random_case(200, 300, (2, 1), (64, 64), torch.bfloat16)
    dout = arguments["dout"]
    whole = exact_attention(*inputs, dense_mask(200, 300, slices), dout=dout)
    lse = whole.lse.float()
    delta = (whole.out * dout.double()).sum(dim=-1).float()
    mask, options = (
        masks.from_slices(200, 300, slices),
        resolve_options(*inputs, backend="emulated"),
    )
    q, k, v = inputs
    parts = [
        attend_backward(dout, q, k[a:b], v[a:b], lse, delta, mask.crop(k=(a, b)), options)
        for a, b in ((0, 130), (130, 300))
    ]
    assert all(x.dtype == torch.float32 for part in parts for x in part)
    dq = parts[0][0] + parts[1][0]
    dk, dv = (torch.cat([part[i] for part in parts]) for i in (1, 2))
    for got, exact in ((dq, whole.dq), (dk, whole.dk), (dv, whole.dv)):
        assert (got - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (192, 192)], ids=str)
def test_a_stage_adds_to_the_gradients_of_keys_of_the_stage_before(head_dims):
    inputs, arguments = random_case(200, 300, (2, 1), head_dims, torch.bfloat16)
    slices, dout = ((0, 150, 0, 300, None, 90), (170, 200, 61, 220, None, None)), arguments["dout"]
    whole = exact_attention(*inputs, dense_mask(200, 300, slices), dout=dout)
    lse, delta = whole.lse.float(), (whole.out * dout.double()).sum(dim=-1).float()
    mask, options = (
        masks.from_slices(200, 300, slices),
        resolve_options(*inputs, backend="emulated"),
    )
    (q, k, v), held, dqs = inputs, None, []
    for a, b in ((0, 131), (131, 200)):
        rows = (dout[a:b], q[a:b], k, v, lse[a:b], delta[a:b], mask.crop(q=(a, b)), options)
        dq, *held = attend_backward_onto_(None, held, *rows)
        dqs.append(dq * dq_factor(options))
    for got, exact in zip((torch.cat(dqs), *held), (whole.dq, whole.dk, whole.dv), strict=True):
        assert got.dtype == torch.float32
        assert (got - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize(
    ("head_dims", "deterministic"),
    [((64, 64), False), ((64, 64), True), ((192, 128), False), ((192, 128), True)],
)
def test_rows_outside_every_slice_may_hold_nan(head_dims, deterministic):
    slices = ((10, 90, 20, 147, None, None), (100, 160, 150, 180, None, 40))
    mask = masks.from_slices(170, 190, slices)
    inputs, arguments = random_case(170, 190, (2, 2), head_dims, torch.bfloat16)
    options = {"deterministic": deterministic}
    expected = _gradients(inputs, mask, arguments, **options)
    q, k, v = (x.clone() for x in inputs)
    q[:10] = q[90:100] = q[160:] = torch.nan
    for x in (k, v):
        x[:20] = x[147:150] = x[180:] = torch.nan
    got = _gradients((q, k, v), mask, arguments, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_dout_of_rows_without_keys_may_hold_nan(head_dim, deterministic, has_sink):
    slices = ((10, 90, 20, 147, None, None), (100, 160, 150, 180, None, 40))
    mask = masks.from_slices(170, 190, slices)
    inputs, _ = random_case(170, 190, (2, 2), (head_dim, head_dim), torch.bfloat16)
    sink = torch.zeros(2) if has_sink else None
    found = []
    for outside in (0.0, torch.nan):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out, _ = attend(*leaves, mask, sink=sink, backend="emulated", deterministic=deterministic)
        dout = torch.ones_like(out)
        dout[:10] = dout[90:100] = dout[160:] = outside
        found.append(torch.autograd.grad(out, leaves, dout))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_do_not_depend_on_the_default_dtype(deterministic):
    mask = masks.sliding_window(150, 40)
    inputs, arguments = random_case(150, 150, (2, 1), (64, 64), torch.bfloat16)
    found = []
    for default in (torch.float32, torch.float64):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        torch.set_default_dtype(default)
        try:
            with running(Settings(host_threads=1)):
                result = attend(*leaves, mask, backend="emulated", deterministic=deterministic)
                weights = arguments["dout"].to(result[0].dtype), arguments["dlse"].float()
                found.append((*result, *torch.autograd.grad(result, leaves, weights)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_call_without_queries_has_gradients_of_zero():
    leaves = [torch.ones(n, 2, 64, dtype=torch.float16, requires_grad=True) for n in (0, 5, 5)]
    out, lse = attend(*leaves, masks.from_slices(0, 5, []), backend="emulated")
    made = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert (out.shape, lse.shape) == ((0, 2, 64), (0, 2))
    assert all(torch.equal(x, torch.zeros_like(leaf)) for x, leaf in zip(made, leaves, strict=True))


class _GradientOnItsWay(torch.autograd.Function):
    """As it is; the gradient comes from a collective that is under way."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return AsyncCollectiveTensor(dx.clone())


def test_results_of_collectives_that_are_under_way_are_read_where_they_lie():
    mask = masks.causal(40)
    inputs, arguments = random_case(40, 40, (2, 2), (64, 64), torch.float16, sink=True)
    inputs = (*inputs, arguments["sink"].float())
    found = []
    for leaves, gives in (
        ([x.detach().requires_grad_() for x in inputs], torch.clone),
        ([AsyncCollectiveTensor(x).requires_grad_() for x in inputs], _GradientOnItsWay.apply),
    ):
        with running(Settings(host_threads=1)):
            *qkv, sink = leaves
            out, lse = attend(*qkv, mask, sink=sink, backend="emulated")
            loss = gives(out).float().square().sum() + gives(lse).sin().sum()
            found.append((out, lse, *torch.autograd.grad(loss, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_sink_may_come_from_a_collective_that_is_under_way():
    inputs, _ = random_case(40, 40, (2, 2), (64, 64), torch.float16)
    sink = torch.tensor([0.5, 3.0])
    found = [
        attend(*inputs, masks.causal(40), sink=x, backend="emulated")
        for x in (sink, AsyncCollectiveTensor(sink))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
