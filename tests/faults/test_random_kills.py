"""A sample of `benchmarks/kill_at_random.py`: eight kills, and every bit as if nobody had been killed."""

import pytest

from tests.faults.random_kills import draw, run_trials

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_was_killed_anywhere_ends_with_the_bits_of_one_that_was_not(tmp_path):
    trials = draw(8, seed=14, layouts=("TP 2 x CP 2", "PP 2 x CP 2, async saves"))
    verdicts = run_trials(trials, tmp_path)
    assert len({trial.phase for trial in trials}) == 4
    assert [v.difference for v in verdicts] == [None] * 8, verdicts
    # Moments lie within what the phase is followed by; on a fast machine one or the other may come too late.
    assert sum(verdict.died for verdict in verdicts) >= 6, verdicts
