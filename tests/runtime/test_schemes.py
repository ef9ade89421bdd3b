"""Schemes that see nodes, split heads or move queries equal dense attention on ranks in small nodes."""

import pytest

import megatron_cp as mcp
from megatron_cp.config import Topology
from megatron_cp.plan import make_plan
from tests.runtime.cases import HEAD_DIM, HEADS, mask_cases, tensors
from tests.runtime.test_dist_attn import check_against_dense

PAIRS = Topology("nodes of two", 300.0, 250.0, 2, 200.0, 20.0, 5.0)
MASKS = ("causal 37", "full 16", "documents", "window", "rows without keys")


@pytest.mark.parametrize("planner", ["dcp", "document_groups", "double_ring", "ultraattn", "usp"])
@pytest.mark.parametrize("cp_size", [4, 8])
def test_attention_on_ranks_in_nodes_of_two_equals_dense_attention(planner, cp_size):
    """As many key as query heads: the double ring's backward pass then moves queries."""
    config = mcp.CPConfig(
        planner=planner, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM, topology=PAIRS
    )
    plans = [make_plan(mask_cases()[name], cp_size, config) for name in MASKS]
    inputs = [
        tensors(plan.num_tokens, seed=i, heads=(HEADS, HEADS)) for i, plan in enumerate(plans)
    ]
    check_against_dense(cp_size, plans, inputs, {"backend": "reference"})
