"""Names for what the stage loops do, seen in a trace of torch.profiler and nowhere else."""

from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

_OFF: AbstractContextManager[object] = nullcontext()


def span(pass_name: str, action: str, stage: int) -> AbstractContextManager[object]:
    """Returns a block that a running profiler shows as `cp forward: attend, stage 0`.

    Without a profiler it is an empty block: a range of torch costs 14 us even then, this 0.2 us. The stage
    loops took 1.3 us a stage of host time without it and take 2.3 us with it (2026-11-22, EPYC, empty stages).
    """
    if not _profiler_enabled():
        return _OFF
    return record_function(f"cp {pass_name}: {action}, stage {stage}")
