"""Seeds of attention dropout under Megatron: the same for a head whatever the tensor- and context-parallel sizes.

Megatron's random streams: the default one, which a layer under sequence parallelism exchanges for one of its
tensor-parallel rank; and one that is alike on all tensor-parallel ranks, by which seeds are drawn. Megatron's
recomputation and a resumed run restore all of them. `torch.utils.checkpoint` around a layer restores the default one
alone: under it this dropout, as Megatron's own, would be another one in backward.
"""

import contextlib
from typing import Any

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
)

from megatron_cp.attn.dropout import draw_seed, seeds_of_heads


def draw_head_seeds(
    num_heads: int, num_samples: int, tp_group: Any, device: torch.device
) -> torch.Tensor:
    """Returns a seed for each of this tensor-parallel rank's heads, int64 `[num_samples * num_heads]`, by one draw.

    The heads of a sample are side by side.
    """
    with _shared_stream():
        seed = draw_seed(device)
    of_rank = torch.arange(num_heads, device=device) + num_heads * tp_group.rank()
    of_samples = torch.arange(num_samples, device=device) * (num_heads * tp_group.size())
    return seeds_of_heads(seed, (of_samples[:, None] + of_rank).flatten())


def _shared_stream() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the default stream is the one that tensor-parallel ranks share.

    A program that seeded none of Megatron's streams has the default stream alone.
    """
    tracker, name = get_cuda_rng_tracker(), get_data_parallel_rng_tracker_name()
    if name not in tracker.get_states():
        return contextlib.nullcontext()
    shared: contextlib.AbstractContextManager[None] = tracker.fork(name)
    return shared
