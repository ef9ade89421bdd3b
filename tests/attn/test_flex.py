"""The flex backend as far as a CPU allows: forward passes, uncompiled, and the algebra of its backward."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend, attend_backward, attend_forward, resolve_options
from megatron_cp.attn.flex import tables
from megatron_cp.attn.flex.backend import local_gradients
from megatron_cp.mask import blocks
from tests.attn.formula import assert_attention, random_case
from tests.strategies import attention_masks


@settings(max_examples=15)
@given(
    case=attention_masks(),
    heads=st.sampled_from(((2, 2), (4, 2))),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    softcap=st.sampled_from((0.0, 2.0)),
    sink=st.booleans(),
)
def test_flex_forward_on_a_cpu_equals_float64(case, heads, dtype, softcap, sink):
    mask, dense = case
    inputs, arguments = random_case(
        mask.num_queries, mask.num_keys, heads, (8, 8), dtype, sink=sink
    )
    sink = arguments.get("sink")
    actual = attend(*inputs, mask, backend="flex", softcap=softcap, sink=sink)
    assert_attention(actual, inputs, dense, plain_dtype=dtype, softcap=softcap, **arguments)


def test_flex_forward_over_many_blocks_equals_float64():
    mask = masks.documents([300, 1, 150], ["causal", "full", ("window", 40)])
    inputs, arguments = random_case(451, 451, (2, 1), (8, 8), torch.float32)
    actual = attend(*inputs, mask, backend="flex")
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **arguments)


def test_rows_outside_every_slice_influence_nothing_even_as_nan():
    mask = masks.from_slices(64, 80, [(3, 40, 5, 45, None, 0)])
    dense = torch.as_tensor(mask.to_dense())
    (q, k, v), _ = random_case(64, 80, (2, 2), (8, 8), torch.float32)
    clean = attend(q, k, v, mask, backend="flex")
    q[~dense.any(1)], k[~dense.any(0)], v[~dense.any(0)] = torch.nan, torch.nan, torch.nan
    for a, b in zip(clean, attend(q, k, v, mask, backend="flex"), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_a_part_are_those_of_the_merged_result():
    """Autograd through the part's own (out, lse) stands for FlexAttention's backward."""
    inputs, arguments = random_case(20, 24, (2, 2), (4, 4), torch.float64)
    mask = masks.from_slices(20, 24, [(0, 15, 0, 24, None, 3)])
    options = resolve_options(*inputs, backend="reference")
    dout, dlse = arguments["dout"], arguments["dlse"]
    out, lse = attend_forward(*inputs, mask, options)
    delta = (dout * out).sum(dim=-1) - dlse
    part, (q, k, v) = mask.crop(k=(0, 9)), (x.clone() for x in inputs)
    leaves = [q.requires_grad_(), k[:9].requires_grad_(), v[:9].requires_grad_()]
    local_out, local_lse = attend(*leaves, part, backend="reference")
    local = local_gradients(dout, local_out.detach(), local_lse.detach(), lse, delta)
    actual = torch.autograd.grad((local_out, local_lse), leaves, local)
    expected = attend_backward(dout, q, k[:9], v[:9], lse, delta, part, options)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_flex_on_a_cpu_refuses_a_backward_pass_and_large_calls():
    inputs, arguments = random_case(8, 8, (2, 2), (4, 4), torch.float32)
    options = resolve_options(*inputs, backend="flex")
    lse = torch.zeros(8, 2)
    with pytest.raises(NotImplementedError, match=r"no backward pass on device=cpu.*'cpu' or"):
        attend_backward(arguments["dout"], *inputs, lse, lse, masks.causal(8), options)
    large = torch.zeros(2048, 2, 4)
    with pytest.raises(NotImplementedError, match=r"scores, at most .* use 'cpu' or 'reference'"):
        attend(large, large, large, masks.causal(2048), backend="flex")


def test_tables_that_are_too_large_for_all_keys_are_made_for_parts_of_them(monkeypatch):
    mask = masks.block_causal(1024, 64).transpose()
    monkeypatch.setattr(blocks, "MAX_ROWS", 4000)  # 16 slices have 8,704 rows in all
    parts = tables._cut(mask, 0)
    assert len(parts) > 1
    pairs = np.zeros((1024, 1024), dtype=bool)
    for part in parts:
        starts, ends = np.split(part.intervals[:, :1024], 2)
        for start, end in zip(starts, ends, strict=True):
            for row in range(1024):
                assert not pairs[row, part.k_start + start[row] : part.k_start + end[row]].any()
                pairs[row, part.k_start + start[row] : part.k_start + end[row]] = True
    np.testing.assert_array_equal(pairs, mask.to_dense())
    monkeypatch.setattr(blocks, "MAX_ROWS", 1000)
    with pytest.raises(NotImplementedError, match=r"1024 queries .* at most 1000"):
        tables._cut(mask, 0)
