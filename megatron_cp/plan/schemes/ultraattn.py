"""UltraAttn: context tiles for nodes, then for the ranks of each node.

The stream is cut into chunks, the mask into blocks of them. A full mask becomes an X x Y grid of tiles: a rank
gathers queries from X ranks and keys from Y, X Y = P, instead of all keys. Other masks are partitioned: nodes
first; then every block that a node computes is shared among its ranks by itself, once per distinct pattern.

    full, P = 8, X = 2     k ->  0 1 0 1 0 1 0 1      block (q, k) on rank q // X * X + k % X
                           q     0 1 0 1 0 1 0 1
                                 2 3 2 3 2 3 2 3      rows of another node arrive once, at the rank with the
                                 2 3 2 3 2 3 2 3      same place in this node, and go on from there inside

The objective is the published one: the fullest way in or out of a part is to be as empty as possible, where an owner
sends to every reader, diagonal blocks stay, and loads are capped. Forward and backward have their own weights (queries
1 + result 1, keys 2 rho; backward 2 + 1 and 4 rho), which the paper solves with Gurobi; here a greedy descent with
exchanges (`blocks.py`), so block tables that Gurobi solves to the optimum may come out up to a fifth fuller. Also ours:
chunks per part by the load that whole blocks leave uneven (the paper's DLI, its threshold is set by hand), partial
blocks weighed by their pairs, GQA weights, and more than two levels where nodes are many.
Tokens stay in order; the paper's manual remaps are a matter of the mask (`mask.strided(remapped=True)`).

Volume per rank, full: 2 (X-1) + 2 rho (Y-1). Source: UltraAttn (SC'25).
"""

import math
from dataclasses import dataclass

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.blocks import cell_areas
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement.placement import Placement, tokens_per_rank
from megatron_cp.plan.schema import BoolArray, Pass, PassName, PlanData
from megatron_cp.plan.schemes.blocks import MOST_TRIES, OwnedBlocks, RowWeights, least_max
from megatron_cp.plan.schemes.divisions import cut_to_chunks, pass_in_divisions
from megatron_cp.plan.schemes.layout import check_pieces, ranks_per_node
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.routing import ThroughNodes

TOLERANCE = 0.125  # over the mean load: what four full blocks and half a block make of four
MOST_PIECES = 4  # chunks per part
FEWER_TRIES = 2_000  # per pattern below the first level
MOST_PARTS = 16  # of one table; more nodes make one more level
DIVISIONS = 4
FINE_CHUNKS = (
    256  # over all ranks: below the first level chunks are halved as long as they are no more
)


@dataclass(frozen=True)
class Level:
    """One cut of the machine: into how many parts, with how many chunks each."""

    parts: int
    pieces: int

    @property
    def chunks(self) -> int:
        """Returns the chunks of the block table."""
        return self.parts * self.pieces


def plan_ultraattn(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns tiles for nodes, then for ranks; forward and backward tiled by their own weights."""
    inner = ranks_per_node(cp_size, config)
    levels = _levels(mask, cp_size, inner)
    chunks = math.prod(level.chunks for level in levels)
    check_pieces("ultraattn", math.ceil(mask.density() * chunks**2), cp_size)
    rows = tokens_per_rank(mask.num_queries, cp_size, config, pieces=chunks // cp_size)
    chunk = cp_size * rows // chunks
    bounds = np.minimum(np.arange(chunks + 1) * chunk, mask.num_queries)
    areas = cell_areas(mask, bounds, bounds)
    is_full = areas == np.outer(np.diff(bounds), np.diff(bounds))
    placed = PlacedMask(mask, Placement.of_chunks(_chunks_of_ranks(levels), chunk))

    def one_pass(name: PassName) -> Pass:
        ranks = _Tiling(levels, RowWeights.of(config, name)).ranks(areas, is_full)
        divisions = config.num_stages or DIVISIONS
        tiles = cut_to_chunks(mask, ranks, chunk)
        return pass_in_divisions(placed, *tiles, divisions, ThroughNodes(inner))

    passes = one_pass("forward"), one_pass("backward")
    return PlanData(mask, config, "ultraattn", placed.placement, *passes)


def _levels(mask: AttentionMask, cp_size: int, inner: int) -> list[Level]:
    """Returns the cuts of the machine, nodes before ranks: few enough parts each, chunks as fine as balance asks."""
    fan_outs = [*_factors(cp_size // inner), *_factors(inner)] or [1]
    is_full = mask.area() == mask.num_queries**2
    first = 1 if is_full else _pieces(mask.density(), fan_outs[0])
    rest = 1 if is_full or 2 * first * cp_size > FINE_CHUNKS else 2
    return [Level(parts, rest if index else first) for index, parts in enumerate(fan_outs)]


def _factors(count: int) -> list[int]:
    """Returns factors of `count`, the first at most `MOST_PARTS` where it has such divisors."""
    if count == 1:
        return []
    divisors = [n for n in range(2, MOST_PARTS + 1) if count % n == 0]
    factor = max(divisors, default=count)
    return [factor, *_factors(count // factor)]


def _pieces(density: float, parts: int) -> int:
    """Returns the fewest chunks per part at which whole blocks, and half of one, spread evenly enough."""
    for pieces in (1, 2):
        blocks = density * parts * pieces**2  # of each part
        if blocks and math.ceil(blocks) + 0.5 <= blocks * (1 + TOLERANCE):
            return pieces
    return MOST_PIECES


def _chunks_of_ranks(levels: list[Level]) -> IntArray:
    """Returns the chunks that each rank owns, int64 `[P, n]`: chunks of a level go to its parts in order."""
    owner = np.zeros(1, dtype=np.int64)
    for level in levels:
        part = np.arange(level.chunks) // level.pieces
        owner = (owner[:, None] * level.parts + part).reshape(-1)
    num_ranks = math.prod(level.parts for level in levels)
    return np.argsort(owner, kind="stable").reshape(num_ranks, -1)


class _Tiling:
    """Ranks of blocks, level by level; every distinct pattern is solved once."""

    def __init__(self, levels: list[Level], weights: RowWeights):
        self.levels, self.weights = levels, weights
        self._known: dict[tuple[int, int, int, bytes], IntArray] = {}

    def ranks(
        self, areas: IntArray, is_full: BoolArray, depth: int = 0, held: tuple[int, int] = (1, 1)
    ) -> IntArray:
        """Returns the rank, within one part of the level above, of each block of `areas`; 0 for empty ones.

        `held`: how many tiles of this size, in rows and in columns, a part of the level above holds.
        """
        key = (depth, *held, areas.tobytes() + is_full.tobytes())
        if key not in self._known:
            self._known[key] = self._assign(areas, is_full, depth, held)
        return self._known[key]

    def _assign(
        self, areas: IntArray, is_full: BoolArray, depth: int, held: tuple[int, int]
    ) -> IntArray:
        level, below = self.levels[depth], self.levels[depth + 1 :]
        owner = np.arange(level.chunks) // level.pieces
        size = len(areas) // level.chunks
        table = areas.reshape(level.chunks, size, level.chunks, size).sum(axis=(1, 3))
        if is_full.all():
            width = self._grid_width(level.parts, held)
            part = owner[:, None] // width * width + owner % width
            held = held[0] * width, held[1] * (level.parts // width)
        else:
            blocks = OwnedBlocks.of_table(table, owner, level.parts)
            part = np.zeros_like(table)
            tries = FEWER_TRIES if depth else MOST_TRIES
            part[blocks.rows, blocks.columns] = least_max(blocks, self.weights, TOLERANCE, tries)
        ranks = np.kron(part, np.ones((size, size), dtype=np.int64))
        if not below:
            return ranks
        ranks *= math.prod(one.parts for one in below)
        for i, j in np.argwhere(table).tolist():
            cell = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
            ranks[cell] += self.ranks(areas[cell], is_full[cell], depth + 1, held)
        return ranks

    def _grid_width(self, parts: int, held: tuple[int, int]) -> int:
        """Returns the X of the X x Y grid that moves least."""
        w = self.weights
        q_cost, k_cost = held[0] * (w.q_there + w.q_back), held[1] * (w.k_there + w.k_back)
        widths = [x for x in range(1, parts + 1) if parts % x == 0]
        return min(widths, key=lambda x: ((x - 1) * q_cost + (parts // x - 1) * k_cost, x))
