"""When a run stops before its last step: all ranks at the same one, whoever saw the reason."""

import pytest

from megatron_cp.training.arguments import parse_arguments
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.ranks import run_on_ranks
from tests.training.commands import SMALL_RUN


def iterations_of_exit(rank, world_size, flags, seconds, setup_s=0):
    """The first of five iterations after which this rank stops; `seconds[rank]` pass in each, `setup_s` before all."""
    with parallel_state(Case()):
        from megatron_cp.training import exit_signal, stop

        clock = [0.0]
        started, exit_signal.STARTED = exit_signal.STARTED, -setup_s
        monotonic, stop.time.monotonic = stop.time.monotonic, lambda: clock[0]
        try:
            conditions = stop.ExitConditions(parse_arguments([*SMALL_RUN, *flags], {}))
            for iteration in range(1, 6):
                clock[0] += seconds[rank]
                if conditions.stops_after(iteration):
                    return iteration
        finally:
            stop.time.monotonic, exit_signal.STARTED = monotonic, started
    return None


@pytest.mark.parametrize(
    ("flags", "seconds", "stops"),
    [
        ([], (1000, 1000), None),
        (["--exit-interval", "3"], (0, 0), 3),
        (["--exit-duration-in-mins", "1"], (20, 20), 4),
        (["--exit-duration-in-mins", "1"], (20, 35), 2),  # the rank with the slow clock goes too
        (["--exit-duration-in-mins", "1", "--exit-interval", "3"], (20, 20), 3),
        (["--exit-duration-in-mins", "1", "--exit-signal-handler"], (35, 20), 2),
    ],
)
def test_all_ranks_stop_after_the_same_iteration(flags, seconds, stops):
    assert run_on_ranks(2, iterations_of_exit, flags, seconds) == [stops, stops]


def test_the_time_of_start_and_load_counts():
    flags = ["--exit-duration-in-mins", "2"]
    assert run_on_ranks(2, iterations_of_exit, flags, (20, 20), 70) == [3, 3]
