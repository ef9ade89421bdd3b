"""Attention dropout on ranks: the pairs that one rank would keep, forward and backward, under every kind of plan."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from megatron_cp.runtime.checkpoint import AttentionTape
from tests.ranks import run_on_ranks
from tests.runtime import test_expansion as latent
from tests.runtime.cases import local_rows, mask_cases, restore, tensors
from tests.runtime.handmade import random_plan
from tests.runtime.test_dist_attn import check_against_dense, plans_for
from tests.runtime.test_head_split import DIMS, config_of

DROPOUT = {"dropout_p": 0.3, "dropout_seed": torch.tensor([2**40 + 77])}


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("planner", ["auto", "zigzag", "distflashattn"])
def test_ranks_keep_the_pairs_of_the_dense_oracle(planner, cp_size):
    plans, inputs = plans_for(planner, cp_size)
    check_against_dense(cp_size, plans, inputs, {"backend": "cpu", **DROPOUT})


@pytest.mark.parametrize("seed", range(3))
def test_relays_and_rows_kept_over_stages(seed):
    plan = random_plan(mask_cases()["documents"], 4, seed, config_of((4, 2)))
    inputs = [tensors(plan.num_tokens, heads=(4, 2), dims=DIMS)]
    sink = torch.linspace(-1, 1, 4)
    check_against_dense(4, [plan], inputs, {"backend": "reference", "sink": sink, **DROPOUT})


@pytest.mark.parametrize(("cp_size", "heads"), [(2, (4, 1)), (3, (6, 3)), (4, (4, 2))])
def test_split_heads_have_the_seeds_of_their_numbers(cp_size, heads):
    masks = [mask_cases()[name] for name in ("documents", "rows without keys", "one token")]
    plans = [make_plan(mask, cp_size, config_of(heads)) for mask in masks]
    assert all(plan.forward.head_split.degree == cp_size for plan in plans)
    inputs = [tensors(plan.num_tokens, heads=heads, dims=DIMS) for plan in plans]
    check_against_dense(cp_size, plans, inputs, {"backend": "cpu", **DROPOUT})


def latent_on_rank(rank, world_size, plan, given, travels_as_latent):
    q, rows, dout = (local_rows(x, plan, rank) for x in given)
    q.requires_grad_()
    rows.requires_grad_()
    up = latent.UpProjection(dtype=q.dtype)
    keys, options = (rows, None), {"expand": up, **DROPOUT}
    if not travels_as_latent:
        keys, options = up(rows), DROPOUT
    out, _ = mcp.cp_attention(q, *keys, plan, dist.group.WORLD, backend="reference", **options)
    return out.detach(), *torch.autograd.grad(out, (q, rows), dout)


@pytest.mark.parametrize("planner", ["auto", "ring"])
def test_latent_rows_bring_the_words_of_their_keys(planner):
    config = mcp.CPConfig(**{**vars(latent.CONFIG), "planner": planner})
    plan = make_plan(mask_cases()["documents"], 3, config)
    given = latent.inputs(plan.num_tokens)
    as_latent, as_keys = (
        run_on_ranks(3, latent_on_rank, plan, given, kind) for kind in (True, False)
    )
    for place in range(3):
        found, expected = ([one[place] for one in ranks] for ranks in (as_latent, as_keys))
        torch.testing.assert_close(restore(found, plan), restore(expected, plan))


def train_layer(rank, world_size, plan, recompute):
    """Gradients of x through a layer with dropout of its own behind attention's, seeds drawn."""
    torch.manual_seed(5)
    q, k, v, dout, _ = (local_rows(x, plan, rank) for x in tensors(plan.num_tokens))
    q.requires_grad_()

    def layer(q):
        out, _ = mcp.cp_attention(q, k, v, plan, dist.group.WORLD, dropout_p=0.4)
        return torch.nn.functional.dropout(out, 0.5)

    out = mcp.checkpoint(layer, q) if recompute else layer(q)
    out.backward(dout)
    return out.detach(), q.grad


@pytest.mark.parametrize("cp_size", [1, 3])
def test_a_recomputed_layer_draws_what_it_drew(cp_size):
    plan = make_plan(mask_cases()["documents"], cp_size, config_of((4, 2), "auto"))
    plain, again = (run_on_ranks(cp_size, train_layer, plan, kind) for kind in (False, True))
    for expected, found in zip(plain, again, strict=True):
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("num_heads", [1, 4])
def test_seeds_that_change_after_the_call_are_not_those_of_its_backward(num_heads):
    plan = make_plan(mask_cases()["documents"], 1, config_of((num_heads, 1), "auto"))
    q, k, v, dout, _ = tensors(plan.num_tokens, heads=(num_heads, 1))
    gradients = []
    for step in (0, 1):
        leaf, seeds = q.clone().requires_grad_(), torch.arange(num_heads)
        out, _ = mcp.cp_attention(leaf, k, v, plan, None, dropout_p=0.4, dropout_seed=seeds)
        seeds += step
        gradients += torch.autograd.grad(out, leaf, dout)
    assert torch.equal(*gradients)


def test_a_recomputation_with_other_random_states_drops_what_the_kept_result_dropped():
    """As under Megatron, whose backward is that of the second forward."""
    plan = make_plan(mask_cases()["documents"], 1, config_of((4, 2), "auto"))
    q, k, v, dout, _ = tensors(plan.num_tokens)
    tape, gradients = AttentionTape(), []
    for context in (tape.recording(), tape.replaying()):
        leaf = q.clone().requires_grad_()
        with context:
            out, _ = mcp.cp_attention(leaf, k, v, plan, None, dropout_p=0.4)
        gradients += torch.autograd.grad(out, leaf, dout)
    assert torch.equal(*gradients)


def drifted_generators(rank, world_size, plan):
    """The directional derivative along q by finite differences and by the backward pass, seeds unlike on each rank."""
    q, k, v, dout, _ = (local_rows(x, plan, rank) for x in tensors(plan.num_tokens, torch.float64))
    step = torch.randn(q.shape, generator=torch.Generator().manual_seed(rank), dtype=q.dtype)

    def loss(q, k):
        torch.manual_seed(rank)
        out, _ = mcp.cp_attention(q, k, v, plan, dist.group.WORLD, dropout_p=0.4)
        return (out * dout).sum()

    found = []
    for moved in (0, 1):
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        loss(*leaves).backward()
        size = 1e-6
        along = step[:, : leaves[moved].shape[1]]
        ends = []
        for sign in (1, -1):
            at = [x.detach().clone() for x in leaves]
            at[moved] += sign * size * along
            ends.append(loss(*at))
        numbers = torch.stack(
            [(ends[0] - ends[1]) / (2 * size), (leaves[moved].grad * along).sum()]
        )
        dist.all_reduce(numbers)
        found.append(numbers)
    return found


def test_ranks_whose_generators_drifted_apart_drop_alike_forward_and_backward():
    plan = make_plan(mask_cases()["documents"], 3, config_of((4, 2), "auto"))
    for by_steps, by_gradient in run_on_ranks(3, drifted_generators, plan)[0]:
        torch.testing.assert_close(by_gradient, by_steps, rtol=1e-6, atol=1e-8)


def test_a_seed_of_another_kind_is_refused_before_anything_travels():
    plan = make_plan(mask_cases()["documents"], 1, config_of((4, 2), "auto"))
    q, k, v, *_ = tensors(plan.num_tokens)
    with (
        mock.patch("megatron_cp.api.open_session", side_effect=AssertionError("too late")),
        pytest.raises(ValueError, match=r"dropout_seed .* must be int64"),
    ):
        seed = torch.tensor([1.0])
        mcp.cp_attention(q, k, v, plan, None, dropout_p=0.1, dropout_seed=seed)
