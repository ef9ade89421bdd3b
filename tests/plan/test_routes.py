"""Routes bring every row where it is wanted, each once, and load links as they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.routing import ThroughNodes, direct, enters_twice, tree
from tests.oracles.plans import held_ids
from tests.plan.cases import config
from tests.plan.test_laws import any_square_mask, check_laws

ROUTES = {
    "direct": direct,
    "tree": tree,
    "through nodes": ThroughNodes(2),
    "tree of nodes": ThroughNodes(2, tree=True),
    "uneven nodes": ThroughNodes(3, tree=True),
}


def random_assignment(placed, num_stages, data):
    """Returns the mask cut at random rows, each part with a random rank and stage."""
    seed = data.draw(st.integers(0, 1000))
    rng = np.random.default_rng(seed)
    rank = rng.integers(0, placed.num_ranks, len(placed.parts))
    return rank, rng.integers(0, num_stages, len(placed.parts))


@pytest.mark.parametrize("name", sorted(ROUTES))
@given(case=any_square_mask(), cp_size=st.sampled_from([2, 3, 4, 8]), data=st.data())
@settings(max_examples=40)
def test_any_assignment_of_pairs_to_ranks_and_stages_becomes_a_plan_that_computes_each_once(
    name, case, cp_size, data
):
    mask, allowed = case
    rows = -(-len(allowed) // cp_size)
    order = data.draw(st.permutations(range(cp_size * rows)))
    placed = PlacedMask(mask, np.array(order).reshape(cp_size, rows))
    builder = PassBuilder(placed, ROUTES[name])
    rank, stage = random_assignment(placed, 3, data)
    for index in range(3):
        keeps = {side: bool(index) and data.draw(st.booleans()) for side in ("keeps_k", "keeps_q")}
        builder.add(placed.parts[stage == index], rank[stage == index], **keeps)
    both = builder.build()
    plan = AttentionPlan(mask, config(), "by hand", placed.placement, both, both)
    check_laws(plan, allowed)
    check_nothing_arrives_twice(plan)


def check_nothing_arrives_twice(plan):
    own = plan.global_from_local.tolist()
    for cast, keeps in (("q_cast", "keeps_q"), ("k_cast", "keeps_k")):
        held = own
        for stage in plan.forward.stages:
            held = held_ids(held if getattr(stage, keeps) else own, getattr(stage, cast))
            assert all(len(set(ids)) == len(ids) for ids in held)


def broadcast(route, cp_size, num_tokens=64):
    """Returns the hops of a full mask whose keys all lie on rank 0."""
    mask = masks.from_slices(num_tokens, num_tokens, [(0, num_tokens, 0, 4, None, None)])
    placed = PlacedMask(mask, np.arange(num_tokens).reshape(cp_size, -1))
    builder = PassBuilder(placed, route)
    builder.add(placed.parts, placed.q_owner)
    return [hop.messages for hop in builder.build().stages[0].k_cast.hops]


def test_a_tree_doubles_the_ranks_that_hold_a_row_in_every_hop():
    hops = broadcast(tree, 16)
    assert [len(messages) for messages in hops] == [1, 2, 4, 8]
    sent_by_owner = sum(int((messages[:, 0] == 0).sum()) for messages in hops)
    assert sent_by_owner == 4  # a star would be 15


@pytest.mark.parametrize("route", [ThroughNodes(4), ThroughNodes(4, tree=True)])
def test_a_row_crosses_to_another_node_once_and_never_from_a_node_that_did_not_need_to(route):
    entered = []
    for messages in broadcast(route, 16):
        crossing = messages[:, 0] // 4 != messages[:, 1] // 4
        entered += (messages[crossing, 1] // 4).tolist()
    assert sorted(entered) == [1, 2, 3]


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 20), st.integers(1, 9)),
        max_size=8,
    ),
    node_size=st.sampled_from([1, 2, 3]),
)
def test_a_row_that_two_ranks_of_a_node_want_is_noticed(pieces, node_size):
    entries = [
        (dst // node_size, token)
        for src, dst, start, size in pieces
        for token in range(start, start + size)
        if src // node_size != dst // node_size
    ]
    rows = [(src, dst, start, start + size) for src, dst, start, size in pieces]
    requests = np.array(rows, dtype=np.int64).reshape(-1, 4)
    assert enters_twice(requests, node_size, stride=100) == (len(set(entries)) < len(entries))
