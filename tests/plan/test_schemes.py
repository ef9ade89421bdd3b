"""Published ring, head-group and helper schemes against the closed forms of their papers, computed here by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan import Transfer
from tests.oracles.plans import held_ids
from tests.plan.cases import HEAD_COUNTS, config, nodes_of, packed, scheme
from tests.plan.test_laws import any_square_mask, check_laws


def rows_by_level(plan, node_size, pass_name="forward"):
    """Returns the rows that each rank receives (inside its node, from other nodes): `[P, 2]`."""
    received = np.zeros((plan.cp_size, 2), dtype=np.int64)
    for _, transfer in plan.get_pass(pass_name).transfers():
        for hop in transfer.hops:
            for src, dst, start, stop in hop.messages.tolist():
                received[dst, int(src // node_size != dst // node_size)] += stop - start
    return received


# ------------------------------------------------------------------ stripe


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_stripes_move_2_rho_times_p_minus_1_and_differ_by_a_diagonal(cp_size, heads):
    rows = 40
    plan, rho = scheme("stripe", masks.causal(rows * cp_size), cp_size, heads)
    assert np.array_equal(plan.global_from_local, np.arange(rows * cp_size).reshape(rows, -1).T)
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(2 * rho * (cp_size - 1))
    assert stats["link_max"] == pytest.approx(2 * rho * (cp_size - 1))
    # query a P + r sees a P + r + 1 keys; the last rank has the most
    loads = [sum(a * cp_size + r + 1 for a in range(rows)) for r in range(cp_size)]
    assert stats["imbalance"] == pytest.approx(loads[-1] * cp_size / sum(loads))
    assert stats["slices_max"] == 1
    for step, stage in enumerate(plan.forward.stages):
        triangle = rows * (rows + 1) // 2
        areas = [triangle if rank >= step else triangle - rows for rank in range(cp_size)]
        assert [work.area() for work in stage.work] == areas


def test_token_stripes_of_a_million_tokens_are_one_slice_per_step():
    plan, _ = scheme("stripe", masks.causal(1 << 20), 8)
    assert plan.stats("forward")["slices_max"] == 1


def test_stripes_of_blocks_place_blocks_in_turn():
    plan, _ = scheme("stripe", packed("uniform", 48, 3), 4, chunk_size=3)
    expected = np.arange(48).reshape(4, 4, 3).transpose(1, 0, 2).reshape(4, 12)
    assert np.array_equal(plan.global_from_local, expected)


# ------------------------------------------------------------------ double ring


@pytest.mark.parametrize(("cp_size", "node_size"), [(8, 2), (8, 4), (6, 3), (12, 8), (4, 8)])
def test_the_double_ring_crosses_the_network_n_minus_1_times_and_every_link_alike(
    cp_size, node_size
):
    rows, nodes = 24, cp_size // np.gcd(cp_size, node_size)
    options = {"topology": nodes_of(node_size)}
    plan, rho = scheme("double_ring", masks.causal(rows * cp_size), cp_size, (8, 4), **options)
    inside = cp_size // nodes
    received = rows_by_level(plan, inside)
    assert (received == [(cp_size - nodes) * rows, (nodes - 1) * rows]).all()
    assert plan.stats("forward")["link_max"] == pytest.approx(2 * rho * (cp_size - 1))
    assert plan.stats("forward")["imbalance"] == pytest.approx(1.0)
    assert len(plan.forward.stages) == cp_size
    assert len(plan.forward.stages[-1].k_cast.hops) == (1 if nodes == 1 or inside == 1 else 2)
    # every stage moves the same rows: at most one block comes in, a w-th of it over the network
    for stage in plan.forward.stages[1:]:
        arrived = sum(hop.rows_received(cp_size) for hop in stage.k_cast.hops)
        assert (arrived == rows).all()


@pytest.mark.parametrize(("heads", "per_block"), [((8, 8), 3), ((8, 4), 2), ((8, 2), 1)])
def test_the_double_ring_passes_queries_backward_where_keys_would_cost_more(heads, per_block):
    """4 rho a block by keys; 3 a block by queries, and two scalars per row and head of width 64."""
    options = {"topology": nodes_of(2)}
    plan, rho = scheme("double_ring", masks.causal(8 * 24), 8, heads, **options)
    by_queries = rho > 3 / 4
    stages = plan.backward.stages[1:]
    assert all((stage.q_cast is not None) == by_queries for stage in stages)
    assert all((stage.k_cast is None) == by_queries for stage in stages)
    scalars = 2 / 64 if by_queries else 0.0
    expected = (per_block + scalars) * 7
    assert plan.stats("backward")["volume_mean"] == pytest.approx(expected)
    assert plan.stats("backward")["volume_max"] == pytest.approx(expected)
    assert (rows_by_level(plan, 2, "backward") == [4 * 24, 3 * 24]).all()


def test_the_steps_of_a_double_ring_are_even_under_a_causal_mask():
    plan, _ = scheme("double_ring", masks.causal(8 * 64), 8, topology=nodes_of(4))
    areas = np.array([[work.area() for work in stage.work] for stage in plan.forward.stages])
    assert (areas[1:] == 64 * 64 // 2).all()


# ------------------------------------------------------------------ usp


@pytest.mark.parametrize("heads", [(16, 16), (16, 4), (16, 2), (16, 1)])
@pytest.mark.parametrize(("cp_size", "degree"), [(8, 1), (8, 2), (8, 4), (8, 8), (12, 4)])
def test_usp_moves_an_exchange_of_h_and_a_ring_over_the_groups(cp_size, degree, heads):
    num_heads, kv_heads = heads
    mask = masks.causal(24 * cp_size)
    plan, _ = scheme("usp", mask, cp_size, heads, head_degree=degree)
    rho = max(kv_heads, degree) / num_heads
    exchange = (degree - 1) / degree
    ring = cp_size // degree - 1
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(2 * (1 + rho) * exchange + 2 * rho * ring)
    assert stats["volume_max"] == pytest.approx(stats["volume_mean"])
    assert stats["imbalance"] == pytest.approx(1.0)
    # backward: q, k, v, dout there and dq, dk, dv back; keys and their gradients round the ring
    backward = (3 + 4 * rho) * exchange + 4 * rho * ring
    assert plan.stats("backward")["volume_mean"] == pytest.approx(backward)


def test_usp_of_the_whole_machine_of_64_moves_what_the_notes_say():
    plan, _ = scheme("usp", masks.causal(64 * 16), 64, (64, 8))
    assert plan.forward.head_split.degree == 8
    assert plan.stats("forward")["volume_mean"] == pytest.approx(3.72, abs=0.005)
    plan, _ = scheme("usp", masks.causal(64 * 16), 64, (32, 32))
    assert plan.stats("forward")["volume_mean"] == pytest.approx(17.5)


@pytest.mark.parametrize(
    ("cp_size", "heads", "node_size", "degree"),
    [
        (8, (24, 24), 8, 8),
        (8, (6, 2), 8, 2),  # 4 and 8 do not divide six heads
        (6, (24, 24), 4, 2),  # three would straddle nodes of four, six as well
        (6, (24, 24), 8, 6),  # one node
        (16, (24, 24), 8, 8),
        (5, (4, 4), 8, 1),
    ],
)
def test_usp_takes_the_largest_degree_that_divides_and_stays_in_a_node(
    cp_size, heads, node_size, degree
):
    options = {"topology": nodes_of(node_size)}
    plan, _ = scheme("usp", masks.causal(60), cp_size, heads, **options)
    split = plan.forward.head_split
    assert (split.degree if split else 1) == degree
    for group in split.groups if split else ():
        assert len({rank // node_size for rank in group}) == 1


def test_usp_refuses_a_degree_that_does_not_divide_and_names_the_nearest():
    with pytest.raises(ValueError, match=r"head_degree=3 must divide cp_size=8.*use 2 \(the near"):
        scheme("usp", masks.causal(64), 8, head_degree=3)
    with pytest.raises(ValueError, match=r"legal degrees are \[1, 2\]: use 2"):
        scheme("usp", masks.causal(64), 8, (6, 2), head_degree=8)
    with pytest.raises(ValueError, match="head_degree=0 must be a positive integer"):
        config("usp", head_degree=0)


# ------------------------------------------------------------------ distflashattn


def helper_blocks(cp_size):
    """Returns (step, rank that computes, queries of, keys of) of every causal block, as published.

    Step t: rank p >= t takes the keys of p - t; a rank p < t helps rank P + p - t, unless 2 t = P.
    """
    blocks = [(0, p, p, p) for p in range(cp_size)]
    for t in range(1, cp_size // 2 + 1):
        for p in range(cp_size):
            if p >= t:
                blocks.append((t, p, p, p - t))
            elif 2 * t < cp_size:
                blocks.append((t, p, cp_size + p - t, p))
    return blocks


@pytest.mark.parametrize("cp_size", [2, 3, 4, 5, 8])
def test_helpers_compute_the_blocks_of_the_published_schedule(cp_size):
    rows = 16
    plan, _ = scheme("distflashattn", masks.causal(rows * cp_size), cp_size)
    assert len(plan.forward.stages) == cp_size // 2 + 1
    blocks = helper_blocks(cp_size)
    assert len({(q, k) for _, _, q, k in blocks}) == cp_size * (cp_size + 1) // 2
    for step, stage in enumerate(plan.forward.stages):
        expected = np.zeros(cp_size, dtype=int)
        for t, rank, queries, keys in blocks:
            if t == step:
                expected[rank] += rows * rows if queries != keys else rows * (rows + 1) // 2
        assert [work.area() for work in stage.work] == expected.tolist()


@pytest.mark.parametrize("heads", HEAD_COUNTS)
@pytest.mark.parametrize("cp_size", [2, 4, 8, 64])
def test_helpers_move_three_eighths_of_the_keys_and_an_eighth_of_the_queries(cp_size, heads):
    plan, rho = scheme("distflashattn", masks.causal(16 * cp_size), cp_size, heads)
    keys, queries = 3 * cp_size / 8 - 1 / 4, cp_size / 8 - 1 / 4
    lse = 1 / 64  # of head width 64, fp32 counted as one element
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(2 * rho * keys + (2 + lse) * queries)
    back = plan.stats("backward")["volume_mean"]
    assert back == pytest.approx(4 * rho * keys + (3 + 2 * lse) * queries)
    exact = (16 * (cp_size / 2 - 1) + 16 + 17 / 2) / ((16 * cp_size + 1) / 2)
    assert stats["imbalance"] == pytest.approx(exact)
    assert stats["imbalance"] == pytest.approx((cp_size + 1) / cp_size, rel=0.04)


def test_helpers_at_rho_1_move_p_minus_1_on_average_and_half_as_much_again_at_most():
    for cp_size, worst in ((8, 11), (64, 95)):
        plan, _ = scheme("distflashattn", masks.causal(16 * cp_size), cp_size, head_dim=4096)
        stats = plan.stats("forward")
        assert stats["volume_mean"] == pytest.approx(cp_size - 1, rel=1e-3)
        assert stats["volume_max"] == pytest.approx(worst, rel=1e-3)


@pytest.mark.parametrize("cp_size", [3, 5, 7])
def test_an_odd_number_of_ranks_leaves_nobody_idle(cp_size):
    plan, _ = scheme("distflashattn", masks.causal(16 * cp_size), cp_size)
    assert plan.stats("forward")["imbalance"] == pytest.approx(1.0)


# ------------------------------------------------------------------ nodes


@pytest.mark.parametrize("planner", ["dcp", "document_groups", "double_ring", "ultraattn", "usp"])
@given(
    case=any_square_mask(),
    ranks=st.sampled_from([(4, 2), (6, 2), (6, 4), (8, 4), (8, 2), (9, 3)]),
    heads=st.sampled_from([(24, 24), (24, 4)]),
)
@settings(max_examples=25)
def test_schemes_that_know_nodes_compute_every_pair_once(planner, case, ranks, heads):
    mask, allowed = case
    plan, _ = scheme(planner, mask, ranks[0], heads, topology=nodes_of(ranks[1]))
    check_laws(plan, allowed)


def arrivals(plan, pass_name):
    """Returns (side, token id, source, destination) of every row that moves, replayed from plain numbers."""
    moved = []
    for side in ("k", "q"):
        own, held = plan.global_from_local.tolist(), None
        for stage in plan.get_pass(pass_name).stages:
            held = held if getattr(stage, f"keeps_{side}") else own
            cast = getattr(stage, f"{side}_cast")
            for hop in cast.hops if cast else ():
                for src, dst, start, stop in hop.messages.tolist():
                    moved += [(side, token, src, dst) for token in held[src][start:stop]]
                held = held_ids(held, Transfer((hop,)))
    return moved


@pytest.mark.parametrize("planner", ["dcp", "double_ring", "ultraattn"])
@pytest.mark.parametrize("cp_size", [6, 8])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_a_row_enters_a_node_once_and_reaches_a_rank_once(planner, cp_size, heads):
    node = cp_size // 2
    for mask in (masks.causal(150), packed("log-normal", 190, 7), masks.star(160), masks.full(96)):
        plan, _ = scheme(planner, mask, cp_size, heads, topology=nodes_of(node))
        for name in ("forward", "backward"):
            moved = arrivals(plan, name)
            reached = [(side, token, dst) for side, token, _, dst in moved]
            assert len(set(reached)) == len(reached)
            entered = [
                (side, token, dst // node)
                for side, token, src, dst in moved
                if src // node != dst // node
            ]
            assert len(set(entered)) == len(entered)
            home = {t: r // node for r, ids in enumerate(plan.global_from_local) for t in ids}
            assert all(home[token] != where for _, token, where in entered)
