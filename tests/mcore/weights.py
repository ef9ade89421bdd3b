"""Weights of the tiny GPT, the same under every layout of ranks."""

import zlib

import torch


def fill_by_name(model) -> None:
    """Draws every parameter from its global name and takes this tensor-parallel rank's part."""
    from megatron.core import parallel_state as groups

    first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    rank, size = (
        groups.get_tensor_model_parallel_rank(),
        groups.get_tensor_model_parallel_world_size(),
    )
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        if "local_experts" in parts:
            place, per_rank = parts.index("local_experts") + 1, model.config.num_moe_experts
            per_rank //= groups.get_expert_model_parallel_world_size()
            offset = groups.get_expert_model_parallel_rank() * per_rank
            parts[place] = str(int(parts[place]) + offset)
        whole = list(parameter.shape)
        is_split = getattr(parameter, "tensor_model_parallel", False)
        if is_split:
            whole[parameter.partition_dim] *= size
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        values = torch.randn(whole, generator=generator) * 0.06
        if "norm" in name:
            values += 1.0 if name.endswith("weight") else 0.0
        if is_split:
            values = values.chunk(size, dim=parameter.partition_dim)[rank]
        parameter.data.copy_(values)
