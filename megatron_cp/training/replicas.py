"""Whether ranks that must hold the same weights do.

Data-parallel and context-parallel ranks apply the same updates to the same weights. A bit that flips in one of
them stays, and the replicas drift apart without an error.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.training.together import gather


class ReplicasDifferError(RuntimeError):
    """Ranks that share weights hold different ones; the message names them."""


def check_replicas(model: list[Any], iteration: int) -> None:
    """Returns if all ranks that share weights hold the same bits. Collective: every rank calls it.

    Raises ReplicasDifferError on every rank alike, with the first parameter that differs and the ranks that
    differ from most.
    """
    groups = {
        True: parallel_state.get_data_parallel_group(with_context_parallel=True),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    found: list[tuple[str, list[int]]] = []
    for is_dense, group in groups.items():
        own = {
            f"{place}.{name}" if len(model) > 1 else name: _digest(parameter)
            for place, chunk in enumerate(model)
            for name, parameter in chunk.named_parameters()
            if getattr(parameter, "allreduce", True) == is_dense
        }
        found += _differences(gather(own, group), dist.get_process_group_ranks(group))
    together = [difference for differences in gather(found) for difference in differences]
    if together:
        ranks = sorted({rank for _, odd in together for rank in odd})
        raise ReplicasDifferError(
            f"weights of replicas differ after iteration {iteration}: ranks {ranks} do not hold what most "
            f"of their replicas hold, first in {together[0][0].removeprefix('module.')}; go on from the last "
            "checkpoint without the machines of these ranks"
        )


def _differences(held: list[dict[str, str]], ranks: list[int]) -> list[tuple[str, list[int]]]:
    """Returns each parameter that differs, with the ranks that hold another one than most."""
    found = []
    for name in held[0]:
        digests = [own[name] for own in held]
        common = Counter(digests).most_common(1)[0][0]
        odd = [rank for rank, digest in zip(ranks, digests, strict=True) if digest != common]
        if odd:
            found.append((name, odd))
    return found


def _digest(parameter: torch.nn.Parameter) -> str:
    """Returns the hash of a parameter's bits."""
    bits = parameter.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(bits.numpy().data).hexdigest()
