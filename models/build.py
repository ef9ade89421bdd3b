"""The model of Megatron-Core that arguments describe: a GPT, or a hybrid where they have a pattern of layers."""

from __future__ import annotations

from typing import Any

from megatron_cp.mcore.memory.save import save_memory
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
    save_memory(
        model,
        loss_chunk_size=arguments.get("loss_chunk_size"),
        mlp_chunks=arguments.get("mlp_chunks_for_training") or 1,
        offload_recompute_inputs=bool(arguments.get("offload_recompute_inputs")),
    )
    return model
