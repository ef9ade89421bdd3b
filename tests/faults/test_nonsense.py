"""Nonsense in public calls is refused in one line of ours (tests/faults/nonsense.py says what counts)."""

import pytest

from tests.child import in_a_child
from tests.faults.nonsense import faults


@pytest.mark.parametrize("seed", [0, 1])
@in_a_child
def test_nonsense_is_refused_and_never_hangs(seed):
    assert faults(seed, mask_calls=20_000, planner_calls=500) == []
