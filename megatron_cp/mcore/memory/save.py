"""Less memory at long contexts, for one model of Megatron or for all that a process builds.

    save_memory(model, loss_chunk_size=4096, mlp_chunks=8, offload_recompute_inputs=True)
    save_memory_in_every_gpt(loss_chunk_size=4096)

The second is for a program that builds its models itself.
"""

from __future__ import annotations

from typing import Any

from megatron_cp.mcore.memory.loss_chunks import chunk_loss
from megatron_cp.mcore.memory.mlp_chunks import chunk_mlps
from megatron_cp.mcore.memory.recompute_inputs import offload_recompute_inputs as offload

_wishes: dict[str, Any] = {}


def save_memory(
    model: Any,
    *,
    loss_chunk_size: int | None = None,
    mlp_chunks: int = 1,
    offload_recompute_inputs: bool = False,
) -> None:
    """Lets a stage of a model hold fewer activations; losses and gradients stay, to rounding.

    Args:
        model: a `GPTModel` or hybrid model of Megatron-Core, without wrappers.
        loss_chunk_size: rows of logits at once, see `chunk_loss`; None means all.
        mlp_chunks: parts in which an MLP computes its rows, see `chunk_mlps`.
        offload_recompute_inputs: whether inputs of recomputed layers wait on the host, if there are such layers.

    Raises:
        ValueError, NotImplementedError: as the functions that it calls.
    """
    if loss_chunk_size is not None:
        chunk_loss(model, loss_chunk_size)
    if mlp_chunks != 1:
        chunk_mlps(model, mlp_chunks)
    if offload_recompute_inputs and model.config.recompute_granularity is not None:
        offload(model)


def save_memory_in_every_gpt(
    *,
    loss_chunk_size: int | None = None,
    mlp_chunks: int = 1,
    offload_recompute_inputs: bool = False,
) -> None:
    """From now on `save_memory` is called so for every GPT or hybrid model that this process builds.

    For programs that do not let one see the model; called before they build it. A second call replaces the wishes, and
    one without any ends it.
    """
    _wishes.update(
        loss_chunk_size=loss_chunk_size,
        mlp_chunks=mlp_chunks,
        offload_recompute_inputs=offload_recompute_inputs,
    )


def save_as_wished(model: Any) -> None:
    """Fulfils the wishes for every model, for one that was just built."""
    save_memory(model, **_wishes)
