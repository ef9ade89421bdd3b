"""The norm of the parameters that the log shows, as Megatron-LM computes it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import param_is_not_shared

from megatron_cp.training.step import Runner, whole_parameters


def params_norm(runner: Runner) -> float:
    """Returns the L2 norm of all parameters, each counted once. Collective: every rank calls it.

    Of 16-bit parameters the fp32 copies of the optimizer count, as in Megatron-LM: a norm's weight of 1.003 is 1 in
    bf16. A distributed optimizer holds shards of them, a layer-wise one (muon) those of its own parameters; their
    squares are added up over its ranks.
    """
    zeros = torch.zeros(4, dtype=torch.float64, device=runner.device)
    dense, experts, dense_shards, expert_shards = zeros.unbind()
    # Transformer Engine's Adam keeps the copies to itself then. Megatron-LM leaves such parameters out.
    is_hidden = runner.config.arguments["use_precision_aware_optimizer"]
    is_layer_wise = runner.config.optimizer.layer_wise_optimizer
    with whole_parameters(runner):
        for parameter in (one for chunk in runner.model for one in chunk.parameters()):
            if not _counts_here(parameter):
                continue
            is_dense = getattr(parameter, "allreduce", True)
            values, is_shard = parameter.detach(), False
            if not is_hidden:
                values, is_shard = _most_precise(parameter, is_layer_wise)
            whole, shards = (dense, dense_shards) if is_dense else (experts, expert_shards)
            (shards if is_shard else whole).add_(values.double().square().sum())
    of_replicas = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=True
    )
    of_experts = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    dist.all_reduce(dense_shards, group=of_replicas)
    dist.all_reduce(expert_shards, group=of_experts)
    dense += dense_shards
    experts += expert_shards
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return float((dense + experts).sqrt())


def _counts_here(parameter: torch.Tensor) -> bool:
    """Says whether this rank is the one among tensor ranks and stages that counts the parameter."""
    if not param_is_not_shared(parameter):
        return False
    if getattr(parameter, "tensor_model_parallel", False):
        return True
    if getattr(parameter, "allreduce", True):
        return bool(parallel_state.get_tensor_model_parallel_rank() == 0)
    return bool(parallel_state.get_expert_tensor_parallel_rank() == 0)


def _most_precise(parameter: torch.Tensor, is_layer_wise: bool) -> tuple[torch.Tensor, bool]:
    """Returns (the fp32 copy of a parameter, or it itself where there is none; whether other ranks have the rest)."""
    main = getattr(parameter, "main_param", None)
    is_owned = is_layer_wise and parameter.requires_grad and parameter.dtype == torch.bfloat16
    if not (is_owned or getattr(parameter, "main_param_sharded", False)):
        return (parameter if main is None else main).detach(), False
    return (parameter.new_zeros(0) if main is None else main).detach(), True
