"""Dispatch, undispatch, roll and positions against plain indexing."""

from unittest import mock

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.errors import PlanMismatchError
from megatron_cp.plan import make_plan
from megatron_cp.runtime import shards
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


ALONE = {
    "padding in front": [-1, -2, -3, 0, 0, 0, 0, 0],
    "padding between": [0, 0, 0, 0, 0, -1, -2, -3, 1, 1, 1, 1],
    "single tokens": [0, 1, 2, 2, 3, 4, 4, 4],
}


@pytest.mark.parametrize("name", ALONE)
def test_positions_depend_on_the_pairs_and_not_on_how_they_are_cut_into_slices(name):
    """Tokens that see themselves alone share a slice with each other and with the first of a document."""
    documents = np.array(ALONE[name])
    sees = (documents[:, None] == documents) & np.tri(len(documents), dtype=bool)
    starts = np.r_[0, np.flatnonzero(np.diff(documents)) + 1]
    expected = (
        np.arange(len(documents))
        - starts[np.searchsorted(starts, np.arange(len(documents)), "right") - 1]
    )
    made = masks.documents(np.diff(np.r_[starts, len(documents)]))
    for mask in (made, made.merged(), masks.from_dense(sees)):
        np.testing.assert_array_equal(mask.to_dense(), sees)
        positions = mcp.position_ids(make_plan(mask, 1), 0, relative=True)
        assert positions.tolist() == expected.tolist()


def test_padding_rows_get_the_value_that_is_asked_for():
    plan = make_plan(masks.causal(7), 3)
    labels = torch.arange(7)
    for rank in range(3):
        real = plan.global_from_local[rank] < 7
        found = dispatched_alone(labels, plan, rank, padding_value=-100)
        assert found[torch.from_numpy(~real)].eq(-100).all()
        assert found[torch.from_numpy(real)].tolist() == plan.global_from_local[rank][real].tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int64", "bool"])
@pytest.mark.parametrize("value", [-100, 0, 1, 156, 300, 0.5, float("nan")])
def test_padding_is_the_number_that_is_asked_for_or_refused(dtype, value):
    """torch makes another number of one that a dtype cannot hold, where NumPy's comparison tells both apart."""
    x = torch.zeros(2, dtype=getattr(torch, dtype))
    with np.errstate(invalid="ignore"):
        held = bool(np.array(value).astype(dtype) == value)
    plan = make_plan(masks.causal(2), 3)
    if held:
        assert dispatched_alone(x, plan, 2, padding_value=value).tolist() == [value] * 2
    else:
        with pytest.raises(ValueError, match=rf"padding_value={value}.*torch\.{dtype}"):
            dispatched_alone(x, plan, 2, padding_value=value)


def dispatched_alone(x, plan, rank, **options):
    """Returns what a rank gets, without the others: their plans need no comparing here."""
    with mock.patch.multiple(
        shards, open_session=lambda *_: None, dist=mock.Mock(get_rank=lambda _: rank)
    ):
        return mcp.dispatch(x, plan, mock.Mock(), **options)


DTYPES = (torch.bool, torch.int8, torch.int16, torch.int64, torch.bfloat16, torch.float64)
DTYPES += (torch.complex64, torch.float8_e4m3fn)


def through_bytes(rank, world_size, plan):
    found = []
    for dtype in DTYPES:
        for shape in ((), (1,), (3, 1, 2), (0,)):
            x = torch.arange(37).view(-1, *[1] * len(shape)).expand(37, *shape).to(dtype)
            local = mcp.dispatch(x, plan, dist.group.WORLD)
            rolled = mcp.undispatch(mcp.roll(local, plan, dist.group.WORLD), plan, dist.group.WORLD)
            whole = mcp.undispatch(local, plan, dist.group.WORLD)
            one_on = x[torch.arange(1, 38) % 37]
            found += [(x.tolist(), whole.tolist()), (one_on.tolist(), rolled.tolist())]
    return found


def test_rows_of_every_dtype_and_shape_travel():
    plan = make_plan(masks.documents([20, 17]), 2)
    for found in run_on_ranks(2, through_bytes, plan):
        for expected, actual in found:
            assert actual == expected


def with_signs_put_off(rank, world_size, plan, real, imaginary):
    """Returns what comes back of views whose sign torch puts off, forward and rolled, and what they are."""
    group, found = dist.group.WORLD, []
    x = torch.complex(*(local_rows(part, plan, rank) for part in (real, imaginary)))
    conjugate, negated = x.conj(), torch._neg_view(x)
    for view, parts in ((conjugate, (real, -imaginary)), (negated, (-real, -imaginary))):
        expected = torch.complex(*parts)
        found.append((mcp.undispatch(view, plan, group), expected))
        rolled = mcp.undispatch(mcp.roll(view, plan, group), plan, group)
        found.append((rolled, expected[torch.arange(1, 38) % 37]))
    return [(a.tolist(), b.tolist()) for a, b in found]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_lazily_conjugated_and_negated_rows_travel_as_the_numbers_they_are(cp_size):
    plan = make_plan(masks.documents([20, 17]), cp_size)
    real = torch.arange(1.0, 38)
    for found in run_on_ranks(cp_size, with_signs_put_off, plan, real, real + 0.5):
        for actual, expected in found:
            assert actual == expected


def calls_that_differ(rank, world_size, plan, name):
    group, rows = dist.group.WORLD, plan.tokens_per_rank
    x = torch.ones(rows, 4)
    whole = torch.ones(plan.num_tokens, 4)
    try:
        if name == "undispatch of another dtype":
            mcp.undispatch(x.int() if rank else x, plan, group)
        elif name == "undispatch of another width":
            mcp.undispatch(x[:, :2] if rank else x, plan, group)
        elif name == "roll by another shift":
            mcp.roll(x, plan, group, shifts=-1 - rank)
        elif name == "roll of another dtype":
            mcp.roll(x.int() if rank else x, plan, group)
        else:
            mcp.dispatch(whole.requires_grad_(bool(rank)), plan, group)
    except PlanMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "name",
    [
        "undispatch of another dtype",
        "undispatch of another width",
        "roll by another shift",
        "roll of another dtype",
        "dispatch that only one wants a gradient of",
    ],
)
def test_calls_that_differ_between_ranks_are_an_error_on_all_of_them(name):
    plan = make_plan(masks.documents([20, 17]), 2)
    for told in run_on_ranks(2, calls_that_differ, plan, name):
        assert "make another call than the rest" in told
