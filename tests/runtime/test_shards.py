"""Dispatch, undispatch, roll and positions against plain indexing."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.plan import make_plan
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows, mask_cases, restore
from tests.runtime.handmade import random_plan


def round_trip(rank, world_size, plan, x):
    local = mcp.dispatch(x, plan, dist.group.WORLD)
    return local, mcp.undispatch(local, plan, dist.group.WORLD)


@hypothesis.given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4])
)
@hypothesis.settings(max_examples=20)
def test_undispatch_undoes_dispatch_bit_for_bit(lengths, cp_size):
    hypothesis.assume(sum(lengths) > 0)
    plan = make_plan(masks.documents(lengths), cp_size)
    x = torch.randn(plan.num_tokens, 3, 2, dtype=torch.bfloat16)
    for rank, (local, whole) in enumerate(run_on_ranks(cp_size, round_trip, plan, x)):
        assert torch.equal(local, local_rows(x, plan, rank))
        assert torch.equal(whole, x)


def gradients_through_dispatch(rank, world_size, plan, x, weights):
    x = x.clone().requires_grad_()
    local = mcp.dispatch(x, plan, dist.group.WORLD, dim=1)
    (local * local_rows(weights, plan, rank).T).sum().backward()
    y = local_rows(x.detach().T, plan, rank).requires_grad_()
    (mcp.undispatch(y, plan, dist.group.WORLD) * weights).sum().backward()
    return x.grad, y.grad


@pytest.mark.parametrize("cp_size", [1, 3])
def test_gradients_pass_through_dispatch_and_undispatch(cp_size):
    plan = random_plan(mask_cases()["causal 37"], cp_size, seed=1)
    x, weights = torch.randn(2, 37), torch.randn(37, 2)
    for rank, (dx, dy) in enumerate(
        run_on_ranks(cp_size, gradients_through_dispatch, plan, x, weights)
    ):
        assert torch.equal(dx, weights.T)
        assert torch.equal(dy, local_rows(weights, plan, rank))


def second_derivatives(rank, world_size, plan, x):
    """Returns the gradient of a squared gradient through both, and without them."""
    found = []
    for there_and_back in (True, False):
        leaf = x.clone().requires_grad_()
        local = mcp.dispatch(leaf, plan, dist.group.WORLD) if there_and_back else leaf
        cubes = local**3
        if there_and_back:
            cubes = mcp.undispatch(cubes, plan, dist.group.WORLD)
        (first,) = torch.autograd.grad(cubes.square().sum(), leaf, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), leaf)
    return found


@pytest.mark.parametrize("cp_size", [1, 3])
def test_second_derivatives_pass_through_dispatch_and_undispatch(cp_size):
    plan = random_plan(mask_cases()["causal 37"], cp_size, seed=1)
    for through, plain in run_on_ranks(cp_size, second_derivatives, plan, torch.randn(37, 2)):
        assert torch.allclose(through, plain, rtol=1e-5)


def rolled(rank, world_size, plan, x, shifts):
    return mcp.roll(local_rows(x, plan, rank), plan, dist.group.WORLD, shifts=shifts)


def gradients_through_roll(rank, world_size, plan, x, shifts):
    """Returns the local gradient of a sum of cubes of rolled rows, and of that gradient's squares."""
    local = local_rows(x, plan, rank).requires_grad_()
    weights = torch.arange(1.0, len(local) + 1)[:, None] * (rank + 1)
    rolled = mcp.roll(local, plan, dist.group.WORLD, shifts=shifts)
    (first,) = torch.autograd.grad((weights * rolled**3).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad((weights * first**2).sum(), local)
    return weights, first.detach(), second


@pytest.mark.parametrize("shifts", [-1, 5])
@pytest.mark.parametrize("cp_size", [1, 3])
def test_gradients_roll_back(cp_size, shifts):
    plan = random_plan(mask_cases()["causal 37"], cp_size, seed=1)
    x = torch.randn(37, 2)
    parts = run_on_ranks(cp_size, gradients_through_roll, plan, x, shifts)
    weights, first, second = (restore(list(own), plan) for own in zip(*parts, strict=True))
    leaf = x.double().requires_grad_()
    rolled = torch.roll(leaf, shifts, 0)
    (expected,) = torch.autograd.grad((weights * rolled**3).sum(), leaf, create_graph=True)
    torch.testing.assert_close(first, expected.detach(), rtol=1e-5, atol=1e-5)
    (expected,) = torch.autograd.grad((weights * expected**2).sum(), leaf)
    torch.testing.assert_close(second, expected, rtol=1e-5, atol=1e-3)


def test_a_shift_without_a_sign_rolls_gradients_back():
    plan = random_plan(mask_cases()["causal 37"], 1, seed=1)
    leaf = torch.randn(37, requires_grad=True)
    weights = torch.arange(37.0)
    (weights * mcp.roll(leaf, plan, None, shifts=np.uint8(3))).sum().backward()
    assert torch.equal(leaf.grad, mcp.roll(weights, plan, None, shifts=-3))


@pytest.mark.parametrize("shifts", [-1, 1, 0, -5, 40])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_roll_follows_the_global_order(cp_size, shifts):
    x = torch.arange(37) * 10
    for plan in (
        make_plan(masks.documents([20, 17]), cp_size),
        random_plan(mask_cases()["causal 37"], cp_size, seed=2),
    ):
        parts = run_on_ranks(cp_size, rolled, plan, x, shifts)
        assert torch.equal(restore(parts, plan).long(), torch.roll(x, shifts))


@pytest.mark.parametrize("cp_size", [1, 2, 5])
def test_positions_are_global_or_restart_in_every_document(cp_size):
    lengths = [5, 0, 13, 1, 1, 17]
    plan = make_plan(masks.documents(lengths), cp_size)
    expected = torch.cat([torch.arange(length) for length in lengths])
    for rank in range(cp_size):
        ids = torch.from_numpy(plan.global_from_local[rank].copy())
        assert torch.equal(mcp.position_ids(plan, rank), ids)
        relative = mcp.position_ids(plan, rank, relative=True)
        real = ids < plan.num_tokens
        assert torch.equal(relative[real], expected[ids[real]])
        assert not relative[~real].any()
