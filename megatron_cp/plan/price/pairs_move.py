"""Predicted seconds of assignments: which route rows take, in how many stages, forward and backward each for itself.

Areas and rows are exact. How they divide over stages is first taken to be even; an option that wins by that
estimate is refined: its stagings are played, as ranks that wait for late senders are in no sum of stages.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.compute.bisection import Assignment, assign
from megatron_cp.plan.compute.blocks import Problem
from megatron_cp.plan.compute.local_search import improved
from megatron_cp.plan.compute.staging import ORDERS, AssignedMask, Staging
from megatron_cp.plan.hardware.cost import Movement, compute_seconds, hidden_seconds, movement_of
from megatron_cp.plan.hardware.play import Script, Sends, played_seconds
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, Strategy
from megatron_cp.plan.schema import PASSES, SIDES, FloatArray, Pass, PassName, Side
from megatron_cp.plan.transfer.head_split import split_heads
from megatron_cp.plan.transfer.routing import (
    ID_START,
    ID_STOP,
    SRC,
    Route,
    ThroughNodes,
    direct,
    enters_twice,
    tree,
)


@dataclass(frozen=True)
class StagingLimits:
    """Which stagings and routes are priced; `search/budget.py` says what set each number."""

    counts: tuple[int, ...]
    """Numbers of stages with foreign rows."""
    most_apart: tuple[float, ...]
    """Quantiles of the ranks' local pairs, see `Staging`, tried beside 1 on the best order of rows."""
    few: int
    """So many stages may do without local pairs at the end: better where latency decides."""
    most_exact: int
    """Stagings that are priced exactly, once an estimate has won."""
    uneven: float
    """Times the estimate: what uneven stages add."""
    as_even: float
    """Times the estimate: no other order of rows is worth a look."""
    stage_penalty: float
    """Share of the time that one more stage must save."""
    order_penalty: float
    """Share of the time that the next order of rows must save, which has more slices."""
    hub: float
    """An owner that sends so many times the mean is worth a tree."""
    straight: float
    """Latency over the seconds of a fair share of pairs, above which rows that enter a node twice may go straight."""


def stay_at_home(groups: HeadGroups) -> Assignment:
    """Returns the assignment of every pair to the rank that owns its query."""
    return Assignment(groups.placed.parts, groups.placed.q_owner)


def go_to_keys(groups: HeadGroups) -> Assignment:
    """Returns the assignment of every pair to the rank that owns its key."""
    return Assignment(groups.placed.parts, groups.placed.k_owner)


def move_compute(groups: HeadGroups) -> Assignment:
    """Returns the assignment by search: areas by speed, and few rows moved on both sides."""
    return _assigned(groups, groups.speeds)


def move_inside_nodes(groups: HeadGroups) -> Assignment | None:
    """Returns the assignment by search in which every node keeps as many pairs as its queries have, by speed inside.

    None where that is `move_compute`: with one node, or head groups that are all as fast.
    """
    size, speeds, loads = groups.links.node_size, groups.speeds, groups.placed.loads
    if not 1 < size < len(speeds) or (speeds == speeds[0]).all():
        return None
    first = np.arange(0, len(speeds), size)
    of_node = np.add.reduceat(loads, first) / np.add.reduceat(speeds, first)
    return _assigned(groups, speeds * of_node.repeat(size)[: len(speeds)])


def move_near(groups: HeadGroups, start: Assignment) -> Assignment:
    """Returns the assignment by local search from another one: links and areas are weighed against each other."""
    inner, outer = groups.links.seconds_per_byte[:2].tolist()
    problem = Problem(
        groups.placed,
        groups.row_cost(),
        groups.compute_seconds(1.0),
        (inner, outer),
        groups.links.node_size,
        get_topology(groups.config.topology).contention,
        groups.speeds,
    )
    return improved(problem, start)


def _assigned(groups: HeadGroups, shares: FloatArray) -> Assignment:
    owners, sizes = groups.placed.owners, groups.links.sizes
    return assign(groups.mask, owners, sizes, groups.row_cost(), shares)


def assigned_strategy(
    groups: HeadGroups, assignment: Assignment, limits: StagingLimits
) -> Strategy:
    """Returns the strategy that runs an assignment; route and stages of each pass as is predicted best."""
    assigned = AssignedMask(groups.placed, assignment)
    straight: dict[Side, list[IntArray]] = {s: assigned.arriving(s, direct) for s in SIDES}
    rows = {side: sum(map(_num_rows, hops)) for side, hops in straight.items()}
    routed = [
        _RoutedAssignment(groups, assigned, route, limits)
        for route in _routes(groups, straight, limits)
    ]
    uneven = groups.imbalance(assigned.areas)

    def option_of(name: PassName) -> PassOption:
        options = _stagings(groups.config, name, rows, limits)
        prices = [float(one.even_seconds(options, name).min()) for one in routed]
        best = routed[prices.index(min(prices))]

        def refined() -> PassOption:
            staging, seconds = best.best_staging(options, name)
            return replace(
                option,
                seconds=seconds,
                build=lambda: best.build(staging),
                refine=None,
                is_estimate=False,
            )

        option = PassOption(
            min(prices) * limits.uneven,
            groups.moved_bytes(rows, name),
            uneven,
            build=lambda: refined().build(),
            refine=refined,
            is_estimate=True,
        )
        return option

    return {name: option_of(name) for name in PASSES}


def _routes(
    groups: HeadGroups, arriving: dict[Side, list[IntArray]], limits: StagingLimits
) -> list[Route]:
    """Returns the routes worth a price, given what arrives when owners send themselves."""
    num_ranks, node_size = groups.placed.num_ranks, groups.links.node_size
    stride = groups.placed.space.stride
    has_nodes = 1 < node_size < num_ranks and any(
        enters_twice(hop, node_size, stride) for hops in arriving.values() for hop in hops
    )
    found: list[Route] = [ThroughNodes(node_size) if has_nodes else direct]
    if has_nodes and groups.links.latency[0] > limits.straight * groups.fair_seconds():
        found.append(direct)
    for requests in (hop for hops in arriving.values() for hop in hops):
        rows = requests[:, ID_STOP] - requests[:, ID_START]
        sent = np.bincount(requests[:, SRC], rows, num_ranks)
        if len(rows) and sent.max() > limits.hub * sent.mean():
            found.append(ThroughNodes(node_size, tree=True) if has_nodes else tree)
            break
    return found


class _Priced(NamedTuple):
    """A staging and its time, and that with what stages and orders must save."""

    price: float
    seconds: float
    staging: Staging


_price = operator.itemgetter(0)


@dataclass(frozen=True)
class _RoutedAssignment:
    """An assignment and a route."""

    groups: HeadGroups
    assigned: AssignedMask
    route: Route
    limits: StagingLimits

    @functools.cached_property
    def _moves(self) -> dict[Side, Movement | None]:
        num_ranks, links = self.groups.placed.num_ranks, self.groups.links
        return {
            side: movement_of(self.assigned.arriving(side, self.route), num_ranks, links)
            for side in SIDES
        }

    def even_seconds(self, stagings: Sequence[Staging], name: PassName) -> FloatArray:
        """Returns about the time of each staging, as if rows were spread evenly over stages."""
        groups, config = self.groups, self.groups.config
        pair = groups.compute_seconds(1.0, [name]) / groups.speeds
        local = self.assigned.local_areas * pair
        remote = self.assigned.areas * pair - local
        count = np.array([[max(1, one.num_remote)] for one in stagings])
        rest = np.array([[one.keeps_rest] for one in stagings])
        arrive, leave, leave_last = np.zeros((3, len(stagings), len(local)))
        for side in SIDES:
            move, size = self._moves[side], row_size(config, name, side, groups.degree)
            if move is None:
                continue
            arrive += move.seconds_per_byte * size.there / count + move.latency * (size.there > 0)
            if size.back:  # of the side that is kept all goes home at the end
                part = move.seconds_per_byte * size.back / count + move.latency
                kept = np.array([[one.kept == side] for one in stagings])
                leave += np.where(kept, 0.0, part)
                leave_last += np.where(kept, count * part, part)
        hidden = functools.partial(hidden_seconds, config)
        one = remote / count
        several = hidden(one, arrive) + hidden(one, leave)
        several += (count - 2) * hidden(one, arrive + leave)
        end = np.where(rest, hidden(local / 2, leave_last), leave_last)
        begin = hidden(np.where(rest, local / 2, local), arrive)
        seconds: FloatArray = (begin + np.where(count == 1, one, several) + end).max(axis=1)
        return seconds + groups.exchange_seconds[name]

    def best_staging(self, stagings: Sequence[Staging], name: PassName) -> tuple[Staging, float]:
        """Returns the best staging and its price; of a few that look best, in every order of rows.

        A stage has its price as well, and so has an order: of stagings that are as good as equal, that with fewer
        slices and sends wins.
        """
        penalties = np.array([1 + self.limits.stage_penalty * one.num_stages for one in stagings])
        estimates = self.even_seconds(stagings, name) * penalties
        best = _Priced(math.inf, math.inf, stagings[0])
        for index in np.argsort(estimates, kind="stable")[: self.limits.most_exact]:
            if estimates[index] >= best.price:  # even rows are the best case, nearly always
                break
            best = min(best, self._refined(stagings[index], name, estimates[index]), key=_price)
        return best.staging, best.seconds

    def _refined(self, staging: Staging, name: PassName, estimate: float) -> "_Priced":
        """Returns the best of a staging's orders of rows, or that with more local pairs in remote stages."""
        enough = self.limits.as_even * estimate
        orders = ORDERS if staging.num_remote > 1 else ORDERS[:1]
        best = self._cheapest([replace(staging, order=order) for order in orders], name, enough)
        if best.price <= enough or not staging.num_remote:
            return best
        apart = [replace(best.staging, most_apart=share) for share in self.limits.most_apart]
        return min(best, self._cheapest(apart, name, enough), key=_price)

    def _cheapest(self, stagings: Sequence[Staging], name: PassName, enough: float) -> "_Priced":
        """Returns the one of the lowest price; none is looked at behind one that is good enough."""
        best = _Priced(math.inf, math.inf, stagings[0])
        for one in stagings:
            if best.price <= enough:
                break
            seconds = self._played_seconds(one, name)
            penalty = self.limits.stage_penalty * one.num_stages
            penalty += self.limits.order_penalty * ORDERS.index(one.order)
            best = min(best, _Priced(seconds * (1 + penalty), seconds, one), key=_price)
        return best

    def build(self, staging: Staging) -> Pass:
        """Returns the pass of a staging; the same object if forward and backward take the same."""
        if staging not in self._built:
            built = self.assigned.in_pieces(staging.kept).build(staging, self.route)
            self._built[staging] = split_heads(built, self.groups.degree)
        return self._built[staging]

    @functools.cached_property
    def _built(self) -> dict[Staging, Pass]:
        return {}

    def _played_seconds(self, staging: Staging, name: PassName) -> float:
        """Returns the time of a staging, played."""
        groups, config = self.groups, self.groups.config
        areas = self.assigned.in_pieces(staging.kept).areas(staging) / groups.degree
        casts: list[list[Sends]] = [[] for _ in areas]
        returns: list[list[Sends]] = [[] for _ in areas]
        for side in SIDES:
            size = row_size(config, name, side, groups.degree)
            arriving = self._arriving(staging, side)
            for index, hops in enumerate(arriving, start=1):
                casts[index] += [hop.there(size.there) for hop in hops]
            for index, hops in reversed([*enumerate(arriving, start=1)]) if size.back else ():
                end = staging.num_remote if staging.kept == side else index
                returns[end] += [hop.back(size.back) for hop in reversed(hops)]
        script = Script(
            compute_seconds(areas, config, name) / groups.speeds,
            casts,
            returns,
            groups.exchange_seconds[name],
            groups=None,
        )
        return played_seconds(script, groups.links, get_topology(config.topology).contention)

    def _arriving(self, staging: Staging, side: Side) -> list[list[Sends]]:
        """Returns what arrives in each remote stage, hop after hop, in rows."""
        key = staging.num_remote, staging.kept, staging.order, side
        if key not in self._found:
            num_ranks, links = self.groups.placed.num_ranks, self.groups.links
            hops = [
                Sends.of_stages(hop.requests, hop.stage - 1, staging.num_remote, num_ranks, links)
                for hop in self.assigned.in_pieces(staging.kept).arriving(staging, self.route, side)
            ]
            self._found[key] = [
                [sends for sends in stage if sends is not None] for stage in zip(*hops, strict=True)
            ]
        return self._found[key]

    @functools.cached_property
    def _found(self) -> dict[object, list[list[Sends]]]:
        return {}


def _num_rows(requests: IntArray) -> float:
    return float((requests[:, ID_STOP] - requests[:, ID_START]).sum())


def _stagings(
    config: CPConfig, name: PassName, rows: dict[Side, float], limits: StagingLimits
) -> list[Staging]:
    """Returns the stagings that compete in a pass, given how many rows of each side move."""
    if not any(rows.values()):
        return [Staging(0, keeps_rest=False, kept="k")]
    counts = limits.counts if config.num_stages is None else (config.num_stages,)
    sides: list[Side] = ["k"] if name == "forward" else ["q"]
    if name == "backward" and rows["q"]:
        sides.append("k")
    one: list[Side] = ["k"]  # in a single stage nothing is kept: both passes may share it
    late = [Staging(n, True, kept) for n in counts for kept in (sides if n > 1 else one)]
    return late + [replace(one, keeps_rest=False) for one in late if one.num_remote <= limits.few]
