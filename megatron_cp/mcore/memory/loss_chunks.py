"""Logits that the loss computes, a few rows at a time (row_chunks.py).

    chunk_loss(model, 4096)      4096 rows of logits at once

The output layer returns logits that nobody has computed yet. The loss asks for those of a chunk, and keeps the loss of
each row.
"""

# s rows of this rank, b batch, t tensor ranks whose rows an output layer gathers, V words of this rank

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import multi_token_prediction

from megatron_cp.mcore.memory.row_chunks import cuts_of, in_chunks
from megatron_cp.mcore.versions.wrapping import put_hook


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
            "logits in chunks beside use_mup or defer_embedding_wgrad_compute; use no chunks: the same results"
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
