"""Context parallelism inside Megatron-Core: the floor that imports `megatron.core`.

Nothing is imported until a name is used, so that `megatron_cp.mcore.cpu.install()` can run before the first import of
`megatron.core` (see cpu.py). From below:

    versions/    which Megatron this is, and where our functions stand in the place of its own
    settings/    what its arguments ask for, and what is refused
    batch.py     what rides in `packed_seq_params`
    parts/       positions, norms, routers, further predictions
    layers.py    what the layers need of a plan
    documents/   the documents of a micro-batch: found, planned, cut
    mixing/      layers that mix tokens: attention.py is the core attention that Megatron is given
    hooks.py     around a stock Megatron-LM's batches, model_hooks.py around its model and loss
    spec.py      how a model gets it all, hybrid.py a hybrid one

Beside them loss.py has the normaliser, memory/ computes a few rows at a time, checkpoint/ reads and completes what is
saved, cpu.py stands in for CUDA.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ContextParallelAttention": "mixing.attention",
    "ContextParallelParams": "batch",
    "LocalBatch": "batch",
    "context_parallel_params": "batch",
    "local_batch": "batch",
    "forget_batch": "documents.cut",
    "params_of_batch": "documents.cut",
    "GPTSamples": "documents.gpt_dataset",
    "open_gpt_samples": "documents.gpt_dataset",
    "plans_of_mask": "layers",
    "make_loss_function": "loss",
    "reduce_report": "loss",
    "install_position_rotary": "parts.rope",
    "offload_recompute_inputs": "memory.recompute_inputs",
    "save_memory": "memory.save",
    "save_memory_in_every_gpt": "memory.save",
    "chunk_loss": "memory.loss_chunks",
    "chunk_mlps": "memory.mlp_chunks",
    "gpt_block_spec": "spec",
    "mtp_block_spec": "spec",
    "use_in_every_gpt": "spec",
    "with_context_parallel": "spec",
    "add_context_parallel_arguments": "settings.arguments",
    "cp_config_from_arguments": "settings.arguments",
    "validate_arguments": "settings.validation",
    "validate_config": "settings.validation",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Returns the public name, imported from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
