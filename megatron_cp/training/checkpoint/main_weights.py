"""Are the weights that a loaded optimizer goes on from those of the model?

An optimizer in mixed precision has float32 copies of its own, and the first step writes them over the model; a sharded
one in float32 writes them while it loads. Copies of other weights train another model, without a word: a checkpoint
whose model was exchanged, or one whose optimizer was saved shifted (Megatron-Core before 0.20, see
mcore/checkpoint/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_cp.mcore.checkpoint.optimizer import parts_of

Copies = list[tuple[Tensor, Tensor, Tensor]]
"""(parameter, what the model holds of it, what the optimizer goes on from)."""

# (parameters, what of them this optimizer updates, its copies of that) of Megatron's optimizers in mixed precision.
_MIXED = (
    ("float16_groups", "float16_groups", "fp32_from_float16_groups"),
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
)


def float_copies(optimizer: Any) -> Copies:
    """Returns (parameter, copy of a shard, shard) where an optimizer writes into the model while it loads."""
    return [
        (parameter, shard.detach().clone(), shard)
        for part in parts_of(optimizer)
        for parameter, shard in _in_order(part, "model_fp32_groups", "shard_fp32_groups")
    ]


def check_copies(model: Sequence[Any], optimizer: Any, before: Copies, folder: Path) -> None:
    """Raises ValueError, with its name, for the first weight of a loaded optimizer that is not the model's.

    `before` is what `float_copies` returned before the optimizer was loaded.
    """
    names = {id(x): name for chunk in unwrap_model(model) for name, x in chunk.named_parameters()}
    for parameter, own, copy in before + _copies_beside_model(optimizer):
        wrong = _differing(own, copy)
        if wrong:
            raise ValueError(
                f"{folder}: the optimizer goes on from other weights than the model's: {wrong:,} of {own.numel():,} "
                f"values of {names.get(id(parameter), 'a parameter')} differ; give --no-load-optim, which takes the "
                "model's weights and begins with new moments, or an earlier --ckpt-step"
            )


def _differing(own: Tensor, copy: Tensor) -> int:
    """Returns how many weights of a model are not their copies: rounded once, or first as the run that saved did."""
    wrong = []
    for dtype in (copy.dtype, torch.bfloat16, torch.float16):
        wrong.append(int((copy.to(dtype).to(own) != own).sum()))
        if not wrong[-1]:
            break
    return min(wrong)


def _copies_beside_model(optimizer: Any) -> Copies:
    """Returns (parameter, what the model holds of it, copy) where an optimizer has float32 copies."""
    return [
        (parameter, own, copy)
        for part in parts_of(optimizer)
        for names in _MIXED
        for parameter, own, copy in _in_order(part, *names)
        if own is not None and copy is not None  # elsewhere, or in eight bits
    ]


def _in_order(part: Any, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yields the entries of an optimizer's groups by name, side by side; none where it has no such groups."""
    if all(hasattr(part, name) for name in names):
        for groups in zip(*(getattr(part, name) for name in names), strict=True):
            yield from zip(*groups, strict=True)
