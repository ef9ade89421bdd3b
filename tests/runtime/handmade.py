"""Random valid plans: what no planner of ours makes yet, but the schema allows and the runtime must do.

Tokens are placed at random; every pair of the mask is computed by a random rank in a random stage; query
and key rows reach it directly or through a relay (two hops), or are still there from the stage before; heads may
be split over groups.
"""

import dataclasses

import numpy as np

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import AttentionPlan, HeadSplit, Hop, Pass, Stage, Transfer
from megatron_cp.plan.placement.placement import tokens_per_rank


def random_plan(mask, cp_size, seed, config=None, num_stages=3, head_degree=1):
    """Returns a plan whose every decision is drawn from `seed`."""
    config = config or CPConfig()
    rng = np.random.default_rng(seed)
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    placement = rng.permutation(cp_size * rows).reshape(cp_size, rows)
    passes = [
        _random_pass(mask, placement, rng, num_stages, head_degree) for _ in ("forward", "backward")
    ]
    return AttentionPlan(mask, config, "random", placement, *passes)


def _random_pass(mask, placement, rng, num_stages, head_degree):
    cp_size = len(placement)
    split = None
    if head_degree > 1:
        ranks = np.sort(rng.permutation(cp_size).reshape(-1, head_degree), axis=1)
        split = HeadSplit(tuple(tuple(int(r) for r in group) for group in ranks))
    own_ids = Pass((), split).own_ids(placement)
    lanes = [list(range(cp_size))]
    if split is not None:
        lanes = [[group[j] for group in split.groups] for j in range(head_degree)]
    dense = np.zeros((placement.size, placement.size), dtype=bool)
    dense[: mask.num_queries, : mask.num_keys] = mask.to_dense()
    # which rank and stage computes a pair, for each lane; in runs, so that slices stay few
    where = {}
    for lane in lanes:
        block = 4
        shape = (-(-placement.size // block), -(-placement.size // block))
        rank = np.kron(rng.choice(lane, shape), np.ones((block, block), dtype=int))
        stage = np.kron(rng.integers(0, num_stages, shape), np.ones((block, block), dtype=int))
        size = placement.size
        where[tuple(lane)] = (rank[:size, :size], stage[:size, :size])
    stages, held = [], (None, None)
    for index in range(num_stages):
        keeps = tuple(bool(index and rng.random() < 0.5) for _ in held)
        before = [rows if keep else list(own_ids) for rows, keep in zip(held, keeps, strict=True)]
        stage, held = _random_stage(dense, own_ids, where, index, rng, before)
        stages.append(dataclasses.replace(stage, keeps_q=keeps[0], keeps_k=keeps[1]))
    return Pass(tuple(stages), split)


def _random_stage(dense, own_ids, where, index, rng, before):
    needs = {}
    for lane, (rank_of, stage_of) in where.items():
        for rank in lane:
            needs[rank] = (lane, dense & (rank_of == rank) & (stage_of == index))
    casts, held = [], []
    for axis in (1, 0):  # pairs.any(1) are query rows, pairs.any(0) key rows
        kept = before[1 - axis]
        wanted = {
            rank: np.setdiff1d(np.flatnonzero(pairs.any(axis)), kept[rank])
            for rank, (_, pairs) in needs.items()
        }
        cast = _random_transfer(own_ids, {r: needs[r][0] for r in needs}, wanted, rng, kept)
        casts.append(cast)
        held.append(cast.held_ids(kept) if cast else kept)
    work = []
    for rank in range(len(own_ids)):
        pairs = needs[rank][1]
        q_ids, k_ids = held[0][rank], held[1][rank]
        local = pairs[np.ix_(q_ids, k_ids)]
        local[_repeated(q_ids)] = False
        local[:, _repeated(k_ids)] = False
        work.append(masks.from_dense(local))
    return Stage(work=tuple(work), q_cast=casts[0], k_cast=casts[1]), tuple(held)


def _random_transfer(own_ids, lane_of, wanted, rng, kept):
    """Returns a transfer that brings each rank the ids it wants, half of them through a relay.

    Some come from a rank that received them in an earlier stage and keeps them.
    """
    home = {}
    for rank, ids in enumerate(own_ids):
        for row, token in enumerate(ids.tolist()):
            home[(lane_of[rank], token)] = (rank, row)
    first, relayed = [], []
    for rank, ids in wanted.items():
        for token in ids.tolist():
            owner, row = home[(lane_of[rank], token)]
            if owner == rank:
                continue
            second_hand = [
                (other, int(np.flatnonzero(kept[other] == token)[-1]))
                for other in lane_of[rank]
                if other != rank and token in kept[other]
            ]
            owner, row = second_hand[rng.integers(len(second_hand))]
            relay = int(rng.choice(lane_of[rank]))
            if rng.random() < 0.5 or relay in (owner, rank):
                first.append((owner, rank, row, row + 1))
            else:
                first.append((owner, relay, row, row + 1))
                relayed.append((relay, rank, token))
    if not first:
        return None
    hop = Hop(np.array(sorted(set(first))))  # a row reaches a rank once per hop
    held = Transfer((hop,)).held_ids(kept)
    second = []
    for relay, rank, token in relayed:
        row = int(np.flatnonzero(held[relay] == token)[-1])
        second.append((relay, rank, row, row + 1))
    return Transfer((hop, Hop(np.array(second)))) if second else Transfer((hop,))


def _repeated(ids):
    seen = np.zeros(len(ids), dtype=bool)
    _, first = np.unique(ids, return_index=True)
    seen[:] = True
    seen[first] = False
    return seen
