"""Striped attention: token i lies on rank i mod P, and keys go round the ring.

Every rank sees a causal triangle in every ring step, so work is even to within a diagonal:

    rank 0 owns 0 2 4 6     its queries against the keys of rank 1     k ->  1 3 5 7
    rank 1 owns 1 3 5 7     (q - 1 >= k: strictly below the diagonal)   0    . . . .
                                                                        2    # . . .
                                                                        4    # # . .

A slice seen by every P-th query and every P-th key is a slice again (its band divides by P and rounds
inwards), so token stripes cost P^2 slices per slice of the mask, not S^2. Stripes of blocks, for
`chunk_size` above 1, have no such form and are cut block by block.

Volume per rank: 2 rho (P-1), masked out or not; imbalance 1 + O(P/S) on one causal document.
Sources: Striped Attention (arXiv 2311.09431); stripes of blocks: MTraining.
"""

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.slice import shift_rows, tighten
from megatron_cp.plan.placement.classes import stripe_rows
from megatron_cp.plan.placement.placement import Placement, tokens_per_rank
from megatron_cp.plan.schema import Hop, Pass, PlanData, Stage, Transfer
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.schemes.layout import check_pieces
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import ring_pass


def plan_stripe(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns the ring over stripes of `config.chunk_size` tokens, one token if it is left out."""
    chunk = config.chunk_size or 1
    check_pieces("stripe", mask.num_slices * cp_size**2, cp_size)
    rows = tokens_per_rank(mask.num_queries, cp_size, config, pieces=chunk)
    stripes = np.arange(cp_size * (rows // chunk), dtype=np.int64).reshape(-1, cp_size).T
    placed = PlacedMask(mask, Placement.of_chunks(stripes, chunk))
    both = token_stripes_pass(mask, cp_size, rows) if chunk == 1 else ring_pass(placed)
    return one_pass_plan(placed, config, "stripe", both)


def token_stripes_pass(mask: AttentionMask, cp_size: int, own_rows: int) -> Pass:
    """Returns the ring of P stages for token i on rank i mod P; O(P^2 x slices of the mask)."""
    stages = []
    for step in range(cp_size):
        ranks = np.arange(cp_size)
        sources = (ranks - step) % cp_size
        messages = np.stack([sources, ranks, 0 * ranks, 0 * ranks + own_rows], axis=1)
        num_keys = own_rows if step == 0 else 2 * own_rows  # own | received
        work = []
        for rank, source in zip(ranks.tolist(), sources.tolist(), strict=True):
            rows = tighten(stripe_rows(mask.array, cp_size, rank, source))
            rows = shift_rows(rows, k=num_keys - own_rows)
            one = AttentionMask(own_rows, num_keys, rows)
            work.append(one.merged() if one.num_slices > 1 else one)
        cast = Transfer((Hop(messages),)) if step else None
        stages.append(Stage(tuple(work), k_cast=cast))
    return Pass(tuple(stages))
