"""What make_plan refuses: one clear line with the value received and the nearest legal one."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Level, Topology
from megatron_cp.plan import make_plan, make_plans, plan_on_placement
from megatron_cp.plan.placement.placement import per_document_zigzag
from megatron_cp.plan.planner import forget_plans

CAUSAL = masks.causal(3000)

BAD_CALLS = {
    "cp_size 0": (lambda: make_plan(CAUSAL, 0), ["cp_size=0", "use 1"]),
    "cp_size -1": (lambda: make_plan(CAUSAL, -1), ["cp_size=-1", "positive integer"]),
    "cp_size True": (lambda: make_plan(CAUSAL, True), ["cp_size=True", "positive integer"]),
    "cp_size 2.0": (lambda: make_plan(CAUSAL, 2.0), ["cp_size=2.0", "positive integer"]),
    "unknown planner": (
        lambda: make_plan(CAUSAL, 2, CPConfig(planner="zig-zag")),
        ["planner='zig-zag'", "allgather, auto", "nearest: zigzag"],
    ),
    "unknown topology": (
        lambda: make_plan(CAUSAL, 2, CPConfig(topology="H100")),
        ["topology='H100'", "a800, cpu, h100, h200", "Topology of your own"],
    ),
    "mask not square": (
        lambda: make_plans({"a": (masks.full(4, 5), 1)}, 2),
        ["(4, 5)", "square", "queries=plan"],
    ),
    "no tokens": (lambda: make_plan(masks.causal(0), 2), ["(0, 0)", "at least one token"]),
    "no masks": (lambda: make_plans({}, 2), ["masks is empty"]),
    "masks of two lengths": (
        lambda: make_plans({"a": (CAUSAL, 1), "b": (masks.causal(8), 1)}, 2),
        ["'b': (8, 8)", "of one length"],
    ),
    "weight 0": (lambda: make_plans({"a": (CAUSAL, 0)}, 2), ["{'a': 0}", "number of layers"]),
    "weight NaN": (
        lambda: make_plans({"a": (CAUSAL, float("nan"))}, 2),
        ["{'a': nan}", "positive and finite"],
    ),
    "chunks that pad more than there is": (
        lambda: make_plan(CAUSAL, 8, CPConfig(chunk_size=1000)),
        ["chunk_size=1000", "3000 tokens", "at most", "chunk_size=750"],
    ),
    "chunks against token_multiple": (
        lambda: make_plan(CAUSAL, 8, CPConfig(chunk_size=191, token_multiple=8)),
        ["chunk_size=191", "chunk_size=192"],
    ),
    "chunks too many": (
        lambda: make_plan(masks.causal(1 << 20), 8, CPConfig(chunk_size=16)),
        ["chunk_size=16", "65536 chunks", "at most 1024", "chunk_size=1024"],
    ),
    "chunk_size 0": (lambda: CPConfig(chunk_size=0), ["chunk_size=0", "positive integer"]),
    "num_stages 0": (lambda: CPConfig(num_stages=0), ["num_stages=0", "positive integer"]),
    "num_stages of a million": (
        lambda: CPConfig(num_stages=1 << 20), ["num_stages=1048576", "at most 4096", "leave it out"],
    ),
    "ranks of a million": (
        lambda: make_plan(CAUSAL, 1 << 20), ["cp_size=1048576", "at most 8192"],
    ),
    "heads that do not divide": (
        lambda: CPConfig(num_heads=8, num_kv_heads=3),
        ["num_kv_heads=3", "num_heads=8"],
    ),
    "ulysses beyond the heads": (
        lambda: make_plan(CAUSAL, 8, CPConfig(planner="ulysses", num_heads=6, num_kv_heads=2)),
        ["head degree 8", "num_heads=6", "[1, 2, 6]", "nearest is 6", "planner='auto'"],
    ),
    "a placement in one dimension": (
        lambda: plan_on_placement(masks.causal(4), [0, 1, 2, 3], CPConfig()),
        ["shape (4,)", "[ranks, tokens]"],
    ),
    "a placement of nobody": (
        lambda: plan_on_placement(masks.causal(4), np.zeros((0, 4), int), CPConfig()),
        ["shape (0, 4)", "one of each at least"],
    ),
    "a placement without a token": (
        lambda: plan_on_placement(masks.causal(4), [[0, 1], [2, 2]], CPConfig()),
        ["each of 0 to 3 once"],
    ),
    "a placement of too few": (
        lambda: plan_on_placement(masks.causal(5), [[0, 1], [2, 3]], CPConfig()),
        ["the 5 of the mask"],
    ),
    "per-document zigzag of an odd document": (
        lambda: per_document_zigzag([16, 20], 4),
        ["document 1 has 20 tokens", "nearest: 24", "planner='auto'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD_CALLS))
def test_bad_input_is_refused_in_one_line_that_says_what_to_do(name):
    call, fragments = BAD_CALLS[name]
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("chunk_size", [750, 375, 25, 13])
def test_the_nearest_legal_chunk_sizes_are_legal(chunk_size):
    plan = make_plan(CAUSAL, 8, CPConfig(chunk_size=chunk_size))
    assert plan.tokens_per_rank <= 2 * 375


@pytest.mark.parametrize(
    ("num_tokens", "cp_size", "chunk_size", "multiple"),
    [(9, 3, 3, 1), (8000, 8, 1999, 1), (7992, 8, 999, 1), (32768, 12, 2731, 1), (63, 3, 7, 3)],
)
@pytest.mark.parametrize("planner", ["auto", "dcp", "magi"])
def test_ranks_hold_the_fewest_rows_that_a_chosen_chunk_allows(
    num_tokens, cp_size, chunk_size, multiple, planner
):
    options = CPConfig(planner=planner, chunk_size=chunk_size, token_multiple=multiple)
    plan = make_plan(masks.causal(num_tokens), cp_size, options)
    step = math.lcm(chunk_size, multiple)
    assert plan.tokens_per_rank == -(-num_tokens // (cp_size * step)) * step


def test_a_placement_that_cannot_keep_the_memory_limit_is_refused():
    tokens = np.arange(4096).reshape(4, -1)
    limit = CPConfig(num_heads=8, num_kv_heads=8, max_received_mb=1)
    message = r"max_received_mb=1 cannot be kept by planner='fixed_placement', which holds (\d+) MB"
    with pytest.raises(ValueError, match=message) as caught:
        plan_on_placement(masks.causal(4096), tokens, limit)
    least = int(re.search(message, str(caught.value))[1])
    plan_on_placement(masks.causal(4096), tokens, replace(limit, max_received_mb=least))
    with pytest.raises(ValueError, match="cannot be kept"):
        plan_on_placement(masks.causal(4096), tokens, replace(limit, max_received_mb=least - 1))


def test_equal_topologies_give_equal_digests():
    digests = set()
    for number in (int, float):
        forget_plans()
        levels = (Level(16, number(20)),)
        topology = Topology(
            "x",
            number(500),
            number(400),
            8,
            number(370),
            number(45),
            number(20),
            outer_levels=levels,
        )
        digests.add(make_plan(masks.causal(64), 4, CPConfig(topology=topology)).digest())
    assert len(digests) == 1


def test_per_document_zigzag_gives_each_rank_two_mirrored_pieces_of_every_document():
    placement = per_document_zigzag([8, 0, 4], 2)
    assert np.array_equal(placement, [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]])
