"""Before a step, all ranks know whether those that share batches hold the same ones.

Context, tensor and pipeline ranks of one replica load their batches each for themselves. A file that differs on one
node, where the digests compared at the start do not look, would give context ranks rows of two texts.

    tokens and plan digests of the step ──> 64 bits a rank ──> largest and smallest of each replica, by
                                                                one all-reduce of 16 bytes a replica over all ranks
    (16 bytes more say the same of all ranks, for batches that span replicas)

Equal where largest and smallest are. Only after a difference are all hashes gathered, to name micro-batch and ranks. A
rank that could not read its batches tells so in their place, and all ranks stop with its words.
Numbers that all ranks are to hear of, now and then, ride in the same all-reduce.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.comm.groups import agreement_group
from megatron_cp.data.batch import PlannedBatch
from megatron_cp.errors import PlanMismatchError
from megatron_cp.training.together import gather

# R replicas (data-parallel size), W ranks, K numbers of each; hashes are int64, read from 8 bytes.
_LEAST = torch.iinfo(torch.int64).min
Prints = list[tuple[str, str]]
"""SHA-256 of tokens and of plan digests, one pair a micro-batch."""


class BatchError(ValueError):
    """A rank could not read the batches of a step; raised on every rank alike."""


class BatchesDifferError(PlanMismatchError):
    """Ranks that share batches hold different ones; raised on every rank alike."""


def check_same_batches(
    batches: Sequence[PlannedBatch],
    where: str,
    told: Sequence[int] = (),
    failure: Exception | None = None,
) -> list[list[int]]:
    """Returns what each rank `told`, as many numbers on each, if ranks that share batches hold the same.

    Those of a replica share tokens and plans, or all ranks where batches span replicas. `failure`: why this rank has
    no batches.

    Collective over the whole job, on CPU tensors. Raises BatchError if a rank has none. Raises BatchesDifferError; it
    names `where` (the step), the first micro-batch that differs, what of it, and the ranks. Both on every rank alike.
    """
    own = [_prints(batch) for batch in batches]
    wrong = "" if failure is None else f"{where}: {failure}"
    number = _hash(own)
    # What all replicas share: their batches where one spans them, else that none does.
    spans = bool(batches) and batches[0].spans_replicas
    of_all = _hash(wrong or (own if spans else None))
    replica = parallel_state.get_data_parallel_rank()
    num_replicas, num_ranks = parallel_state.get_data_parallel_world_size(), dist.get_world_size()
    num_rows = num_replicas + 1
    numbers = torch.full((2 * num_rows + len(told) * num_ranks,), _LEAST, dtype=torch.int64)
    extremes_R2 = numbers[: 2 * num_rows].view(num_rows, 2)
    extremes_R2[replica] = torch.tensor([number, ~number])  # ~ turns the order around
    extremes_R2[num_replicas] = torch.tensor([of_all, ~of_all])
    told_WK = numbers[2 * num_rows :].view(num_ranks, len(told))
    told_WK[dist.get_rank()] = torch.tensor(told, dtype=torch.int64)
    assert dist.group.WORLD is not None
    group = agreement_group(dist.group.WORLD)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    if torch.equal(extremes_R2[:, 0], ~extremes_R2[:, 1]):
        if wrong:  # on all ranks, the same
            raise BatchError(wrong)
        return [[int(x) for x in row] for row in told_WK]
    gathered = gather((replica, own, wrong), group)
    failed = [rank for rank, (_, _, words) in enumerate(gathered) if words]
    if failed:
        raise BatchError(f"ranks {failed}: {gathered[failed[0]][2]}")
    prints = [(replica, own) for replica, own, _ in gathered]
    if not torch.equal(extremes_R2[num_replicas, 0], ~extremes_R2[num_replicas, 1]):
        prints = [(0, one) for _, one in prints]
    raise BatchesDifferError(_difference(prints, where))


def _hash(prints: Prints | str | None) -> int:
    digest = hashlib.sha256(repr(prints).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _prints(batch: PlannedBatch) -> tuple[str, str]:
    tokens = hashlib.sha256(np.ascontiguousarray(batch.batch.tokens).data)
    digests = sorted((name, plan.digest()) for name, plan in batch.plans.items())
    return tokens.hexdigest(), hashlib.sha256(repr(digests).encode()).hexdigest()


def _difference(told: Sequence[tuple[int, Prints]], where: str) -> str:
    """Returns one line on the first micro-batch in which ranks of one replica differ."""
    for replica in sorted({replica for replica, _ in told}):
        ranks = [rank for rank, (other, _) in enumerate(told) if other == replica]
        most = max(len(told[rank][1]) for rank in ranks)
        for place in range(most):
            found = {rank: told[rank][1][place : place + 1] for rank in ranks}
            common = Counter(map(str, found.values())).most_common(1)[0][0]
            odd = [rank for rank, prints in found.items() if str(prints) != common]
            if not odd:
                continue
            like = next(prints for prints in found.values() if str(prints) == common)
            pair = (found[odd[0]], like)
            is_plan = all(pair) and pair[0][0][0] == pair[1][0][0]
            values = [prints[0][is_plan][:12] if prints else "none" for prints in pair]
            return (
                f"{'plans' if is_plan else 'tokens'} of micro-batch {place} of {where} are not the same on "
                f"ranks {ranks}, which share it: {values[0]} on ranks {odd}, {values[1]} on the others "
                "(SHA-256); all of them must read the same files with the same version: compare the token "
                "files of their nodes"
            )
    raise AssertionError("no difference")
