"""Rows that a layer computes a few at a time, in both passes: what lies between in and out is held for those alone.

    chunk_loss(model, 4096)      the output layer and the loss: 4096 rows of logits at once
    chunk_mlps(model, 8)         each MLP: an eighth of the rows at once

At long contexts the widest activations are not those of attention: 128K rows of 128K words are 34 GB of logits in bf16,
and as much of their gradients. Each row of them depends on its own input row. So forward keeps the input; backward
computes a chunk once more and takes its gradients at once. The price is one more product with each weight.
The products of chunks that make a weight's gradient are summed in fp32.

Source: chunked cross entropy is known from Liger Kernel (arXiv 2410.10989), tiled MLPs from ALST (arXiv 2506.13996).
"""

# s rows of this rank, b batch, h hidden size, t tensor ranks whose rows an output layer gathers

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch.autograd.function import once_differentiable
from torch.nn.modules.dropout import _DropoutNd

from megatron_cp.mcore.wrapping import put_hook

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


def chunk_loss(model: Any, num_rows: int) -> None:
    """Lets a model of Megatron compute its logits when the loss wants them, `num_rows` at a time.

    Predictions of further tokens are losses too. Without labels the model returns all logits as before. A stage without
    an output layer stays as it is.

    Args:
        model: a `GPTModel` or hybrid model of Megatron-Core, without wrappers.
        num_rows: rows of logits that a rank holds at once, of all samples and tensor ranks that it gathers them from.

    Raises:
        ValueError: if there is no row.
        NotImplementedError: if the model scales its logits (MuP), or computes the layer's gradient later
            (`defer_embedding_wgrad_compute`).
    """
    if num_rows < 1:
        raise ValueError(f"num_rows={num_rows} must be at least 1")
    if not model.post_process:
        return
    if getattr(model.config, "use_mup", False) or model.config.defer_embedding_wgrad_compute:
        raise NotImplementedError(
            "logits in chunks beside use_mup or defer_embedding_wgrad_compute; leave out one of the two"
        )
    layer, plain_loss = model.output_layer, model.compute_language_model_loss
    plain_forward, gathers = layer.forward, layer.sequence_parallel

    def forward(
        rows: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> Any:
        if layer.sequence_parallel != gathers:
            # Inference has gathered the rows itself, and lets the layer gather again before it reads the logits.
            return plain_forward(rows, weight, runtime_gather_output)
        weight = layer.weight if weight is None else weight
        logits_of = functools.partial(
            plain_forward, weight=weight, runtime_gather_output=runtime_gather_output
        )
        gathered = layer.tp_group.size() if layer.sequence_parallel else 1
        return _PendingLogits(logits_of, rows, weight, gathered, num_rows), None

    def compute_language_model_loss(labels: torch.Tensor, logits: Any) -> torch.Tensor:
        if isinstance(logits, _PendingLogits):
            return _loss_in_chunks(plain_loss, labels, logits)
        losses: torch.Tensor = plain_loss(labels, logits)
        return losses

    layer.forward = forward
    model.compute_language_model_loss = compute_language_model_loss
    if hasattr(multi_token_prediction, "_compute_mtp_acceptance_counts"):  # since 0.19
        put_hook(multi_token_prediction, "_compute_mtp_acceptance_counts", _counting_in_chunks)


class _PendingLogits:
    """Logits that nobody has computed yet.

    Under sequence parallelism the layer gathers the rows of its `gathered` tensor ranks, one rank's behind another's: a
    chunk holds some of each.
    """

    def __init__(
        self,
        logits_of: Callable[..., Any],
        rows: torch.Tensor,
        weight: torch.Tensor,
        gathered: int,
        num_rows: int,
    ) -> None:
        self._logits_of, self.rows, self.weight, self.gathered = logits_of, rows, weight, gathered
        at_once = max(1, num_rows // (rows.shape[1] * gathered))
        self.num_chunks = -(-len(rows) // at_once)

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits of some rows, `[t s', b, V]`."""
        logits: torch.Tensor
        logits, _ = self._logits_of(rows)
        return logits

    def chosen(self, values: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Returns what `[b, t s]` holds of rows `[first, stop)` of each tensor rank, `[b, t s']`."""
        batch = len(values)
        return values.reshape(batch, self.gathered, -1)[..., first:stop].reshape(batch, -1)

    def transpose(self, *dims: int) -> torch.Tensor:
        """Returns all of them, transposed: what a model without labels does first."""
        return self.of(self.rows).transpose(*dims)


def _loss_in_chunks(
    plain_loss: Callable[..., torch.Tensor], labels: torch.Tensor, logits: _PendingLogits
) -> torch.Tensor:
    """Returns the loss of each token, `[b, t s]`."""
    batch = len(labels)

    def of_chunk(rows: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        losses = plain_loss(logits.chosen(labels, first, stop), logits.of(rows))
        return losses.reshape(batch, logits.gathered, -1)

    losses = in_chunks(of_chunk, logits.rows, logits.num_chunks, [logits.weight], dim=-1)
    return losses.reshape(batch, -1)


def _counting_in_chunks(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron's count of further tokens that were predicted rightly, which it logs."""

    def _compute_mtp_acceptance_counts(
        logits: Any, labels: torch.Tensor, mask: torch.Tensor, *options: Any, **named: Any
    ) -> Any:
        if not isinstance(logits, _PendingLogits):
            return plain(logits, labels, mask, *options, **named)
        counts = []
        with torch.no_grad():
            for first, stop in cuts_of(len(logits.rows), logits.num_chunks):
                chosen = (logits.chosen(values, first, stop) for values in (labels, mask))
                counts.append(plain(logits.of(logits.rows[first:stop]), *chosen, *options, **named))
        return tuple(sum(parts) for parts in zip(*counts, strict=True))

    return _compute_mtp_acceptance_counts


def chunk_mlps(model: torch.nn.Module, num_chunks: int) -> None:
    """Lets each MLP of a model compute its rows in `num_chunks` parts. Experts stay as they are.

    Megatron-Core's own `mlp_chunks_for_training` keeps the activations of all parts for backward, and so saves
    little; here backward computes them once more.

    Raises:
        TypeError: if the model is none of Megatron-Core.
        ValueError: if there is no part.
        NotImplementedError: in fp8, whose scales are found over all rows together; where an MLP is of another class;
            where the gradients of weights are computed later (`delay_wgrad_compute`); and at the first step, where an
            MLP drops at random, as an adapter in it may.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks={num_chunks} must be at least 1")
    if not isinstance(model, MegatronModule):
        raise TypeError(
            f"model={type(model).__name__} is no module of Megatron-Core, whose MLPs alone are computed in chunks"
        )
    module: Any
    for module in model.modules():
        if type(module) is MLP:
            if module.config.fp8 or getattr(module.config, "fp4", None):
                raise NotImplementedError("MLPs in chunks in fp8 or fp4; use --bf16, or no chunks")
            if getattr(module.config, "delay_wgrad_compute", False):
                raise NotImplementedError(
                    "MLPs in chunks beside delay_wgrad_compute; leave out one of the two"
                )
            _chunk_mlp(module, num_chunks)
        elif isinstance(module, MLP) and not isinstance(module, SharedExpertMLP):
            raise NotImplementedError(
                f"an MLP of the class {type(module).__name__} in chunks; use Megatron-Core's MLP, or no chunks"
            )


def _chunk_mlp(mlp: Any, num_chunks: int) -> None:
    plain_forward = mlp.forward

    def forward(rows: torch.Tensor, *options: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        named.pop("padding_mask", None)  # for experts
        if any(option is not None for option in (*options, *named.values())):
            result: tuple[torch.Tensor, Any] = plain_forward(rows, *options, **named)
            return result
        if mlp.training and any(isinstance(x, _DropoutNd) and x.p > 0 for x in mlp.modules()):
            raise NotImplementedError(
                "an MLP in chunks with dropout inside, as an adapter may have: backward would drop something else; "
                "use no dropout there, or no chunks"
            )
        biases: list[Any] = []

        def of_chunk(chunk: torch.Tensor, _first: int, _stop: int) -> torch.Tensor:
            out: torch.Tensor
            out, bias = plain_forward(chunk)
            biases.append(bias)
            return out

        weights = [weight for weight in mlp.parameters() if weight.requires_grad]
        out = in_chunks(of_chunk, rows, num_chunks, weights)
        bias = biases[0]  # is added outside
        if bias is not None and not any(bias is weight for weight in mlp.parameters()):
            raise NotImplementedError(
                "an MLP in chunks whose bias is no parameter of its own; use no chunks"
            )
        return out, bias

    mlp.forward = forward
