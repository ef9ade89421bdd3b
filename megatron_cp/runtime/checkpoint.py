"""Activation recomputation that stops at attention: layers are recomputed, attention is not.

Attention needs only q, k, v, out and lse for its backward pass. A tape keeps (out, lse) of every
`cp_attention` call in the first forward; the recomputation of the layer gets q, k, v back from the cheap
projections and takes (out, lse) from the tape, so neither attention nor its communication runs twice.
The cost is one activation of hidden size and one fp32 scalar per head and token, per layer.

Source: DISTFLASHATTN (arXiv 2310.03294), section 3.3: 1.31x end to end at 32K tokens per GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_cp.attn.eager import eager
from megatron_cp.runtime.host_memory import Away, leaves, put_away

Result = tuple[Tensor, ...]
"""(out, lse), and the largest logits where they were asked for."""


class AttentionTape:
    """(out, lse) of the attention calls of one checkpointed region, in call order."""

    def __init__(self) -> None:
        self._results: list[tuple[tuple[Tensor | Away, ...], list[int]]] = []
        self._next = 0
        self._outer: AttentionTape | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While open, every `cp_attention` of this thread leaves its result here."""
        self._results.clear()
        self._outer = _open_here(_recorder)
        token = _recorder.set((self, torch._C._current_graph_task_id()))
        try:
            yield
        finally:
            _recorder.reset(token)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """While open, `cp_attention` takes its results from here, from the first on, and computes nothing."""
        self._next = 0
        token = _player.set((self, torch._C._current_graph_task_id()))
        try:
            yield
        finally:
            _player.reset(token)

    def keep(self, result: Result) -> None:
        """Appends one result, without its graph, here and in the tapes of enclosing regions; on the host if wanted."""
        kept = tuple(put_away(tensor) if leaves(tensor) else tensor.detach() for tensor in result)
        self._results.append((kept, [tensor._version for tensor in result]))
        if self._outer is not None:
            self._outer.keep(result)

    def take(self) -> Result:
        """Returns the next result; RuntimeError when the recomputation calls attention more often."""
        if self._next >= len(self._results):
            raise RuntimeError(
                f"recomputation made attention call {self._next + 1}, the first forward made "
                f"{len(self._results)}; a checkpointed function must do the same on both runs"
            )
        kept, versions = self._results[self._next]
        if any(
            isinstance(tensor, Tensor) and tensor._version != version
            for tensor, version in zip(kept, versions, strict=True)
        ):
            raise RuntimeError(
                f"a result of attention call {self._next + 1} was changed in place after the first "
                "forward of a checkpointed function; use an operation that returns a new tensor"
            )
        self._next += 1
        return tuple(x.back() if isinstance(x, Away) else x for x in kept)


class _EveryTime:
    """A context made anew each time it is entered: a graph that is kept is recomputed in every backward pass."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]):
        self._make, self._open = make, ExitStack()

    def __enter__(self) -> None:
        self._open.enter_context(self._make())

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)


_Open = ContextVar[tuple[AttentionTape, int] | None]
"""The tape that is open, and the backward pass in which it was opened."""
_recorder: _Open = ContextVar("attention_recorder", default=None)
_player: _Open = ContextVar("attention_player", default=None)


def _open_here(kind: _Open) -> AttentionTape | None:
    """Returns the tape that is open for a call made now.

    A region may differentiate something itself: what is made again for that, in a backward pass inside of the region,
    is none of its calls.
    """
    tape, graph_task = kind.get() or (None, None)
    return tape if graph_task == torch._C._current_graph_task_id() else None


@eager
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, keeping only its inputs and its attention results for backward.

    As `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, except that `cp_attention` calls
    inside are not repeated, unless they are made under `torch.inference_mode()`.
    """
    tape = AttentionTape()

    def contexts() -> tuple[Any, Any]:
        return tape.recording(), _EveryTime(tape.replaying)

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def recorded_result() -> Result | None:
    """Returns the next kept result when a tape is replaying, else None."""
    tape = _open_here(_player)
    return None if tape is None or torch.is_inference_mode_enabled() else tape.take()


def record_result(result: Result) -> None:
    """Keeps the result of an attention call when a tape is recording.

    None under `torch.inference_mode()`: nothing tells whether such a result was changed in place.
    """
    tape = _open_here(_recorder)
    if tape is not None and not torch.is_inference_mode_enabled():
        tape.keep(result)
