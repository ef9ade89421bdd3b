"""How far a result is from an exact one, row by row: what tests on a GPU are judged by."""

from torch import Tensor, ones_like


def largest_difference(actual: Tensor, exact: Tensor) -> float:
    """Returns the largest difference; infinite where one of the two is infinite and the other is not."""
    difference = (actual.double() - exact).abs().masked_fill(actual.double() == exact, 0.0)
    return difference.max().item()


def row_error(actual: Tensor, exact: Tensor) -> float:
    """Returns the largest error of a row of a head, relative to its size, or to a typical one if that is larger."""
    size = exact.norm(dim=-1)
    typical = size[size > 0].median() if (size > 0).any() else ones_like(size)[0, 0]
    return ((actual.double() - exact).norm(dim=-1) / size.clamp(min=typical)).max().item()
