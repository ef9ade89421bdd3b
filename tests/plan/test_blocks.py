"""The block search against brute force on small tables and against known optima."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.plan.schemes.blocks import Blocks, RowWeights, least_max, least_sum
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
    [(triangle(8), 8, 6), (triangle(4), 2, 4), (np.eye(8, dtype=int), 8, 0)],
    ids=["causal, 8 parts", "causal, 2 parts", "diagonal"],
)
def test_the_fullest_link_is_within_a_fifth_of_the_published_optimum(table, num_parts, optimum):
    """Eight parts: proved by an exact solver for the published model; two: by hand, two columns each."""
    pieces = len(table) // num_parts
    blocks = Blocks.of_table(table, np.arange(len(table)) // pieces, num_parts)
    part = least_max(blocks, FORWARD, tolerance=0.125)
    assert fullest(blocks, FORWARD, part) <= 1.2 * optimum
    assert loads(blocks, part).max() <= 1.125 * table.sum() / num_parts


@st.composite
def small_tables(draw):
    """Returns blocks of up to four chunks on two or three parts, at most 3^6 deals."""
    num_parts = draw(st.sampled_from([2, 3]))
    size = draw(st.integers(num_parts, 4))
    cells = draw(
        st.lists(
            st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)),
            min_size=1,
            max_size=6,
            unique=True,
        )
    )
    table = np.zeros((size, size), dtype=int)
    for i, j in cells:
        table[i, j] = draw(st.integers(1, 3))
    return Blocks.of_table(table, np.arange(size) * num_parts // size, num_parts)


@given(blocks=small_tables(), planner=st.sampled_from([least_sum, least_max]))
@settings(max_examples=120)
def test_a_deal_costs_at_most_half_more_than_the_best_that_is_as_balanced(blocks, planner):
    """Brute force over all deals; for `least_max` the cost is the sum of fourth powers: an eighth on a link."""
    part = planner(blocks, FORWARD, tolerance=0.1)
    home = blocks.q_owner[blocks.rows] == blocks.k_owner[blocks.columns]
    assert np.array_equal(part[home], blocks.q_owner[blocks.rows][home])

    def cost(deal):
        into, out = flows(blocks, FORWARD, deal)
        return sum(into) if planner is least_sum else sum(x**4 for x in into + out)

    cap = max(loads(blocks, part).max(), 1.1 * blocks.areas.sum() / blocks.num_parts)
    choices = [
        [int(owner)] if pinned else range(blocks.num_parts)
        for owner, pinned in zip(blocks.q_owner[blocks.rows], home, strict=True)
    ]
    deals = (np.array(deal) for deal in itertools.product(*choices))
    best = min(cost(deal) for deal in deals if loads(blocks, deal).max() <= cap)
    assert cost(part) <= 1.5 * best


def test_row_weights_follow_the_heads_and_the_pass():
    options = config(num_heads=64, num_kv_heads=8, head_dim=128)
    assert RowWeights.of(options, "forward") == RowWeights(16, 16, 4, 0)
    assert RowWeights.of(options, "backward") == RowWeights(32, 16, 4, 4)
    single = config(num_heads=64, num_kv_heads=1, head_dim=128)
    assert RowWeights.of(single, "backward").k_there == 1  # rounded, never to nothing
