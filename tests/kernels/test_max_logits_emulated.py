"""The largest logit of each head as the forward kernel finds it, against a dense matrix of scores in float64."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn.emulated import backend as emulated
from megatron_cp.attn.hopper.checks import forward_variants
from megatron_cp.attn.options import AttendOptions
from tests.attn.formula import random_case
from tests.attn.test_max_logits import largest_logits
from tests.closeness import assert_within_budget
from tests.kernels.features import SOFTCAP, with_feature
from tests.kernels.masks import MIXED, dense_mask
from tests.oracles.attention import dense_attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-5  # float32 sums of exact products
SCALE = 0.2


def _options(softcap=0.0):
    return AttendOptions(SCALE, softcap, "emulated")


def _no_logits(q):
    return torch.full((q.shape[1],), -torch.inf)


def _forward(inputs, mask, options, *, seed=1, num_blocks=3):
    """Returns the largest logits beside `(out, lse)`."""
    found = _no_logits(inputs[0])
    with emulated.running(emulated.Settings(seed=seed, num_blocks=num_blocks, host_threads=1)):
        results = emulated.forward(*inputs, mask, options, found)
    return found, results


def _assert_largest(found, q, k, dense, softcap=0.0):
    expected = largest_logits(q, k, dense, SCALE, softcap)
    assert torch.allclose(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _loud_case(heads, dims, dtype):
    """Returns q, k, v whose largest products are of pairs that MIXED does not allow."""
    (q, k, v), _ = random_case(300, 300, heads, dims, dtype)
    q[171:180] *= 50.0  # rows without keys, in tiles of rows that have some
    k[100:130] *= 50.0  # seen by some of the rows only
    return q, k, v


@pytest.mark.parametrize("variant", forward_variants(), ids=lambda key: "-".join(map(str, key)))
def test_every_variant_finds_them_and_leaves_the_bits_of_the_result(variant):
    dtype, head_dim, value_dim, feature = variant
    softcap = SOFTCAP if feature == "softcap" else 0.0
    inputs = _loud_case((4, 2), (head_dim, value_dim), DTYPES[dtype])
    mask = masks.from_slices(300, 300, MIXED)
    options = with_feature(_options(0.0), feature, *inputs[:2])
    found, results = _forward(inputs, mask, options)
    _assert_largest(found, *inputs[:2], dense_mask(300, 300, MIXED), softcap)
    with emulated.running(emulated.Settings(num_blocks=3, host_threads=1)):
        plain = emulated.forward(*inputs, mask, options)
    assert all(torch.equal(x, y) for x, y in zip(results, plain, strict=True))


@pytest.mark.parametrize("sign", [-1.0, 0.0, 1.0])
def test_negative_and_zero_logits_are_as_large_as_they_are(sign):
    (q, k, v), _ = random_case(140, 300, (2, 1), (64, 64), torch.bfloat16)
    q, k = q.abs(), sign * k.abs()
    mask = masks.from_slices(140, 300, [(0, 129, 0, 300, None, None)])
    found, _ = _forward((q, k, v), mask, _options())
    _assert_largest(found, q, k, mask.to_dense())


def test_every_seed_and_grid_gives_the_same_bits():
    inputs = _loud_case((4, 2), (128, 128), torch.bfloat16)
    mask = masks.from_slices(300, 300, MIXED)
    first, _ = _forward(inputs, mask, _options(), seed=0, num_blocks=1)
    for seed, num_blocks in ((1, 5), (2, 2), (3, 3)):
        found, _ = _forward(inputs, mask, _options(), seed=seed, num_blocks=num_blocks)
        assert torch.equal(found, first), f"seed {seed}, {num_blocks} blocks"


def test_they_are_raised_never_lowered_and_stay_without_pairs():
    inputs = _loud_case((4, 2), (64, 64), torch.bfloat16)
    held = torch.tensor([-torch.inf, -1e30, 1e30, 0.0])
    for mask in (masks.from_slices(300, 300, MIXED), masks.from_slices(300, 300, [])):
        found = held.clone()
        emulated.forward(*inputs, mask, _options(), found)
        expected = largest_logits(*inputs[:2], mask.to_dense(), SCALE, 0.0)
        expected = torch.maximum(expected, held.double())
        assert torch.allclose(found.double(), expected, rtol=TOLERANCE)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_parts_of_the_keys_leave_those_of_the_whole(softcap):
    # 160 logits per row: lse is above all of them, which must not pass for a logit.
    q, k, v = _loud_case((4, 2), (64, 64), torch.bfloat16)
    mask, options = masks.from_slices(300, 300, MIXED), _options(softcap)
    found = _no_logits(q)
    held = emulated.forward(q, k[:90], v[:90], mask.crop(k=(0, 90)), options, found)
    rest = (q, k[90:], v[90:], mask.crop(k=(90, 300)), options)
    emulated.forward_onto_(*held, *rest, found)
    with pytest.raises(ValueError, match=r"out of torch.bfloat16 must be torch.float32"):
        emulated.forward_onto_(held[0].bfloat16(), held[1].clone(), *rest, found)
    allowed = dense_mask(300, 300, MIXED)
    _assert_largest(found, q, k, allowed, softcap)
    wishes = {"softcap": softcap, "softmax_scale": SCALE}
    exact, _ = dense_attention(*(x.double() for x in (q, k, v)), allowed, **wishes)
    plain, _ = dense_attention(q, k, v, allowed, **wishes)
    assert_within_budget(held[0], plain, exact, "out")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_attend_finds_them_beside_a_sink_without_a_gradient(needs_grad):
    inputs = _loud_case((4, 2), (64, 64), torch.bfloat16)
    leaves = [x.detach().requires_grad_(needs_grad) for x in inputs]
    mask, found = masks.from_slices(300, 300, MIXED), _no_logits(inputs[0])
    sink = torch.full((4,), 1e4)  # no logit of a pair
    out, _ = emulated.attend(*leaves, mask, sink, _options(), found)
    if needs_grad:
        gradients = torch.autograd.grad(out.sum(), leaves)
        assert all(torch.isfinite(x).all() for x in gradients)
    assert found.grad_fn is None and not found.requires_grad
    _assert_largest(found, *inputs[:2], dense_mask(300, 300, MIXED))
