"""The model of Megatron-Core that arguments describe: a GPT, or a hybrid where they have a pattern of layers."""

from __future__ import annotations

from typing import Any

from megatron_cp.mcore.recompute_inputs import offload_recompute_inputs
from megatron_cp.mcore.row_chunks import chunk_loss, chunk_mlps
from megatron_cp.models.gpt import Arguments, build_gpt
from megatron_cp.models.hybrid import build_hybrid


def build_model(
    config: Any, arguments: Arguments, *, vp_stage: int | None = None, **options: Any
) -> Any:
    """Returns one pipeline stage whose layers follow the plans; options are those of either builder."""
    if arguments.get("hybrid_layer_pattern") is not None:
        model = build_hybrid(config, arguments, **options)
    else:
        model = build_gpt(config, arguments, vp_stage=vp_stage, **options)
    _save_memory(model, arguments)
    return model


def _save_memory(model: Any, arguments: Arguments) -> None:
    """Lets the model hold fewer activations, where the arguments ask for it."""
    if (num_rows := arguments.get("loss_chunk_size")) is not None:
        chunk_loss(model, num_rows)
    if (num_chunks := arguments.get("mlp_chunks_for_training") or 1) > 1:
        chunk_mlps(model, num_chunks)
    if arguments.get("offload_recompute_inputs") and model.config.recompute_granularity:
        offload_recompute_inputs(model)
