"""Prices from below for published schemes with a stage per rank, where building the plan would be too large.

A ring on 4096 ranks has 4096 stages of 4096 masks. Its time is at least that of its busiest rank's pairs while rows
travel, and at least that of the rows; here stands the larger of the two. So the baseline looks as good as it can
be, or better: a comparison made with these figures is never unfair to it.
"""

from collections.abc import Callable

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask, cell_areas
from megatron_cp.plan.hardware.cost import compute_seconds, hidden_seconds
from megatron_cp.plan.hardware.rows import head_split_bytes, row_size
from megatron_cp.plan.hardware.speeds import rank_speeds, total_speed
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import OwnRows, PassName
from megatron_cp.plan.schemes.documents import local_intra_inter
from megatron_cp.plan.schemes.double_ring import passes_queries
from megatron_cp.plan.schemes.layout import ranks_per_node
from megatron_cp.plan.transfer.head_split import head_degrees
from megatron_cp.plan.transfer.pass_builder import PlacedMask

STRIPS = 256
MOST_STEPS = 128  # ranks up to which plans with a stage per rank are built
MOST_BUILT = {
    "stripe": 32,  # tokens are dealt one by one: slices are many
    "per_document_zigzag": 32,  # every document is cut by every rank: 1M tokens on 64 ranks take up to ten seconds
    "allgather": 512,  # a message for every two ranks
    "usp": 512,  # a stage per node
    "document_groups": 256,  # a stage per rank, wherever a document is on all of them
}


def is_built(planner: str, cp_size: int) -> bool:
    """Returns whether the planner's plan for so many ranks is built, not priced from below."""
    return planner not in BEST_CASES or cp_size <= MOST_BUILT.get(planner, MOST_STEPS)


def best_case_seconds(
    planner: str, mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName
) -> float:
    """Returns a time that a pass of `planner`, one of BEST_CASES, cannot beat."""
    return BEST_CASES[planner](mask, cp_size, config, pass_name)


def busiest_area(mask: AttentionMask, cp_size: int, config: CPConfig, pieces: int) -> float:
    """Returns the pairs of the slowest rank over its speed: in order (1 piece per rank) or zigzag (2)."""
    size = tokens_per_rank(mask.num_queries, cp_size, config, pieces=pieces) // pieces
    bounds = np.minimum(np.arange(pieces * cp_size + 1) * size, mask.num_queries)
    areas = mask.area_of_rows(bounds)
    if pieces == 2:
        areas = areas[:cp_size] + areas[: cp_size - 1 : -1]
    return float((areas / rank_speeds(config, cp_size)).max())


def _ring(pieces: int) -> Callable[[AttentionMask, int, CPConfig, PassName], float]:
    def seconds(mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName) -> float:
        topology = get_topology(config.topology)
        remote = max(0, cp_size - topology.node_size)  # steps that cross nodes on every rank
        steps = cp_size - 1
        moved = _key_bytes(mask, cp_size, config, pass_name)
        links = remote * moved / topology.outer_gbytes_per_s
        links += (steps - remote) * moved / topology.inner_gbytes_per_s
        area = even_area(mask, cp_size, config)
        if pieces:
            area = busiest_area(mask, cp_size, config, pieces)
        return _overlapped(compute_seconds(area, config, pass_name), links * 1e-9, steps, config)

    return seconds


def _double_ring(mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName) -> float:
    topology = get_topology(config.topology)
    nodes = -(-cp_size // topology.node_size)
    moved = _key_bytes(mask, cp_size, config, pass_name)
    outer = (nodes - 1) * moved / topology.outer_gbytes_per_s
    inner = (cp_size - nodes) * moved / topology.inner_gbytes_per_s
    if pass_name == "backward" and passes_queries(config):  # pairs are computed where keys live
        mask = mask.transpose()
    compute = compute_seconds(busiest_area(mask, cp_size, config, pieces=2), config, pass_name)
    return _overlapped(compute, max(outer, inner) * 1e-9, cp_size - 1, config)


def _allgather(mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName) -> float:
    topology = get_topology(config.topology)
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    key = row_size(config, pass_name, "k")
    remote = max(0, cp_size - topology.node_size) * rows / topology.outer_gbytes_per_s
    inner = (min(cp_size, topology.node_size) - 1) * rows / topology.inner_gbytes_per_s
    links = max(remote, inner) * key.both_ways * 1e-9
    area = busiest_area(mask, cp_size, config, pieces=2)
    return links + compute_seconds(area, config, pass_name)  # one stage: nothing to hide behind


def _usp(mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName) -> float:
    """Returns the best head degree: the exchange, then a ring over what is left, balanced."""
    topology = get_topology(config.topology)
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    compute = compute_seconds(even_area(mask, cp_size, config), config, pass_name)
    times = []
    for degree in head_degrees(cp_size, config):
        is_inside = degree <= topology.node_size
        gbytes = topology.inner_gbytes_per_s if is_inside else topology.outer_gbytes_per_s
        exchange = head_split_bytes(OwnRows.of_tokens(rows), degree, config, pass_name) / (
            gbytes * 1e9
        )
        key, query = (row_size(config, pass_name, side, degree) for side in ("k", "q"))
        size = min(key.both_ways, query.both_ways) if key.back else key.there
        inside = max(1, topology.node_size // degree)  # steps that may stay in the node
        steps = max(0, cp_size // degree - inside)
        links = steps * rows * degree * size / (topology.outer_gbytes_per_s * 1e9)
        times.append(exchange + _overlapped(compute, links, 0, config))
    return min(times)


def _distflashattn(
    mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName
) -> float:
    num_tokens = mask.num_queries
    compute = compute_seconds(_helped_area(mask, cp_size, config), config, pass_name)
    if mask.area() != num_tokens * (num_tokens + 1) // 2 or mask.num_slices != 1:
        return compute  # its volume is known for one causal document
    topology = get_topology(config.topology)
    rows = tokens_per_rank(num_tokens, cp_size, config)
    query, key = (row_size(config, pass_name, side) for side in ("q", "k"))
    moved = rows * key.both_ways * (3 * cp_size / 8 - 0.25)
    moved += rows * query.both_ways * (cp_size / 8 - 0.25)
    share = max(0.0, 1 - topology.node_size / cp_size)  # of the rows, from other nodes
    links = share * moved / (topology.outer_gbytes_per_s * 1e9)
    return _overlapped(compute, links, cp_size // 2, config)


def _document_groups(
    mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName
) -> float:
    """Returns the time of the busiest rank's pairs, or of rows that the other members of its documents send it."""
    pieces, shares = local_intra_inter(mask, cp_size, config)
    topology, node = get_topology(config.topology), ranks_per_node(cp_size, config)
    in_node = shares.reshape(len(shares), -1, node).sum(axis=2).repeat(node, axis=1)
    is_member = shares > 0
    inner = int(((in_node - shares) * is_member).sum(axis=0).max())
    outer = int(((shares.sum(axis=1)[:, None] - in_node) * is_member).sum(axis=0).max())
    links = max(inner / topology.inner_gbytes_per_s, outer / topology.outer_gbytes_per_s)
    loads = PlacedMask(mask, pieces.placement).loads
    return max(
        compute_seconds((loads / rank_speeds(config, cp_size)).max(), config, pass_name),
        links * _row_bytes(config, pass_name) * 1e-9,
    )


def _helped_area(mask: AttentionMask, cp_size: int, config: CPConfig) -> float:
    """Returns pairs over speed of DISTFLASHATTN's slowest rank: blocks more than P / 2 places apart go to the keys."""
    size = tokens_per_rank(mask.num_queries, cp_size, config)
    bounds = np.minimum(np.arange(cp_size + 1) * size, mask.num_queries)
    loads = np.zeros(cp_size)
    keys = np.arange(cp_size)
    for first in range(0, cp_size, STRIPS):  # the whole table of 4096 ranks would be large
        queries = np.arange(first, min(first + STRIPS, cp_size))[:, None]
        areas = cell_areas(mask, bounds[first : first + STRIPS + 1], bounds).astype(np.float64)
        is_helped = (queries - keys) % cp_size > cp_size / 2
        loads[queries[:, 0]] += np.where(is_helped, 0.0, areas).sum(axis=1)
        loads += np.where(is_helped, areas, 0.0).sum(axis=0)
    return float((loads / rank_speeds(config, cp_size)).max())


def even_area(mask: AttentionMask, cp_size: int, config: CPConfig) -> float:
    """Returns the pairs that each rank of speed 1 has if all have their share."""
    return mask.area() / total_speed(config, cp_size)


def _key_bytes(mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName) -> float:
    """Returns the bytes of one rank's keys and values; in a backward pass of the cheaper side."""
    return float(tokens_per_rank(mask.num_queries, cp_size, config) * _row_bytes(config, pass_name))


def _row_bytes(config: CPConfig, pass_name: PassName) -> int:
    """Returns the bytes of a row's key and value; in a backward pass of the cheaper side.

    LoongTrain and BurstAttention pass queries and their gradients where that is less.
    """
    sides = [row_size(config, pass_name, side) for side in ("k", "q")]
    if pass_name == "forward":
        return sides[0].there
    return min(side.both_ways for side in sides)


def _overlapped(compute: float, links: float, steps: int, config: CPConfig) -> float:
    """Returns the larger of compute, slowed by the rows that travel under it, and links with the latency of steps."""
    latency = get_topology(config.topology).latency_us * 1e-6
    return max(float(hidden_seconds(config, compute, links)), links + steps * latency)


BEST_CASES: dict[str, Callable[[AttentionMask, int, CPConfig, PassName], float]] = {
    "ring": _ring(1),
    "zigzag": _ring(2),
    "stripe": _ring(0),  # balanced to within a diagonal
    "allgather": _allgather,
    "usp": _usp,
    "per_document_zigzag": _ring(0),  # balanced to within a piece
    "double_ring": _double_ring,
    "distflashattn": _distflashattn,
    "document_groups": _document_groups,
}
