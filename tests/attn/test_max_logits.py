"""The largest logit of each head, against a dense matrix of scores in float64."""

import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from tests.attn.flash_on_host import on_host
from tests.attn.formula import random_case
from tests.attn.on_host import host_device
from tests.strategies import attention_masks


def largest_logits(q, k, dense, scale, softcap):
    """Returns the maximum over allowed pairs for each query head, float64 `[N]`."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qnh,knh->nqk", q.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    allowed = torch.as_tensor(dense)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if not allowed.numel():
        return torch.full((q.shape[1],), -torch.inf, dtype=torch.float64)
    return scores.flatten(1).amax(dim=1)


@settings(max_examples=40)
@given(
    case=attention_masks(),
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    softcap=st.sampled_from([0.0, 1.5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    backend=st.sampled_from(["reference", "cpu"]),
)
def test_largest_logits_are_those_of_the_dense_scores(case, heads, softcap, dtype, backend):
    mask, dense = case
    (q, k, v), _ = random_case(*dense.shape, heads, (8, 8), dtype, seed=1)
    arguments = {"softmax_scale": 0.3, "softcap": softcap, "backend": backend}
    out, lse = attend(q, k, v, mask, **arguments)
    out_too, lse_too, found = attend(q, k, v, mask, return_max_logits=True, **arguments)
    assert found.dtype == torch.float32 and not found.requires_grad
    assert torch.allclose(found.double(), largest_logits(q, k, dense, 0.3, softcap), rtol=1e-5)
    assert torch.allclose(out.float(), out_too.float(), rtol=0.02, atol=1e-5)
    assert torch.allclose(lse, lse_too, rtol=1e-5)


@settings(max_examples=40)
@given(
    case=attention_masks(),
    heads=st.sampled_from([(4, 2), (3, 3), (4, 1)]),
    size=st.sampled_from([0.0, 1.0, 300.0]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    backend=st.sampled_from([("flash", 0.0), ("flex", 0.0), ("flex", 20.0)]),
)
def test_libraries_that_return_lse_alone_give_them_within_their_bound(
    case, heads, size, dtype, backend
):
    mask, dense = case
    (q, k, v), _ = random_case(*dense.shape, heads, (8, 8), dtype, seed=4)
    q = q * size
    name, softcap = backend
    expected = largest_logits(q, k, dense, 0.3, softcap)
    arguments = {"softmax_scale": 0.3, "softcap": softcap, "backend": name}
    with on_host():
        out, lse = attend(q, k, v, mask, **arguments)
        out_too, lse_too, found = attend(q, k, v, mask, return_max_logits=True, **arguments)
    assert torch.equal(out, out_too) and torch.equal(lse, lse_too)
    assert found.dtype == torch.float32 and not found.requires_grad
    seen = torch.isfinite(expected)
    assert torch.equal(seen, torch.isfinite(found))
    above = (found.double() - expected)[seen]
    rounding = 2e-6 * expected.abs()[seen] + 1e-9
    assert (above >= -rounding).all()
    assert (above <= math.log(dense.shape[1]) / 2**14 + rounding).all()


def test_gradients_flow_beside_them_and_none_through_them():
    mask = masks.causal(50)
    (q, k, v), arguments = random_case(50, 50, (4, 2), (8, 8), torch.float32, seed=2)
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    asked = [x.clone().requires_grad_() for x in (q, k, v)]
    attend(*plain, mask)[0].backward(arguments["dout"])
    out, _, found = attend(*asked, mask, return_max_logits=True)
    out.backward(arguments["dout"])
    assert found.grad_fn is None
    for x, y in zip(plain, asked, strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-6)


def test_they_are_fp32_whatever_the_default_dtype():
    (q, k, v), _ = random_case(50, 50, (4, 2), (8, 8), torch.bfloat16, seed=2)
    *_, expected = attend(q, k, v, masks.causal(50), return_max_logits=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        *_, found = attend(q, k, v, masks.causal(50), return_max_logits=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_a_large_call_that_is_split_by_heads_has_them_all(monkeypatch):
    from megatron_cp.attn.cpu import heads

    monkeypatch.setattr(heads, "MAX_GROUP_NUMEL", 1)
    mask = masks.causal(70)
    (q, k, v), _ = random_case(70, 70, (6, 3), (8, 8), torch.float32, seed=3)
    *_, found = attend(q, k, v, mask, return_max_logits=True)
    assert torch.allclose(found.double(), largest_logits(q, k, mask.to_dense(), 8**-0.5, 0.0))


@pytest.mark.parametrize(
    "backend",
    [pytest.param("emulated", marks=pytest.mark.slow), "hopper"],  # g++ compiles the former
)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_kernels_give_them_through_attend_at_any_head_dim(backend, head_dim):
    """40 has no kernel of its own: rows are widened with zeros, which add nothing to a logit."""
    mask = masks.documents([70, 1, 90], "causal")
    (q, k, v), arguments = random_case(161, 161, (4, 2), (head_dim,) * 2, torch.bfloat16, seed=5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with host_device() if backend == "hopper" else nullcontext():
        out, lse, found = attend(*leaves, mask, backend=backend, return_max_logits=True)
        out.backward(arguments["dout"])
    expected = largest_logits(q, k, mask.to_dense(), head_dim**-0.5, 0.0)
    assert not found.requires_grad and lse.shape == (161, 4)
    assert all(x.grad is not None for x in leaves)
    assert torch.allclose(found.double(), expected, rtol=1e-5)
