"""What one rank finds, told to all of them, so that every rank goes on or stops alike.

    gather(own)                      what each rank says
    any_rank(a, b)                   whether any rank says so: one small all-reduce, cheap enough for each step
    with refused_together(OSError):  what the block refuses on one rank is refused on all

Nothing is decided by one rank alone: the others would wait for it in the next collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def gather(own: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns what each rank of the group says, in the order of its ranks; None: of the whole job.

    Collective over the group.
    """
    said = [own] * dist.get_world_size(group)
    dist.all_gather_object(said, own, group=group)
    return said


def any_rank(*says: bool) -> list[bool]:
    """Returns for each statement whether any rank makes it. Collective over the whole job."""
    votes = torch.tensor(says, dtype=torch.int32).to(torch.cuda.current_device())
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


@contextmanager
def refused_together(*kinds: type[BaseException]) -> Iterator[None]:
    """Raises ValueError on every rank with the words of the first rank whose block raised one of `kinds`.

    Collective over the whole job, behind the block: every rank enters it. The block itself may hold a collective only
    where all ranks come through it before one may raise.
    """
    own: BaseException | None = None
    try:
        yield
    except kinds as refusal:
        own = refusal
    first = next(
        (text for text in gather(None if own is None else str(own)) if text is not None), None
    )
    if first is not None:
        raise ValueError(first) from own
