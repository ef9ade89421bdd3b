"""Rows that a layer computes a few at a time, in both passes: what lies between in and out is held for those alone.

    logits and the loss     loss_chunks.py
    MLPs                    mlp_chunks.py

At long contexts the widest activations are not those of attention: 128K rows of 128K words are 34 GB of logits in bf16,
and as much of their gradients. Each row of them depends on its own input row. So forward keeps the input; backward
computes a chunk once more and takes its gradients at once. The price is one more product with each weight.
The products of chunks that make a weight's gradient are summed in fp32.

Source: chunked cross entropy is known from Liger Kernel (arXiv 2410.10989), tiled MLPs from ALST (arXiv 2506.13996).
"""

# s rows of this rank, b batch, h hidden size

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

OfChunk = Callable[[torch.Tensor, int, int], torch.Tensor]
"""What is computed of rows `[first, stop)`, `[s', b, h]`: a tensor with one place for each of them."""


def in_chunks(
    of_chunk: OfChunk,
    rows: torch.Tensor,
    num_chunks: int,
    weights: Sequence[torch.Tensor],
    *,
    dim: int = 0,
) -> torch.Tensor:
    """Returns `torch.cat([of_chunk(rows[a:b], a, b), ...], dim)`, holding what lies between for one chunk at a time.

    Args:
        of_chunk: computes each row by itself, without random numbers, and the same in both passes. Where it is
            collective, so is this, forward and backward.
        rows: `[s, b, h]`. They are cut into chunks as equal as may be.
        num_chunks: at most this many, and no more than there are rows.
        weights: all that it reads and that learns.
        dim: the one of its result along which rows lie.

    Raises:
        RuntimeError: in backward, if a weight was changed since, or one that it reads and that learns is not given.
    """
    cuts = cuts_of(len(rows), num_chunks)
    if len(cuts) == 1:
        return of_chunk(rows, 0, len(rows))
    result: torch.Tensor = _Chunks.apply(of_chunk, cuts, dim, rows, *weights)
    return result


def cuts_of(num_rows: int, num_chunks: int) -> list[tuple[int, int]]:
    """Returns the first row of each chunk and the one behind its last."""
    num_chunks = max(1, min(num_chunks, num_rows))
    stops = [num_rows * (i + 1) // num_chunks for i in range(num_chunks)]
    return list(zip([0, *stops], stops, strict=False))


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        of_chunk: OfChunk,
        cuts: list[tuple[int, int]],
        dim: int,
        rows: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.of_chunk, ctx.cuts, ctx.dim = of_chunk, cuts, dim
        ctx.save_for_backward(rows)
        ctx.weights, ctx.versions = weights, [weight._version for weight in weights]
        whole: torch.Tensor | None = None
        for first, stop in cuts:
            part = of_chunk(rows[first:stop], first, stop)
            if whole is None:
                shape = list(part.shape)
                shape[dim] = len(rows)
                whole = part.new_empty(shape)
            whole.narrow(dim, first, stop - first).copy_(part)
        assert whole is not None
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        if [weight._version for weight in ctx.weights] != ctx.versions:
            raise RuntimeError(
                "a weight of rows that are computed in chunks was changed between forward and backward; change "
                "weights after the backward pass"
            )
        wants_rows, wants_weights = ctx.needs_input_grad[3], ctx.needs_input_grad[4:]
        learned = [w for w, is_wanted in zip(ctx.weights, wants_weights, strict=True) if is_wanted]
        grad_rows = torch.empty_like(rows) if wants_rows else None
        sums = [_Sum(weight) for weight in learned]
        for first, stop in ctx.cuts:
            chunk = rows[first:stop].detach().requires_grad_(wants_rows)
            with torch.enable_grad():
                result = ctx.of_chunk(chunk, first, stop)
            if first == 0:
                _require_all_weights(result, [chunk, *ctx.weights])
            inputs = [chunk, *learned] if wants_rows else learned
            grad_chunk = grad.narrow(ctx.dim, first, stop - first)
            with _without_hooks(learned):  # autograd runs them on the sum
                grads = list(torch.autograd.grad(result, inputs, grad_chunk, allow_unused=True))
            del result
            if grad_rows is not None:
                grad_rows[first:stop] = grads.pop(0)
            for total in sums:
                total.add(grads.pop(0))  # none is held beside those of the next chunk
        found = iter(sums)
        return (
            *(None, None, None, grad_rows),
            *(next(found).value() if is_wanted else None for is_wanted in wants_weights),
        )


def _require_all_weights(result: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
    """Raises RuntimeError if a result depends on a weight that is not known: nobody would get its gradient."""
    leaves = {id(tensor) for tensor in known}
    done = {tensor.grad_fn for tensor in known}  # None too, the end of a graph
    todo: list[Any] = [result.grad_fn]
    while todo:
        node = todo.pop()
        if node in done:
            continue
        done.add(node)
        todo.extend(before for before, _ in node.next_functions)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in leaves:
            raise RuntimeError(
                f"a weight of shape {tuple(node.variable.shape)} is used by rows that are computed in chunks and is no "
                "parameter of their layer: its gradient would be lost; make it one of that module, or use no chunks"
            )


@contextlib.contextmanager
def _without_hooks(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """While open, what `Tensor.register_hook` has put on these weights does not run."""
    hooked = [(w, w._backward_hooks) for w in weights if w._backward_hooks]
    for weight, _ in hooked:
        weight._backward_hooks = None
    try:
        yield
    finally:
        for weight, hooks in hooked:
            weight._backward_hooks = hooks


class _Sum:
    """The gradient of one weight, in fp32 while chunks are added."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._sum: torch.Tensor | None = None

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        if getattr(self._weight, "grad_added_to_main_grad", False):
            if self._sum is not None and getattr(self._weight, "overwrite_main_grad", False):
                raise NotImplementedError(
                    "rows in chunks with gradient_accumulation_fusion under Megatron-FSDP, where a chunk's gradient "
                    "replaces the one before; use gradient_accumulation_fusion=False, or no chunks"
                )
            # The layer has added it to the buffer itself (gradient_accumulation_fusion); this holds no gradient.
            self._sum = part
        elif self._sum is None:
            dtype = torch.promote_types(part.dtype, torch.float32)
            self._sum = part.to(dtype, copy=True)  # autograd may give one tensor to two weights
        else:
            self._sum += part

    def value(self) -> torch.Tensor | None:
        return None if self._sum is None else self._sum.to(self._weight.dtype)
