"""A row of NaN stays one: it must never pass for a row without keys, whose results are zeros."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend, attend_backward, attend_forward, resolve_options
from megatron_cp.attn.merge import merge_partials, merge_rows_, merge_span_, sink_gradient
from tests.attn.formula import random_case

BACKENDS = ("reference", "cpu")
ROW = 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("length", [4, 30, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_query_of_nan_has_a_result_of_nan_and_its_neighbours_have_none(
    backend, softcap, length, dtype
):
    (q, k, v), _ = random_case(length, length, (4, 2), (8, 8), dtype)
    q[ROW] = torch.nan
    options = resolve_options(q, k, v, backend=backend, softcap=softcap)
    out, lse = attend_forward(q, k, v, masks.full(length), options)
    others = torch.arange(length) != ROW
    assert out[ROW].isnan().all() and lse[ROW].isnan().all()
    assert out[others].isfinite().all() and lse[others].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("length", [5, 30])
def test_a_key_of_nan_has_a_result_of_nan_for_every_query_that_sees_it(backend, softcap, length):
    (q, k, v), _ = random_case(length, length, (4, 2), (8, 8), torch.float32)
    k[ROW] = torch.nan
    options = resolve_options(q, k, v, backend=backend, softcap=softcap)
    mask = masks.documents(
        [ROW, length - ROW], "causal"
    )  # the first query that sees it sees nothing else
    out, lse = attend_forward(q, k, v, mask, options)
    assert out[ROW:].isnan().all() and lse[ROW:].isnan().all()
    assert out[:ROW].isfinite().all() and lse[:ROW].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("length", [5, 30])
def test_an_lse_of_nan_reaches_every_gradient_of_its_row(backend, softcap, length):
    (q, k, v), arguments = random_case(length, length, (4, 2), (8, 8), torch.float32)
    mask, dout = masks.causal(length), arguments["dout"]
    options = resolve_options(q, k, v, backend=backend, softcap=softcap)
    out, lse = attend_forward(q, k, v, mask, options)
    delta = (dout * out).sum(dim=-1)
    lse[ROW] = torch.nan
    dq, dk, dv = attend_backward(dout, q, k, v, lse, delta, mask, options)
    assert dq[ROW].isnan().all()
    assert dq[ROW + 1 :].isfinite().all() and dq[:ROW].isfinite().all()
    for gradient in (dk, dv):  # of the keys that the row sees; a block's other keys may get nan too
        assert gradient[: ROW + 1].isnan().all()


def test_a_merge_with_nan_is_nan_on_either_side():
    out, part = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    lse, part_lse = torch.randn(5, 2), torch.randn(5, 2)
    part_lse[ROW] = torch.nan
    for a, b in (((out, lse), (part, part_lse)), ((part, part_lse), (out, lse))):
        merged = [merge_partials(*a, *b)]
        for merge in (merge_span_, lambda *x: merge_rows_(x[0], x[1], torch.arange(5), *x[2:])):
            held = [x.clone() for x in a]
            merge(*held, *b)
            merged.append(tuple(held))
        for joined_out, joined_lse in merged:
            assert joined_out[ROW].isnan().all() and joined_lse[ROW].isnan().all()
            others = torch.arange(5) != ROW
            assert joined_out[others].isfinite().all() and joined_lse[others].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_keys", [4, 30, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_whose_scores_are_below_all_numbers_count_nothing(backend, num_keys, dtype):
    """Finite rows whose product has no exponent: of no key at all in one part, of another part's as if alone."""
    largest = torch.finfo(dtype).max ** 0.5
    q = torch.full((5, 2, 8), largest, dtype=dtype)
    k = torch.randn(2 * num_keys, 2, 8, dtype=dtype) / largest
    k[num_keys:] = -largest
    v = torch.randn(2 * num_keys, 2, 8, dtype=dtype)
    options = resolve_options(q, k, v, backend=backend)
    first, last = slice(0, num_keys), slice(num_keys, None)
    box = masks.full(5, num_keys)
    out, lse = attend_forward(q, k[last], v[last], box, options)
    assert (out == 0).all() and (lse == -torch.inf).all()
    alone = attend_forward(q, k[first], v[first], box, options)
    both = attend_forward(q, k, v, masks.full(5, 2 * num_keys), options)
    for part in (merge_partials(*alone, out, lse), both):
        for found, expected in zip(part, alone, strict=True):
            torch.testing.assert_close(found, expected)
    delta = torch.zeros(5, 2, dtype=dtype)
    grads = attend_backward(
        torch.ones_like(q), q, k, v, both[1], delta, masks.full(5, 2 * num_keys), options
    )
    assert (grads[2][last] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_keys", [4, 30, 100])
def test_a_negative_scale_may_take_scores_below_all_numbers(backend, num_keys):
    x = torch.full((num_keys, 1, 2), 1e19)
    out, lse = attend(x, x, x, masks.causal(num_keys), softmax_scale=-4.0, backend=backend)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharp", [False, True])
def test_a_gradient_of_nan_in_rows_without_keys_does_not_reach_the_sink(backend, sharp):
    """Their out is 0 whatever the sink is; dlse counts there. `sharp`: the sink outweighs keys too."""
    (q, k, v), arguments = random_case(9, 9, (4, 2), (8, 8), torch.float64)
    dout, dlse = arguments["dout"], torch.randn(9, 4, dtype=torch.float64)
    seen, sink = 5, torch.linspace(-1.0, 1.0, 4, dtype=torch.float64) + (20.0 if sharp else 0.0)
    dout[seen:] = torch.nan
    mask = masks.from_slices(9, 9, [(0, seen, 0, seen, None, None)])
    found, expected = sink.clone().requires_grad_(), sink.clone().requires_grad_()
    out, lse = attend(q, k, v, mask, sink=found, backend=backend)
    torch.autograd.backward((out, lse), (dout, dlse))
    keys, values = (x[:seen].repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qnh,knh->qnk", q[:seen], keys) * 8**-0.5
    scores = torch.cat([scores, expected[None, :, None].expand(seen, -1, 1)], dim=-1)
    exact = torch.einsum("qnk,knh->qnh", scores.softmax(dim=-1)[..., :-1], values)
    loss = (exact * dout[:seen]).sum() + (scores.logsumexp(dim=-1) * dlse[:seen]).sum()
    (loss + (expected * dlse[seen:]).sum()).backward()
    torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


def test_a_sink_that_a_kernel_gives_back_an_ulp_off_is_the_lse_of_a_row_without_keys():
    sink = torch.tensor([3.0, -0.7])
    lse = torch.nextafter(sink, torch.tensor(9.0)).expand(2, -1)
    dlse = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    found = sink_gradient(lse, sink, torch.full((2, 2), torch.nan), dlse)
    torch.testing.assert_close(found, torch.tensor([5.0, 10.0]))
