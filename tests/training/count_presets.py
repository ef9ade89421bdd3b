"""Prints the parameters of every preset's model as JSON; the models are built without memory."""

import json
import sys
import tempfile


def count(rank: int) -> None:
    """Ends the process when it has printed; a plant of `tests/faults/program.py`."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from megatron_cp.models.build import build_model
    from megatron_cp.models.gpt import transformer_config
    from megatron_cp.models.presets import PRESETS

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        counts = {}
        for name, preset in PRESETS.items():
            config = transformer_config(preset, perform_initialization=False)
            with torch.device("meta"):
                model = build_model(config, preset, vocab_size=preset["vocab_size"])
            counts[name] = sum(parameter.numel() for parameter in model.parameters())
        dist.destroy_process_group()
    sys.stdout.write(json.dumps(counts) + "\n")
    raise SystemExit(0)
