"""How far a plan lies above its bound, said so that few tokens do not look like a bad plan."""

import re

import pytest

from megatron_cp.config import CPConfig
from megatron_cp.mask import causal, documents
from megatron_cp.plan import make_plan
from megatron_cp.plan.explain import over_bound


@pytest.mark.parametrize("topology", ["cpu", "h100"])
def test_a_bound_below_the_cost_of_a_message_gives_no_ratio(topology: str):
    """Of three documents on four ranks a balanced plan needs no row of others: the bound is pairs alone."""
    plan = make_plan(documents([3, 4, 5]), 4, CPConfig(topology=topology))
    gaps = re.findall(r": gap (\S+ \S+)$", str(plan), flags=re.MULTILINE)
    assert [gap.split()[1] for gap in gaps] == ["ms", "ms"]
    for gap, name in zip(gaps, ("forward", "backward"), strict=True):
        stats = plan.stats(name)
        more = stats["makespan_ms"] - stats["bound_ms"]
        assert float(gap.split()[0]) == pytest.approx(more, rel=5e-3)


def test_a_bound_above_it_gives_the_ratio():
    plan = make_plan(causal(65536), 8, CPConfig(topology="h100"))
    stats = plan.stats("forward")
    ratio = stats["makespan_ms"] / stats["bound_ms"]
    assert f": gap {ratio:.2f} x\n" in str(plan)


@pytest.mark.parametrize(
    ("predicted", "bound", "said"),
    [(0.3, 0.1, "3.00 x"), (0.0, 0.0, "1.00 x"), (1e-5, 1e-5, "1.00 x"), (0.02, 1e-8, "0.02 ms")],
)
def test_what_lies_on_its_bound_has_the_ratio_one(predicted: float, bound: float, said: str):
    assert over_bound(predicted, bound, "h100") == said
