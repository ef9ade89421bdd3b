"""The oracle is checked too: against torch's own attention, and by hand where torch has none."""

import math

import pytest
import torch

from tests.oracles.attention import dense_attention, exact_attention, plain_attention


def _inputs(num_queries, num_keys, num_heads=4, num_kv_heads=2, head_dim=8):
    q = torch.randn(num_queries, num_heads, head_dim, dtype=torch.float64)
    k = torch.randn(num_keys, num_kv_heads, head_dim, dtype=torch.float64)
    v = torch.randn(num_keys, num_kv_heads, head_dim + 3, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("scale", [None, 0.3])
def test_output_and_gradients_equal_those_of_torch(scale):
    q, k, v = _inputs(7, 9)
    allowed = torch.rand(7, 9) < 0.6
    allowed[:, 0] = True
    dout = torch.randn(7, 4, 11, dtype=torch.float64)
    ours = exact_attention(q, k, v, allowed, dout=dout, softmax_scale=scale)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in leaves), attn_mask=allowed, scale=scale, enable_gqa=True
    ).transpose(0, 1)
    gradients = torch.autograd.grad((theirs * dout).sum(), leaves)
    torch.testing.assert_close(ours.out, theirs)
    for mine, other in zip((ours.dq, ours.dk, ours.dv), gradients, strict=True):
        torch.testing.assert_close(mine, other)


def test_lse_softcap_and_sink_equal_a_loop_over_rows():
    q, k, v = _inputs(3, 4, num_heads=2, num_kv_heads=1)
    sink = torch.tensor([0.5, -1.0], dtype=torch.float64)
    allowed = torch.ones(3, 4, dtype=torch.bool).tril()
    out, lse = dense_attention(q, k, v, allowed, softmax_scale=0.7, softcap=2.0, sink=sink)
    for row in range(3):
        for head in range(2):
            keys = range(row + 1)
            capped = [2 * math.tanh(0.7 * float(q[row, head] @ k[i, 0]) / 2) for i in keys]
            total = sum(math.exp(s) for s in capped) + math.exp(sink[head])
            assert lse[row, head].item() == pytest.approx(math.log(total))
            expected = sum(math.exp(s) / total * v[i, 0] for i, s in zip(keys, capped, strict=True))
            torch.testing.assert_close(out[row, head], expected)


@pytest.mark.parametrize("num_keys", [0, 5])
@pytest.mark.parametrize("with_sink", [False, True])
def test_rows_without_keys_give_zero_and_no_nan(num_keys, with_sink):
    q, k, v = _inputs(6, num_keys)
    sink = torch.randn(4, dtype=torch.float64) if with_sink else None
    allowed = torch.zeros(6, num_keys, dtype=torch.bool)
    dlse = torch.randn(6, 4, dtype=torch.float64)
    result = exact_attention(q, k, v, allowed, dlse=dlse, sink=sink)
    assert result.out.eq(0).all()
    expected_lse = sink.expand(6, 4) if with_sink else torch.full((6, 4), float("-inf"))
    assert torch.equal(result.lse, expected_lse.double())
    for gradient in (result.dq, result.dk, result.dv):
        assert gradient.eq(0).all()
    if with_sink:
        torch.testing.assert_close(result.dsink, dlse.sum(0))


def test_gradient_through_lse_equals_finite_differences():
    q, k, v = _inputs(3, 4)
    allowed = torch.ones(3, 4, dtype=torch.bool).tril()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def attention(q, k, v, sink):
        return dense_attention(q, k, v, allowed, softcap=3.0, sink=sink)

    assert torch.autograd.gradcheck(attention, (*leaves, sink))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_formula_stays_in_the_dtype_of_its_inputs(dtype):
    q, k, v = (x.to(dtype) for x in _inputs(5, 5))
    result = plain_attention(q, k, v, torch.ones(5, 5).tril(), sink=torch.zeros(4))
    assert {x.dtype for x in result} == {dtype}
    exact = exact_attention(q, k, v, torch.ones(5, 5).tril(), sink=torch.zeros(4))
    torch.testing.assert_close(result.out.double(), exact.out, rtol=0.05, atol=0.05)
