"""Ways through a listing: loops, and the best way from one instruction to another.

Every wait is taken to succeed: of a branch on the result of a `try_wait` only the way of success is followed.
Then what is left of a kernel's loops are its work, and a way between two places that goes round no loop can be
chosen by what it holds: the shortest, or the one with the most stores.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.kernel_model.listing import Instruction, Listing

_LOOK_BACK = 100  # instructions between a try_wait and the branch on its result: seen, at most 30
_ENDS = ("EXIT", "RET", "BRX", "JMP")

Value = Callable[[Instruction], tuple[int, ...]]


class NoWayError(ValueError):
    """Nothing leads from one instruction to the other."""


@dataclass(frozen=True)
class Loop:
    """A loop: the index of its first instruction, and the indices of all of them."""

    head: int
    body: frozenset[int]


def successors(listing: Listing, index: int) -> tuple[int, ...]:
    """Returns the indices that may follow."""
    i = listing[index]
    following = (index + 1,) if index + 1 < len(listing) else ()
    if i.base in _ENDS:
        return following if i.predicate else ()
    if i.base != "BRA" or i.target is None or ".DIV" in i.name:
        return following
    second = re.match(r"!?U?P\d", i.operands)
    if not i.predicate and not second:
        return (i.target,)
    if _is_of_a_wait(listing, index):
        return following if i.predicate.startswith("!") else (i.target,)
    return (*following, i.target)


def _is_of_a_wait(listing: Listing, index: int) -> bool:
    """Says whether the branch's predicate is the result of a try_wait."""
    predicate = listing[index].predicate.lstrip("!")
    for i in reversed(listing[max(0, index - _LOOK_BACK) : index]):
        if predicate in [part.strip() for part in i.operands.split(",")[:2]]:
            return i.base == "SYNCS" and "TRYWAIT" in i.name
    return False


def walk_order(listing: Listing, start: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns what is reached from `start`, each after all it leads to, and the edges that go back (from, to)."""
    order: list[int] = []
    back: list[tuple[int, int]] = []
    open_, done = {start}, set()
    stack = [(start, iter(successors(listing, start)))]
    while stack:
        node, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            stack.pop()
            open_.discard(node)
            done.add(node)
            order.append(node)
        elif following in open_:
            back.append((node, following))
        elif following not in done:
            open_.add(following)
            stack.append((following, iter(successors(listing, following))))
    return order, back


def loops(listing: Listing, start: int = 0) -> list[Loop]:
    """Returns the loops that are reached from `start`, smallest first; those with one head are one loop."""
    order, back = walk_order(listing, start)
    before: dict[int, list[int]] = {}
    for node in order:
        for following in successors(listing, node):
            before.setdefault(following, []).append(node)
    bodies: dict[int, set[int]] = {}
    for tail, head in back:
        body = bodies.setdefault(head, {head})
        waiting = [tail]
        while waiting:
            node = waiting.pop()
            if node not in body:
                body.add(node)
                waiting += before.get(node, [])
    found = [Loop(head, frozenset(body)) for head, body in bodies.items()]
    return sorted(found, key=lambda loop: (len(loop.body), loop.head))


def round_loop(listing: Listing, loop: Loop, value: Value) -> tuple[Instruction, ...]:
    """Returns the instructions of one round with the largest sum of `value`; inner loops are gone through once."""
    return _best_way(listing, loop.head, loop.head, value, loop.body)


def best_way(listing: Listing, start: int, goal: int, value: Value) -> tuple[Instruction, ...]:
    """Returns the instructions from `start` up to `goal` (left out) with the largest sum of `value`.

    A way goes round no loop. Raises: NoWayError.
    """
    return _best_way(listing, start, goal, value, frozenset(range(len(listing))))


def _best_way(
    listing: Listing, start: int, goal: int, value: Value, inside: frozenset[int]
) -> tuple[Instruction, ...]:
    best: dict[int, tuple[int, ...]] = {}
    follows: dict[int, int] = {}
    order, back = walk_order(listing, start)
    backwards = set(back)
    for node in order:
        for following in successors(listing, node):
            if following == goal:
                rest: tuple[int, ...] | None = ()
            elif (node, following) in backwards or following == start or following not in inside:
                continue
            else:
                rest = best.get(following)
            if rest is None:
                continue
            total = _add(value(listing[node]), rest)
            if node not in best or total > best[node]:
                best[node], follows[node] = total, following
    if start not in best:
        raise NoWayError(
            f"start={listing[start].address:#x} leads not to {listing[goal].address:#x}"
        )
    way, at = [listing[start]], follows[start]
    while at != goal:
        way.append(listing[at])
        at = follows[at]
    return tuple(way)


def _add(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if b else tuple(a)
