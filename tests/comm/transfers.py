"""Random transfers, drawn alike on every rank, and their simulation in one process."""

import numpy as np

from megatron_cp.plan import Hop, Transfer


def random_transfer(num_ranks, own_rows, num_hops, seed, density=0.5, silent_hops=()):
    """Returns a transfer whose later hops forward own and received rows; some ranks may move nothing."""
    rng = np.random.default_rng(seed)
    held = np.full(num_ranks, own_rows)
    hops = []
    for index in range(num_hops):
        messages = []
        for src in range(num_ranks):
            for dst in range(num_ranks):
                if index in silent_hops or src == dst or rng.random() > density:
                    continue
                cuts = np.unique(rng.integers(0, held[src] + 1, size=4))
                pieces = list(zip(cuts[:-1:2], cuts[1::2], strict=False))
                rng.shuffle(pieces)  # messages of a pair keep their order, whatever it is
                messages += [(src, dst, int(a), int(b)) for a, b in pieces]
        hop = Hop(np.array(messages, dtype=np.int64).reshape(-1, 4))
        for _, dst, start, stop in hop.messages.tolist():
            held[dst] += stop - start
        hops.append(hop)
    return Transfer(tuple(hops))


def matrix_of(transfer, num_ranks, own_rows):
    """Returns, per rank, the 0/1 matrix `[received, P * own_rows]` from all own rows to the rows it receives.

    Dense algebra instead of messages: a cast is a product with these, a reduce with their transposes.
    """
    size = num_ranks * own_rows
    space = [np.eye(size)[rank * own_rows : (rank + 1) * own_rows] for rank in range(num_ranks)]
    for hop in transfer.hops:
        arrived = [[] for _ in range(num_ranks)]
        for src in range(num_ranks):
            for source, dst, start, stop in hop.messages.tolist():
                if source == src:
                    arrived[dst].append(space[src][start:stop])
        space = [np.concatenate([rows, *new]) for rows, new in zip(space, arrived, strict=True)]
    return [rows[own_rows:] for rows in space]
