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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.completion import completing_quadrants, quadrants_with_pairs
from megatron_cp.plan.hardware.rows import FP32_BYTES, row_size
from megatron_cp.plan.schema import (
    ANSWERED,
    DST,
    SIDES,
    SRC,
    BoolArray,
    FloatArray,
    Hop,
    PassName,
    PlanData,
    Side,
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
    books = _Books(plan, pass_name)
    books.run()
    return Peaks(books.received.peak, books.all.peak)


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
class _Side:
    """Queries, or keys and values, of a pass: rows and results held."""

    own: int
    """Rows of this rank inside the pass."""
    there: int
    """Bytes of a row."""
    result: int
    """Bytes of the result for a row, held and on its way home in fp32; 0 where there is none."""
    room: FloatArray
    """Bytes of the chain's rows."""
    rows: FloatArray
    """Rows received in the chain so far."""
    own_result: FloatArray
    received_result: FloatArray
    is_rounded: BoolArray
    """Whether the results for own rows are complete, in the dtype of the inputs."""


class _Books:
    """What is held in a pass, on all ranks."""

    def __init__(self, plan: PlanData, pass_name: PassName):
        self.plan, self.config, self.name = plan, plan.config, pass_name
        self.pass_ = plan.get_pass(pass_name)
        self.degree, self.own = self.pass_.head_degree, plan.own_rows.times(self.pass_.head_degree)
        self.none = none = np.zeros(plan.cp_size)
        self.all, self.received = _Held(none, none), _Held(none, none)
        self.sides: dict[Side, _Side] = {}
        for side in SIDES:
            size = row_size(plan.config, pass_name, side, self.degree)
            held = (none, none, none, none, none.astype(bool))
            self.sides[side] = _Side(self.own.of(side), size.there, size.back, *held)

    def run(self) -> None:
        """Books the events of the pass in the runtime's order."""
        ends = self._ends()
        if self.degree > 1:
            enters = sum(one.own * one.there for one in self.sides.values())
            self._take(enters, received=True)
            self._pass_through(enters)
        sent = self._start(0)
        travelling = returned = self.none
        for index in range(len(self.pass_.stages)):
            self._take(-sent)
            for side in SIDES:
                self._arrive(index, side)
            sent = self._start(index + 1)
            self._compute(index, ends == index)
            home = [self._go_home(index, side) for side in SIDES]
            self._take(-travelling)
            self._take(-returned, received=True)
            travelling, returned = (sum(sizes, self.none) for sizes in zip(*home, strict=True))
        self._take(-travelling)
        self._take(-returned, received=True)
        self._leave()

    def _take(self, size: FloatArray | float, *, received: bool = False) -> None:
        """Books an allocation, or with a negative size its end."""
        self.all.add(size)
        if received:
            self.received.add(size)

    def _pass_through(self, size: FloatArray | float) -> None:
        """Books what is allocated and given back at once."""
        self._take(size)
        self._take(-size)

    def _start(self, index: int) -> FloatArray:
        """Books what a stage needs before its rows arrive; returns the bytes of its messages."""
        sent = self.none
        if index == len(self.pass_.stages):
            return sent
        stage = self.pass_.stages[index]
        for side, one in self.sides.items():
            if not stage.keeps(side):
                self._take(self._chain_bytes(index, side), received=True)
            sent = sent + self._largest(stage.hops(side), SRC) * one.there
        self._take(sent)
        return sent

    def _arrive(self, index: int, side: Side) -> None:
        """Books that the rows of a stage are there, and that those of the chain before are given back."""
        stage, one = self.pass_.stages[index], self.sides[side]
        if not stage.keeps(side):
            self._take(-one.room, received=True)
            one.room, one.rows = self._chain_bytes(index, side), self.none
        one.rows = one.rows + self._rows(stage.hops(side), DST)

    def _compute(self, index: int, completes: BoolArray) -> None:
        """Books the results of a stage: own or received queries with own or received keys, in the runtime's order.

        `completes` `[P, quadrants]`: whether a kernel may round the results for own rows.
        """
        works = self.pass_.stages[index].work
        exists = np.array([quadrants_with_pairs(work.array, self.own) for work in works])
        queries, keys = self.sides["q"], self.sides["k"]
        answered = [self.sides[side] for side in ANSWERED[self.name]]
        for quadrant, (of_received_q, of_received_k) in enumerate(np.ndindex(2, 2)):
            rounds = completes[:, quadrant].copy()
            if self.name == "backward":  # gradients are rounded where nothing is added to them
                rounds &= sum(one.own_result for one in answered) == 0
            is_there = exists[:, quadrant] & ~rounds
            for one, is_received in ((queries, of_received_q), (keys, of_received_k)):
                rows = one.rows if is_received else np.full(self.plan.cp_size, float(one.own))
                self._take_result(one, is_there * rows * one.result, is_received=bool(is_received))
            for one in answered:
                self._round_result(one, rounds)

    def _ends(self) -> IntArray:
        """Returns the stage `[P, quadrants]` whose quadrant completes own results that a kernel may round, or -1.

        In backward both sides' at once; copies of a head under a head split, and those of latent rows, are added to.
        """
        config, ranks = self.config, self.plan.cp_size
        ends = np.full((ranks, 4), -1)
        is_added_to = config.latent_dim or config.num_kv_heads < self.degree
        if config.element_bytes == FP32_BYTES or (self.name == "backward" and is_added_to):
            return ends
        places = [
            completing_quadrants(self.pass_, self.own, side, range(ranks))
            for side in ANSWERED[self.name]
        ]
        for rank, (place, *others) in enumerate(zip(*places, strict=True)):
            if place is not None and all(other == place for other in others):
                ends[rank, place[1]] = place[0]
        return ends

    def _round_result(self, one: _Side, rounds: BoolArray) -> None:
        """Books results for own rows in the dtype of the inputs, beside what was held, which is then given back.

        `lse`, of the forward pass, is fp32 and stays where it lies.
        """
        heads = max(1, self.config.num_heads // self.degree) if self.name == "forward" else 0
        scalars = one.own * heads * FP32_BYTES
        rounded = (one.own * one.result - scalars) * self.config.element_bytes / FP32_BYTES
        rounded += scalars
        stays = np.where(one.own_result > 0, scalars, 0.0)
        self._take(rounds * (rounded - stays))
        self._take(rounds * (stays - one.own_result))
        one.own_result = np.where(rounds, rounded, one.own_result)
        one.is_rounded = one.is_rounded | rounds

    def _take_result(self, one: _Side, size: FloatArray, *, is_received: bool) -> None:
        """Books results of this size where smaller ones, or none, were held."""
        held = one.received_result if is_received else one.own_result
        is_larger = size > held
        self._take(np.where(is_larger, size, 0.0), received=is_received)
        self._take(-np.where(is_larger, held, 0.0), received=is_received)
        larger = np.maximum(size, held)
        if is_received:
            one.received_result = larger
        else:
            one.own_result = larger

    def _go_home(self, index: int, side: Side) -> tuple[FloatArray, FloatArray]:
        """Books results on their way home; returns the bytes of messages, and of what others send or get."""
        one, none = self.sides[side], self.none
        hops = self.pass_.hops_of_chain(index, side)
        if not one.result or not self.pass_.ends_chain(index, side) or not hops:
            return none, none
        self._take_result(one, none + one.own * float(one.result), is_received=False)
        self._take_result(one, one.rows * one.result, is_received=True)
        held, one.received_result = one.received_result, none
        message = self._largest(hops, DST) * one.result
        # One tensor goes home as it lies; so do dk and dv of `hopper`, but of no other backend.
        if (self.name, side) == ("backward", "q"):
            message = none
        back = self._rows(hops, SRC) * one.result
        self._take(message)
        self._take(back, received=True)
        return message, back + held

    def _leave(self) -> None:
        """Books this rank's results in the dtype of the inputs, after heads became tokens again."""
        config, own = self.config, self.plan.own_rows
        for one in self.sides.values():
            size = np.where(one.is_rounded, 0.0, one.own * one.result)
            self._take_result(one, size, is_received=False)
        value_dim, element = config.value_dim, config.element_bytes
        heads = own.q * config.num_heads
        if self.name == "forward":
            queries, keys, scalars = heads * value_dim, 0, heads * FP32_BYTES
        else:
            queries, scalars = heads * config.head_dim, 0
            keys = own.k * config.num_kv_heads * (config.head_dim + value_dim)
        outputs = (queries + keys) * element
        if self.degree == 1:
            rounds = (element != FP32_BYTES) & ~self.sides["q"].is_rounded
            self._take(np.where(rounds, float(outputs), 0.0))
            return
        message = outputs + scalars
        if keys and config.num_kv_heads < self.degree:  # copies travel in fp32
            copied = own.k * self.degree * (config.head_dim + value_dim)
            message = queries * element + copied * FP32_BYTES
            self._pass_through(keys * FP32_BYTES)
        self._take(message)
        self._take(message, received=True)
        self._take(outputs + scalars)

    def _chain_bytes(self, index: int, side: Side) -> FloatArray:
        """Returns the bytes of the rows that each rank receives in the chain that begins at a stage."""
        chain = self.pass_.whole_chain(index, side)
        hops = self.pass_.hops_of_chain(chain[-1], side)
        return self._rows(hops, DST) * self.sides[side].there

    def _rows(self, hops: Iterable[Hop], end: int) -> FloatArray:
        """Returns the rows that each rank sends (SRC) or receives (DST) over hops."""
        return np.sum([self.none, *(hop.rows_at(end, len(self.none)) for hop in hops)], axis=0)

    def _largest(self, hops: Iterable[Hop], end: int) -> FloatArray:
        """Returns the same of the hop in which a rank has most."""
        return np.max([self.none, *(hop.rows_at(end, len(self.none)) for hop in hops)], axis=0)
