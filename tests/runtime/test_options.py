"""Options of attention survive distribution: head counts, widths, dtypes, softcap, sink, scale."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEADS, local_rows, mask_cases, tensors
from tests.runtime.handmade import random_plan
from tests.runtime.test_dist_attn import check_against_dense

NAMES = ("documents", "window", "rows without keys")


@functools.cache
def mixed_plans(cp_size, heads, dims):
    """Returns one plan of ours and one random plan per mask; options of attention change neither."""
    config = mcp.CPConfig(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=dims[0], value_head_dim=dims[1]
    )
    masks = [mask_cases()[name] for name in NAMES]
    ours = [make_plan(mask, cp_size, config) for mask in masks]
    return ours + [random_plan(mask, cp_size, seed, config) for seed, mask in enumerate(masks)]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 3)], ids=["mha", "mqa", "gqa"])
def test_head_layouts_on_ranks_equal_dense_attention(cp_size, heads):
    plans = mixed_plans(cp_size, heads, (8, 8))
    inputs = [tensors(plan.num_tokens, heads=heads) for plan in plans]
    check_against_dense(cp_size, plans, inputs, {"backend": "cpu"})


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"softmax_scale": 0.5},
        {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"sink": torch.zeros(4), "softcap": 3.0},
    ],
    ids=["softcap", "scale", "learned sink", "off by one and softcap"],
)
def test_options_on_ranks_equal_dense_attention(cp_size, options):
    plans = mixed_plans(cp_size, (4, 2), (8, 8))
    inputs = [tensors(plan.num_tokens) for plan in plans]
    check_against_dense(cp_size, plans, inputs, {"backend": "reference", **options})


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_different_value_width_on_ranks_equals_dense_attention(cp_size, backend):
    plans = mixed_plans(cp_size, (4, 2), (12, 6))
    inputs = [tensors(plan.num_tokens, dims=(12, 6)) for plan in plans]
    check_against_dense(cp_size, plans, inputs, {"backend": backend})


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64], ids=["bf16", "fp16", "fp64"]
)
def test_the_error_in_every_dtype_keeps_one_budget_at_every_cp_size(cp_size, dtype):
    """The budget does not know the number of ranks: an error that grows with it fails at 8."""
    plans = mixed_plans(cp_size, (4, 2), (8, 8))
    inputs = [tensors(plan.num_tokens, dtype=dtype) for plan in plans]
    check_against_dense(cp_size, plans, inputs, {"backend": "cpu"})


@pytest.mark.parametrize(
    ("cp_size", "heads", "dims", "deterministic"),
    [
        (3, (2, 2), (64, 64), False),
        (2, (4, 2), (40, 33), True),
        (1, (2, 1), (64, 64), False),
        (1, (2, 1), (64, 64), True),
    ],
    ids=["built", "padded and odd", "one rank", "one rank, in order"],
)
def test_the_kernels_of_hopper_on_ranks_equal_dense_attention(cp_size, heads, dims, deterministic):
    """In the emulator: results of other ranks join by our kernels, gradients add up in them, over relays too."""
    plans = mixed_plans(cp_size, heads, dims)[2:4]  # one of ours, a random one
    inputs = [
        tensors(plan.num_tokens, heads=heads, dims=dims, dtype=torch.float16) for plan in plans
    ]
    sink = torch.linspace(-1.0, 1.0, heads[0])
    options = {"backend": "emulated", "deterministic": deterministic, "sink": sink}
    check_against_dense(cp_size, plans, inputs, options)


def sink_gradients_on_rank(rank, world_size, plan, given, sink):
    """Returns this rank's share for a `dout` that is nan where no keys are, padding included, and for one of 0."""
    q, k, v, dout, _ = (local_rows(x, plan, rank) for x in given)
    tokens = torch.from_numpy(plan.global_from_local[rank].copy())
    sees = torch.from_numpy(plan.mask.to_dense()).any(dim=1)
    keyless = torch.cat([~sees, torch.ones(len(tokens) * world_size, dtype=torch.bool)])[tokens]
    shares = []
    for value in (torch.nan, 0.0):
        leaf = sink.clone().requires_grad_()
        out, _ = mcp.cp_attention(q, k, v, plan, dist.group.WORLD, sink=leaf)
        out.backward(dout.masked_fill(keyless[:, None, None], value))
        shares.append(leaf.grad)
    return shares


@pytest.mark.parametrize("cp_size", [1, 3])
def test_a_gradient_of_nan_where_no_keys_are_does_not_reach_the_sink(cp_size):
    """All heads of the sink became nan; what a gradient of 0 gives there is compared with dense attention above."""
    sink = torch.linspace(-1.0, 1.0, HEADS)
    for name in ("rows without keys", "causal 37"):
        plan = make_plan(mask_cases()[name], cp_size, mcp.CPConfig(planner="zigzag"))
        given = tensors(plan.num_tokens)
        for nans, zeros in run_on_ranks(cp_size, sink_gradients_on_rank, plan, given, sink):
            assert torch.equal(nans, zeros)


def refusals_of_distributed_tensors(rank, world_size, plan):
    """Returns what calls say to a DTensor, and the result for its local part."""
    group, mesh = dist.group.WORLD, init_device_mesh("cpu", (world_size,))
    x = local_rows(tensors(plan.num_tokens)[0], plan, rank)
    of_all = DTensor.from_local(x, mesh)
    weight, sink = (DTensor.from_local(torch.ones(4, *shape), mesh) for shape in ((3,), ()))
    lengths = {"document_lengths": [plan.num_tokens]}
    calls = {
        "q": lambda: mcp.cp_attention(of_all, x, x, plan, group),
        "v": lambda: mcp.cp_attention(x, x, of_all, plan, group),
        "sink": lambda: mcp.cp_attention(x, x, x, plan, group, sink=sink),
        "k": lambda: mcp.cp_linear_attention(x, of_all, x, plan, group, **lengths),
        "weight": lambda: mcp.cp_causal_conv1d(x[:, :, 0], weight, plan, group, **lengths),
        "x_local": lambda: mcp.undispatch(of_all, plan, group),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} is DTensor, a tensor of all ranks"):
            call()
    rows = [of_all.to_local()] * 3
    return mcp.cp_attention(*rows, plan, group)[0], mcp.cp_attention(x, x, x, plan, group)[0]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_distributed_tensors_are_refused_by_name(cp_size):
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=HEADS, head_dim=8)
    plan = make_plan(mask_cases()["documents"], cp_size, config)
    for found, expected in run_on_ranks(cp_size, refusals_of_distributed_tensors, plan):
        assert torch.equal(found, expected)
