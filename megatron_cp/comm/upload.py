"""Index tensors of a compiled plan on their device: one buffer, copied once, and nobody waits for it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


def upload(tree: Tree, device: torch.device) -> Tree:
    """Returns a tree of dataclasses and tuples with its int64 CPU tensors on `device`, as views of one buffer.

    On CUDA the copy is from pinned memory on the current stream; other streams must wait for it as for any work.
    """
    if device.type == "cpu":
        return tree
    found = list(_tensors(tree))
    if not found:
        return tree
    whole = torch.cat([tensor.flatten() for tensor in found])
    moved = copy_to(whole, device).split([tensor.numel() for tensor in found])
    views = (part.view(tensor.shape) for part, tensor in zip(moved, found, strict=True))
    result: Tree = _replaced(tree, iter(views))
    return result


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on `device` without waiting for the copy."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for child in _children(tree):
        yield from _tensors(child)


def _replaced(tree: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return next(tensors)
    if isinstance(tree, tuple):
        return tuple(_replaced(child, tensors) for child in tree)
    if not dataclasses.is_dataclass(tree) or not any(True for _ in _tensors(tree)):
        return tree
    names = [field.name for field in dataclasses.fields(tree)]
    changed = {name: _replaced(getattr(tree, name), tensors) for name in names}
    return dataclasses.replace(tree, **changed)  # type: ignore[type-var]


def _children(tree: Any) -> tuple[Any, ...]:
    if isinstance(tree, tuple):
        return tree
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return tuple(getattr(tree, field.name) for field in dataclasses.fields(tree))
    return ()
