"""The numbers of a step beside its loss.

Balance and traffic of the plans, lengths of the documents, operations done.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.data.batch import PlannedBatch
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.baselines import PackFigures, pack_figures, per_document_imbalance


@dataclass(frozen=True)
class StepWork:
    """What the whole job computed in a step."""

    num_tokens: int
    """Real tokens of all replicas, tail padding excluded."""
    area: dict[str, int]
    """Pairs (query, key) that the masks allow, by mask name."""


def work_of_step(batches: list[PlannedBatch], device: torch.device) -> StepWork:
    """Returns tokens and mask area of the global batch.

    Collective over data-parallel replicas when there are several with batches of their own.
    """
    names = sorted(batches[0].plans)
    counts = [sum(sum(item.batch.document_lengths) for item in batches)]
    counts += [sum(int(item.plans[name].mask.area()) for item in batches) for name in names]
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1 and not batches[0].spans_replicas:
        total = torch.tensor(counts, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=group)
        counts = total.tolist()
    return StepWork(counts[0], dict(zip(names, counts[1:], strict=True)))


def plan_metrics(config: TrainConfig, batches: list[PlannedBatch]) -> dict[str, float]:
    """Returns the `cp/*` and `data/*` rows of this replica; the worst micro-batch for balance.

    Where batches span replicas, they are those of all replicas.

    Bytes and predicted milliseconds are those of attention in a whole step: all layers, both passes.
    """
    lengths = np.concatenate([item.batch.document_lengths for item in batches])
    p50, p99 = np.percentile(lengths, [50, 99])
    replicas = config.parallel.data_parallel_size if batches[0].spans_replicas else 1
    packs = len(batches) * config.steps.micro_batch_size * replicas
    layers, shown = config.model.layers_by_mask(), config.model.shown_mask
    figures = [
        (name, layers[name], pack_figures(plan, replicas))
        for item in batches
        for name, plan in item.plans.items()
    ]
    tp = config.parallel.tensor_model_parallel_size

    def sum_of(value: Callable[[PackFigures], float]) -> float:
        return float(sum(count * value(one) for _, count, one in figures))

    return {
        "cp/area_max_over_mean": max(one.imbalance for name, _, one in figures if name == shown),
        "cp/zigzag_area_max_over_mean": max(
            one.zigzag_imbalance for name, _, one in figures if name == shown
        ),
        "cp/per_document_area_max_over_mean": max(
            per_document_imbalance(item.plans[shown], replicas) for item in batches
        ),
        "cp/tokens_per_rank": float(batches[0].plans["full"].tokens_per_rank),
        "cp/plan_ms": float(np.mean([item.plan_ms for item in batches])),
        "cp/comm_bytes_sent": tp * sum_of(lambda one: one.sent_bytes),
        "cp/ring_bytes_sent": tp * sum_of(lambda one: one.ring_bytes),
        "cp/predicted_ms": sum_of(lambda one: one.predicted_ms),
        "cp/zigzag_predicted_ms": sum_of(lambda one: one.zigzag_ms),
        "cp/per_document_predicted_ms": sum_of(lambda one: one.per_document_ms),
        "cp/bound_ms": sum_of(lambda one: one.bound_ms),
        **({"cp/is_hybrid": float(replicas > 1)} if config.parallel.spans_replicas else {}),
        "data/doc_len_p50": float(p50),
        "data/doc_len_p99": float(p99),
        "data/docs_per_pack": len(lengths) / packs,
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Returns Megatron-LM's memory keys; empty without a GPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def memory_line() -> str:
    """Returns a line on this rank's memory: the GPU's as Megatron-LM prints it, or what is resident."""
    name, mib = f"(Rank {dist.get_rank()}) memory (MB)", 1024 * 1024
    if not torch.cuda.is_available():
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return f"{name} | max resident: {kib / 1024:.2f}"
    return (
        f"{name} | allocated: {torch.cuda.memory_allocated() / mib:.2f} | max allocated: "
        f"{torch.cuda.max_memory_allocated() / mib:.2f} | reserved: "
        f"{torch.cuda.memory_reserved() / mib:.2f} | max reserved: "
        f"{torch.cuda.max_memory_reserved() / mib:.2f}"
    )
