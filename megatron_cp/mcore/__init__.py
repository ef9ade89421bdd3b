"""Context parallelism inside Megatron-Core: the floor that imports `megatron.core`.

Nothing is imported until a name is used, so that `megatron_cp.mcore.cpu.install()` can run before
the first import of `megatron.core` (see cpu.py). The reader's path: attention.py (the swapped-in
core attention), batch.py (what rides in `packed_seq_params`), rope.py (positions), loss.py (the
normaliser), spec.py (how a model gets it all).
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ContextParallelAttention": "attention",
    "ContextParallelParams": "batch",
    "LocalBatch": "batch",
    "context_parallel_params": "batch",
    "local_batch": "batch",
    "forget_batch": "cut",
    "params_of_batch": "cut",
    "GPTSamples": "gpt_dataset",
    "open_gpt_samples": "gpt_dataset",
    "plans_of_mask": "layers",
    "make_loss_function": "loss",
    "reduce_report": "loss",
    "install_position_rotary": "rope",
    "offload_recompute_inputs": "recompute_inputs",
    "save_memory": "memory",
    "save_memory_in_every_gpt": "memory",
    "chunk_loss": "loss_chunks",
    "chunk_mlps": "mlp_chunks",
    "gpt_block_spec": "spec",
    "mtp_block_spec": "spec",
    "use_in_every_gpt": "spec",
    "with_context_parallel": "spec",
    "add_context_parallel_arguments": "arguments",
    "cp_config_from_arguments": "arguments",
    "validate_arguments": "validation",
    "validate_config": "validation",
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
