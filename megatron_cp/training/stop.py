"""Why a run stops before its last step; every rank comes to the same answer at the same step."""

from __future__ import annotations

import time

from megatron_cp.training import exit_signal
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_datetime, print_rank_0
from megatron_cp.training.together import any_rank


class ExitConditions:
    """Signal, duration and interval of one run. Every rank asks the same questions in the same order."""

    def __init__(self, config: TrainConfig) -> None:
        """Keeps what the run asks for. The clock runs since the program began: start and load are a job's time too."""
        self._steps = config.steps
        self._is_signalled = False

    def is_signalled(self) -> bool:
        """Whether the exit signal reached any rank. Collective with `--exit-signal-handler`."""
        if self._steps.exit_signal_handler and not self._is_signalled:
            self._agree(exit_signal.arrived(), is_late=False)
        return self._is_signalled

    def stops_after(self, iteration: int) -> bool:
        """Whether the run stops after this iteration.

        Collective with `--exit-signal-handler` and `--exit-duration-in-mins`, one number for both.
        """
        steps, minutes = self._steps, self._steps.exit_duration_in_mins
        if self._is_signalled:
            return True
        is_late = False
        if steps.exit_signal_handler or minutes is not None:
            own = minutes is not None and time.monotonic() - exit_signal.STARTED > 60 * minutes
            is_late = self._agree(steps.exit_signal_handler and exit_signal.arrived(), is_late=own)
        if is_late:
            print_rank_0(f"exiting program after {minutes} minutes at iteration {iteration}")
        elif steps.exit_interval and iteration % steps.exit_interval == 0:
            print_rank_0(f"exiting program at iteration {iteration}")
            return True
        return is_late or self._is_signalled

    def _agree(self, has_signal: bool, *, is_late: bool) -> bool:
        """Returns whether any rank is late, and keeps whether any has the signal; collective."""
        self._is_signalled, is_late = any_rank(has_signal, is_late)
        if self._is_signalled:
            print_datetime(f"exiting program after receiving {self._steps.exit_signal}.")
        return is_late
