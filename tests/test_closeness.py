"""The error budget itself: what it lets pass and what it stops."""

import pytest
import torch

from tests.closeness import assert_within_budget


def _rounded_product(dtype):
    a, b = torch.randn(64, 64).double(), torch.randn(64, 64).double()
    return (a.to(dtype) @ b.to(dtype)), a @ b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_formula_is_within_its_own_budget(dtype):
    plain, exact = _rounded_product(dtype)
    assert_within_budget(plain, plain, exact, "product")


def test_three_times_the_plain_error_is_refused():
    plain, exact = _rounded_product(torch.bfloat16)
    worse = exact + 3 * (plain.double() - exact)
    with pytest.raises(AssertionError, match=r"product .* outside its error budget"):
        assert_within_budget(worse, plain, exact, "product")


def test_small_error_everywhere_is_caught_by_the_norm():
    exact = torch.randn(1000).double()
    exact[0] = 100.0
    plain = exact.float()
    shifted = exact + 1e-6  # below eps x 100, far above the rounding of the others
    with pytest.raises(AssertionError, match="norm"):
        assert_within_budget(shifted, plain, exact, "shifted")


def test_nan_and_misplaced_infinity_are_refused():
    exact = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    plain = exact.float()
    assert_within_budget(plain, plain, exact, "lse")
    with pytest.raises(AssertionError, match="NaN"):
        assert_within_budget(torch.tensor([1.0, float("nan")]), plain, exact, "lse")
    with pytest.raises(AssertionError, match="infinities differ"):
        assert_within_budget(torch.tensor([1.0, -1e30]), plain, exact, "lse")


def test_exact_zero_must_be_met_exactly_unless_a_size_is_given():
    exact = torch.zeros(4, dtype=torch.float64)
    noise = torch.full((4,), 1e-8)
    assert_within_budget(exact.float(), exact.float(), exact, "dq")
    with pytest.raises(AssertionError):
        assert_within_budget(noise, exact.float(), exact, "dq")
    assert_within_budget(noise, exact.float(), exact, "dq", size=1.0)


def test_float64_result_may_differ_by_the_order_of_its_sums():
    x = torch.randn(10_000).double()
    exact = x.sum().reshape(1)
    other_order = x.flip(0).cumsum(0)[-1:]
    assert_within_budget(other_order, exact, exact, "sum", size=x.abs().sum().item())
    with pytest.raises(AssertionError):
        assert_within_budget(exact.float() + 1e-4, exact, exact, "sum")
