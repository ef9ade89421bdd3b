"""The raw passes that the distributed runtime calls: parts of the keys, merged lse and delta."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn import attend_backward, attend_forward, resolve_options
from tests.attn.formula import assert_attention, random_case
from tests.attn.in_parts import assert_silent_rows_get_and_give_zeros, attend_in_parts
from tests.strategies import attention_masks

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    case=attention_masks(),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    heads=st.sampled_from(((2, 2), (4, 2))),
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    softcap=st.sampled_from((0.0, 2.0)),
)
def test_parts_of_the_keys_add_up_to_attention_over_all(backend, case, cuts, heads, dtype, softcap):
    mask, dense = case
    cuts = [round(cut * mask.num_keys) for cut in cuts]
    inputs, arguments = random_case(mask.num_queries, mask.num_keys, heads, (8, 6), dtype)
    actual = attend_in_parts(inputs, mask, arguments, cuts, backend, softcap=softcap)
    plain_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(x.dtype == plain_dtype for x in actual)
    assert_attention(actual, inputs, dense, plain_dtype=plain_dtype, softcap=softcap, **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_to_float32_accuracy(dtype):
    mask = masks.documents([700, 100], "causal")
    inputs, arguments = random_case(800, 800, (2, 1), (16, 16), dtype)
    actual = attend_in_parts(inputs, mask, arguments, [350], "cpu")
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **arguments)


@pytest.mark.parametrize("num_parts", [1, 2, 4, 8, 16])
def test_error_does_not_grow_with_the_number_of_parts(num_parts):
    mask = masks.causal(512)
    inputs, arguments = random_case(512, 512, (2, 2), (16, 16), torch.float32)
    cuts = [512 * i // num_parts for i in range(1, num_parts)]
    actual = attend_in_parts(inputs, mask, arguments, cuts, "cpu")
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_rows_whose_global_lse_is_minus_infinity_get_and_give_exact_zeros(backend, softcap):
    assert_silent_rows_get_and_give_zeros(backend, torch.float32, softcap=softcap)


@pytest.mark.parametrize("dout_scale", [0.0, 1e-25, 1e-12, 1.0, 1e12, 1e20])
def test_delta_survives_any_size_of_dout(dout_scale):
    mask = masks.causal(90)
    inputs, arguments = random_case(90, 90, (2, 2), (8, 8), torch.float32)
    for dlse_scale in (0.0, 1.0, dout_scale):
        scaled = {
            "dout": arguments["dout"] * dout_scale,
            "dlse": arguments["dlse"] * dlse_scale,
        }
        scaled["dout"][::4] = 0
        actual = attend_in_parts(inputs, mask, scaled, [40], "cpu")
        dense = torch.as_tensor(mask.to_dense())
        assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **scaled)


def test_backends_refuse_a_mask_of_another_grid():
    (q, k, v), arguments = random_case(8, 9, (2, 2), (4, 4), torch.float32)
    options = resolve_options(q, k, v)
    with pytest.raises(ValueError, match="8 x 8 must equal the rows of q and k, 8 x 9"):
        attend_forward(q, k, v, masks.causal(8), options)
    with pytest.raises(ValueError, match="crop or shift the mask"):
        lse = torch.zeros(8, 2)
        attend_backward(arguments["dout"], q, k, v, lse, lse, masks.causal(8), options)


def test_splitting_heads_into_groups_changes_no_bit(monkeypatch):
    from megatron_cp.attn.cpu import heads

    mask = masks.documents([60, 40], "causal")
    for head_counts in ((6, 6), (6, 3)):
        inputs, arguments = random_case(100, 100, head_counts, (8, 8), torch.float32)
        whole = attend_in_parts(inputs, mask, arguments, [30], "cpu")
        with monkeypatch.context() as patch:
            patch.setattr(heads, "MAX_GROUP_NUMEL", 1)
            assert len(list(heads.head_groups(inputs[0], inputs[1]))) > 1
            split = attend_in_parts(inputs, mask, arguments, [30], "cpu")
        assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
