"""Gradients that know that they have no gradient themselves.

torch's `once_differentiable` refuses only where the refused path is the one that is asked for: under
`torch.autograd.grad` a gradient penalty would leave attention out without a word.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Saved = tuple[Any, ...]
Gradients = tuple[Tensor | None, ...]


def first_derivative_only(
    name: str,
) -> Callable[[Callable[..., Gradients]], Callable[..., Gradients]]:
    """Returns a decorator for the backward of an autograd function whose gradients cannot be differentiated.

    What it decorates takes the saved tensors behind its context: a checkpoint lets them be read once.

    With `create_graph=True` they depend on everything that the function saved or was given, by a node
    that raises NotImplementedError, naming ``name``, when a second derivative comes through.
    """

    def decorate(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
        @functools.wraps(backward)
        def guarded(ctx: Any, *grads: Tensor | None) -> Gradients:
            saved: Saved = ctx.saved_tensors
            if not torch.is_grad_enabled():
                return backward(ctx, saved, *grads)
            with torch.no_grad():
                results = backward(ctx, saved, *grads)
            causes = [x for x in (*grads, *saved) if x is not None and x.requires_grad]
            found = [x for x in results if x is not None]
            if not causes or not found:
                return results
            refusing = iter(_Refusing.apply(name, len(found), *found, *causes))
            return tuple(None if x is None else next(refusing) for x in results)

        return guarded

    return decorate


class _Refusing(torch.autograd.Function):
    """The gradients as they are, made from their causes by what cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        refusal_of(ctx.name)(ctx, *grads)


def refusal_of(name: str) -> Callable[..., None]:
    """Returns the backward of the gradients of ``name``: it raises NotImplementedError."""

    def refuse(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(
            f"the gradient of {name} has no gradient itself: no second derivative through attention; "
            "keep attention out of what is differentiated twice, or write it in operators of torch there"
        )

    return refuse
