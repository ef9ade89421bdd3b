"""Replays a plan row by row and pair by pair, from the plain numbers it holds: the measure of planners.

Only arrays are read (`global_from_local`, `key_tokens`, `messages`, `array`); no code of the package takes part.
"""

import numpy as np


def tokens_of(plan, side):
    """Returns the ids of each rank's own queries or keys; they are other tokens in cross attention only."""
    return (
        plan.key_tokens if side == "k" and plan.key_tokens is not None else plan.global_from_local
    )


def own_ids(plan, pass_name, side="q"):
    """Returns the token ids of each rank's own rows at the start of the stages, a list per rank."""
    split = getattr(plan, pass_name).head_split
    rows = [ids.tolist() for ids in tokens_of(plan, side)]
    if split is None:
        return rows
    groups = {rank: group for group in split.groups for rank in group}
    return [[i for member in groups[rank] for i in rows[member]] for rank in range(len(rows))]


def held_ids(own, transfer):
    """Returns each rank's rows after a transfer, by the order that the schema promises."""
    held = [list(ids) for ids in own]
    for hop in transfer.hops if transfer else ():
        arrived = [[] for _ in held]
        for src in range(len(held)):  # a destination appends source by source
            for source, dst, start, stop in hop.messages.tolist():
                if source == src:
                    assert 0 <= start < stop <= len(held[src])
                    arrived[dst] += held[src][start:stop]
        held = [ids + new for ids, new in zip(held, arrived, strict=True)]
    return held


def times_computed(plan, pass_name):
    """Returns how often each (query id, key id) is computed: int64 `[head groups, ids, ids]`."""
    pass_ = getattr(plan, pass_name)
    own, own_keys = (own_ids(plan, pass_name, side) for side in "qk")
    sizes = [tokens_of(plan, side).size for side in "qk"]
    degree, position = 1, dict.fromkeys(range(len(own)), 0)
    if pass_.head_split is not None:
        degree = len(pass_.head_split.groups[0])
        position = {r: group.index(r) for group in pass_.head_split.groups for r in group}
    times = np.zeros((degree, *sizes), dtype=np.int64)
    queries = keys = None
    for stage in pass_.stages:
        queries = held_ids(queries if stage.keeps_q else own, stage.q_cast)
        keys = held_ids(keys if stage.keeps_k else own_keys, stage.k_cast)
        for rank, work in enumerate(stage.work):
            assert (work.num_queries, work.num_keys) == (len(queries[rank]), len(keys[rank]))
            for q_start, q_end, k_start, k_end, lo, hi in work.array.tolist():
                for q in range(q_start, q_end):
                    for k in range(max(k_start, q + lo), min(k_end, q + hi + 1)):
                        times[position[rank], queries[rank][q], keys[rank][k]] += 1
    return times


def received_ids(plan, pass_name):
    """Returns the key ids that each rank receives over all stages, in order of arrival, with repeats."""
    own = own_ids(plan, pass_name)
    received, held = [[] for _ in own], None
    for stage in getattr(plan, pass_name).stages:
        before = held if stage.keeps_k else own
        held = held_ids(before, stage.k_cast)
        for rank, ids in enumerate(held):
            received[rank] += ids[len(before[rank]) :]
    return received


def needed_remote_ids(plan, allowed):
    """Returns, by brute force, the keys that each rank's queries may see and it does not own, as sets."""
    needed = []
    for ids in plan.global_from_local.tolist():
        queries = [i for i in ids if i < len(allowed)]
        keys = np.flatnonzero(allowed[queries].any(axis=0)).tolist()
        needed.append(set(keys) - set(ids))
    return needed
