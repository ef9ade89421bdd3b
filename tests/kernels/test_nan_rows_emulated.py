"""In the kernel too a row of NaN stays one: the maximum of its scores ignores NaN, the row must not."""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from tests.attn.formula import random_case

ROW = 3


@pytest.mark.parametrize("slices", [((0, 70, 0, 70, None, 0),), ((0, 70, 0, 70, None, None),)])
def test_a_query_of_nan_has_a_result_of_nan_and_its_neighbours_have_none(slices):
    (q, k, v), _ = random_case(70, 70, (2, 1), (64, 64), torch.bfloat16)
    q[ROW] = torch.nan
    out, lse = attend(q, k, v, masks.from_slices(70, 70, slices), backend="emulated")
    others = torch.arange(70) != ROW
    assert lse[ROW].isnan().all() and out[ROW].isnan().all()
    assert out[others].isfinite().all() and lse[others].isfinite().all()
