"""Recomputation of a layer repeats neither attention nor its communication, and changes no bit."""

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from megatron_cp.runtime import dist_attn
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEAD_DIM, HEADS, KV_HEADS, mask_cases


def train_layer(rank, world_size, plan, recompute):
    """Returns (gradients, number of attention forwards) of two layers with projections."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(plan.tokens_per_rank, 16, generator=generator).requires_grad_()
    weights = torch.randn(
        2, 16, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=torch.Generator().manual_seed(9)
    ).requires_grad_()
    calls = []

    def counted(plain):
        return lambda *args: calls.append(1) or plain(*args)

    def layer(x, weight):
        q, k, v = (x @ weight).view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out, _ = mcp.cp_attention(q, k, v, plan, dist.group.WORLD)
        return x + out.mean(dim=1).repeat(1, 2)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("attend_forward", "attend_forward_onto_", "attend_forward_last"):
            patch.setattr(dist_attn, name, counted(getattr(dist_attn, name)))
        y = x
        for weight in weights:
            y = mcp.checkpoint(layer, y, weight) if recompute else layer(y, weight)
        y.square().sum().backward()
    return [x.grad, weights.grad], len(calls)


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_recomputed_layers_give_the_same_bits_without_a_second_attention(cp_size):
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plan = make_plan(mask_cases()["documents"], cp_size, config)
    plain = run_on_ranks(cp_size, train_layer, plan, False)
    recomputed = run_on_ranks(cp_size, train_layer, plan, True)
    for (grads, calls), (grads_again, calls_again) in zip(plain, recomputed, strict=True):
        assert calls_again == calls > 0
        assert all(map(torch.equal, grads, grads_again))


def nested_regions(rank, world_size, plan):
    """Returns the gradient of x through a checkpoint inside a checkpoint, and through neither."""
    gradients = []
    for wrap in (mcp.checkpoint, lambda function, *args: function(*args)):
        x = torch.randn(
            plan.tokens_per_rank, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(rank)
        ).requires_grad_()

        def inner(x):
            return mcp.cp_attention(x, x[:, :KV_HEADS], x[:, :KV_HEADS], plan, dist.group.WORLD)[0]

        def outer(x, inner=inner, wrap=wrap):
            return wrap(inner, x).tanh() + inner(2 * x)

        wrap(outer, x).square().sum().backward()
        gradients.append(x.grad)
    return gradients


def test_a_region_inside_a_region_replays_its_own_results():
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plan = make_plan(mask_cases()["documents"], 2, config)
    for nested, plain in run_on_ranks(2, nested_regions, plan):
        assert torch.equal(nested, plain)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_result_changed_in_place_after_its_first_forward_is_an_error(which):
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plan = make_plan(mask_cases()["causal 37"], 1, config)
    x = torch.randn(plan.tokens_per_rank, HEADS, HEAD_DIM, requires_grad=True)

    def layer(x):
        keys = x[:, :KV_HEADS]
        results = mcp.cp_attention(x, keys, keys, plan, None, return_max_logits=True)
        results[which].mul_(3)
        out, lse, max_logits = results
        return out * lse[..., None].sin() * max_logits[None, :, None]

    with pytest.raises(RuntimeError, match="changed in place"):
        mcp.checkpoint(layer, x).sum().backward()


def test_a_call_under_inference_mode_inside_of_a_region_is_made_again():
    """A teacher beside its student; its result may even be changed in place."""
    plan = make_plan(mask_cases()["documents"], 1)
    x = torch.randn(plan.num_tokens, HEADS, HEAD_DIM, requires_grad=True)

    def distance(x):
        with torch.inference_mode():
            taught = mcp.cp_attention(2 * x, x, x, plan, None)[0].mul_(3.0)
        return (mcp.cp_attention(x, x, x, plan, None)[0] * taught.clone()).sin()

    (expected,) = torch.autograd.grad(distance(x).sum(), x)
    kept = mcp.checkpoint(distance, x).sum()
    for _ in range(2):
        (found,) = torch.autograd.grad(kept, x, retain_graph=True)
        assert torch.equal(found, expected)


def test_a_graph_that_is_kept_is_recomputed_in_every_backward_pass():
    plan = make_plan(mask_cases()["documents"], 1)
    x = torch.randn(plan.num_tokens, HEADS, HEAD_DIM, requires_grad=True)
    plain = mcp.cp_attention(x, x, x, plan, None)[0].square().sum()
    kept = mcp.checkpoint(lambda x: mcp.cp_attention(x, x, x, plan, None)[0].square(), x).sum()
    (expected,) = torch.autograd.grad(plain, x)
    for _ in range(3):
        (found,) = torch.autograd.grad(kept, x, retain_graph=True)
        assert torch.equal(found, expected)


def call(function, *args):
    return function(*args)


def by_torch(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


REGIONS = {"none": call, "torch": by_torch, "ours": mcp.checkpoint}


def learning_layers(rank, world_size, plan, outer, inner):
    """Returns output and gradient of layers that learn by gradients of their own in the forward pass."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(plan.tokens_per_rank, 2, 8, generator=generator).requires_grad_()

    def attend(x):
        return mcp.cp_attention(x, x, x, plan, dist.group.WORLD)[0]

    def learned(x):
        with torch.enable_grad():
            for _ in range(2):
                x = x.detach().requires_grad_()
                loss = (x.sin() * x).square().sum() + attend(x).square().sum()
                x = x - 0.01 * torch.autograd.grad(loss, x)[0]
        return x.detach()

    def layer(x):
        hidden = attend(x)
        return attend(hidden + learned(hidden)) + attend(2 * x)

    def layers(x):
        hidden = attend(REGIONS[inner](layer, x)).cos()
        return hidden + learned(attend(REGIONS[inner](layer, x / 2)))

    out = REGIONS[outer](layers, x)
    out.square().sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize(("outer", "inner"), [("none", "ours"), ("ours", "none"), ("ours", "torch"),
                                              ("torch", "ours"), ("ours", "ours")])  # fmt: skip
@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_region_may_differentiate_in_its_forward_pass(cp_size, outer, inner):
    config = mcp.CPConfig(num_heads=2, num_kv_heads=2, head_dim=8)
    plan = make_plan(mask_cases()["documents"], cp_size, config)
    plain = run_on_ranks(cp_size, learning_layers, plan, "none", "none")
    found = run_on_ranks(cp_size, learning_layers, plan, outer, inner)
    for one, other in zip(found, plain, strict=True):
        assert all(map(torch.equal, one, other))
