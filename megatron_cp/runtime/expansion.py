"""Rows that travel as latent vectors and become keys and values where they are attended to.

    own latent rows      -> expand -> keys and values of this rank          (once for each pass)
    received latent rows -> expand -> keys and values of the stage          (once for each row, where it arrives)

Multi-head latent attention makes keys and values of 128 heads from one vector per token, 71 times smaller. What the
function captures, its weights, is used on every rank for the rows that the rank attends to; so each rank has a share of
the weights' gradient, to be summed over the group as that of any replicated parameter.

Source: multi-head latent attention, DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

# T tokens of this rank, R received rows, L width of a latent row, G key/value heads, H head dim, Hv value head dim

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.options import accumulation_dtype
from megatron_cp.comm import Pending, group_reduce
from megatron_cp.comm.packed import PackedRows
from megatron_cp.runtime.session import RankSide, Rows, Source
from megatron_cp.runtime.sides import Combination, SideResults, SideRows

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Latent rows `[R, ...]` -> keys `[R, G, H]` and values `[R, G, Hv]`, each row for itself."""


@dataclass(frozen=True)
class Expansion:
    """What one call makes of latent rows: the function, this rank's rows, and what else wants a gradient of it."""

    function: Expand
    latent: Tensor
    captured: Rows
    """Leaf tensors that the function uses."""
    like: Rows
    """No rows of the keys and values that it makes."""
    first: Rows
    """What it made of the first row."""
    counters: tuple[tuple[Tensor, int], ...]
    """Version counters of the tensors that the first row's gradient reads, and where they stood."""

    @classmethod
    def of(cls, function: Expand, latent: Tensor) -> "Expansion":
        """Tries the function on the first row of `latent` `[T, ...]`.

        Raises TypeError, ValueError when it does not give a key and a value of each row.
        """
        function = _in_this_precision(function, latent.device.type)
        before = _random_state(latent.device)
        counters: list[tuple[Tensor, int]] = []

        def count(saved: Tensor) -> Tensor:
            if type(saved) is Tensor:  # other classes may have no counter of their own
                counter = saved.detach()
                counter.data = saved.new_empty(0)  # the counter stays, and no memory with it
                counters.append((counter, counter._version))
            return saved.detach()  # a result that its own graph holds would never be freed

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            row, made = _try(function, latent)
        if not torch.equal(before, _random_state(latent.device)):
            raise ValueError(
                "expand draws random numbers (dropout, say); rows are expanded on several ranks, and again in "
                "backward, and must become the same keys and values each time: put dropout before or behind it"
            )
        _check(made)
        like = tuple(x.new_empty((0, *x.shape[1:])).requires_grad_() for x in made)
        first = tuple(x.detach() for x in made)
        captured = tuple(_captured(made, row))
        return cls(function, latent.detach(), captured, like, first, tuple(counters))

    def check_unchanged(self) -> None:
        """Raises RuntimeError where the function is seen not to be that of forward any more.

        Values are compared on the CPU alone; elsewhere that would wait for the device.
        """
        changed = any(counter._version != stood for counter, stood in self.counters)
        if not changed and self.latent.device.type == "cpu":
            again = zip(self.first, _try(self.function, self.latent)[1], strict=True)
            changed = not all(torch.allclose(x, y, 0.0, 0.0, equal_nan=True) for x, y in again)
        if changed:
            raise RuntimeError(
                "expand runs again in backward and is not the function of forward any more: a tensor that it reads was "
                "changed in place, or a variable that it reads names another one; leave such tensors as they are "
                "until backward, and bind the variable of a loop: expand=lambda x, w=w: ..."
            )


class _Piece:
    """Some latent rows and what became of them, in backward with the graph between."""

    def __init__(self, function: Expand, latent: Tensor, keeps_graph: bool):
        with torch.set_grad_enabled(keeps_graph):
            self.latent = latent.detach().contiguous().requires_grad_(keeps_graph)
            self._made = function(self.latent)
        self.rows: Rows = tuple(x.detach() for x in self._made)

    def gradients(self, captured: Rows, given: Rows) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the latent rows and of `captured`, given those of keys and values."""
        known = set(map(id, captured))
        if any(id(x) not in known for x in _captured(self._made, self.latent)):
            raise RuntimeError(
                "expand uses a tensor in backward that wants a gradient and that the first row of this rank did not "
                "use in forward, so it would get none; let each row use all weights (an expert that it does not "
                "choose times zero), and bind the variable of a loop: expand=lambda x, w=w: ..."
            )
        pairs = [
            (x, g.to(x.dtype)) for x, g in zip(self._made, given, strict=True) if x.requires_grad
        ]
        inputs = (self.latent, *captured)
        if not pairs:  # keys and values frozen inside of the function
            return (None,) * len(inputs)
        outputs, gradients = zip(*pairs, strict=True)
        # Other pieces go back through what was made outside of the function, a sum of weights say, as well.
        with _hooks_off(captured):
            return torch.autograd.grad(
                outputs, inputs, gradients, allow_unused=True, retain_graph=True
            )


class ExpandedRows(SideRows):
    """Keys and values of latent rows, own and received; each row is expanded once in a pass."""

    def __init__(self, expansion: Expansion, beside: Rows, keeps_graph: bool):
        """`beside`: what else travels with the rows, as it is. `keeps_graph`: for `latent_gradient`."""
        if keeps_graph:
            expansion.check_unchanged()
        super().__init__((expansion.latent.contiguous(), *beside))
        self.expansion, self._keeps_graph = expansion, keeps_graph
        self._pieces: dict[Source, list[_Piece]] = {"own": [], "received": []}
        self._received: Rows = ()
        self._captured = tuple(
            torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in expansion.captured
        )

    def arrive(self, side: RankSide, pending: Pending[PackedRows] | None) -> None:
        """As for rows that are used as they travel; a new chain begins without any."""
        super().arrive(side, pending)
        if not side.keeps:
            self._pieces["received"].clear()
            shapes = [(side.chain_rows, *x.shape[1:]) for x in self.expansion.like]
            self._received = tuple(map(Tensor.new_empty, self.expansion.like, shapes))

    def rows(self, source: Source) -> Rows:
        """Returns keys, values and what is beside them, of the own rows or of those received in the chain so far."""
        (latent, *beside), pieces = super().rows(source), self._pieces[source]
        begin = sum(len(piece.latent) for piece in pieces)
        if begin < len(latent):
            pieces.append(_Piece(self.expansion.function, latent[begin:], self._keeps_graph))
            if source == "received":
                for room, x in zip(self._received, pieces[-1].rows, strict=True):
                    room[begin : len(latent)] = x
        if source == "own":
            return (*pieces[0].rows, *beside)
        return (*(x[: len(latent)] for x in self._received), *beside)

    def latent_gradient(self, source: Source, given: Rows) -> Tensor:
        """Returns the gradient of latent rows, given those of all keys and values of a source; ends their graphs."""
        self.rows(source)  # with those that nobody here attended to
        found, begin = [], 0
        for piece in self._pieces[source]:
            end = begin + len(piece.latent)
            part = tuple(x[begin:end] for x in given)
            latent, *captured = piece.gradients(self.expansion.captured, part)
            found.append(torch.zeros_like(piece.latent) if latent is None else latent)
            for total, x in zip(self._captured, captured, strict=True):
                if x is not None:
                    total += x
            begin = end
        self._pieces[source].clear()
        return torch.cat(found)

    def captured_gradients(self) -> Rows:
        """Returns the gradients of what the function captures: this rank's share."""
        return self._captured


class ExpandedResults(SideResults):
    """Gradients of keys and values; those of latent rows go home, and are what is left in the end."""

    def __init__(self, rows: ExpandedRows, dtype: torch.dtype, combination: Combination):
        expansion = rows.expansion
        shapes = tuple(x.shape[1:] for x in expansion.like)
        super().__init__(expansion.latent, shapes, dtype, combination)
        self._rows, self._latent = rows, torch.zeros_like(expansion.latent, dtype=dtype)

    def send_home(self, side: RankSide, group: dist.ProcessGroup | None) -> Pending[None] | None:
        """Starts the way home of the gradients of received latent rows, after the last stage of a chain."""
        if side.returns is None:
            return None
        assert group is not None, "a plan for one rank moves nothing"
        received = self._whole("received", side.num_received)
        del self._held["received"]
        back = self._latent.new_empty((0, *self._latent.shape[1:]))
        if side.num_received:
            back = self._rows.latent_gradient("received", received).to(back.dtype)
        own, combine = (self._latent,), self._combination.rows_
        return group_reduce(own, (back,), side.returns, group, combine)

    def own(self) -> Rows:
        """Returns the gradients of this rank's latent rows, from all ranks, and of what the function captures."""
        self._latent += self._rows.latent_gradient("own", super().own())
        return (self._latent, *self._rows.captured_gradients())


@contextmanager
def _hooks_off(leaves: Rows) -> Iterator[None]:
    """While open, hooks of leaves do not run: autograd runs them on the whole gradient, which it gets in the end."""
    hooked = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    try:
        for leaf, _ in hooked:
            leaf._backward_hooks = None
        yield
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks


def _try(function: Expand, latent: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns the first row of `latent` and what the function makes of it, with the graph between."""
    with torch.enable_grad():
        row = latent[:1].detach().requires_grad_()
        return row, function(row)


def _random_state(device: torch.device) -> Tensor:
    """Returns where the default generator of a device is; nothing while a CUDA graph records, which cannot be asked."""
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(0)
    torch.cuda.init()
    return torch.tensor(torch.cuda.default_generators[device.index or 0].get_offset())


def _in_this_precision(function: Expand, device: str) -> Expand:
    """Returns the function under today's autocast, wherever it is called; backward runs outside of it."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def expand(latent: Tensor) -> tuple[Tensor, Tensor]:
        # Uncached: a copy of a weight made where no gradient is wanted would be used where one is.
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            return function(latent)

    return expand


def _captured(outputs: tuple[Tensor, ...], latent: Tensor) -> list[Tensor]:
    """Returns the leaves besides `latent` from which `outputs` were made and which want a gradient, in graph order."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting = [x.grad_fn for x in outputs if x.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not latent:
            found[id(leaf)] = leaf
        waiting += [parent for parent, _ in node.next_functions if parent is not None]
    return list(found.values())


def _check(made: object) -> None:
    if not (isinstance(made, tuple) and len(made) == 2):
        raise TypeError(
            f"expand gave {type(made).__name__}; it must return (keys, values) of its rows"
        )
    for name, x in zip(("keys", "values"), made, strict=True):
        if x.dim() != 3 or len(x) != 1:
            raise ValueError(
                f"expand gave {name} of shape {tuple(x.shape)} for one row; it must be [1, heads, dim]: "
                "each row for itself"
            )
