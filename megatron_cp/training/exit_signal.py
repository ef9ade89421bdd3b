"""The signal that asks a run to save and leave: noted when it arrives, acted on between two steps.

    pretrain_gpt.py     catch_exit_signal     before the slow imports: a signal that comes during them is kept
    stop.py             arrived               once a step; ranks agree, and all of them leave

Without `--exit-signal-handler` nothing is caught: a scheduler's SIGTERM ends the process, as Python has it.
Nothing but the standard library is imported here, so that the first second of a run is covered too: also by the clock
of `--exit-duration-in-mins`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")

STARTED = time.monotonic()
"""When the program began, as Megatron-LM counts it: when its own modules were imported."""

_caught: signal.Signals | None = None
_catcher: int | None = None
_arrived = False


def catch_exit_signal(argv: Sequence[str]) -> None:
    """Notes the exit signal from now on, if the command line asks for it. Call it in the main thread.

    What is wrong with the command line is said later, by the whole parser.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--exit-signal-handler", action="store_true")
    parser.add_argument("--exit-signal", choices=EXIT_SIGNALS, default=EXIT_SIGNALS[0])
    try:
        wish, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return
    if wish.exit_signal_handler:
        _catch(signal.Signals[wish.exit_signal])


def _catch(wanted: signal.Signals) -> None:
    global _caught, _catcher
    _caught, _catcher = wanted, os.getpid()
    signal.signal(wanted, _note)
    signal.siginterrupt(wanted, False)  # libraries that do not expect EINTR go on where they were


def _note(number: int, frame: FrameType | None) -> None:
    """Keeps that the signal came, and says so once: until the step is over nothing else is seen."""
    global _arrived
    if os.getpid() != _catcher:
        return  # a fork that writes a checkpoint goes on, and says nothing
    if not _arrived:
        name = signal.Signals(number).name
        # A handler may run inside a print: straight to the descriptor, which may be a full disk.
        with suppress(OSError):
            os.write(2, f"{name} received: this rank leaves after the current step\n".encode())
    _arrived = True


def arrived() -> bool:
    """Whether the exit signal reached this process."""
    return _arrived


@contextmanager
def held_back() -> Iterator[None]:
    """Programs started within the block never see the exit signal.

    A scheduler signals every process of a job; what a run still needs for its last checkpoint and its
    last log line must outlive that. The signal itself waits until the block ends.
    """
    if _caught is None:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {_caught})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
