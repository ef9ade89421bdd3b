"""Error budgets that are measured, not typed.

A result may be about twice as far from the float64 oracle as the plain formula in the same dtype.
With e = error of the plain formula and u = eps of its dtype x size of the exact result, both hold:

    max |actual - exact|  <= 2 e_max  + u
    ||actual - exact||    <= 2 e_norm + u_norm / 4

On 6,400 correct merges neither rule raised a false alarm; the norm finds an lse kept in bfloat16
about twice as often as the maximum does.
"""

import torch

# In float64 the plain formula *is* the oracle, so its measured error says nothing about rounding.
_FLOAT64_UNITS = 64.0


def assert_within_budget(
    actual: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
    name: str,
    *,
    size: float | None = None,
    most: float = 2.0,
) -> None:
    """Passes if `actual` is as close to `exact` as `plain` is, by both rules above.

    Args:
        actual: the result under test, any floating dtype; infinite exactly where `exact` is.
        plain: the plain formula in the dtype of the inputs; its dtype sets eps.
        exact: the float64 oracle.
        name: what the message calls the result.
        size: magnitude at which the result is rounded; default max |exact|. Needed where terms of
            known size cancel to (nearly) zero, as in dq of a row with one key.
        most: how many times the largest error of the plain formula the largest may be. Only where many correct
            results were measured to go beyond 2, by luck of single elements; the norm stays at 2.
    """
    __tracebackhide__ = True
    assert exact.dtype == torch.float64, f"{name}: exact has {exact.dtype}; compute it in float64"
    for other, label in ((actual, "actual"), (plain, "plain")):
        assert other.shape == exact.shape, (
            f"{name}: {label} has shape {tuple(other.shape)}, exact has {tuple(exact.shape)}"
        )
    actual_f64 = actual.detach().double()
    plain_f64 = plain.detach().double()
    exact_f64 = exact.detach()
    _assert_same_infinities(actual_f64, exact_f64, name)

    finite = torch.isfinite(exact_f64)
    if not finite.any():
        return
    error = (actual_f64 - exact_f64)[finite].abs()
    plain_error = (plain_f64 - exact_f64)[finite].abs().nan_to_num(0.0, posinf=0.0)
    max_size = exact_f64[finite].abs().max().item() if size is None else size
    norm_size = exact_f64[finite].norm().item() if size is None else size * error.numel() ** 0.5
    eps = torch.finfo(plain.dtype).eps
    if plain.dtype == torch.float64:
        eps *= _FLOAT64_UNITS

    max_error, max_plain = error.max().item(), plain_error.max().item()
    norm_error, norm_plain = error.norm().item(), plain_error.norm().item()
    max_budget = most * max_plain + eps * max_size
    norm_budget = 2 * norm_plain + eps * norm_size / 4
    if max_error <= max_budget and norm_error <= norm_budget:
        return
    worst = _index_of_worst(actual_f64, exact_f64, finite)
    values = ", ".join(
        f"{label} {tensor[worst].item():.9g}"
        for label, tensor in (("actual", actual_f64), ("plain", plain_f64), ("exact", exact_f64))
    )
    num_off = (error > max_budget).sum().item()
    raise AssertionError(
        f"{name} ({actual.dtype}, shape {tuple(actual.shape)}) is outside its error budget\n"
        f"  max : error {max_error:.3e}, allowed {max_budget:.3e}, "
        f"plain {plain.dtype} formula {max_plain:.3e}\n"
        f"  norm: error {norm_error:.3e}, allowed {norm_budget:.3e}, plain {norm_plain:.3e}\n"
        f"  worst at {worst}: {values}\n"
        f"  elements off by more than the max budget: {num_off} of {error.numel()}"
    )


def _assert_same_infinities(actual: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    __tracebackhide__ = True
    num_nan = actual.isnan().sum().item()
    assert num_nan == 0, (
        f"{name}: {num_nan} of {actual.numel()} elements are NaN, first at {_first(actual.isnan())}"
    )
    differs = (actual.isinf() | exact.isinf()) & (actual != exact)
    if differs.any():
        first = _first(differs)
        raise AssertionError(
            f"{name}: infinities differ at {differs.sum().item()} elements, first at {first}: "
            f"actual {actual[first].item()}, exact {exact[first].item()}"
        )


def _first(flags: torch.Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero()[0].tolist())


def _index_of_worst(
    actual: torch.Tensor, exact: torch.Tensor, finite: torch.Tensor
) -> tuple[int, ...]:
    error = torch.where(finite, (actual - exact).abs(), torch.zeros_like(exact))
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
