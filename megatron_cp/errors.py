"""Errors of our own; wrong input raises `ValueError`, a wish we cannot serve `NotImplementedError`."""


class PlanMismatchError(RuntimeError):
    """Ranks of one context-parallel group hold different plans; raised on every rank alike."""


class DamagedCheckpointError(ValueError):
    """A file of a checkpoint is missing, cut, or holds something else than what was saved."""
