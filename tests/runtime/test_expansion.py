"""Latent rows that become keys and values where they are attended to: values and all gradients, weights' too."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEADS, KV_HEADS, local_rows, mask_cases, restore
from tests.runtime.handmade import random_plan

LATENT, HEAD_DIM, VALUE_DIM = 6, 8, 5
CONFIG = mcp.CPConfig(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    value_head_dim=VALUE_DIM,
    latent_dim=LATENT,
)


class UpProjection(torch.nn.Module):
    """A nonlinear map with a weight, a bias and a part of the latent row that all heads share, as rotated keys are."""

    def __init__(self, seed=0, dtype=torch.float64):
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        width = KV_HEADS * (HEAD_DIM - 2 + VALUE_DIM)
        weight = torch.randn(LATENT - 2, width, generator=draw, dtype=torch.float64)
        self.weight = torch.nn.Parameter(weight.to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(width, generator=draw).to(dtype))

    def forward(self, latent):
        made = torch.tanh(latent[:, :-2]) @ self.weight + self.bias
        made = made.view(len(latent), KV_HEADS, -1)
        shared = latent[:, None, -2:].expand(-1, KV_HEADS, -1)
        return torch.cat([made[..., : HEAD_DIM - 2], shared], dim=-1), made[..., HEAD_DIM - 2 :]


def inputs(num_tokens, dtype=torch.float64):
    draw = torch.Generator().manual_seed(num_tokens)
    shapes = (HEADS, HEAD_DIM), (LATENT,), (HEADS, VALUE_DIM)
    return [
        torch.randn(num_tokens, *s, generator=draw, dtype=torch.float64).to(dtype) for s in shapes
    ]


def dense(mask, q, latent, dout):
    """Attention over all rows at once, in plain torch: out and the gradients of q, latent, weight and bias."""
    q, latent, up = q.clone().requires_grad_(), latent.clone().requires_grad_(), UpProjection()
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in up(latent))
    logits = torch.einsum("qnh,knh->nqk", q, k) * HEAD_DIM**-0.5
    allowed = torch.from_numpy(mask.to_dense())
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    out = torch.einsum("nqk,knh->qnh", torch.nan_to_num(weights), v)
    out.backward(dout)
    return out.detach(), q.grad, latent.grad, up.weight.grad, up.bias.grad


def attend_on_rank(rank, world_size, plan, given, again):
    """Returns this rank's results; `again`: backward a second time, which must not add to what was found."""
    q, latent, dout = (local_rows(x, plan, rank) for x in given)
    q.requires_grad_()
    latent.requires_grad_()
    up = UpProjection(dtype=q.dtype)
    group = dist.group.WORLD
    out, _ = mcp.cp_attention(q, latent, None, plan, group, expand=up, backend="reference")
    wanted = (q, latent, up.weight, up.bias)
    if again:
        torch.autograd.grad(out, wanted, dout, retain_graph=True)
    return out.detach(), *torch.autograd.grad(out, wanted, dout)


def check(cp_size, plan, again=False):
    given = inputs(plan.num_tokens)
    expected = dense(plan.mask, *given)
    found = run_on_ranks(cp_size, attend_on_rank, plan, given, again)
    for place, name in enumerate(("out", "dq", "dlatent")):
        whole = restore([one[place] for one in found], plan)
        torch.testing.assert_close(
            whole, expected[place], rtol=1e-9, atol=1e-9, msg=f"{name}, {plan.planner}"
        )
    for place, name in ((3, "dweight"), (4, "dbias")):
        total = sum(one[place] for one in found)
        torch.testing.assert_close(
            total, expected[place], rtol=1e-9, atol=1e-9, msg=f"{name}, {plan.planner}"
        )


NAMES = ("causal 37", "documents", "window", "one long, many short", "one token")


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_latent_rows_give_the_attention_and_the_gradients_of_the_keys_made_of_them(cp_size):
    for name, planner in itertools.product(NAMES, ("auto", "zigzag", "ring", "distflashattn")):
        config = mcp.CPConfig(**{**vars(CONFIG), "planner": planner})
        check(cp_size, make_plan(mask_cases()[name], cp_size, config))


@pytest.mark.parametrize("seed", range(4))
def test_relays_and_rows_kept_over_stages(seed):
    check(4, random_plan(mask_cases()["documents"], 4, seed, CONFIG), again=True)


def attend_under_autocast(rank, world_size, plan, given):
    """The gradients of latent rows and weights through `expand` and through keys made before the call."""
    q, latent, dout = given
    group, q, dout = dist.group.WORLD, q.bfloat16(), dout.bfloat16()
    weight = UpProjection(dtype=torch.float32).weight
    precisions, found = set(), []

    def expand(rows):
        precisions.add((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        made = torch.nn.functional.linear(rows[:, :-2], weight.t()).view(len(rows), KV_HEADS, -1)
        return made[..., :VALUE_DIM].repeat(1, 1, 2)[..., :HEAD_DIM], made[..., -VALUE_DIM:]

    for travels_as_latent in (True, False):
        leaf = latent.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if travels_as_latent:
                out, _ = mcp.cp_attention(q, leaf, None, plan, group, expand=expand)
            else:
                out, _ = mcp.cp_attention(q, *expand(leaf), plan, group)
        found.append(torch.autograd.grad(out, (leaf, weight), dout))
    return precisions, found


def test_backward_makes_keys_again_under_the_autocast_of_the_call():
    plan = make_plan(mask_cases()["causal 37"], 1, CONFIG)
    given = inputs(37, torch.float32)
    ((precisions, found),) = run_on_ranks(1, attend_under_autocast, plan, given)
    assert precisions == {(True, torch.bfloat16)}
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-2, atol=1e-2 * expected.abs().max())


def attend_with_a_lambda(rank, world_size, plan, given):
    q, latent, dout = (local_rows(x, plan, rank) for x in given)
    up = UpProjection()
    up.bias.requires_grad_(False)
    out, _ = mcp.cp_attention(q, latent, None, plan, dist.group.WORLD, expand=lambda x: up(x))
    out.backward(dout)
    return up.weight.grad


def recompute_on_rank(rank, world_size, plan, given):
    q, latent, dout = (local_rows(x, plan, rank) for x in given)
    up = UpProjection()

    def layer(x):
        return mcp.cp_attention(q, x, None, plan, dist.group.WORLD, expand=up)[0]

    mcp.checkpoint(layer, latent.requires_grad_()).backward(dout)
    return up.weight.grad


@pytest.mark.parametrize(
    ("name", "on_rank"), [("causal 37", attend_with_a_lambda), ("documents", recompute_on_rank)]
)
def test_a_function_needs_no_module_and_a_recomputed_layer_gives_the_same(name, on_rank):
    """Half of the rows' gradients would be missing if the weight were not found in the graph."""
    plan, given = make_plan(mask_cases()[name], 2, CONFIG), inputs(37)
    found = run_on_ranks(2, on_rank, plan, given)
    expected = dense(plan.mask, *given)
    torch.testing.assert_close(sum(found), expected[3], rtol=1e-9, atol=1e-9)


def test_latent_rows_are_freed_when_nothing_wants_a_gradient_of_them_any_more():
    """An operation that saves its result (a norm, tanh) held them for ever, in evaluation too: call after call."""
    plan = make_plan(mask_cases()["documents"], 1, CONFIG)
    q, latent, dout = inputs(plan.num_tokens)
    up = UpProjection()
    for training in (True, False):
        rows = latent.clone().requires_grad_(training)
        kept = StorageWeakRef(rows.untyped_storage())
        with torch.set_grad_enabled(training):
            out, lse = mcp.cp_attention(q, rows, None, plan, None, expand=up)
        if training:
            out.backward(dout)
        del rows, out, lse
        assert kept.expired()
    expected = dense(plan.mask, q, latent, dout)
    torch.testing.assert_close(up.weight.grad, expected[3], rtol=1e-9, atol=1e-9)


def test_latent_rows_of_a_recomputed_layer_are_not_kept_for_backward():
    """They were: of every layer, beside what a checkpoint keeps."""
    plan = make_plan(mask_cases()["documents"], 1, CONFIG)
    q, latent, dout = inputs(plan.num_tokens)
    up, kept = UpProjection(), []

    def layer(x):
        rows = x.sin()
        kept.append(StorageWeakRef(rows.untyped_storage()))
        return mcp.cp_attention(q, rows, None, plan, None, expand=up)[0]

    out = mcp.checkpoint(layer, latent.clone().requires_grad_())
    assert kept[0].expired()
    out.backward(dout)
    expected = dense(plan.mask, q, latent.sin(), dout)
    torch.testing.assert_close(up.weight.grad, expected[3], rtol=1e-9, atol=1e-9)


def test_plans_count_latent_rows_and_never_exchange_heads():
    mask = mcp.mask.causal(4096)
    sizes = {"num_heads": 16, "num_kv_heads": 16, "head_dim": 192, "value_head_dim": 128}
    whole = make_plan(mask, 8, mcp.CPConfig(planner="zigzag", **sizes))
    latent = make_plan(mask, 8, mcp.CPConfig(planner="zigzag", latent_dim=576, **sizes))
    ratio = whole.stats("forward")["volume_mean"] / latent.stats("forward")["volume_mean"]
    assert ratio == pytest.approx(16 * (192 + 128) / 576)
    auto = make_plan(mask, 8, mcp.CPConfig(latent_dim=576, **sizes))
    assert {auto.forward.head_degree, auto.backward.head_degree} == {1}


def with_a_sum_of_weights(rank, world_size, plan):
    """Returns gradients of weights that are added up before the call, and inside of the function."""
    found = []
    for inside in (False, True):
        q, latent, _ = (local_rows(x, plan, rank) for x in inputs(plan.num_tokens))
        draw = torch.Generator().manual_seed(3)
        width = KV_HEADS * (HEAD_DIM + VALUE_DIM)
        shapes = ((LATENT, 2), (2, width))
        low, high = (
            torch.randn(*s, generator=draw, dtype=q.dtype).requires_grad_() for s in shapes
        )
        weight = low @ high

        def expand(rows, low=low, high=high, weight=None if inside else weight):
            made = rows @ (low @ high if weight is None else weight)
            return made.view(len(rows), KV_HEADS, -1).split([HEAD_DIM, VALUE_DIM], dim=-1)

        out, _ = mcp.cp_attention(q, latent, None, plan, dist.group.WORLD, expand=expand)
        found.append(torch.autograd.grad(out.square().sum(), (low, high)))
    return found


def test_weights_may_be_made_outside_of_the_function():
    """An adapter that is added to its weight once: own and received rows go back through the same sum."""
    plan = make_plan(mask_cases()["documents"], 2, CONFIG)
    for outside, inside in run_on_ranks(2, with_a_sum_of_weights, plan):
        for found, expected in zip(outside, inside, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def call(plan, **changes):
    q, latent, _ = inputs(plan.tokens_per_rank)
    options = {"expand": UpProjection(), "v": None} | changes
    return mcp.cp_attention(q, latent, options.pop("v"), plan, None, **options)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"v": torch.zeros(16, 2, 5)}, ValueError, "v is given beside expand"),
        ({"expand": None}, ValueError, "v is None; give values, or expand"),
        ({"expand": lambda x: x}, TypeError, r"must return \(keys, values\)"),
        ({"expand": lambda x: (x, x)}, ValueError, r"\[1, heads, dim\]"),
        (
            {"expand": lambda x: UpProjection()(torch.dropout(x, 0.5, True))},
            ValueError,
            "random numbers",
        ),
    ],
)
def test_what_cannot_be_expanded_is_refused(changes, error, words):
    plan = make_plan(mcp.mask.causal(16), 1, CONFIG)
    with pytest.raises(error, match=words):
        call(plan, **changes)


def test_a_plan_that_exchanges_heads_is_refused():
    config = mcp.CPConfig(planner="ulysses", num_heads=HEADS, num_kv_heads=HEADS)
    with pytest.raises(ValueError, match=r"exchanges heads.*latent_dim"):
        call(make_plan(mcp.mask.causal(16), 2, config))
