"""RoPE by position id: row i of this rank is rotated by `params.positions[i]`, wherever it came from.

Megatron rotates by row index, after it has cut its table zigzag over the context ranks: a packed document
would need a length divisible by 2 x cp_size. Here positions travel with the tokens, so every dispatch,
packing and restart is right.

Megatron asks a rotary module twice per forward: `get_rotary_seq_len(..., packed_seq_params)`, then
`forward(that length)`. The length that we return *carries* the positions. Nothing is stored between the two
calls, so interleaved pipeline stages, micro-batches in flight and recomputation cannot meet. Angles are
linear in the position: the row of position 1 in Megatron's own table gives all of them, for RoPE, its
scaled forms and YaRN alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch.distributed.fsdp import FSDPModule

from megatron_cp.mcore.batch import ContextParallelParams


class PositionedLength(int):
    """A rotary sequence length that carries the positions of this micro-batch's rows."""

    positions: torch.Tensor

    def __new__(cls, length: int, positions: torch.Tensor) -> PositionedLength:
        """Returns the length, with `positions` int64 `[T / b, b]`, as the rows lie in the model."""
        self = super().__new__(cls, length)
        self.positions = positions
        return self


class _ByPosition:
    """Makes a rotary class of Megatron follow our parameters; without them it behaves as before."""

    squeezes_batch = False
    """Whether the layer drops the batch dimension under packed_seq_params, as multi-latent attention does."""
    is_still = False
    """Whether all angles are 0: latent attention without positions, which Megatron would rotate all the same."""

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> int:
        """Returns Megatron's length; with ContextParallelParams it carries their positions."""
        if isinstance(packed_seq_params, ContextParallelParams):
            if packed_seq_params.positions is None:
                raise ValueError(
                    "packed_seq_params.positions=None; RoPE needs one position per local row; "
                    "make the parameters with megatron_cp.mcore.batch.local_batch or "
                    "context_parallel_params"
                )
            positions = packed_seq_params.positions.view(packed_seq_params.num_samples, -1).t()
            return PositionedLength(packed_seq_params.max_seqlen_q, positions)
        return super().get_rotary_seq_len(  # type: ignore[misc]
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        """Returns the angles `[T / b, b, 1, D]` (MLA: `[T, 1, D]`) at the carried positions; YaRN: and mscale."""
        if not isinstance(max_seq_len, PositionedLength):
            angles = super().forward(max_seq_len, *args, **kwargs)  # type: ignore[misc]
            return torch.zeros_like(angles) if self.is_still else angles
        table = self.get_emb(2)  # type: ignore[attr-defined]
        emb, mscale = table if isinstance(table, tuple) else (table, None)
        angle_of_one_D = emb[1].reshape(-1)
        positions = max_seq_len.positions.to(device=emb.device, dtype=emb.dtype)
        if self.squeezes_batch and positions.shape[1] > 1:
            raise NotImplementedError(
                f"multi-latent attention with {positions.shape[1]} samples in a micro-batch of documents: Megatron "
                "squeezes the batch there; give --micro-batch-size 1 and the same --global-batch-size"
            )
        angles = positions[:, :, None, None] * angle_of_one_D
        angles = angles.squeeze(1) if self.squeezes_batch else angles
        angles = torch.zeros_like(angles) if self.is_still else angles
        return angles if mscale is None else (angles, mscale)


def install_position_rotary(model: torch.nn.Module | Iterable[torch.nn.Module]) -> int:
    """Returns the number of rotary embeddings in the model, all of which now follow position ids.

    Call it after the model is built, on every pipeline stage, before it is wrapped. Parameters and
    checkpoints do not change: the modules keep their state and change class only. A second call changes
    nothing. Raises NotImplementedError for multimodal RoPE and rotary classes that Megatron does not ship.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    num_installed = 0
    for parent in (module for chunk in chunks for module in chunk.modules()):
        rotary = getattr(parent, "rotary_pos_emb", None)
        if not isinstance(rotary, torch.nn.Module):
            continue
        if not isinstance(rotary, _ByPosition):
            rotary.__class__ = _by_position(type(rotary))
        if isinstance(parent, MultiLatentAttention):
            rotary.squeezes_batch = getattr(parent, "squeezes_batch", True)  # type: ignore[assignment]
            rotary.is_still = not getattr(parent.config, "latent_rotates", True)  # type: ignore[assignment]
        num_installed += 1
    return num_installed


def _by_position(kind: type) -> type:
    """Returns the class of rotary embeddings that follows position ids."""
    # FSDP2 derives a class of its own: (its FSDPModule, Megatron's class).
    plain = kind.__bases__[-1] if issubclass(kind, FSDPModule) else kind
    if plain in (RotaryEmbedding, YarnRotaryEmbedding):
        return type(f"Position{kind.__name__}", (_ByPosition, kind), {})
    name = "multimodal RoPE" if issubclass(plain, MultimodalRotaryEmbedding) else plain.__name__
    raise NotImplementedError(
        f"rotary_pos_emb={name}; position ids are served for RotaryEmbedding and YarnRotaryEmbedding; train "
        "another one with Megatron's own attention"
    )
