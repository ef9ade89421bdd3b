"""Schemes that place document by document: every document zigzag over a group of ranks, keys go round the group.

per_document_zigzag   all ranks are the group of every document
document_groups       one rank, one node or all ranks, by the document's share of tokens and pairs
"""

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.linked import document_bounds
from megatron_cp.mask.slice import Q_START
from megatron_cp.plan.placement.by_documents import (
    DocumentGroups,
    Pieces,
    mirrored,
)
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import Pass, PlanData
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.schemes.layout import check_pieces, ranks_per_node
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.passes import ring_pass

MOST_LOAD = 1.25  # of the fair share of a group


def plan_per_document_zigzag(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns every document zigzag over all ranks, and the ring over all keys.

    Volume per rank: 2 rho (P-1), whatever the lengths; balanced, in pieces of length / 2P. The published
    layouts pad documents to multiples of 2P; ours equals them where nothing is to pad, and never pads.
    Sources: TransformerEngine (THD), WLB-LLM (OSDI'25).
    """
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    bounds = np.r_[document_bounds(mask), cp_size * rows]  # the last one is padding
    lengths = np.diff(bounds)
    pieces = np.minimum(
        lengths[:-1], 2 * cp_size
    )  # of each document; about half of all pairs are seen
    check_pieces("per_document_zigzag", int((pieces**2).sum()) // 2, cp_size)
    before = np.cumsum(lengths % (2 * cp_size)) - lengths % (2 * cp_size)
    extra = lengths % (2 * cp_size)  # tokens over; ranks take turns, on through all documents
    turn = (np.arange(cp_size) - before[:, None]) % cp_size
    taken = (extra[:, None] - turn + cp_size - 1) // cp_size
    shares = 2 * (lengths // (2 * cp_size))[:, None] + taken
    placed = PlacedMask(mask, mirrored(shares, bounds[:-1]).placement)
    return one_pass_plan(placed, config, "per_document_zigzag", ring_pass(placed))


def plan_document_groups(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns documents on one rank, one node or all ranks, as little spread as their size allows.

    A document goes where its tokens fit and its pairs are no more than the ranks' fair share; the largest
    are placed first, each on the least loaded rank or node with room, and cut further where none has.
    Volume: 2 rho (d-1) rows for each row of a document over d ranks. Equal tokens per rank, always, so the
    balance is as good as the lengths allow.
    Sources: Zeppelin (EuroSys'26), FlexSP (ASPLOS'25), ByteScale (arXiv 2502.21231).
    """
    bounds = document_bounds(mask)
    pieces, shares = local_intra_inter(mask, cp_size, config)
    placed = PlacedMask(mask, pieces.placement)
    both = group_rings_pass(placed, pieces, bounds, shares)
    return one_pass_plan(placed, config, "document_groups", both)


def local_intra_inter(
    mask: AttentionMask, cp_size: int, config: CPConfig
) -> tuple[Pieces, IntArray]:
    """Returns documents on one rank, one node or all ranks, and how many tokens each rank has of each: `[D, P]`."""
    bounds = document_bounds(mask)
    areas = mask.area_of_rows(bounds).astype(np.float64)[:, None]
    sizes = sorted({1, ranks_per_node(cp_size, config), cp_size})
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    groups = DocumentGroups(sizes, rows, areas.sum(axis=0), MOST_LOAD)
    shares = groups.place(np.diff(bounds), areas)
    return mirrored(np.concatenate([shares, groups.room[None]]), bounds), shares


def group_rings_pass(
    placed: PlacedMask, pieces: Pieces, bounds: IntArray, shares: IntArray
) -> Pass:
    """Returns own keys first; in step s the keys of the member s places before, in groups of more than s."""
    is_member = shares > 0
    degree = is_member.sum(axis=1)
    place = np.cumsum(is_member, axis=1) - 1  # of a rank in the group of a document
    members = np.argsort(~is_member, axis=1, kind="stable")  # those first, in order
    of_part = np.searchsorted(bounds, placed.parts[:, Q_START], side="right") - 1
    distance = place[of_part, placed.q_owner] - place[of_part, placed.k_owner]
    distance %= np.maximum(1, degree[of_part])
    builder = PassBuilder(placed)
    builder.add_own()
    real = pieces.document < len(degree)
    document, rank, ids = pieces.document[real], pieces.rank[real], pieces.ids[real]
    for step in range(1, int(degree.max(initial=1))):
        sent = degree[document] > step
        where = document[sent]
        reader = members[where, (place[where, rank[sent]] + step) % degree[where]]
        now = distance == step
        requests = np.column_stack([rank[sent], reader, ids[sent]])
        builder.add(placed.parts[now], placed.q_owner[now], all_keys=requests)
    return builder.build()
