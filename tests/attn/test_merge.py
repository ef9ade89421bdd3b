"""Laws of merging partial results; the oracle is a softmax over all keys at once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.attn import apply_sink, merge_partials, merge_rows_, sink_gradient
from megatron_cp.attn.merge import merge_span_
from tests.closeness import assert_within_budget

ROWS, HEADS, DIM = 5, 3, 4


def _partial(scores_QNK, values_QNKV):
    """Returns softmax-weighted values and lse over the last key axis; (0, -inf) without keys."""
    lse = torch.logsumexp(scores_QNK, dim=-1)
    weights = torch.exp(scores_QNK - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1))
    return torch.einsum("qnk,qnkv->qnv", weights, values_QNKV), lse


@st.composite
def parts(draw, num_parts=3):
    """Draws scores and values of a few key ranges, some rows without keys, lse of any size."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    shift = draw(st.sampled_from((0.0, -200.0, 300.0)))
    result = []
    for index in range(num_parts):
        num_keys = draw(st.integers(0, 6))
        scores = torch.randn(ROWS, HEADS, num_keys, generator=generator, dtype=torch.float64)
        scores = scores * 3 + shift * index
        hidden = torch.rand(ROWS, HEADS, 1, generator=generator) < draw(st.sampled_from((0, 0.5)))
        values = torch.randn(ROWS, HEADS, num_keys, DIM, generator=generator, dtype=torch.float64)
        result.append((scores.masked_fill(hidden, -torch.inf), values))
    return result


def _merged(partials):
    out, lse = partials[0]
    for part in partials[1:]:
        out, lse = merge_partials(out, lse, *part)
    return out, lse


@given(parts())
def test_merge_of_key_ranges_equals_attention_over_all(key_ranges):
    exact = _partial(*(torch.cat(x, dim=2) for x in zip(*key_ranges, strict=True)))
    in_float = [tuple(x.float() for x in part) for part in key_ranges]
    plain = _partial(*(torch.cat(x, dim=2) for x in zip(*in_float, strict=True)))
    actual = _merged([_partial(*part) for part in in_float])
    # A partial result already carries the rounding of its lse: eps x |lse| of every weight.
    lse_size = exact[1][exact[1].isfinite()].abs().max().item() if exact[1].isfinite().any() else 0
    value_size = max([1.0, *(v.abs().max().item() for _, v in key_ranges if v.numel())])
    assert_within_budget(actual[0], plain[0], exact[0], "out", size=value_size * (1 + lse_size))
    assert_within_budget(actual[1], plain[1], exact[1], "lse", size=1 + lse_size)


@given(parts())
def test_merge_is_commutative_and_associative_up_to_rounding(key_ranges):
    a, b, c = (_partial(*part) for part in key_ranges)
    for other in (_merged([c, b, a]), merge_partials(*a, *merge_partials(*b, *c))):
        for x, y in zip(_merged([a, b, c]), other, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


@given(parts(num_parts=1))
def test_a_part_without_keys_changes_no_bit(key_ranges):
    out, lse = _partial(*key_ranges[0])
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge_partials(out, lse, *nothing), merge_partials(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


@given(parts(num_parts=2), st.permutations(range(ROWS)), st.integers(0, ROWS))
def test_merging_some_rows_in_place_equals_merging_them_apart(key_ranges, order, num_rows):
    first, second = (_partial(*part) for part in key_ranges)
    rows = torch.tensor(order[:num_rows], dtype=torch.int64)
    out, lse = (x.clone() for x in first)
    merge_rows_(out, lse, rows, second[0][rows], second[1][rows])
    merged = merge_partials(*first, *second)
    for actual, before, after in zip((out, lse), first, merged, strict=True):
        expected = before.clone()
        expected[rows] = after[rows]
        assert torch.equal(actual, expected)


@given(parts(num_parts=2))
def test_merging_a_span_in_place_equals_merging_it_apart(key_ranges):
    first, second = (_partial(*part) for part in key_ranges)
    out, lse = (x.clone() for x in first)
    merge_span_(out[1:4], lse[1:4], second[0][1:4], second[1][1:4])
    merged = merge_partials(*first, *second)
    torch.testing.assert_close(out[1:4], merged[0][1:4], rtol=1e-13, atol=1e-13)
    assert torch.equal(lse[1:4], merged[1][1:4])
    assert torch.equal(out[::4], first[0][::4])


@given(parts(num_parts=1), st.sampled_from((0.0, -50.0, 80.0)))
def test_a_sink_is_one_more_key_with_value_zero(key_ranges, level):
    scores, values = key_ranges[0]
    sink = torch.linspace(-1, 1, HEADS, dtype=torch.float64) + level
    with_sink = torch.cat([scores, sink[None, :, None].expand(ROWS, -1, 1)], dim=2)
    padded = torch.cat([values, torch.zeros(ROWS, HEADS, 1, DIM, dtype=torch.float64)], dim=2)
    exact = _partial(with_sink, padded)
    for actual, expected in zip(apply_sink(*_partial(scores, values), sink), exact, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("empty_rows", [0, 2, ROWS])
def test_sink_gradient_equals_autograd_through_the_merge(empty_rows):
    torch.manual_seed(0)
    scores = torch.randn(ROWS, HEADS, 6, dtype=torch.float64)
    scores[:empty_rows] = -torch.inf
    out, lse = _partial(scores, torch.randn(ROWS, HEADS, 6, DIM, dtype=torch.float64))
    sink = torch.randn(HEADS, dtype=torch.float64, requires_grad=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    weight = torch.sigmoid(lse - sink)
    exact_out, exact_lse = out * weight.unsqueeze(-1), torch.logaddexp(lse, sink.expand_as(lse))
    expected = torch.autograd.grad((exact_out * dout).sum() + (exact_lse * dlse).sum(), sink)[0]
    final_out, final_lse = apply_sink(out, lse, sink.detach())
    delta = (dout * final_out).sum(dim=-1) - dlse
    torch.testing.assert_close(sink_gradient(final_lse, sink.detach(), delta, dlse), expected)
