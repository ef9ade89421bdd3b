"""Index tensors of a compiled plan on their device: one buffer, copied once, and nobody waits for it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from megatron_cp.device_memory import SharedTensor, copy_to, share

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Uploaded(Generic[Tree]):
    """A tree whose tensors are views of one buffer on a device; None on a CPU, where nothing is copied."""

    tree: Tree
    buffer: SharedTensor | None

    def here(self) -> Tree:
        """Returns the tree, ready for the current stream."""
        if self.buffer is not None:
            self.buffer.wait()
        return self.tree


def upload(tree: Tree, device: torch.device) -> Uploaded[Tree]:
    """Returns a tree of dataclasses and tuples with its int64 CPU tensors on `device`, as views of one buffer.

    On CUDA the copy is from pinned memory on the current stream.
    """
    found = [] if device.type == "cpu" else list(_tensors(tree))
    if not found:
        return Uploaded(tree, None)
    buffer = copy_to(torch.cat([tensor.flatten() for tensor in found]), device)
    moved = buffer.split([tensor.numel() for tensor in found])
    views = (part.view(tensor.shape) for part, tensor in zip(moved, found, strict=True))
    return Uploaded(_replaced(tree, iter(views)), share(buffer))


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
