"""Published schemes that deal documents, chunks or blocks, against figures of their papers and code."""

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_cp import mask as masks
from megatron_cp.mask.linked import document_bounds
from megatron_cp.plan import make_plans
from megatron_cp.plan.placement.placement import per_document_zigzag
from tests.oracles.plans import needed_remote_ids, received_ids
from tests.plan.cases import HEAD_COUNTS, config, nodes_of, packed, scheme
from tests.strategies import document_lengths

# ------------------------------------------------------------------ documents


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_per_document_zigzag_moves_all_keys_and_balances_any_documents(cp_size, heads):
    lengths = [16 * cp_size, 2 * cp_size, 6 * cp_size, 40 * cp_size]
    plan, rho = scheme("per_document_zigzag", masks.documents(lengths), cp_size, heads)
    assert np.array_equal(plan.global_from_local, per_document_zigzag(lengths, cp_size))
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(2 * rho * (cp_size - 1))
    assert stats["volume_max"] == pytest.approx(2 * rho * (cp_size - 1))
    assert stats["imbalance"] == pytest.approx(1.0)


@given(lengths=document_lengths(max_documents=6, max_length=60, min_total=1))
@settings(max_examples=40)
def test_per_document_zigzag_cuts_documents_of_any_length_into_mirrored_pieces(lengths):
    cp_size, mask = 4, masks.documents(lengths, within="full")
    plan, _ = scheme("per_document_zigzag", mask, cp_size)
    owner = np.empty(plan.global_from_local.size, dtype=int)
    owner[plan.global_from_local] = np.arange(cp_size)[:, None]
    start = 0
    for length in lengths:
        mine = owner[start : start + length]
        turns = np.flatnonzero(np.diff(mine, prepend=-1))  # where another rank's piece begins
        assert len(turns) <= 2 * cp_size
        counts = np.bincount(mine, minlength=cp_size)
        assert np.ptp(counts) <= 2
        start += length


def test_documents_of_a_mask_are_its_runs_that_no_pair_leaves():
    mask = masks.documents([5, 0, 3, 7], within=["causal", "full", "full", ("window", 2)])
    assert document_bounds(mask).tolist() == [0, 5, 8, 15]
    apart = masks.from_slices(12, 12, [(1, 3, 5, 6), (4, 5, 4, 5), (8, 9, 8, 9)])
    assert document_bounds(apart).tolist() == [0, 1, 6, 8, 9, 12]
    assert document_bounds(masks.from_slices(4, 4, [])).tolist() == [0, 4]
    assert document_bounds(masks.causal(9)).tolist() == [0, 9]


def test_groups_keep_short_documents_local_and_send_long_ones_round_their_node_or_all_ranks():
    """8 ranks in nodes of 4, 64 rows each: one document of half the tokens, one of a node, short ones."""
    lengths = [256, 128] + [16] * 8
    mask = masks.documents(lengths)
    plan, rho = scheme("document_groups", mask, 8, (8, 4), topology=nodes_of(4))
    owner = np.empty(512, dtype=int)
    owner[plan.global_from_local] = np.arange(8)[:, None]
    ends = np.cumsum(lengths)
    groups = [set(owner[stop - length : stop]) for length, stop in zip(lengths, ends, strict=True)]
    assert groups[0] == set(range(8))
    assert groups[1] in ({0, 1, 2, 3}, {4, 5, 6, 7})
    local = [length for length, group in zip(lengths, groups, strict=True) if len(group) == 1]
    assert len(local) >= 6  # of eight: the node with the second document has no room for all
    moved = sum(length * (len(group) - 1) for length, group in zip(lengths, groups, strict=True))
    expected = 2 * rho * moved / (8 * 64)
    assert plan.stats("forward")["volume_mean"] == pytest.approx(expected)
    assert plan.stats("backward")["volume_mean"] == pytest.approx(2 * expected)


@pytest.mark.parametrize("kind", ["log-normal", "uniform", "one long", "equal"])
@pytest.mark.parametrize("cp_size", [4, 6, 8])
def test_every_row_of_a_document_reaches_just_the_other_members_of_its_group(kind, cp_size):
    mask = packed(kind, 1024, 12, seed=3)
    plan, _ = scheme("document_groups", mask, cp_size, topology=nodes_of(2))
    document = np.repeat(np.arange(12), np.diff(document_bounds(mask)))
    owned = [document[ids[ids < 1024]] for ids in plan.global_from_local]
    for rank, received in enumerate(received_ids(plan, "forward")):
        assert len(set(received)) == len(received)
        own = set(plan.global_from_local[rank].tolist())
        expected = set(np.flatnonzero(np.isin(document, owned[rank]))) - own
        assert set(received) == expected


# ------------------------------------------------------------------ magi


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (masks.causal(16), [[0, 3, 4, 7], [1, 2, 5, 6]]),
        (masks.from_slices(16, 16, [(0, 16, 0, 16, 0, None)]), [[0, 3, 4, 7], [1, 2, 5, 6]]),
        (masks.full(16), [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_magi_deals_chunks_as_published(mask, expected):
    """The published figures for eight chunks on two ranks (theirs names the ranks of a full mask 1, 0)."""
    plan, _ = scheme("magi", mask, 2, chunk_size=2)
    chunks = plan.global_from_local.reshape(2, 4, 2)[:, :, 0] // 2
    assert sorted(chunks.tolist()) == expected


@pytest.mark.parametrize(
    ("mask", "rows", "imbalance"),
    [
        (masks.causal(1 << 17), 115_200, 1.000),
        (masks.sliding_window(1 << 17, 1023), 8_120, 1.004),
        (masks.sliding_window(1 << 17, 4095), 32_120, 1.016),
    ],
    ids=["causal", "window 1024", "window 4096"],
)
def test_magi_moves_what_its_own_code_moves_on_128k_tokens_and_16_ranks(mask, rows, imbalance):
    plan, _ = scheme("magi", mask, 16, chunk_size=1024)
    stats = plan.stats("forward")
    assert stats["imbalance"] == pytest.approx(imbalance, abs=6e-4)
    volume = 2 * rows / (1 << 13)  # a key and a value row each, of 8K tokens per rank
    assert stats["volume_mean"] == pytest.approx(volume, rel=0.01)


def test_magi_overlaps_two_stages_of_remote_keys_and_moves_no_row_twice():
    mask = packed("log-normal", 4096, 20)
    plan, _ = scheme("magi", mask, 4)
    assert plan.global_from_local.shape == (4, 8 * 128)
    assert len(plan.forward.stages) == 3
    needed = needed_remote_ids(plan, mask.to_dense())
    for ids, expected in zip(received_ids(plan, "forward"), needed, strict=True):
        assert sorted(ids) == sorted(expected)
    areas = mask.to_dense().sum(axis=1)[plan.global_from_local].sum(axis=1)
    assert plan.stats("forward")["imbalance"] == pytest.approx(areas.max() / areas.mean())
    assert areas.max() <= 1.05 * areas.mean()


# ------------------------------------------------------------------ ultraattn


def best_grid(cp_size, rho):
    """Returns X and Y with the least 2 (X-1) + 2 rho (Y-1), by trying all."""
    grids = [(x, cp_size // x) for x in range(1, cp_size + 1) if cp_size % x == 0]
    return min(grids, key=lambda xy: 2 * (xy[0] - 1) + 2 * rho * (xy[1] - 1))


@pytest.mark.parametrize("cp_size", [2, 4, 8, 64])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
def test_ultraattn_tiles_a_full_mask_by_the_best_grid(cp_size, heads):
    plan, rho = scheme("ultraattn", masks.full(16 * cp_size), cp_size, heads)
    x, y = best_grid(cp_size, rho)
    lse = (x - 1) / 64  # beside each row of results: one scalar per head of width 64
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(2 * (x - 1) + 2 * rho * (y - 1) + lse)
    assert stats["volume_max"] == pytest.approx(stats["volume_mean"])
    assert stats["imbalance"] == pytest.approx(1.0)
    # backward: q and dout there (and two scalars), dq back; keys there and back
    costs = {g: 3 * (g - 1) + 4 * rho * (cp_size // g - 1) for g in (1, 2, 4, 8) if g <= cp_size}
    backward = plan.stats("backward")["volume_mean"]
    assert backward == pytest.approx(min(costs.values()), rel=0.02)


def test_the_tiles_of_nodes_cross_the_network_as_the_grid_of_nodes_says():
    """64 ranks in 8 nodes, rho 1: 2 x 4 nodes of 2 x 4 or 4 x 2 ranks: 8 between nodes, 20 inside."""
    plan, _ = scheme("ultraattn", masks.full(16 * 64), 64, (8, 8))
    received = {}
    for side, transfer in plan.forward.transfers():
        for hop in transfer.hops:
            for src, dst, start, stop in hop.messages.tolist():
                level = int(src // 8 != dst // 8)
                received[side, level] = received.get((side, level), 0) + stop - start
    rows = {place: count / (16 * 64) for place, count in received.items()}
    # rows in a rank: X_n - 1 query blocks over the network, results the same way; Y_n - 1 key blocks
    assert 2 * rows["q", 1] + 2 * rows["k", 1] == pytest.approx(8)
    assert 2 * rows["q", 0] + 2 * rows["k", 0] == pytest.approx(20)


@pytest.mark.parametrize(
    ("name", "mask", "cp_size", "volume", "link"),
    [
        ("causal", masks.causal(64 * 64), 8, 7, 8.2),
        ("causal", masks.causal(64 * 64), 64, 31, 38),
        ("strided", masks.strided(64 * 64, remapped=True), 8, 2.1, 2.1),
        ("strided", masks.strided(64 * 64, remapped=True), 64, 16.5, 18),
        ("global+local", masks.global_local(64 * 64), 8, 4, 14),
        ("global+local", masks.global_local(64 * 64), 64, 19, 57.5),
        ("star", masks.star(64 * 64), 64, 26, 42),
        ("streaming", masks.streaming(64 * 64), 64, 27, 40.5),
    ],
)
def test_ultraattn_stays_below_star_broadcast_and_near_partitions_of_the_whole_table(
    name, mask, cp_size, volume, link
):
    """Links: owner of queries, or the best hypergraph partition under star broadcast (notes); loads by blocks."""
    plan, _ = scheme("ultraattn", mask, cp_size, (8, 8), head_dim=4096)
    stats = plan.stats("forward")
    assert stats["volume_mean"] <= volume
    assert stats["link_max"] <= link
    assert stats["imbalance"] <= 1.15


# ------------------------------------------------------------------ dcp


@pytest.mark.parametrize(
    ("mask", "cp_size", "volume"),
    [
        (masks.causal(64 * 64), 8, 7.2),
        (masks.causal(64 * 64), 64, 26),
        (masks.full(64 * 64), 8, 8),
        (masks.strided(64 * 64, remapped=True), 64, 13.6),
        (masks.global_local(64 * 64), 64, 15),
        (masks.star(64 * 64), 64, 19.6),
        (masks.streaming(64 * 64), 64, 20.5),
    ],
    ids=["causal 8", "causal 64", "full 8", "strided", "global+local", "star", "streaming"],
)
def test_dcp_moves_about_what_a_hypergraph_partitioner_moves(mask, cp_size, volume):
    """Means of one at loads up to 1.05 to 1.10: causal 6.4 and 25.3, global+local 11.4; the others as here."""
    plan, _ = scheme("dcp", mask, cp_size, (8, 8), head_dim=4096)
    stats = plan.stats("forward")
    assert stats["volume_mean"] <= volume * 1.001
    assert stats["imbalance"] <= 1.4 * 1.1 + 0.01
    assert len(plan.forward.stages) == 5


def test_dcp_moves_tokens_to_where_they_are_used():
    """Two documents, each in every other chunk: in order everything would travel."""
    edges = np.arange(0, 512, 32)
    blocks = [(q, q + 32, k, k + 32, None, None) for q in edges for k in edges if (q - k) % 64 == 0]
    mask = masks.from_slices(512, 512, blocks)
    plan, _ = scheme("dcp", mask, 2, chunk_size=32)
    assert plan.stats("forward")["volume_mean"] == 0
    assert plan.stats("forward")["imbalance"] == 1.0
    chunks = plan.global_from_local.reshape(2, 8, 32)[:, :, 0] // 32
    assert {tuple(row % 2) for row in chunks} == {(0,) * 8, (1,) * 8}


def test_dcp_moves_nothing_for_documents_that_fit_a_rank():
    plan, _ = scheme("dcp", masks.documents([64] * 16), 8)
    assert plan.stats("forward")["volume_max"] == 0


@pytest.mark.parametrize(
    ("planner", "mask", "cp_size", "message"),
    [
        ("stripe", masks.documents([512] * 128), 512, "33554432 slices .* at most 8388608"),
        ("per_document_zigzag", masks.documents([2048] * 64), 512, "33554432 slices"),
        ("ultraattn", masks.full(4096), 4096, "16777216 slices"),
        ("dcp", masks.causal(1 << 16), 1024, "ways to deal this mask .* at most 16777216"),
    ],
)
def test_schemes_name_the_sizes_that_they_do_not_serve(planner, mask, cp_size, message):
    with pytest.raises(NotImplementedError, match=f"planner='{planner}' would .*{message}"):
        scheme(planner, mask, cp_size)


def test_a_family_that_a_scheme_would_place_twice_is_refused():
    full = masks.documents([300, 40, 500, 184])
    family = {"full": (full, 1), "window": (full & masks.sliding_window(1024, 64), 3)}
    with pytest.raises(NotImplementedError, match=r"'magi' places tokens by the mask.*'window'"):
        make_plans(family, 4, config("magi"))
    plans = make_plans(family, 4, config("zigzag"))
    assert np.array_equal(plans["full"].global_from_local, plans["window"].global_from_local)
