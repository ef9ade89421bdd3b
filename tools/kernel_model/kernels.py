"""From a kernel's listing to what the model says of it: its loop over full tiles, and a whole work item.

    work item    | start: mailbox, first products | loop, n - 1 times | end: last products, results to memory |

Three ways through the machine code; the model joins them.
"""

from dataclasses import dataclass

from tools.kernel_model.issue import Steady, Work, steady_state
from tools.kernel_model.listing import Instruction, Listing
from tools.kernel_model.machine import MACHINES, Machine
from tools.kernel_model.paths import Loop, NoWayError, Value, best_way, loops, round_loop

TILES_OF_ITEM = 4  # of the work item whose fixed cost is asked for: 512 keys at tiles of 128
Way = tuple[Instruction, ...]


@dataclass(frozen=True)
class Shape:
    """What a step of the kernel's loop computes. `consumers`: warpgroups; `turns`: one after the other."""

    is_backward: bool
    block_m: int
    block_n: int
    head_dim: int
    consumers: int = 2
    turns: bool = False
    separate_code: bool = False  # the last consumer has a loop of its own
    products: int = 0  # where it is neither 2 forward nor 5 backward
    steps_through_keys: bool = False  # a backward kernel that does, as the forward one
    value_dim: int | None = None  # of values, where it is not head_dim

    @property
    def flops(self) -> int:
        """Returns the operations of all products of a step: with values are P V; dP and dV."""
        products = self.products or (5 if self.is_backward else 2)
        with_values = {2: 1, 5: 2, 4: 2, 3: 1}[products]
        width = (products - with_values) * self.head_dim + with_values * self._values
        return 2 * self.block_m * self.block_n * width

    @property
    def tma_bytes(self) -> int:
        """Returns what is moved through shared memory for a step: 16-bit tiles, and dq in fp32."""
        rows = self.block_n if not self.is_backward or self.steps_through_keys else self.block_m
        adds_dq = self.is_backward and not self.products
        return rows * (2 * (self.head_dim + self._values) + (4 * self.head_dim if adds_dq else 0))

    @property
    def _values(self) -> int:
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class Ways:
    """What the consumers of a kernel do: one way per consumer, once round the loop. `items`: by kind of result."""

    full: tuple[Way, ...]
    masked: tuple[Way, ...] | None
    items: dict[str, tuple[Way, ...]]


@dataclass(frozen=True)
class Figures:
    """The model's figures under one set of assumptions. Cycles, and the share of them that products need."""

    cycles: float
    utilisation: float
    masked_utilisation: float | None
    fixed_cycles: dict[str, float]  # of a work item of TILES_OF_ITEM tiles, by kind of result
    steady: Steady


def _count(i: Instruction, *bases: str) -> int:
    return int(i.base in bases)


def _shortest(i: Instruction) -> tuple[int, ...]:
    return _count(i, "HGMMA"), -_count(i, "LDG", "LD"), int("TRYWAIT" in i.name), -1


def _longest(i: Instruction) -> tuple[int, ...]:
    return _count(i, "HGMMA"), -_count(i, "LDG", "LD"), int("TRYWAIT" in i.name), 1


def _start(i: Instruction) -> tuple[int, ...]:
    return -_count(i, "HGMMA"), -1


def _to_16_bits(i: Instruction) -> tuple[int, ...]:
    loads = _count(i, "LDG", "LD")
    return -_count(i, "HGMMA"), _count(i, "F2FP"), -loads, _count(i, "STG", "ST"), -1


def _onto_floats(i: Instruction) -> tuple[int, ...]:
    loads, stores = _count(i, "LDG", "LD"), _count(i, "STG", "ST")
    return -_count(i, "HGMMA"), -_count(i, "F2FP"), stores, loads, -1


RESULTS = {"16 bits": (_to_16_bits, False), "accumulate": (_onto_floats, True)}


def find_loops(listing: Listing, count: int) -> list[Loop]:
    """Returns the `count` loops over full tiles: with products, no mask if possible, few products, short.

    A mask is seen by its bits, which become predicates (R2P).

    Raises: ValueError if there are fewer.
    """
    ranked = []
    for loop in loops(listing):
        if any(listing[index].base == "HGMMA" for index in loop.body):
            way = round_loop(listing, loop, _shortest)
            masks, products = (sum(_count(i, b) for i in way) for b in ("R2P", "HGMMA"))
            ranked.append((masks > 0, products, len(way), loop))
    chosen: list[Loop] = []
    for *_, loop in sorted(ranked, key=lambda r: r[:3]):
        if all(loop.body.isdisjoint(other.body) for other in chosen):
            chosen.append(loop)
    if len(chosen) < count:
        raise ValueError(f"loops with products: {len(chosen)}, needed {count}; look at the listing")
    return sorted(chosen[:count], key=lambda loop: loop.head)


def ways_through(listing: Listing, shape: Shape) -> Ways:
    """Returns the consumers' ways. Raises: ValueError where the listing has no such loops."""
    found = _loops_of_consumers(listing, shape)
    full = tuple(round_loop(listing, at, _shortest) for at in found)
    masked = tuple(_masked(listing, at, way) for at, way in zip(found, full, strict=True))
    items = {}
    for kind, (value, _) in RESULTS.items():
        try:
            items[kind] = tuple(
                _item(listing, at, way, value) for at, way in zip(found, full, strict=True)
            )
        except NoWayError:
            continue  # one work item per CTA: nothing goes back to a start
    has_masked = shape.is_backward and any(masked)  # of one consumer, where the other has no scores
    ways = tuple(way or unmasked for way, unmasked in zip(masked, full, strict=True))
    return Ways(full, ways if has_masked else None, items)


def _loops_of_consumers(listing: Listing, shape: Shape) -> list[Loop]:
    """Returns one per consumer: where the last has its own, all others run the other one, that of the scores."""
    found = find_loops(listing, 2 if shape.separate_code else 1)
    of_scores = next(
        (at for at in found if _masked(listing, at, round_loop(listing, at, _shortest))), found[0]
    )
    return found + [of_scores] * (shape.consumers - len(found))


def _masked(listing: Listing, loop: Loop, full: Way) -> Way | None:
    """Returns the way through a masked tile: in the loop itself, or in the one around it."""
    for candidate in (loop, *_around(listing, loop)[:1]):
        way = round_loop(listing, candidate, _longest)
        masks, products = (sum(_count(i, base) for i in way) for base in ("R2P", "HGMMA"))
        if masks and products == sum(_count(i, "HGMMA") for i in full):
            return way
    return None


def _around(listing: Listing, loop: Loop) -> list[Loop]:
    """Returns the loops around a loop, smallest first."""
    return [at for at in loops(listing) if loop.head in at.body and at.head != loop.head]


def _item(listing: Listing, loop: Loop, way: Way, value: Value) -> Way:
    """Returns a whole work item: the loop's way with its start before it and its end behind it."""
    around = _around(listing, loop)
    if not around:
        raise NoWayError("no loop over work items")
    head = around[-1].head
    start = best_way(listing, head, loop.head, _start)
    end = best_way(listing, loop.head, head, value)
    products, outside = (sum(_count(i, "HGMMA") for i in part) for part in (way, (*start, *end)))
    return (*start, *way * (TILES_OF_ITEM - outside // products), *end)


def figures(ways: Ways, shape: Shape, machine: Machine) -> Figures:
    """Returns what the model says under one set of assumptions."""
    steady = steady_state(Work(ways.full, shape.turns, shape.tma_bytes), machine)
    ideal = shape.flops / machine.product_flops
    masked = None
    if ways.masked:
        work = Work(ways.masked, shape.turns, shape.tma_bytes)
        masked = ideal / steady_state(work, machine).cycles
    fixed = {}
    for kind, item in ways.items.items():
        work = Work(item, shape.turns, TILES_OF_ITEM * shape.tma_bytes, RESULTS[kind][1])
        fixed[kind] = steady_state(work, machine, 6).cycles - TILES_OF_ITEM * steady.cycles
    return Figures(steady.cycles, ideal / steady.cycles, masked, fixed, steady)


def both_figures(ways: Ways, shape: Shape) -> dict[str, Figures]:
    """Returns the figures under every set of assumptions, by its name."""
    return {name: figures(ways, shape, machine) for name, machine in MACHINES.items()}
