"""Process groups, seeds and the model: everything between checked arguments and the first step."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module, param_is_not_shared
from torch._C._distributed_c10d import Store, TCPStore

from megatron_cp.training.agreement import Recorded, check_agreement
from megatron_cp.training.bad_steps.attempt import LocalGradients
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.watchdog import record_collectives

ModelProvider = Callable[..., Any]
# How Megatron-LM numbers ranks without and with --use-tp-pp-dp-mapping.
_RANK_ORDER = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


def initialize_distributed(
    config: TrainConfig, identity: dict[str, Any], files: Recorded
) -> torch.device:
    """Starts the process group and Megatron's parallel groups; returns the device of this rank.

    `identity` and token `files` are what must be equal on all ranks beside the arguments. Collective:
    every rank of the job calls it. Raises PlanMismatchError on every rank where ranks were started differently.
    """
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", config.parallel.local_rank) if on_cuda else torch.device("cpu")
    if on_cuda:  # ran with one rank on an H100; several GPUs never
        torch.cuda.set_device(device)
    backend = config.parallel.distributed_backend or ("nccl" if on_cuda else "gloo")
    if backend == "nccl":
        record_collectives(config.records.run_dir, os.environ)
    if on_cuda and config.steps.deterministic_mode:
        fix_algorithms(os.environ)
        if config.parallel.rank == 0:
            print_rank_0(f"> --deterministic-mode: NCCL_ALGO={os.environ['NCCL_ALGO']}")
    if config.parallel.rank == 0:
        show_log_lines()
        print_rank_0("> initializing torch distributed ...")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group(
        backend,
        store=_store(config.parallel.world_size),
        rank=config.parallel.rank,
        world_size=config.parallel.world_size,
        timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
    )
    check_agreement(config, identity, files)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.parallel.context_parallel_size,
        expert_model_parallel_size=config.parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=config.parallel.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.parallel.num_distributed_optimizer_instances,
        order=_RANK_ORDER[config.parallel.use_tp_pp_dp_mapping],
        distributed_timeout_minutes=config.parallel.distributed_timeout_minutes,
    )
    return device


def _store(world_size: int) -> Store | None:
    """Returns the store of a run of one rank that nothing has launched, at a free port: many may run on a machine.

    Else None: torch makes one at MASTER_PORT, which ranks agree on.
    """
    if world_size > 1 or "MASTER_PORT" in os.environ:
        os.environ.setdefault("MASTER_PORT", "29511")
        return None
    store = TCPStore(os.environ["MASTER_ADDR"], 0, world_size=1, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)  # for whoever looks for it, as watchdog.py does
    return store


def show_log_lines() -> None:
    """Lets the run's output have the package's log lines, such as which backend computes attention and why.

    Python drops them where nobody has set up logging.
    """
    logger = logging.getLogger("megatron_cp")
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("> %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def fix_algorithms(environment: MutableMapping[str, str]) -> None:
    """Lets cuBLAS and NCCL have one way to sum, unless the user has chosen; before either is started.

    torch refuses matrix products under `use_deterministic_algorithms` without the first, Megatron-LM the mode
    without the second.
    """
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    environment.setdefault("NCCL_ALGO", "Ring")


def own_place() -> str:
    """Returns this rank by its numbers in all groups, for messages."""
    return (
        f"rank {dist.get_rank()} (pipeline stage {parallel_state.get_pipeline_model_parallel_rank()}, "
        f"replica {parallel_state.get_data_parallel_rank()}, "
        f"context rank {parallel_state.get_context_parallel_rank()}, "
        f"tensor rank {parallel_state.get_tensor_model_parallel_rank()})"
    )


def set_seeds(config: TrainConfig) -> None:
    """Seeds every generator: equal on context ranks (they share weights), not on pipeline stages.

    Tensor-parallel ranks differ where Megatron wants them to (its random tracker sees to that).
    """
    print_rank_0(f"> setting random seeds to {config.steps.seed} ...")
    seed = config.steps.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    if config.steps.data_parallel_random_init:
        seed += 10 * parallel_state.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    if config.steps.deterministic_mode:
        torch.use_deterministic_algorithms(True)


def build_model(config: TrainConfig, provider: ModelProvider, device: torch.device) -> list[Any]:
    """Returns the chunks of this pipeline stage, wrapped for bf16 and gradient reduction.

    There is one without virtual stages.

    `provider(config, pre_process=, post_process=, vp_stage=)` builds one chunk. Collective: every
    rank calls it.
    """
    kind = "GPT" if config.model.hybrid_layer_pattern is None else "hybrid"
    print_rank_0(f"building {kind} model ...")
    num_chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
    chunks = []
    for place in range(num_chunks):
        stage = place if num_chunks > 1 else None
        chunk = provider(
            config,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=stage
            ),
            vp_stage=stage,
        )
        if getattr(chunk, "embedding", None) is not None:
            # Megatron-Core says it of the first stage's alone; the copy that predictions read learns alike.
            chunk.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.to(device))
    _print_num_parameters(chunks)
    if config.model.bf16 or config.model.fp16:
        chunks = [Float16Module(chunk.config, chunk) for chunk in chunks]
    wrapped = [_wrap(config, chunk, is_first=place == 0) for place, chunk in enumerate(chunks)]
    if config.steps.data_parallel_random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


def _print_num_parameters(chunks: list[Any]) -> None:
    """Megatron-LM's line about the size of the model, once per tensor and pipeline rank."""
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    place = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    count = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    print(
        f" > number of parameters on (tensor, pipeline) model parallel rank ({place[0]}, "
        f"{place[1]}): {count}",
        flush=True,
    )


def count_parameters(model: list[Any]) -> int:
    """Returns the parameters of the whole model, padding included, each counted once.

    Collective: every rank calls it.
    """
    # By whether a parameter is dense: experts are spread over groups of their own.
    is_first_tensor_rank = {
        True: parallel_state.get_tensor_model_parallel_rank() == 0,
        False: parallel_state.get_expert_tensor_parallel_rank() == 0,
    }
    is_first_replica = {
        True: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        False: parallel_state.get_expert_data_parallel_rank() == 0,
    }
    count = 0
    for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
        is_dense = getattr(parameter, "allreduce", True)
        is_split = getattr(parameter, "tensor_model_parallel", False)
        is_own = is_first_replica[is_dense] and param_is_not_shared(parameter)
        if is_own and (is_split or is_first_tensor_rank[is_dense]):
            count += parameter.numel()
    device = "cuda" if torch.cuda.is_available() else "cpu"  # a stage may hold no parameter to ask
    total = torch.tensor([count], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total.item())


def _wrap(config: TrainConfig, chunk: Any, *, is_first: bool) -> Any:
    """Returns the chunk inside Megatron's DistributedDataParallel."""
    options = config.parallel
    # Megatron-LM's, so that either reads optimizer state that the other has saved by buckets.
    bucket_size = 1_000_000 * options.data_parallel_size * options.context_parallel_size
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=options.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        num_distributed_optimizer_instances=options.num_distributed_optimizer_instances,
        fp8_param_gather=options.fp8_param_gather,
        check_for_nan_in_grad=False,  # it would end one rank alone; bad_steps looks on all together
        bucket_size=options.ddp_bucket_size or max(40_000_000, bucket_size),
    )
    return DistributedDataParallel(
        config=chunk.config, ddp_config=settings, module=chunk, disable_bucketing=not is_first
    )


def connect_schedule(
    model: list[Any], optimizer: Any, *, looks_at_gradients: bool
) -> LocalGradients:
    """Tells Megatron's pipeline schedule how to scale losses, hold back gradient sends and finish.

    Returns what looks at the gradients of this rank when a backward pass has ended.
    """
    config, ddp = model[0].config, model[0].ddp_config
    gradients = LocalGradients(looks_at_gradients, ddp.overlap_grad_reduce)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = gradients.finalize
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
        start = [chunk.start_grad_sync for chunk in model]
        config.grad_sync_func = start if len(model) > 1 else start[0]
    if ddp.overlap_param_gather:
        gather = [chunk.start_param_sync for chunk in model]
        config.param_sync_func = gather if len(model) > 1 else gather[0]
    return gradients
