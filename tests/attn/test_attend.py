"""`attend` of every backend against float64, gradients always."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from tests.attn.formula import assert_attention, attend_with_gradients, random_case
from tests.strategies import attention_masks, document_lengths

BACKENDS = ("reference", "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADS = ((2, 2), (4, 2), (3, 1), (1, 1))
HEAD_DIMS = ((8, 8), (5, 9), (16, 3))


def _check(mask, dense, heads, head_dims, dtype, backend, *, sink=False, seed=0, **options):
    inputs, arguments = random_case(
        mask.num_queries, mask.num_keys, heads, head_dims, dtype, seed=seed, sink=sink
    )
    actual = attend_with_gradients(inputs, mask, arguments, backend=backend, **options)
    assert actual[0].dtype == dtype
    assert actual[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_attention(actual, inputs, dense, plain_dtype=dtype, **arguments, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    case=attention_masks(),
    heads=st.sampled_from(HEADS),
    head_dims=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from((0.0, 2.0)),
    softmax_scale=st.sampled_from((None, 0.3, -0.5)),
    sink=st.booleans(),
    seed=st.integers(0, 3),
)
def test_attention_over_any_disjoint_slices_equals_float64(
    backend, case, heads, head_dims, dtype, softcap, softmax_scale, sink, seed
):
    mask, dense = case
    options = {"softcap": softcap, "softmax_scale": softmax_scale}
    _check(mask, dense, heads, head_dims, dtype, backend, sink=sink, seed=seed, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    lengths=document_lengths(),
    within=st.sampled_from(("causal", "full")),
    heads=st.sampled_from(HEADS),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_packed_documents_attend_only_within_themselves(backend, lengths, within, heads, dtype):
    total = sum(lengths)
    dense = torch.zeros(total, total, dtype=torch.bool)
    start = 0
    for length in lengths:
        block = torch.ones(length, length, dtype=torch.bool)
        dense[start : start + length, start : start + length] = (
            block.tril() if within == "causal" else block
        )
        start += length
    _check(masks.documents(lengths, within), dense, heads, (8, 8), dtype, backend)


def _banded(num_queries, num_keys, lo, hi):
    distance = torch.arange(num_keys) - torch.arange(num_queries)[:, None]
    return (lo <= distance) & (distance <= hi)


LARGE_BANDS = {
    "causal": (331, 331, -400, 0),
    "causal behind a long prefix": (130, 1500, -2000, 1300),
    "triangle of more than 1024 rows": (1100, 1150, -2000, 40),
    "inverse causal": (211, 211, 0, 300),
    "narrow window": (301, 301, -40, 3),
    "window": (500, 500, -127, 0),
    "wide window over many keys": (300, 2600, 50, 2350),
    "full": (65, 257, -400, 400),
}


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", LARGE_BANDS, ids=str)
def test_cpu_backend_equals_float64_on_shapes_of_many_pieces(shape, dtype, softcap):
    num_queries, num_keys, lo, hi = LARGE_BANDS[shape]
    mask = masks.from_slices(num_queries, num_keys, [(0, num_queries, 0, num_keys, lo, hi)])
    dense = _banded(num_queries, num_keys, lo, hi)
    _check(mask, dense, (2, 1), (8, 8), dtype, "cpu", sink=True, softcap=softcap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_scores_neither_overflow_nor_lose_accuracy(backend):
    inputs, arguments = random_case(37, 41, (2, 2), (8, 8), torch.float32)
    inputs = (inputs[0] * 30, inputs[1] * 30, inputs[2])
    mask, dense = masks.causal(37, 41), _banded(37, 41, -41, 4)
    actual = attend_with_gradients(inputs, mask, arguments, backend=backend)
    assert all(torch.isfinite(x).all() for x in actual)
    assert_attention(actual[:2], inputs, dense, plain_dtype=torch.float32, **arguments)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_reference_gradients_pass_gradcheck_through_out_lse_and_sink(softcap):
    mask = masks.from_slices(6, 7, [(0, 3, 0, 3, None, 0), (3, 5, 2, 7, -1, 2)])
    inputs, arguments = random_case(6, 7, (4, 2), (3, 2), torch.float64, sink=True)
    leaves = [x.requires_grad_() for x in (*inputs, arguments["sink"])]

    def function(q, k, v, sink):
        return attend(q, k, v, mask, sink=sink, softcap=softcap, backend="reference")

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", ["out", "lse"])
def test_gradient_through_one_result_alone_equals_float64(backend, through):
    mask, dense = masks.causal(70), _banded(70, 70, -70, 0)
    inputs, arguments = random_case(70, 70, (4, 2), (8, 8), torch.float32, sink=True)
    leaves = [x.requires_grad_() for x in (*inputs, arguments["sink"])]
    out, lse = attend(*leaves[:3], mask, sink=leaves[3], backend=backend)
    result, name = (out, "dout") if through == "out" else (lse, "dlse")
    gradients = torch.autograd.grad(result, leaves, arguments[name])
    other = "dlse" if through == "out" else "dout"
    arguments[other] = torch.zeros_like(arguments[other])
    actual = (out.detach(), lse.detach(), *gradients)
    inputs = tuple(x.detach() for x in inputs)
    arguments["sink"] = arguments["sink"].detach()
    assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rows_outside_every_slice_influence_nothing_even_as_nan(backend, softcap):
    slices = [(3, 40, 5, 45, None, 0), (50, 60, 70, 75, None, None)]
    mask = masks.from_slices(64, 80, slices)
    dense = torch.as_tensor(mask.to_dense())
    inputs, arguments = random_case(64, 80, (4, 2), (8, 6), torch.float32)
    options = {"backend": backend, "softcap": softcap}
    clean = attend_with_gradients(inputs, mask, arguments, **options)
    q, k, v = (x.clone() for x in inputs)
    q[~dense.any(1)], k[~dense.any(0)], v[~dense.any(0)] = torch.nan, torch.nan, torch.nan
    dirty = attend_with_gradients((q, k, v), mask, arguments, **options)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(clean[0][~dense.any(1)], torch.zeros_like(clean[0][~dense.any(1)]))
    assert (clean[1][~dense.any(1)] == -torch.inf).all()
    for gradient, used in zip(clean[2:], (dense.any(1), dense.any(0), dense.any(0)), strict=True):
        assert not gradient[~used].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (4, 6)])
def test_a_mask_without_pairs_gives_zero_and_minus_infinity(backend, shape):
    num_queries, num_keys = shape
    mask = masks.from_slices(num_queries, num_keys, [])
    inputs, arguments = random_case(num_queries, num_keys, (2, 1), (4, 3), torch.float32)
    out, lse, *gradients = attend_with_gradients(inputs, mask, arguments, backend=backend)
    assert torch.equal(out, torch.zeros(num_queries, 2, 3))
    assert torch.equal(lse, torch.full((num_queries, 2), -torch.inf))
    for gradient, x in zip(gradients, inputs, strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_every_run_gives_the_same_bits(backend, dtype, heads):
    mask = masks.documents([130, 1, 77, 200], ["causal", "full", ("window", 33), "causal"])
    inputs, arguments = random_case(408, 408, heads, (16, 16), dtype, sink=True)
    first = attend_with_gradients(inputs, mask, arguments, backend=backend)
    for _ in range(3):
        again = attend_with_gradients(inputs, mask, arguments, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def _transposed_memory(x):
    return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _every_other_row(x):
    return torch.stack([x, torch.full_like(x, torch.nan)], dim=1).flatten(0, 1)[::2]


def _slice_of_a_wider_tensor(x):
    return torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., : x.shape[-1]]


def _heads_outermost(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


STRIDES = (_transposed_memory, _every_other_row, _slice_of_a_wider_tensor, _heads_outermost)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stride", STRIDES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_strides_of_inputs_do_not_change_results(backend, stride, heads):
    mask = masks.documents([50, 90], "causal")
    inputs, arguments = random_case(140, 140, heads, (8, 8), torch.float32)
    contiguous = [x.clone().requires_grad_() for x in inputs]
    strided = [stride(x).detach().requires_grad_() for x in inputs]
    results = []
    for leaves, dout in ((contiguous, arguments["dout"]), (strided, stride(arguments["dout"]))):
        out, lse = attend(*leaves, mask, backend=backend)
        gradients = torch.autograd.grad((out, lse), leaves, (dout, arguments["dlse"]))
        results.append((out, lse, *gradients))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_expanded_over_all_rows_is_read_right(backend):
    inputs, _ = random_case(40, 40, (2, 2), (8, 8), torch.float32)
    q, k, v = (x[:1].expand(40, -1, -1) for x in inputs)
    out, _ = attend(q, k, v, masks.causal(40), backend=backend)
    torch.testing.assert_close(out, v)  # a mean of equal values


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout_p": 0.1}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_default_device_of_the_user_is_not_where_things_are_made(backend, options):
    inputs, arguments = random_case(70, 70, (4, 2), (8, 8), torch.float32)
    options = {"backend": backend, "dropout_seed": torch.tensor([3]), **options}
    mask = masks.sliding_window(70, 9)
    plain = attend_with_gradients(inputs, mask, arguments, **options)
    with torch.device("meta"):
        elsewhere = attend_with_gradients(inputs, mask, arguments, **options)
    for one, other in zip(plain, elsewhere, strict=True):
        assert torch.equal(one, other)
