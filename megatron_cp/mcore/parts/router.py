"""The router of experts, the same at every context-parallel and tensor-parallel size.

Two things of Megatron's router depend on how tokens are dealt to ranks.

Auxiliary losses. Megatron adds each rank's part of such a loss to the gradient. Under
`calculate_per_token_loss` gradients are summed over the ranks that share a sequence and divided by the
tokens of the whole batch, so the part is multiplied by tokens first:

    before 0.19    part x tokens of this rank                  weight falls as 1 / (tp x cp)
    since 0.19     part x tokens of this rank x tp x cp        the same weight on any ranks

`EqualWeightRouter` makes the first the second. Without per-token loss both are right. The loss itself is
one over the rows of all ranks that share the sequence (Megatron sums expert counts over them), so it does
not matter which rank a row was dispatched to. A padding mask leaves fewer tokens on one rank than on
another: `ContextRouter` counts the mean of the ranks for each.

Sinkhorn routing. Megatron balances the rows of a rank among themselves; under sequence parallelism
that is a part of a sequence. `ContextRouter` balances the rows of all context ranks, and of the tensor
ranks that share them, as one rank would.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

_ONE_RANK = SimpleNamespace(size=lambda: 1)


class ContextRouter(TopKRouter):
    """Megatron's top-k router; Sinkhorn's algorithm and padding masks mean what they mean on one rank."""

    tensor_model_parallel = False  # all of it on every tensor rank; as in ContextParallelAttention
    cp_group: Any
    tp_cp_group: Any
    _tokens_of_mask: Tensor | None = None
    """In a call with a padding mask: tokens of a rank, the mean over those that share the rows."""

    def _rows_group(self) -> Any:
        """Returns the ranks that share the rows of a pack: tensor ranks only under sequence parallelism."""
        return self.tp_cp_group if self.config.sequence_parallel else self.cp_group

    def sinkhorn_load_balancing(self, logits: Tensor) -> Any:
        """Returns scores and choice of this rank's rows `[T, E]`. Collective over those ranks."""
        group = self._rows_group()
        if group.size() == 1 or not self.training:
            return super().sinkhorn_load_balancing(logits)
        rows = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(rows, logits.detach().contiguous(), group=group)
        rows[group.rank()] = logits  # the gradient is that of this rank's rows
        scores, chosen = super().sinkhorn_load_balancing(torch.cat(rows))
        own = slice(group.rank() * len(logits), (group.rank() + 1) * len(logits))
        return scores[own], chosen[own]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Returns weights and choice of this rank's rows; True in the mask is a row that is no token.

        Collective over the ranks that share the rows, where there is a mask.
        """
        self._tokens_of_mask = None
        size = self.tp_cp_group.size()
        if padding_mask is not None and self.calculate_per_token_loss and size > 1:
            self._tokens_of_mask = (~padding_mask).sum() / size
            dist.all_reduce(self._tokens_of_mask, group=self.tp_cp_group)
        return super().routing(logits, padding_mask)

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        *args: Any,
        valid_token_count: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns `activation` with the loss attached; the part of every rank weighs the same.

        With a mask Megatron's own count is that of all ranks, since it sums counts of experts in place.
        """
        tokens = activation.shape[0] if valid_token_count is None else valid_token_count
        if self._tokens_of_mask is not None:
            tokens = self._tokens_of_mask
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss / getattr(self, "num_calls", 1),
            *args,
            valid_token_count=tokens * self._weight_of_tokens(),
            **kwargs,
        )

    def _weight_of_tokens(self) -> int:
        """Returns what Megatron leaves to be multiplied with a rank's tokens."""
        return 1


class EqualWeightRouter(ContextRouter):
    """The same for versions before 0.19, with auxiliary losses that weigh the same."""

    num_calls = 1
    """How often a micro-batch calls it, in a prediction that is repeated; since 0.17 Megatron knows it."""

    def _weight_of_tokens(self) -> int:
        """Returns how many ranks share the rows: Megatron multiplies by the tokens of this one."""
        return int(self._rows_group().size())

    def apply_z_loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns `logits` with the z-loss attached, weighed by the tokens of all ranks."""
        if not self.calculate_per_token_loss:
            return super().apply_z_loss(logits, *args, **kwargs)
        # Megatron divides the coefficient by the size of this group; a sum over tokens, divided once by
        # all of them, must not be.
        group, self.tp_cp_group = self.tp_cp_group, _ONE_RANK
        try:
            return super().apply_z_loss(logits, *args, **kwargs)
        finally:
            self.tp_cp_group = group
