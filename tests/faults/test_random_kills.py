"""A sample of `benchmarks/kill_at_random.py`: five kills, and every bit as if nobody had been killed."""

import pytest

from tests.faults.random_kills import draw, run_trials

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_run_that_was_killed_anywhere_ends_with_the_bits_of_one_that_was_not(tmp_path):
    drawn = draw(8, seed=14, layouts=("TP 2 x CP 2", "PP 2 x CP 2, async saves"))
    trials = [
        drawn[place] for place in (0, 2, 3, 5, 6)
    ]  # every phase in one of the layouts, saves in both
    verdicts = run_trials(trials, tmp_path)
    assert len({trial.phase for trial in trials}) == 4
    assert [v.difference for v in verdicts] == [None] * 5, verdicts
    # Moments lie within what the phase is followed by; on a fast machine one or the other may come too late.
    assert sum(verdict.died for verdict in verdicts) >= 4, verdicts
