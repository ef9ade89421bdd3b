"""DISTFLASHATTN (LightSeq): ranks with few keys before them help those with many.

Tokens lie in order. Block (a, b), the queries of rank a against the keys of rank b, is d = (a - b) mod P
places apart. In step t, counted to P // 2, a rank computes

    its own queries against the keys of the rank t places before       blocks with d = t <= P / 2
    the queries of the rank t places before against its own keys,      blocks with d = P - t > P / 2
    and sends (out, lse) back                                          (it helps)

    causal, P = 5      keys of    0  1  2  3  4        t   by rank: 0    1    2    3    4
    queries of 0                  o                     0        00   11   22   33   44
               1                  1  o                  1       h40   10   21   32   43
               2                  2  1  o               2       h30  h41   20   31   42
               3                 h2  2  1  o
               4                 h1 h2  2  1  o

Under a causal mask the second kind falls just to ranks that have no keys t places before, so all P ranks
work in all steps; for even P half of them rest in the last. Other masks are computed by the same rule:
served, balanced as far as their blocks are. Only rows that a block needs travel (under a causal mask: all).
Odd P is served too, unlike by the published code.

Forward volume, causal, even P: 2 rho (3P/8 - 1/4) + 2 (P/8 - 1/4) on average, plus lse; imbalance
(P+1)/P in steps of whole blocks. Source: arXiv 2310.03294.
"""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.placement import contiguous
from megatron_cp.plan.schema import Pass, PlanData
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask


def plan_distflashattn(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns tokens in order and P // 2 + 1 steps with helpers."""
    placed = PlacedMask(mask, contiguous(mask.num_queries, cp_size, config))
    return one_pass_plan(placed, config, "distflashattn", helpers_pass(placed))


def helpers_pass(placed: PlacedMask) -> Pass:
    """Returns own keys first, then P // 2 steps in which keys, or queries of far ranks, come one place further."""
    builder = PassBuilder(placed)
    builder.add_own()
    distance = (placed.q_owner - placed.k_owner) % placed.num_ranks
    for step in range(1, placed.num_ranks // 2 + 1):
        local = distance == step
        helped = (distance == placed.num_ranks - step) & ~local  # P even: the middle is local
        ranks = placed.q_owner.copy()
        ranks[helped] = placed.k_owner[helped]
        now = local | helped
        builder.add(placed.parts[now], ranks[now])
    return builder.build()
