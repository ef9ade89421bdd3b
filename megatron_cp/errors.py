"""Errors of our own; wrong input raises `ValueError`, a wish we cannot serve `NotImplementedError`."""

import os


class PlanMismatchError(RuntimeError):
    """Ranks of one context-parallel group hold different plans; raised on every rank alike."""


ANOTHER_CHECKPOINT = (
    "load another checkpoint with --ckpt-step, or the last good one with --ckpt-fallback"
)
"""What every message about a damaged file advises."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, cut, or holds something else than what was saved."""


def unreadable(path: str | os.PathLike[str], failure: OSError) -> DamagedCheckpointError:
    """Returns the refusal of a checkpoint whose file the system does not read."""
    return DamagedCheckpointError(
        f"{path} cannot be read ({failure.strerror}); {ANOTHER_CHECKPOINT}"
    )
