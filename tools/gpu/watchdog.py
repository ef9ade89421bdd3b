"""What ends an invocation: a reason that makes the rest meaningless, a step that hangs."""

import threading
from collections.abc import Callable


class StopError(Exception):
    """Nothing after this would mean anything."""


class Watchdog:
    """Ends the process when a step takes too long, after telling which: a GPU that hangs cannot be interrupted."""

    def __init__(self, on_silence: Callable[[str], None]):
        self._on_silence = on_silence
        self._timer: threading.Timer | None = None

    def watch(self, step: str, seconds: float) -> None:
        """Begins to wait for the next step, or for `stop`."""
        self.stop()
        text = f"{step} did not end within {seconds:.0f} s; the kernel may wait for itself forever"
        self._timer = threading.Timer(seconds, self._on_silence, (text,))
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """Ends waiting."""
        if self._timer is not None:
            self._timer.cancel()
