"""Options of attention survive distribution: head counts, widths, dtypes, softcap, sink, scale."""

import pytest
import torch

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from tests.runtime.cases import mask_cases, tensors
from tests.runtime.handmade import random_plan
from tests.runtime.test_dist_attn import check_against_dense

NAMES = ("documents", "window", "rows without keys")


def mixed_plans(cp_size, heads, dims):
    """Returns one plan of ours and one random plan per mask."""
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
        (3, (4, 4), (64, 64), False),
        (2, (4, 2), (40, 33), True),
        (1, (4, 2), (64, 64), False),
        (1, (4, 2), (64, 64), True),
    ],
    ids=["built", "padded and odd", "one rank", "one rank, in order"],
)
def test_the_kernels_of_hopper_on_ranks_equal_dense_attention(cp_size, heads, dims, deterministic):
    """In the emulator: results of other ranks join by our kernels, gradients add up in them, over relays too."""
    plans = mixed_plans(cp_size, heads, dims)[2:5]  # one of ours, two random ones
    inputs = [
        tensors(plan.num_tokens, heads=heads, dims=dims, dtype=torch.float16) for plan in plans
    ]
    sink = torch.linspace(-1.0, 1.0, heads[0])
    options = {"backend": "emulated", "deterministic": deterministic, "sink": sink}
    check_against_dense(cp_size, plans, inputs, options)
