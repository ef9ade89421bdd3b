"""The block search against brute force on small tables and against known optima."""

import itertools

import numpy as np
import pytest

from megatron_cp.plan.schemes.blocks import OwnedBlocks, RowWeights, least_max, least_sum
from tests.plan.cases import config

FORWARD = RowWeights(1, 1, 2, 0)  # in the published unit: query 1, result 1, keys and values 2


def flows(blocks, weights, part):
    """Returns rows into and out of every part, counted chunk by chunk: two lists."""
    into, out = [0] * blocks.num_parts, [0] * blocks.num_parts
    sides = (
        (blocks.rows, blocks.q_owner, weights.q_there, weights.q_back),
        (blocks.columns, blocks.k_owner, weights.k_there, weights.k_back),
    )
    for chunks, owner, there, back in sides:
        readers = {(int(c), int(p)) for c, p in zip(chunks, part, strict=True) if owner[c] != p}
        for chunk, reader in readers:
            into[reader] += there
            out[reader] += back
            into[owner[chunk]] += back
            out[owner[chunk]] += there
    return into, out


def fullest(blocks, weights, part):
    into, out = flows(blocks, weights, part)
    return max(into + out)


def loads(blocks, part):
    return np.bincount(part, blocks.areas, blocks.num_parts)


def triangle(num_chunks):
    """Returns causal blocks: whole ones of area 2 below the diagonal, half ones on it."""
    return np.tril(np.full((num_chunks, num_chunks), 2)) - np.eye(num_chunks, dtype=int)


@pytest.mark.parametrize(
    ("table", "num_parts", "optimum"),
    [
        (triangle(8), 8, 6),
        (triangle(4), 2, 4),
        (np.full((8, 8), 2), 8, 8),
        (np.eye(8, dtype=int), 8, 0),
    ],
    ids=["causal, 8 parts", "causal, 2 parts", "full, 8 parts", "diagonal"],
)
def test_the_fullest_link_is_within_a_fifth_of_the_published_optimum(table, num_parts, optimum):
    """Eight parts: proved by an exact solver for the published model; two: by hand, two columns each."""
    pieces = len(table) // num_parts
    blocks = OwnedBlocks.of_table(table, np.arange(len(table)) // pieces, num_parts)
    part = least_max(blocks, FORWARD, tolerance=0.125)
    assert fullest(blocks, FORWARD, part) <= 1.2 * optimum
    assert loads(blocks, part).max() <= 1.125 * table.sum() / num_parts


def small_table(seed):
    """Returns two to six blocks of up to four chunks on two or three parts: at most 3^6 deals."""
    rng = np.random.default_rng(seed)
    num_parts = int(rng.integers(2, 4))
    size = int(rng.integers(num_parts, 5))
    table = np.zeros(size * size, dtype=int)
    cells = rng.choice(size * size, min(int(rng.integers(2, 7)), size * size), replace=False)
    table[cells] = rng.integers(1, 4, len(cells))
    return OwnedBlocks.of_table(
        table.reshape(size, size), np.arange(size) * num_parts // size, num_parts
    )


@pytest.mark.parametrize("planner", [least_sum, least_max])
def test_nine_of_ten_small_deals_are_the_best_that_are_as_balanced(planner):
    """Brute force over all deals; for `least_max` the cost is the sum of fourth powers of the flows."""

    def cost(blocks, deal):
        into, out = flows(blocks, FORWARD, deal)
        return sum(into) if planner is least_sum else sum(x**4 for x in into + out)

    num_best = 0
    for seed in range(100):
        blocks = small_table(seed)
        part = planner(blocks, FORWARD, tolerance=0.1)
        diagonal = blocks.rows == blocks.columns
        home = blocks.q_owner[blocks.rows]
        assert np.array_equal(part[diagonal], home[diagonal])
        cap = max(loads(blocks, part).max(), 1.1 * blocks.areas.sum() / blocks.num_parts)
        choices = [
            [int(owner)] if pinned else range(blocks.num_parts)
            for owner, pinned in zip(home, diagonal, strict=True)
        ]
        deals = (np.array(deal) for deal in itertools.product(*choices))
        best = min(cost(blocks, deal) for deal in deals if loads(blocks, deal).max() <= cap)
        assert cost(blocks, part) >= best
        num_best += cost(blocks, part) == best
    assert num_best >= 90


def test_row_weights_follow_the_heads_and_the_pass():
    options = config(num_heads=64, num_kv_heads=8, head_dim=128)
    assert RowWeights.of(options, "forward") == RowWeights(16, 16, 4, 0)
    assert RowWeights.of(options, "backward") == RowWeights(32, 16, 4, 4)
    single = config(num_heads=64, num_kv_heads=1, head_dim=128)
    assert RowWeights.of(single, "backward").k_there == 1  # rounded, never to nothing
