"""What one rank keeps of a plan: its part compiled to index tensors, checked once against its peers.

`open_session` is the gate in front of the first collective of a plan object: all ranks of the group
compare digests there, so that ranks that bring different new plans get an error everywhere, never a hang or a
wrong result. A rank that goes on with a plan agreed on earlier while another brings a new one is not noticed
here: it ends in the process group's time-out.
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
from megatron_cp.plan.schema import AttentionPlan, Pass, PassName, Stage, Transfer

MAX_SESSIONS = 16  # compiled plans kept per process: micro-batches in flight, not history


@dataclass(frozen=True)
class Side:
    """Where the rows of one side (queries, or keys and values) of a stage come from."""

    transfer: RankTransfer | None
    uses_own: (
        bool  # False: the work names received rows only, so own rows need not be copied beside them
    )

    def held(self, own: tuple[Tensor, ...], received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the rows that the stage's work counts in."""
        if self.transfer is None or not self.transfer.num_received:
            return own
        if not self.uses_own:
            return received
        return tuple(torch.cat(pair) for pair in zip(own, received, strict=True))

    def parts(
        self, held: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Returns (own, received) results of rows that `held` put side by side; None where there are none."""
        if self.transfer is None:
            return held, None
        if not self.transfer.num_received:
            return held, tuple(t[:0] for t in held)
        if not self.uses_own:
            return None, held
        split = self.transfer.own_rows
        return tuple(t[:split] for t in held), tuple(t[split:] for t in held)


@dataclass(frozen=True)
class RankStage:
    """One stage as one rank executes it; `work` is on the grid of `query.held x key.held`."""

    work: AttentionMask
    query: Side
    key: Side


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
    stages = [_compile_stage(stage, rank, plan.cp_size, own_rows, device) for stage in pass_.stages]
    return RankPass(tuple(stages), exchange)


def _compile_stage(
    stage: Stage, rank: int, num_ranks: int, own_rows: int, device: torch.device
) -> RankStage:
    work = stage.work[rank]
    sides = []
    for axis, cast in ((0, stage.q_cast), (2, stage.k_cast)):
        transfer = _compile_transfer(cast, rank, num_ranks, own_rows, device)
        brings_nothing = transfer is None or not transfer.num_received
        uses_own = brings_nothing or bool((work.array[:, axis] < own_rows).any())
        sides.append(Side(transfer, uses_own))
    query, key = sides
    work = work.crop(
        q=(0 if query.uses_own else own_rows, work.num_queries),
        k=(0 if key.uses_own else own_rows, work.num_keys),
    )
    return RankStage(work, query, key)


def _compile_transfer(
    cast: Transfer | None, rank: int, num_ranks: int, own_rows: int, device: torch.device
) -> RankTransfer | None:
    if cast is None or not any(len(hop.messages) for hop in cast.hops):
        return None
    return RankTransfer.compile(cast, rank, num_ranks, own_rows, device)
