"""Head dims without a kernel of their own run on the next wider one; the values are those of the formula."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import (
    attend,
    attend_backward,
    attend_backward_onto_,
    attend_forward,
    attend_forward_onto_,
    dq_factor,
    resolve_options,
)
from megatron_cp.attn.hopper.checks import built_dims
from tests.attn.formula import assert_attention, random_case
from tests.kernels.masks import dense_mask


@pytest.mark.parametrize(
    ("dims", "built"),
    [
        ((40, 40), (64, 64)),
        ((72, 72), (96, 96)),
        ((80, 80), (96, 96)),
        ((112, 112), (128, 128)),
        ((160, 160), (192, 192)),
        ((160, 128), (192, 128)),
        ((64, 64), (64, 64)),
        ((192, 128), (192, 128)),
        ((250, 8), (256, 256)),
    ],
)
@pytest.mark.parametrize("feature", ["", "softcap"])
def test_the_narrowest_pair_that_fits_is_taken(dims, built, feature):
    assert built_dims(torch.bfloat16, *dims, feature, True) == built
    q, k, v = torch.empty(1, 1, dims[0]), torch.empty(1, 1, dims[0]), torch.empty(1, 1, dims[1])
    options = resolve_options(*(x.bfloat16() for x in (q, k, v)), backend="emulated")
    assert options.wide_dims == (None if dims == built else built)
    assert options.softmax_scale == pytest.approx(dims[0] ** -0.5)


SIZE, SLICES = (150, 170), ((0, 60, 0, 170, None, 0), (60, 150, 20, 160, -70, 40))


@pytest.mark.parametrize(
    ("dims", "dtype", "softcap"),
    [
        ((40, 40), torch.bfloat16, 0.0),
        ((80, 80), torch.bfloat16, 3.0),
        ((72, 40), torch.float16, 0.0),
        ((160, 160), torch.bfloat16, 0.0),
    ],
    ids=str,
)
def test_values_and_gradients_of_narrow_rows_are_those_of_the_formula(dims, dtype, softcap):
    mask = masks.from_slices(*SIZE, SLICES)
    inputs, arguments = random_case(*SIZE, (2, 1), dims, dtype, seed=3)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves, mask, backend="emulated", softcap=softcap)
    dlse = arguments["dlse"].to(lse.dtype)
    finite = lse.masked_fill(~torch.isfinite(lse), 0.0)
    loss = (out * arguments["dout"]).sum(dtype=lse.dtype) + (finite * dlse).sum()
    grads = torch.autograd.grad(loss, leaves)
    actual = (out.detach(), lse.detach(), *grads)
    allowed = dense_mask(*SIZE, SLICES)
    wanted = {**arguments, "softcap": softcap}
    assert_attention(actual, inputs, allowed, plain_dtype=dtype, **wanted)


def test_stages_of_narrow_rows_add_up_to_the_whole():
    """As context parallelism runs them: a part of the keys, then the others onto it."""
    (q, k, v), arguments = random_case(*SIZE, (2, 1), (80, 40), torch.bfloat16, seed=4)
    mask, options = masks.from_slices(*SIZE, SLICES), resolve_options(q, k, v, backend="emulated")
    dout = arguments["dout"]
    out, lse = attend_forward(q, k, v, mask, options)
    delta = (dout.float() * out).sum(dim=-1)
    whole = out, lse, *attend_backward(dout, q, k, v, lse, delta, mask, options)
    parts = [
        (keys, mask.crop(k=(keys.start, keys.stop))) for keys in (slice(0, 90), slice(90, 170))
    ]
    summed, dq, dks, dvs = None, None, [], []
    for keys, part in parts:
        if summed is None:
            summed = attend_forward(q, k[keys], v[keys], part, options)
        else:
            attend_forward_onto_(summed, q, k[keys], v[keys], part, options)
    for keys, part in parts:
        dq, dk, dv = attend_backward_onto_(
            dq, None, dout, q, k[keys], v[keys], lse, delta, part, options
        )
        dks.append(dk)
        dvs.append(dv)
    results = *summed, dq * dq_factor(options), torch.cat(dks), torch.cat(dvs)
    for result, expected in zip(results, whole, strict=True):
        assert result.shape == expected.shape
        size = expected[torch.isfinite(expected)].abs().max()
        differs = result != expected  # not where rows without keys are -inf
        assert ((result - expected).abs()[differs] <= 4e-3 * size).all()
