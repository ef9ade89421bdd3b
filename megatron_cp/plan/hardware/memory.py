"""How much memory a pass takes on each rank: what the runtime allocates, event by event, counted from the plan.

    tokens -> heads     message and what is received, if the plan splits heads
    a chain begins      room for all rows that it receives; results for them where they are first computed
    a stage begins      the rows of the next stage are gathered and sent
    its results         those that complete own rows in the dtype of the inputs; what was held for them is given back
    results go home     a message of them, and what comes back for own rows
    heads -> tokens     message, what is received, and this rank's results

Counted for all ranks at once. Left out: a rank's inputs, which the caller holds, and what the attention of a stage
takes and gives back. Passing on costs a hop's message; the largest counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.completion import completing_quadrants, quadrants_with_pairs
from megatron_cp.plan.hardware.rows import FP32_BYTES, row_size
from megatron_cp.plan.schema import (
    DST,
    SIDES,
    SRC,
    START,
    STOP,
    BoolArray,
    FloatArray,
    OwnRows,
    PassName,
    PlanData,
    Side,
    Transfer,
)


class Peaks(NamedTuple):
    """The most bytes at once on each rank in a pass of one layer: `[P]` each."""

    received: FloatArray
    """Held because others sent them: the rows of a stage and of the chain before it, what is computed for them, the
    rows of the next stage that arrive meanwhile, results that come home, and rows that are exchanged for heads."""
    allocated: FloatArray
    """By the runtime, what is received included."""


def peak_bytes(plan: PlanData, pass_name: PassName) -> Peaks:
    """Returns the peaks of a pass."""
    memory = _count(plan, pass_name)
    return Peaks(memory.received.peak, memory.all.peak)


def received_bytes(plan: PlanData, pass_name: PassName) -> FloatArray:
    """Returns `peak_bytes(...).received`, which `max_received_mb` limits."""
    return peak_bytes(plan, pass_name).received


@dataclass
class _Held:
    """Bytes held now and at most, per rank."""

    now: FloatArray
    peak: FloatArray

    def add(self, size: FloatArray | float) -> None:
        self.now = self.now + size
        self.peak = np.maximum(self.peak, self.now)


@dataclass
class _Memory:
    """The books of a pass over all ranks."""

    num_ranks: int
    all: _Held = field(init=False)
    received: _Held = field(init=False)

    def __post_init__(self) -> None:
        self.all, self.received = (
            _Held(np.zeros(self.num_ranks), np.zeros(self.num_ranks)) for _ in range(2)
        )

    def take(self, size: FloatArray | float, *, received: bool = False) -> None:
        """Books an allocation, or with a negative size its end."""
        self.all.add(size)
        if received:
            self.received.add(size)

    def pass_through(self, size: FloatArray | float, *, received: bool = False) -> None:
        """Books what is allocated and given back at once."""
        self.take(size, received=received)
        self.take(-size, received=received)


@dataclass
class _Side:
    """Queries, or keys and values, of a pass: rows and results held."""

    own: int
    """Rows of this rank inside the pass."""
    there: int
    """Bytes of a row."""
    result: int
    """Bytes of the result for a row, held and on its way home; 0 where there is none."""
    room: FloatArray
    """Bytes of the chain's rows."""
    rows: FloatArray
    """Rows received in the chain so far."""
    own_result: FloatArray
    received_result: FloatArray
    is_rounded: BoolArray
    """Whether the results for own rows are complete, in the dtype of the inputs."""


def _count(plan: PlanData, pass_name: PassName) -> _Memory:
    pass_, ranks = plan.get_pass(pass_name), plan.cp_size
    memory, own = _Memory(ranks), plan.own_rows.times(pass_.head_degree)
    none = np.zeros(ranks)
    sides = {
        side: _Side(
            own.of(side), *_row_bytes(plan, pass_name, side), *(none,) * 4, none.astype(bool)
        )
        for side in SIDES
    }
    ends = _ends(plan, pass_name)
    if pass_.head_degree > 1:
        enters = sum(one.own * one.there for one in sides.values())
        memory.take(enters, received=True)
        memory.pass_through(enters)
    sent = _start(plan, pass_name, 0, sides, memory)
    travelling: FloatArray = none
    returned: FloatArray = none
    for index in range(len(pass_.stages)):
        memory.take(-sent)
        for side, one in sides.items():
            _arrive(plan, pass_name, index, side, one, memory)
        sent = _start(plan, pass_name, index + 1, sides, memory)
        _compute(plan, pass_name, index, sides, ends == index, memory)
        home = [_go_home(plan, pass_name, index, side, one, memory) for side, one in sides.items()]
        memory.take(-travelling)
        memory.take(-returned, received=True)
        travelling = sum((message for message, _ in home), none)
        returned = sum((back for _, back in home), none)
    memory.take(-travelling)
    memory.take(-returned, received=True)
    _leave(plan, pass_name, sides, memory)
    return memory


def _row_bytes(plan: PlanData, pass_name: PassName, side: Side) -> tuple[int, int]:
    """Returns the bytes of a row, and of the result for it, held in fp32 as it travels."""
    size = row_size(plan.config, pass_name, side, plan.get_pass(pass_name).head_degree)
    return size.there, size.back


def _start(
    plan: PlanData, pass_name: PassName, index: int, sides: dict[Side, _Side], memory: _Memory
) -> FloatArray:
    """Books what a stage needs before its rows arrive; returns the bytes of its messages."""
    pass_, sent = plan.get_pass(pass_name), np.zeros(plan.cp_size)
    if index == len(pass_.stages):
        return sent
    stage = pass_.stages[index]
    for side, one in sides.items():
        if not stage.keeps(side):
            memory.take(_chain_rows(plan, pass_name, index, side) * one.there, received=True)
        sent = sent + _largest_hop(stage.cast(side), plan.cp_size, SRC) * one.there
    memory.take(sent)
    return sent


def _arrive(
    plan: PlanData, pass_name: PassName, index: int, side: Side, one: _Side, memory: _Memory
) -> None:
    """Books that the rows of a stage are there, and that those of the chain before are given back."""
    stage = plan.get_pass(pass_name).stages[index]
    if not stage.keeps(side):
        memory.take(-one.room, received=True)
        one.room = _chain_rows(plan, pass_name, index, side) * one.there
        one.rows = np.zeros(plan.cp_size)
    one.rows = one.rows + _received_rows([stage.cast(side)], plan.cp_size)


def _compute(
    plan: PlanData,
    pass_name: PassName,
    index: int,
    sides: dict[Side, _Side],
    completes: BoolArray,
    memory: _Memory,
) -> None:
    """Books the results of a stage: own or received queries with own or received keys, in the runtime's order.

    `completes` `[P, quadrants]`: whether a kernel may round the results for own rows.
    """
    works = plan.get_pass(pass_name).stages[index].work
    own = OwnRows(sides["q"].own, sides["k"].own)
    exists = np.array([quadrants_with_pairs(work.array, own) for work in works])
    answered = [one for one in sides.values() if one.result]
    for quadrant, (of_received_q, of_received_k) in enumerate(np.ndindex(2, 2)):
        rounds = completes[:, quadrant].copy()
        if pass_name == "backward":  # gradients are rounded where nothing is added to them
            rounds &= sum(one.own_result for one in answered) == 0
        is_there = exists[:, quadrant] & ~rounds
        for one, is_received in ((sides["q"], of_received_q), (sides["k"], of_received_k)):
            rows = one.rows if is_received else np.full(plan.cp_size, float(one.own))
            size = is_there * rows * one.result
            _take_result(one, size, memory, is_received=bool(is_received))
        for one in answered:
            _round_result(plan, pass_name, one, rounds, memory)


def _ends(plan: PlanData, pass_name: PassName) -> IntArray:
    """Returns the stage `[P, quadrants]` whose quadrant completes results for own rows that a kernel may round, or -1.

    In backward both sides' at once; copies of a head under a head split, and those of latent rows, are added to.
    """
    pass_, config = plan.get_pass(pass_name), plan.config
    ends = np.full((plan.cp_size, 4), -1)
    own, degree = plan.own_rows.times(pass_.head_degree), pass_.head_degree
    is_added_to = pass_name == "backward" and (config.latent_dim or config.num_kv_heads < degree)
    if config.element_bytes == FP32_BYTES or is_added_to:
        return ends
    answered: tuple[Side, ...] = ("q",) if pass_name == "forward" else SIDES
    places = [completing_quadrants(pass_, own, side, range(plan.cp_size)) for side in answered]
    for rank, (place, *others) in enumerate(zip(*places, strict=True)):
        if place is not None and all(other == place for other in others):
            ends[rank, place[1]] = place[0]
    return ends


def _round_result(
    plan: PlanData, pass_name: PassName, one: _Side, rounds: BoolArray, memory: _Memory
) -> None:
    """Books results for own rows in the dtype of the inputs, beside what was held, which is then given back.

    `lse` is fp32 and stays where it lies.
    """
    scalars = one.own * _scalar_bytes(plan, pass_name)
    rounded = (one.own * one.result - scalars) * plan.config.element_bytes / FP32_BYTES + scalars
    stays = np.where(one.own_result > 0, scalars, 0.0)
    memory.take(rounds * (rounded - stays))
    memory.take(rounds * (stays - one.own_result))
    one.own_result = np.where(rounds, rounded, one.own_result)
    one.is_rounded = one.is_rounded | rounds


def _scalar_bytes(plan: PlanData, pass_name: PassName) -> int:
    """Returns the bytes of a query's fp32 scalars in its result: lse, forward alone."""
    if pass_name == "backward":
        return 0
    degree = plan.get_pass(pass_name).head_degree
    return max(1, plan.config.num_heads // degree) * FP32_BYTES


def _take_result(one: _Side, size: FloatArray, memory: _Memory, *, is_received: bool) -> None:
    """Books results of this size where smaller ones, or none, were held."""
    held = one.received_result if is_received else one.own_result
    grown = np.where(size > held, size, 0.0)
    memory.take(grown, received=is_received)
    memory.take(-np.where(size > held, held, 0.0), received=is_received)
    larger = np.maximum(size, held)
    if is_received:
        one.received_result = larger
    else:
        one.own_result = larger


def _go_home(
    plan: PlanData, pass_name: PassName, index: int, side: Side, one: _Side, memory: _Memory
) -> tuple[FloatArray, FloatArray]:
    """Books results on their way home; returns the bytes of messages, and of what others sent or is held for them."""
    pass_, none = plan.get_pass(pass_name), np.zeros(plan.cp_size)
    casts = [pass_.stages[i].cast(side) for i in pass_.chain(index, side)]
    if not one.result or not pass_.ends_chain(index, side) or not any(casts):
        return none, none
    _take_result(one, none + one.own * float(one.result), memory, is_received=False)
    _take_result(one, one.rows * one.result, memory, is_received=True)
    held, one.received_result = one.received_result, none
    message = np.max([_largest_hop(cast, plan.cp_size, DST) for cast in casts], axis=0)
    # One tensor goes home as it lies; so do dk and dv of `hopper`, but of no other backend.
    if (pass_name, side) == ("backward", "q"):
        message = none
    back = sum((_rows_by(cast, plan.cp_size, SRC) for cast in casts), none) * one.result
    memory.take(message * one.result)
    memory.take(back, received=True)
    return message * one.result, back + held


def _leave(plan: PlanData, pass_name: PassName, sides: dict[Side, _Side], memory: _Memory) -> None:
    """Books this rank's results in the dtype of the inputs, after heads became tokens again."""
    config, degree = plan.config, plan.get_pass(pass_name).head_degree
    for one in sides.values():
        size = np.where(one.is_rounded, 0.0, one.own * one.result)
        _take_result(one, size, memory, is_received=False)
    value_dim, element = config.value_head_dim or config.head_dim, config.element_bytes
    own, heads = plan.own_rows, config.num_heads
    if pass_name == "forward":
        queries, keys, scalars = own.q * heads * value_dim, 0, own.q * heads * FP32_BYTES
    else:
        queries, scalars = own.q * heads * config.head_dim, 0
        keys = own.k * config.num_kv_heads * (config.head_dim + value_dim)
    outputs = (queries + keys) * element
    if degree == 1:
        rounds = (element != FP32_BYTES) & ~sides["q"].is_rounded
        memory.take(np.where(rounds, float(outputs), 0.0))
        return
    message = outputs + scalars
    if keys and config.num_kv_heads < degree:  # copies travel in fp32
        copied = own.k * degree * (config.head_dim + value_dim)
        message = queries * element + copied * FP32_BYTES
        memory.pass_through(keys * FP32_BYTES)
    memory.take(message)
    memory.take(message, received=True)
    memory.take(outputs + scalars)


def _chain_rows(plan: PlanData, pass_name: PassName, index: int, side: Side) -> FloatArray:
    """Returns the rows that each rank receives in the chain that begins at a stage."""
    stages, end = plan.get_pass(pass_name).stages, index + 1
    while end < len(stages) and stages[end].keeps(side):
        end += 1
    return _received_rows([stage.cast(side) for stage in stages[index:end]], plan.cp_size)


def _received_rows(casts: Iterable[Transfer | None], num_ranks: int) -> FloatArray:
    return sum((_rows_by(cast, num_ranks, DST) for cast in casts), np.zeros(num_ranks))


def _rows_by(cast: Transfer | None, num_ranks: int, column: int) -> FloatArray:
    """Returns the rows that each rank sends (column SRC) or receives (DST) over all hops."""
    hops = () if cast is None else cast.hops
    return sum((_rows_of_hop(hop.messages, num_ranks, column) for hop in hops), np.zeros(num_ranks))


def _largest_hop(cast: Transfer | None, num_ranks: int, column: int) -> FloatArray:
    hops = () if cast is None else cast.hops
    none = np.zeros(num_ranks)
    return np.max([none, *(_rows_of_hop(hop.messages, num_ranks, column) for hop in hops)], axis=0)


def _rows_of_hop(messages: IntArray, num_ranks: int, column: int) -> FloatArray:
    rows = messages[:, STOP] - messages[:, START]
    return np.bincount(messages[:, column], weights=rows, minlength=num_ranks).astype(np.float64)
