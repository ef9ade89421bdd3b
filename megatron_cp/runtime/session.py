"""What one rank keeps of a plan: its part compiled to index tensors, checked once against its peers.

`open_session` is the gate in front of the first collective of a plan object: all ranks of the group
compare digests there, so that ranks that bring different new plans get an error everywhere, never a hang or a
wrong result. A rank that goes on with a plan agreed on earlier while another brings a new one is not noticed
here: it ends in the process group's time-out; docs/runtime.md says why and how to see it.
"""

import atexit
import hashlib
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.comm import HeadExchange, RankTransfer
from megatron_cp.errors import PlanMismatchError
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.schema import (
    SIDES,
    START,
    AttentionPlan,
    Hop,
    Pass,
    PassName,
    Side,
    Transfer,
)

Rows = tuple[Tensor, ...]

MAX_SESSIONS = 16  # compiled plans kept per process: micro-batches in flight, not history


@dataclass(frozen=True)
class RankSide:
    """Where the rows of one side (queries, or keys and values) of a stage come from, and go back to."""

    cast: RankTransfer | None
    keeps: bool
    """Received rows of the stage before stay."""
    ends_chain: bool
    """The stage after starts from own rows again."""
    forwards: bool
    """The cast sends rows that were received before, so it needs the whole row space."""
    returns: RankTransfer | None
    """The casts of the whole chain, where it ends: what was computed for received rows goes home."""
    own_rows: int
    uses_own: bool
    """False: the work names received rows only, so own rows need not be copied beside them."""

    def held(self, own: Rows, received: Rows) -> Rows:
        """Returns the rows that the stage's work counts in."""
        if not len(received[0]):
            return own
        if not self.uses_own:
            return received
        return tuple(torch.cat(pair) for pair in zip(own, received, strict=True))

    def parts(self, held: Rows, num_received: int) -> tuple[Rows | None, Rows]:
        """Returns (own, received) results of rows that `held` put side by side; own may be None."""
        if not num_received:
            return held, tuple(t[:0] for t in held)
        if not self.uses_own:
            return None, held
        return tuple(t[: self.own_rows] for t in held), tuple(t[self.own_rows :] for t in held)


@dataclass(frozen=True)
class RankStage:
    """One stage as one rank executes it; `work` is on the grid of `query.held x key.held`."""

    work: AttentionMask
    query: RankSide
    key: RankSide


@dataclass(frozen=True)
class RankPass:
    """One pass as one rank executes it."""

    stages: tuple[RankStage, ...]
    exchange: HeadExchange | None


@dataclass(frozen=True)
class Session:
    """A plan compiled for one rank of a group on one device."""

    forward: RankPass
    backward: RankPass
    group: dist.ProcessGroup | None
    tokens_per_rank: int


_sessions: OrderedDict[tuple[str, str, int, str], Session] = OrderedDict()
_agreed: dict[tuple[int, str], weakref.ref[AttentionPlan]] = {}


@atexit.register
def forget_plans() -> None:
    """Drops compiled plans, and with them the groups they hold.

    A process group that is still referenced when the interpreter ends aborts in its threads' destructors.
    """
    _sessions.clear()
    _agreed.clear()


def open_session(
    plan: AttentionPlan, group: dist.ProcessGroup | None, device: torch.device, call: str = ""
) -> Session:
    """Returns the compiled plan of this rank after all ranks of `group` agreed on it.

    `group` may be None for cp_size 1. `call` describes what else must be equal on all ranks (dtypes,
    head counts, options). Collective on the first use of a plan object (and of each `call` text) only.

    Raises:
        ValueError: when the group's size is not the plan's.
        PlanMismatchError: on every rank, when ranks hold different plans or make different calls.
    """
    size = 1 if group is None else dist.get_world_size(group)
    if size != plan.cp_size:
        raise ValueError(
            f"group has {size} ranks, the plan was made for cp_size={plan.cp_size}; "
            f"make_plan(mask, {size}) or pass the context-parallel group"
        )
    if group is not None and size > 1:
        _agree(plan, group, device, call)
    rank = 0 if group is None else dist.get_rank(group)
    key = (plan.digest(), _name(group), rank, str(device))
    if key not in _sessions:
        _sessions[key] = _compile(plan, rank, group, device)
        if len(_sessions) > MAX_SESSIONS:
            _sessions.popitem(last=False)
    _sessions.move_to_end(key)
    return _sessions[key]


def _agree(plan: AttentionPlan, group: dist.ProcessGroup, device: torch.device, call: str) -> None:
    """Compares plan and call with all peers, once per plan *object*.

    Objects, not digests: two ranks that alternate between two known plans out of step would otherwise
    both believe to have agreed already.
    """
    key = (id(plan), f"{_name(group)} {call}")
    if key in _agreed and _agreed[key]() is plan:
        return
    mine = hashlib.sha256(f"{plan.digest()} {call}".encode()).digest()
    local = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    all_digests = [torch.empty_like(local) for _ in range(plan.cp_size)]
    dist.all_gather(all_digests, local, group=group)
    digests = [bytes(t.cpu().tolist()).hex()[:12] for t in all_digests]
    if len(set(digests)) > 1:
        majority = max(sorted(set(digests)), key=digests.count)
        odd = [rank for rank, digest in enumerate(digests) if digest != majority]
        raise PlanMismatchError(
            f"ranks {odd} of {plan.cp_size} hold another plan or make another call than the rest "
            f"(digests {digests}, this call: {call or 'dispatch'}); give every rank the same mask, "
            "CPConfig, dtype and options"
        )
    _agreed[key] = weakref.ref(plan, lambda _: _agreed.pop(key, None))


def _name(group: dist.ProcessGroup | None) -> str:
    """Returns a name that no other group of this process has had; ids of dead groups come back."""
    return "" if group is None else str(group.group_name)


def _compile(
    plan: AttentionPlan, rank: int, group: dist.ProcessGroup | None, device: torch.device
) -> Session:
    passes = [_compile_pass(plan, name, rank, group, device) for name in ("forward", "backward")]
    return Session(passes[0], passes[1], group, plan.tokens_per_rank)


def _compile_pass(
    plan: AttentionPlan,
    name: PassName,
    rank: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> RankPass:
    pass_: Pass = plan.get_pass(name)
    own_rows, exchange = plan.tokens_per_rank, None
    if pass_.head_split is not None and pass_.head_split.degree > 1:
        assert group is not None
        exchange = HeadExchange.compile(pass_.head_split, rank, plan.cp_size, group)
        own_rows *= pass_.head_split.degree
    stages = []
    for index, stage in enumerate(pass_.stages):
        query, key = (
            _compile_side(pass_, index, side, (rank, plan.cp_size, own_rows), device)
            for side in SIDES
        )
        work = stage.work[rank]
        work = work.crop(
            q=(0 if query.uses_own else own_rows, work.num_queries),
            k=(0 if key.uses_own else own_rows, work.num_keys),
        )
        stages.append(RankStage(work, query, key))
    return RankPass(tuple(stages), exchange)


def _compile_side(
    pass_: Pass, index: int, side: Side, who: tuple[int, int, int], device: torch.device
) -> RankSide:
    """`who`: rank, number of ranks, own rows."""
    rank, num_ranks, own_rows = who
    stage, chain = pass_.stages[index], pass_.chain(index, side)
    hops = [hop for i in chain[:-1] for hop in _hops(pass_.stages[i].cast(side))]
    own_hops = _hops(stage.cast(side))
    before = own_rows + sum(int(hop.rows_received(num_ranks)[rank]) for hop in hops)
    cast = _compile_hops(own_hops, rank, num_ranks, before, device)
    ends, returns = pass_.ends_chain(index, side), cast
    if hops or not ends:
        returns = (
            _compile_hops(hops + own_hops, rank, num_ranks, own_rows, device) if ends else None
        )
    start, span = (
        (0, stage.work[rank].num_queries) if side == "q" else (2, stage.work[rank].num_keys)
    )
    uses_own = span == own_rows or bool((stage.work[rank].array[:, start] < own_rows).any())
    forwards = len(own_hops) > 1 or any(
        bool((hop.messages[:, START] >= own_rows).any()) for hop in own_hops
    )
    return RankSide(cast, stage.keeps(side), ends, forwards, returns, own_rows, uses_own)


def _hops(cast: Transfer | None) -> list[Hop]:
    return [] if cast is None else list(cast.hops)


def _compile_hops(
    hops: list[Hop], rank: int, num_ranks: int, rows: int, device: torch.device
) -> RankTransfer | None:
    if not any(len(hop.messages) for hop in hops):
        return None
    return RankTransfer.compile(Transfer(tuple(hops)), rank, num_ranks, rows, device)
