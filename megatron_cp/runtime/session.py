"""What one rank keeps of a plan: its part compiled to index tensors, checked once against its peers.

`open_session` is the gate in front of the first collective of a plan object: all ranks of the group
compare digests there, so that ranks that bring different new plans get an error everywhere, never a hang or a
wrong result. A rank that goes on with a plan agreed on earlier while another brings a new one is not noticed
here: it ends in the process group's time-out; docs/runtime.md says why and how to see it.
"""

import atexit
import hashlib
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.comm import HeadExchange, RankTransfer
from megatron_cp.comm.groups import agreement_group, forget_groups, name_of, transfer_group
from megatron_cp.comm.upload import Uploaded, upload
from megatron_cp.device_memory import is_capturing
from megatron_cp.errors import PlanMismatchError
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.completion import completing_quadrants
from megatron_cp.plan.hardware.makespan import transfer_shares
from megatron_cp.plan.schema import ANSWERED, SIDES, Hop, OwnRows, Pass, PassName, Side, Transfer
from megatron_cp.runtime.hardware import tell_of_other_hardware

Rows = tuple[Tensor, ...]

Source = Literal["own", "received"]
SOURCES: tuple[Source, ...] = ("own", "received")

MAX_SESSIONS = 16  # compiled plans kept per process: micro-batches in flight, not history


@dataclass(frozen=True)
class RankSide:
    """Where the rows of one side (queries, or keys and values) of a stage come from, and go back to."""

    cast: RankTransfer | None
    keeps: bool
    """Received rows of the stage before stay."""
    num_received: int
    """Received rows that the stage holds: its own and those of the stages before it in its chain."""
    chain_rows: int
    """Received rows at the end of the chain: room is made for all of them where it begins."""
    returns: RankTransfer | None
    """The casts of the whole chain, where it ends: what was computed for received rows goes home along them."""


@dataclass(frozen=True)
class Quadrant:
    """The pairs of a stage between own or received queries and own or received keys.

    A stage's row spaces are `[own | received]`; its work is cut at these borders, so that rows are read where
    they lie and nothing is put side by side.
    """

    work: AttentionMask
    query: Source
    key: Source
    completes: tuple[Side, ...]
    """Sides whose results for own rows are all there after it."""


@dataclass(frozen=True)
class RankStage:
    """One stage as one rank executes it."""

    quadrants: tuple[Quadrant, ...]
    query: RankSide
    key: RankSide
    sm_share: float
    """Share of the multiprocessors that its attention leaves to the transfers that travel under it."""


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
    places: tuple[Tensor, Tensor]
    """Of this rank's queries and of its keys: which tokens they are, int64."""
    group: dist.ProcessGroup | None
    """Over which rows travel."""


_sessions: OrderedDict[tuple[str, str, int, str], Uploaded[Session]] = OrderedDict()
_lock = threading.Lock()
_agreed: dict[tuple[int, str, Hashable], weakref.ref[AttentionPlan]] = {}


@atexit.register
def forget_sessions() -> None:
    """Drops compiled plans, and with them the groups they hold.

    A process group that is still referenced when the interpreter ends aborts in its threads' destructors.
    """
    _sessions.clear()
    _agreed.clear()
    forget_groups()


def open_session(
    plan: AttentionPlan, group: dist.ProcessGroup | None, device: torch.device, call: Hashable = ""
) -> Session:
    """Returns the compiled plan of this rank after all ranks of `group` agreed on it.

    `group` may be None for cp_size 1. `call` describes what else must be equal on all ranks (dtypes,
    head counts, options), and shows it. Collective on the first use of a plan object (and of each `call`) only.

    Raises:
        ValueError: when the group's size is not the plan's.
        RuntimeError: while a CUDA graph is recorded.
        PlanMismatchError: on every rank, when ranks hold different plans or make different calls.
    """
    check_plan(plan)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {type(group).__name__}; it must be the context-parallel process group, or None for one rank"
        )
    if is_capturing(device):
        raise RuntimeError(
            "a CUDA graph must not record calls with a plan: replays would read its index tensors after they are "
            "gone, and agree on nothing with other ranks; call outside of the graph, or attend() on one device"
        )
    size = 1 if group is None else dist.get_world_size(group)
    if size != plan.cp_size:
        raise ValueError(
            f"group has {size} ranks, the plan was made for cp_size={plan.cp_size}; "
            f"make_plan(mask, {size}) or pass the context-parallel group"
        )
    if group is not None and size > 1:
        _agree(plan, group, call)
    rank = 0 if group is None else dist.get_rank(group)
    key = (plan.digest(), _name(group), rank, str(device))
    session = _sessions.get(key)
    if session is None:
        if device.type == "cuda":
            tell_of_other_hardware(plan.config.topology, device)
        session = _compile(plan, rank, group, device)
    with _lock:  # threads may drop each other's
        _sessions[key] = session
        _sessions.move_to_end(key)
        if len(_sessions) > MAX_SESSIONS:
            _sessions.popitem(last=False)
    return session.here()


def check_plan(plan: object) -> None:
    """Raises TypeError for what is no plan."""
    if not isinstance(plan, AttentionPlan):
        raise TypeError(
            f"plan is {type(plan).__name__}; it must be what make_plan(mask, size) returns"
        )


def _agree(plan: AttentionPlan, group: dist.ProcessGroup, call: Hashable) -> None:
    """Compares plan and call with all peers, once per plan *object*.

    Objects, not digests: two ranks that alternate between two known plans out of step would otherwise
    both believe to have agreed already. Digests travel between CPUs: a GPU goes on with what it has to do.
    """
    key = (id(plan), _name(group), call)
    if key in _agreed and _agreed[key]() is plan:
        return
    mine = hashlib.sha256(f"{plan.digest()} {call}".encode()).digest()
    local = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    all_digests = [torch.empty_like(local) for _ in range(plan.cp_size)]
    dist.all_gather(all_digests, local, group=agreement_group(group))
    digests = [bytes(t.tolist()).hex()[:12] for t in all_digests]
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
    return "" if group is None else name_of(group)


def _compile(
    plan: AttentionPlan, rank: int, group: dist.ProcessGroup | None, device: torch.device
) -> Uploaded[Session]:
    group = None if group is None else transfer_group(group)
    forward, backward = (_compile_pass(plan, name, rank, group) for name in ("forward", "backward"))
    queries, keys = (torch.from_numpy(plan.tokens_of(side)[rank].copy()) for side in SIDES)
    return upload(Session(forward, backward, (queries, keys), group), device)


def _compile_pass(
    plan: AttentionPlan, name: PassName, rank: int, group: dist.ProcessGroup | None
) -> RankPass:
    pass_: Pass = plan.get_pass(name)
    exchange = None
    if pass_.head_split is not None and pass_.head_split.degree > 1:
        assert group is not None
        exchange = HeadExchange.compile(pass_.head_split, rank, plan.cp_size, group)
    own = plan.own_rows.times(pass_.head_degree)
    shares = transfer_shares(plan, name, rank)
    answered = ANSWERED[name]
    ends = {side: completing_quadrants(pass_, own, side, (rank,))[0] for side in answered}
    stages = []
    for index, stage in enumerate(pass_.stages):
        query, key = (
            _compile_side(pass_, index, side, (rank, plan.cp_size, own.of(side)), side in answered)
            for side in SIDES
        )
        quadrants = _cut_into_quadrants(stage.work[rank], own, index, ends)
        stages.append(RankStage(quadrants, query, key, shares[index]))
    return RankPass(tuple(stages), exchange)


def _cut_into_quadrants(
    work: AttentionMask, own: OwnRows, index: int, ends: dict[Side, tuple[int, int] | None]
) -> tuple[Quadrant, ...]:
    """Returns the quadrants of a stage that hold pairs, own rows before received ones.

    `ends`: the stage and the quadrant that complete the results for own rows.
    """
    spans: dict[Source, dict[Side, tuple[int, int]]] = {
        "own": {"q": (0, own.q), "k": (0, own.k)},
        "received": {"q": (own.q, work.num_queries), "k": (own.k, work.num_keys)},
    }
    quadrants = [
        Quadrant(
            work.crop(q=spans[query]["q"], k=spans[key]["k"]),
            query,
            key,
            tuple(side for side, end in ends.items() if end == (index, place)),
        )
        for place, (query, key) in enumerate(itertools.product(SOURCES, SOURCES))
    ]
    return tuple(quadrant for quadrant in quadrants if quadrant.work.num_slices)


def _compile_side(
    pass_: Pass, index: int, side: Side, who: tuple[int, int, int], is_answered: bool
) -> RankSide:
    """`who`: rank, number of ranks, own rows. `is_answered`: there are results for the rows of this side."""
    rank, num_ranks, _ = who
    stage, chain = pass_.stages[index], pass_.whole_chain(index, side)
    received = [
        sum(int(hop.rows_received(num_ranks)[rank]) for hop in pass_.stages[i].hops(side))
        for i in chain
    ]
    before = sum(received[: index - chain.start])
    held = before + received[index - chain.start]
    now, so_far = stage.hops(side), pass_.hops_of_chain(index, side)
    goes_home, is_first = is_answered and index == chain[-1], len(now) == len(so_far)
    cast = _compile_hops(now, who, before, goes_home and is_first)
    returns = cast if goes_home else None
    if goes_home and not is_first:
        returns = _compile_hops(so_far, who)
    return RankSide(cast, stage.keeps(side), held, sum(received), returns)


def _compile_hops(
    hops: Sequence[Hop],
    who: tuple[int, int, int],
    received_before: int = 0,
    comes_home: bool = True,
) -> RankTransfer | None:
    if not any(len(hop.messages) for hop in hops):
        return None
    return RankTransfer.compile(Transfer(tuple(hops)), *who, received_before, comes_home)
