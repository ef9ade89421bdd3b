"""Attention dropout: every backend keeps the pairs of the definition, and what it keeps looks like chance."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend, resolve_options
from megatron_cp.attn.attend import attend_backward, attend_forward
from megatron_cp.attn.dropout import (
    Dropout,
    head_seeds,
    keeps,
    key_words,
    row_words,
    seeds_of_heads,
    threshold,
)
from megatron_cp.attn.flash import checks as flash_checks
from tests.attn.formula import assert_attention, attend_with_gradients, random_case
from tests.oracles.dropout import GOLDEN, dropout_factors
from tests.strategies import attention_masks

SEED = 0x1234_5678_9ABC_DEF1


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@given(
    case=attention_masks(),
    heads=st.sampled_from(((2, 2), (4, 2), (3, 1), (1, 1))),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16)),
    rate=st.sampled_from((0.1, 0.5, 0.97)),
    softcap=st.sampled_from((0.0, 2.0)),
    sink=st.booleans(),
)
def test_dropout_over_any_slices_equals_float64(backend, case, heads, dtype, rate, softcap, sink):
    mask, dense = case
    sizes = mask.num_queries, mask.num_keys
    inputs, arguments = random_case(*sizes, heads, (5, 9), dtype, sink=sink)
    options = {"dropout_p": rate, "dropout_seed": torch.tensor([SEED]), "softcap": softcap}
    actual = attend_with_gradients(inputs, mask, arguments, backend=backend, **options)
    factors = dropout_factors(SEED, heads[0], *map(np.arange, sizes), rate)
    given = {**arguments, "factors": factors, "softcap": softcap}
    assert_attention(actual, inputs, dense, plain_dtype=dtype, **given)


@settings(max_examples=10)
@given(
    case=attention_masks(), softcap=st.sampled_from((0.0, 2.0)), rate=st.sampled_from((0.1, 0.9))
)
def test_flex_forward_with_dropout_equals_float64(case, softcap, rate):
    mask, dense = case
    sizes = mask.num_queries, mask.num_keys
    inputs, arguments = random_case(*sizes, (4, 2), (8, 8), torch.float32)
    options = {"dropout_p": rate, "dropout_seed": torch.tensor([SEED]), "softcap": softcap}
    actual = attend(*inputs, mask, backend="flex", **options)
    factors = dropout_factors(SEED, 4, *map(np.arange, sizes), rate)
    given = {**arguments, "factors": factors, "softcap": softcap}
    assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **given)


def test_long_documents_are_cut_into_tiles_that_keep_the_same_pairs():
    mask = masks.documents([700, 1, 1200], ["causal", "full", ("window", 300)])
    size = mask.num_queries
    inputs, arguments = random_case(size, size, (4, 2), (16, 16), torch.float64)
    options = {"dropout_p": 0.2, "dropout_seed": torch.tensor([-5])}
    by_tiles, whole = (
        attend_with_gradients(inputs, mask, arguments, backend=backend, **options)
        for backend in ("cpu", "reference")
    )
    for a, b in zip(by_tiles, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_rate_zero_is_no_dropout_and_draws_nothing():
    mask, (inputs, _) = masks.causal(30), random_case(30, 30, (2, 2), (8, 8), torch.float32)
    state = torch.get_rng_state()
    plain = attend(*inputs, mask)
    for a, b in zip(plain, attend(*inputs, mask, dropout_p=0.0), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())


def test_a_seed_is_drawn_from_the_default_generator_once_for_each_call():
    mask, (inputs, _) = masks.causal(30), random_case(30, 30, (2, 2), (8, 8), torch.float32)
    torch.manual_seed(3)
    first, second = (attend(*inputs, mask, dropout_p=0.5)[0] for _ in range(2))
    torch.manual_seed(3)
    again = attend(*inputs, mask, dropout_p=0.5)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_seeds_of_heads_are_counted_from_the_first():
    q = torch.zeros(3, 4, 8)
    seeds = head_seeds(torch.tensor([7]), q)
    assert [seed % 2**64 for seed in seeds.tolist()] == [(7 + n * GOLDEN) % 2**64 for n in range(4)]
    of_some = seeds_of_heads(torch.tensor([7]), torch.tensor([2, 3]))
    assert torch.equal(head_seeds(of_some, q[:, :2]), seeds[2:])


def test_lse_and_the_largest_logits_are_those_without_dropout():
    mask, (inputs, _) = masks.causal(50), random_case(50, 50, (2, 2), (8, 8), torch.float32)
    for backend in ("cpu", "reference", "flex"):
        _, lse, top = attend(*inputs, mask, backend=backend, return_max_logits=True)
        with_dropout = attend(*inputs, mask, backend=backend, return_max_logits=True, dropout_p=0.6)
        torch.testing.assert_close(with_dropout[1], lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(with_dropout[2], top, rtol=1e-6, atol=1e-6)


def test_a_raw_pass_that_is_not_told_its_rows_is_refused():
    inputs, _ = random_case(4, 4, (2, 2), (8, 8), torch.float32)
    options = resolve_options(*inputs, dropout_p=0.3)
    with pytest.raises(ValueError, match=r"dropout_p=0\.3 needs the words"):
        attend_forward(*inputs, masks.causal(4), options)


def test_a_rate_close_to_one_keeps_almost_nothing():
    words = row_words(torch.tensor([1]), torch.arange(64)), key_words(torch.arange(64))
    factors = Dropout(1 - 1e-12, *words).factors(slice(None), slice(None), torch.float64)
    assert (factors == 0).all()


def test_a_part_of_the_keys_gets_the_gradients_of_the_whole():
    """What stages do: words of some keys, and the lse and delta of all."""
    inputs, arguments = random_case(20, 24, (2, 2), (4, 4), torch.float64)
    mask = masks.from_slices(20, 24, [(0, 20, 0, 24, None, 3)])
    words = row_words(torch.tensor([1, 2]), torch.arange(20)), key_words(torch.arange(24))
    options = {
        backend: replace(
            resolve_options(*inputs, backend=backend, dropout_p=0.3), dropout=Dropout(0.3, *words)
        )
        for backend in ("cpu", "reference")
    }
    lse, delta = arguments["dlse"], arguments["dlse"] * 0.5
    (q, k, v), dout = inputs, arguments["dout"]
    whole = attend_backward(dout, q, k, v, lse, delta, mask, options["reference"])
    parts = []
    for keys in (slice(0, 9), slice(9, 24)):
        some = replace(options["cpu"], dropout=Dropout(0.3, words[0], words[1][keys]))
        part = mask.crop(k=(keys.start, keys.stop))
        parts.append(attend_backward(dout, q, k[keys], v[keys], lse, delta, part, some))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    for place in (1, 2):
        joined = torch.cat([part[place] for part in parts])
        torch.testing.assert_close(joined, whole[place])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5])
def test_kept_pairs_look_like_chance(rate):
    """Means over heads, rows, columns and products of neighbours spread as those of independent draws do.

    Seeds are fixed, so the limits, five standard deviations, either hold always or never.
    """
    size, heads, deviation = 1024, 32, (rate * (1 - rate)) ** 0.5
    seeds = seeds_of_heads(torch.tensor([2024]), torch.arange(heads))
    rows, keys = row_words(seeds, torch.arange(size)), key_words(torch.arange(size))
    x = keeps(rows.t().unsqueeze(-1), keys, threshold(rate)).float().sub_(1 - rate) / deviation

    def is_unit(sums, number, what):
        """Means of `number` draws: their squares times `number` are 1 on average."""
        squares = sums.square() * number
        assert abs(squares.mean().item() - 1) < 5 * (2 / squares.numel()) ** 0.5, what

    is_unit(x.mean((1, 2)), size**2, "heads")
    is_unit(x.mean(2), size, "rows")
    is_unit(x.mean(1), size, "columns")
    for lag in (1, 2, 8, 64, 512):
        along, down = x[:, :, lag:] * x[:, :, :-lag], x[:, lag:] * x[:, :-lag]
        diagonal = x[:, lag:, lag:] * x[:, :-lag, :-lag]
        for name, pairs in (("keys", along), ("rows", down), ("both", diagonal)):
            assert abs(pairs.mean().item()) < 5 / pairs.numel() ** 0.5, (name, lag)
    between_heads = x[1:] * x[:-1]
    assert abs(between_heads.mean().item()) < 5 / between_heads.numel() ** 0.5
    squares = x[:, 1:, 1:] * x[:, :-1, 1:] * x[:, 1:, :-1] * x[:, :-1, :-1]
    assert abs(squares.mean().item()) < 5 / squares.numel() ** 0.5


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate):
    inputs, _ = random_case(4, 4, (2, 2), (8, 8), torch.float32)
    with pytest.raises(ValueError, match=r"dropout_p=.* must lie in \[0, 1\)"):
        attend(*inputs, masks.causal(4), dropout_p=rate)


@pytest.mark.parametrize("seed", [torch.tensor([1.0]), torch.tensor([1, 2, 3]), torch.tensor(1)])
def test_a_seed_of_another_kind_is_refused(seed):
    inputs, _ = random_case(4, 4, (2, 2), (8, 8), torch.float32)
    with pytest.raises(ValueError, match=r"must be int64 \(1,\) or \(2,\)"):
        attend(*inputs, masks.causal(4), dropout_p=0.1, dropout_seed=seed)


def test_a_seed_that_is_no_tensor_is_refused():
    inputs, _ = random_case(4, 4, (2, 2), (8, 8), torch.float32)
    with pytest.raises(
        TypeError, match=r"dropout_seed=3 must be a tensor.* torch\.tensor\(\[3\]\)"
    ):
        attend(*inputs, masks.causal(4), dropout_p=0.1, dropout_seed=3)


def test_what_no_kernel_has_is_refused_by_name():
    inputs, _ = random_case(4, 4, (2, 2), (192, 192), torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"192 and dropout, only for .*use backend='cpu'"):
        attend(*inputs, masks.causal(4), dropout_p=0.1, backend="emulated")
    with pytest.raises(NotImplementedError, match="softcap and dropout at once"):
        attend(*inputs, masks.causal(4), dropout_p=0.1, softcap=2.0, backend="emulated")
    with pytest.raises(NotImplementedError, match=r"backend='flash' has no dropout .*'flex'"):
        flash_checks.check_no_dropout(True)
