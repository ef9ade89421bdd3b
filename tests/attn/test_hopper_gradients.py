"""Gradients and operators of the Hopper backend without a GPU: a host 'device' follows the parameter blocks."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp import mask as masks
from megatron_cp.attn import attend, merge_partials
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.hopper import gradients, row_stats
from megatron_cp.attn.hopper.device_lists import BackwardList, gradient_work_of, work_of
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.options import AttendOptions
from tests.attn.on_host import draw, host_device
from tests.closeness import assert_within_budget
from tests.oracles.attention import exact_attention, plain_attention
from tests.strategies import attention_masks

OPTIONS = AttendOptions(0.25, backend="hopper")


@pytest.fixture
def device():
    with host_device() as host:
        yield host


def _leaves(tensors):
    return [x.detach().requires_grad_() for x in tensors]


def _assert_gradients(made, tensors, dense, dout, dlse=None, names=("dq", "dk", "dv"), **options):
    exact = exact_attention(*tensors, dense, dout=dout, dlse=dlse, **options)
    rounded_dlse = None if dlse is None else dlse.to(dout.dtype)
    plain = plain_attention(*tensors, dense, dout=dout, dlse=rounded_dlse, **options)
    for name, gradient in zip(names, made, strict=True):
        wanted = getattr(exact, name)
        # `out`, rounded to 16 bits, enters delta: a gradient that cancels keeps the size of its terms
        size = max(1.0, wanted.abs().max().item())
        assert_within_budget(gradient, getattr(plain, name), wanted, name, size=size)


@settings(max_examples=20)
@given(
    attention_masks(max_queries=20, max_keys=20),
    st.sampled_from([(4, 2), (3, 1)]),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
    st.booleans(),
)
def test_gradients_of_the_public_call(case, heads, softcap, deterministic, lse_counts):
    mask, dense = case
    dim = 128 if softcap else 64
    tensors = draw(mask.num_queries, mask.num_keys, heads, (dim, dim), torch.float16)
    dout = torch.randn(mask.num_queries, heads[0], dim).half()
    dlse = torch.randn(mask.num_queries, heads[0]) if lse_counts else None
    leaves = _leaves(tensors)
    with host_device():
        out, lse = attend(
            *leaves,
            mask,
            backend="hopper",
            softmax_scale=0.25,
            softcap=softcap,
            deterministic=deterministic,
        )
        results, weights = ((out, lse), (dout, dlse)) if lse_counts else ((out,), (dout,))
        made = torch.autograd.grad(results, leaves, weights)
    assert {gradient.dtype for gradient in made} == {torch.float16}
    options = {"softmax_scale": 0.25, "softcap": softcap}
    dlse = dlse if dlse is not None else torch.zeros(mask.num_queries, heads[0])
    _assert_gradients(made, tensors, dense, dout, dlse, **options)


def test_gradient_of_a_sink_and_of_rows_without_keys(device):
    mask = masks.from_slices(6, 5, [(0, 3, 0, 5, None, 0), (4, 6, 2, 5, None, None)])
    tensors = draw(6, 5, dtype=torch.float16)
    sink = torch.linspace(-1, 1, 4).double().requires_grad_()
    leaves = _leaves(tensors)
    out, lse = attend(*leaves, mask, backend="hopper", sink=sink)
    dout, dlse = torch.randn(6, 4, 64).half(), torch.randn(6, 4)
    made = torch.autograd.grad((out, lse), (*leaves, sink), (dout, dlse))
    assert made[3].dtype == torch.float64
    assert (made[0][3] == 0).all()
    names = ("dq", "dk", "dv", "dsink")
    dense = mask.to_dense()
    exact = exact_attention(*tensors, dense, dout=dout, dlse=dlse, sink=sink.detach())
    for name, gradient in zip(names, made, strict=True):
        assert torch.allclose(gradient.double(), getattr(exact, name), rtol=2e-2, atol=2e-2), name


class Listening(TorchDispatchMode):
    """Sees operators, so that `attend` shows its own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("sees", [nullcontext, Listening], ids=["plain", "operators"])
@pytest.mark.parametrize("place", ["q", "k", "v", "sink"])
def test_a_second_derivative_is_refused(device, place, sees):
    tensors = dict(zip("qkv", draw(9, 9, dtype=torch.float16), strict=True))
    tensors["sink"] = torch.randn(4)
    leaf = tensors[place].requires_grad_()
    with sees():
        out, _ = attend(**tensors, mask=masks.causal(9), backend="hopper")
        output = out.float().square().sum() + leaf.float().pow(3).sum()
        (first,) = torch.autograd.grad(output, leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of attend has no gradient itself"):
        torch.autograd.grad(first.float().square().sum(), leaf)


def test_raw_gradients_of_parts_add_up_to_those_of_the_whole(device):
    mask, dense = masks.sliding_window(20, 7), masks.sliding_window(20, 7).to_dense()
    q, k, v = draw(20, 20, dtype=torch.float16)
    parts = [mask.crop(k=span) for span in ((0, 9), (9, 20))]
    halves = [(k[:9], v[:9]), (k[9:], v[9:])]
    first, second = (
        hopper.forward(q, *half, part, OPTIONS) for half, part in zip(halves, parts, strict=True)
    )
    out, lse = merge_partials(*first, *second)
    dout = torch.randn(20, 4, 64).half()
    delta = (dout.float() * out).sum(-1)
    one, other = (
        hopper.backward(dout, q, *half, lse, delta, part, OPTIONS)
        for half, part in zip(halves, parts, strict=True)
    )
    made = (one[0] + other[0], torch.cat([one[1], other[1]]), torch.cat([one[2], other[2]]))
    assert {gradient.dtype for gradient in made} == {torch.float32}
    _assert_gradients(made, (q, k, v), dense, dout, softmax_scale=0.25)
    rounded = hopper.backward(dout, q, k, v, lse, delta, mask, OPTIONS, rounded=True)
    assert {gradient.dtype for gradient in rounded} == {torch.float16}
    _assert_gradients(rounded, (q, k, v), dense, dout, softmax_scale=0.25)


def test_gradient_that_is_expanded_or_of_another_type_is_made_right(device):
    mask = masks.causal(9)
    tensors = draw(9, 9, dtype=torch.float16)
    leaves = _leaves(tensors)
    out, _ = attend(*leaves, mask, backend="hopper", softmax_scale=0.25)
    made = torch.autograd.grad(out.sum(), leaves)  # a gradient with strides of zero
    ones = torch.ones(9, 4, 64)
    _assert_gradients(made, tensors, mask.to_dense(), ones.half(), softmax_scale=0.25)
    out, lse = hopper.forward(*tensors, mask, OPTIONS)
    delta = (ones * out).sum(-1)
    made = hopper.backward(ones.expand(9, 4, 64), *tensors, lse, delta, mask, OPTIONS)
    _assert_gradients(made, tensors, mask.to_dense(), ones.half(), softmax_scale=0.25)


@pytest.mark.parametrize("is_apart", [False, True])
def test_row_statistics_of_rows_between_others_are_those_of_their_rows(device, is_apart):
    """As they lie in a message: lse and dlse of 3 heads, with gaps between rows."""
    out, dout = torch.randn(2, 5, 3, 64).half().unbind()
    lse, dlse = torch.randn(2, 5, 7)[..., :3].unbind()
    dlse = dlse.clone() if is_apart else dlse
    stats = row_stats.preprocess(out, dout, lse, dlse)
    delta = (out.double() * dout.double()).sum(-1) - dlse
    given = row_stats.row_stats(dout, lse, delta.float())
    for found in (stats, given):
        assert torch.allclose(found.delta_of_rows(5).double(), delta, atol=1e-5)
        lse_2 = found.lse_2[0, :, :5].t()
        assert torch.allclose(lse_2.double(), lse.double() / math.log(2), atol=1e-5)


def test_a_stage_of_the_backward_pass_asks_torch_for_few_things(device):
    """Each is a call of the dispatcher, and most are a launch of their own: the host's time of a short stage."""
    tensors = draw(20, 20, dtype=torch.float16)
    stats = torch.zeros(20, 4), torch.zeros(20, 4)
    given = (torch.randn(20, 4, 64).half(), *tensors, *stats, masks.causal(20), OPTIONS)
    held = hopper.backward_onto_(None, None, *given)
    with Listening() as listening:
        hopper.backward_onto_(held[0], held[1:], *given)
    asked = [one for one in listening.seen if "fill_" not in one]  # tests fill torch.empty with NaN
    assert len(asked) <= 5, asked


def test_nothing_is_launched_for_a_mask_without_pairs(device):
    tensors = draw(4, 5)
    mask = masks.from_slices(4, 5, [])
    zeros = torch.zeros(4, 4)
    made = hopper.backward(tensors[0], *tensors, zeros, zeros, mask, OPTIONS)
    assert all((gradient == 0).all() for gradient in made)
    assert device.launches == []


@pytest.mark.parametrize(
    ("dim", "deterministic", "apart"),
    [
        (128, False, False),
        (128, True, True),
        (192, False, False),
        (192, True, True),
        (256, False, False),
        (256, True, True),
    ],
)
def test_dq_has_a_kernel_of_its_own_in_the_deterministic_mode(device, dim, deterministic, apart):
    tensors = draw(300, 300, (2, 1), (dim, dim), torch.float16)
    options = AttendOptions(0.25, 0.0, "hopper", deterministic)
    lists = gradient_work_of(tensors[0], tensors[2], masks.causal(300), options)
    assert (lists.dq_tiles > 0) == (lists.dq_segs > 0) == apart
    leaves = _leaves(tensors)
    out, _ = attend(*leaves, masks.causal(300), backend="hopper", deterministic=deterministic)
    out.sum().backward()
    entries = [name for name, _ in device.entries]
    assert ("mcp_attention_backward_dq" in entries) == apart
    assert ("mcp_attention_backward_postprocess" in entries) != apart


def test_parts_of_kernels_that_share_no_sum_add_to_the_gradients_that_are_held(device):
    mask, (q, k, v) = masks.causal(40), draw(40, 40, (2, 1), (256, 256), torch.float16)
    options = AttendOptions(0.25, 0.0, "hopper", deterministic=True)
    out, lse = hopper.forward(q, k, v, mask, options)
    dout = torch.randn(40, 2, 256).half()
    given = (dout, q, k, v, lse, (dout.float() * out).sum(-1), mask, options)
    once = hopper.backward_onto_(None, None, *given)
    held = [x.clone() for x in once]
    twice = hopper.backward_onto_(held[0], tuple(held[1:]), *given)
    for x, y, z in zip(once, twice, held, strict=True):
        assert torch.allclose(y, 2 * x) and x.abs().max() > 0
        assert y is z
    alone = hopper.backward_onto_(None, None, *given)
    assert all(map(torch.equal, alone, once))


@pytest.mark.parametrize(
    ("num_queries", "heads_per_item", "items"),
    [(1 << 10, 8, 8), (1 << 14, 8, 1), (1 << 14, 1, 4)],
)
def test_items_side_by_side_are_those_whose_queries_fit_the_cache(
    num_queries, heads_per_item, items
):
    # 2^10 queries are 512 KB per query head, 4 MB per kv head.
    item_bytes = heads_per_item * num_queries * (128 + 128) * 2
    assert gradients._items_per_section(item_bytes, 64 // heads_per_item, 32 << 20) == items


def _call(num_tokens, heads, visits, most_visits, *, in_order=False):
    q, k = (torch.empty(num_tokens, n, 128, device="meta") for n in heads)
    num_tiles = -(-num_tokens // 128)
    lists = BackwardList(torch.empty(0), *[num_tiles] * 3, visits, most_visits, 0, 0, 0, in_order)
    return gradients.BackwardCall(q, k, k, q, None, lists, Scores(1.0))


@pytest.mark.parametrize(
    ("heads", "num_tokens", "reach", "expected"),
    [
        ((64, 8), 32768, 32768, 1),  # long: CTAs would drift apart between the heads of a group
        ((8, 1), 8192, 8192, 1),  # 64 tiles of one kv head would leave half of 132 CTAs idle
        ((64, 8), 32768, 1024, 8),  # a window: short items, of one length
        ((8, 8), 32768, 32768, 1),  # no groups
    ],
)
def test_query_heads_of_a_group_are_worked_on_side_by_side_where_that_ends_sooner(
    heads, num_tokens, reach, expected
):
    most = reach // 64
    visits = sum(min(most, (num_tokens - first) // 64) for first in range(0, num_tokens, 128))
    assert _call(num_tokens, heads, visits, most).heads_per_item(132) == expected
    group = heads[0] // heads[1]
    assert _call(num_tokens, heads, visits, most, in_order=True).heads_per_item(132) == group


def test_sums_with_an_order_are_of_query_heads_apart_where_that_ends_sooner_and_memory_allows():
    visits = sum(128 - first // 64 for first in range(0, 8192, 128))
    assert _call(8192, (8, 1), visits, 128).of_heads_apart(132) is None
    apart = _call(8192, (8, 1), visits, 128, in_order=True).of_heads_apart(132)
    assert apart.k.shape == (8192, 8, 128) and apart.heads_per_item(132) == 1
    long = sum(512 - first // 64 for first in range(0, 32768, 128))
    assert _call(32768, (64, 8), long, 512, in_order=True).of_heads_apart(132) is None


# ---------------------------------------------------------------------- the operators


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("sink", [None, torch.zeros(4)])
def test_forward_operator_keeps_the_rules_of_operators(device, needs_grad, sink):
    q, k, v = draw(9, 9, dtype=torch.float16)
    mask = masks.causal(9)
    grad_data, *counts = gradient_work_of(q, v, mask, OPTIONS)
    arguments = (
        q,
        k,
        v,
        *work_of(q, v, mask, OPTIONS)[:3],
        sink,
        0.125,
        0.0,
        grad_data,
        counts,
    )
    if needs_grad:
        arguments = (*_leaves((q, k, v)), *arguments[3:])
    torch.library.opcheck(torch.ops.megatron_cp.attention_forward.default, arguments)


@pytest.mark.parametrize("mask", [masks.causal(9), masks.from_slices(9, 9, [])], ids=str)
def test_backward_operator_keeps_the_rules_of_operators(device, mask):
    q, k, v = draw(9, 9, dtype=torch.float16)
    q = (
        q.transpose(0, 1).contiguous().transpose(0, 1)
    )  # gradients are contiguous whatever the inputs are
    data, *counts = gradient_work_of(q, v, mask, OPTIONS)
    out, lse = attend(q, k, v, mask, backend="hopper")
    arguments = (out, torch.zeros_like(lse), q, k, v, out, lse, data, counts, 0.125, 0.0)
    operator = torch.ops.megatron_cp.attention_backward.default
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("weighted", ["out", "lse", "both"])
def test_operators_give_the_bits_of_the_plain_call(device, weighted):
    mask, tensors, sink = masks.documents([4, 9]), draw(13, 13), torch.linspace(-1, 1, 4)
    weights = {"out": torch.randn(13, 4, 64).bfloat16(), "lse": torch.randn(13, 4)}
    results = []
    for listening in (Listening(), None):
        leaves = _leaves((*tensors, sink))
        with listening or nullcontext():
            made = attend(
                *leaves[:3], mask, sink=leaves[3], backend="hopper", return_max_logits=True
            )
            named = dict(zip(("out", "lse"), made[:2], strict=True))
            chosen = [name for name in named if weighted in (name, "both")]
            of, by = ([pairs[name] for name in chosen] for pairs in (named, weights))
            gradients = torch.autograd.grad(of, leaves, by, allow_unused=True)
        results.append((*made, *gradients))
        if listening is not None:
            names = [name for name in listening.seen if "megatron_cp" in name]
            assert names == [
                f"megatron_cp.attention_{way}.default" for way in ("forward", "backward")
            ]
    assert not results[1][2].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it behind a graph break
def test_compiled_attention_gives_the_bits_of_the_plain_call(device):
    mask = masks.documents([4, 9])

    def layer(q, k, v):
        out, lse = attend(q * 1.0, k, v, mask, backend="hopper")
        return out * 2.0, lse

    tensors = draw(13, 13)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        plain, made = layer(*tensors), compiled(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))
    gradients = [
        torch.autograd.grad(function(*leaves)[0].sum(), leaves)
        for function in (layer, compiled)
        for leaves in [_leaves(tensors)]
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_operator_in_one_graph_gives_the_bits_of_the_plain_call(device):
    q, k, v = draw(13, 13)
    mask = masks.documents([4, 9])
    data, num_tiles, num_segs, _ = work_of(q, v, mask, OPTIONS)
    grad_data, *counts = gradient_work_of(q, v, mask, OPTIONS)

    def layer(q, k, v, data, grad_data):
        out, *_ = torch.ops.megatron_cp.attention_forward(
            q, k, v, data, num_tiles, num_segs, None, 0.125, 0.0, grad_data, counts
        )
        return out * 2.0

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for function in (layer, compiled):
        leaves = _leaves((q, k, v))
        out = function(*leaves, data, grad_data)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradient_of_an_operator_called_without_a_list_for_it_is_refused(device):
    q, k, v = draw(9, 9)
    lists = work_of(q, v, masks.causal(9), OPTIONS)[:3]
    operator = torch.ops.megatron_cp.attention_forward
    out, *_ = operator(q.requires_grad_(), k, v, *lists, None, 0.125, 0.0, None, [])
    with pytest.raises(RuntimeError, match=r"without grad_work, .*; call attend\(\)"):
        out.sum().backward()
