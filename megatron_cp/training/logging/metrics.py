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
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.slice import HI, K_END, K_START, LO, Q_END, Q_START
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.baselines import PackFigures, pack_figures, per_document_imbalance


@dataclass(frozen=True)
class StepWork:
    """What the whole job computed in a step."""

    num_tokens: int
    """Real tokens of all replicas, tail padding excluded."""
    area: dict[str, int]
    """Pairs (query, key) that the masks allow, by mask name."""
    read: dict[str, int]
    """Those of them that attention reads."""


def work_of_step(
    batches: list[PlannedBatch], device: torch.device, most_keys: int | None = None
) -> StepWork:
    """Returns what the global batch has; `most_keys` are the keys that a query attends to at most.

    Collective over data-parallel replicas when there are several with batches of their own.
    """
    names = sorted(batches[0].plans)
    masks = [[item.plans[name].mask for item in batches] for name in names]
    counts = [sum(sum(item.batch.document_lengths) for item in batches)]
    counts += [sum(int(mask.area()) for mask in own) for own in masks]
    counts += [sum(area_read(mask, most_keys) for mask in own) for own in masks]
    group = parallel_state.get_data_parallel_group()
    if group.size() > 1 and not batches[0].spans_replicas:
        total = torch.tensor(counts, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=group)
        counts = total.tolist()
    area, read = counts[1 : 1 + len(names)], counts[1 + len(names) :]
    return StepWork(
        counts[0], dict(zip(names, area, strict=True)), dict(zip(names, read, strict=True))
    )


def area_read(mask: AttentionMask, most_keys: int | None) -> int:
    """Returns the pairs of a mask, of each query `most_keys` at most."""
    if most_keys is None or not mask.num_slices:
        return int(mask.area())
    slices = mask.array
    corners = [slices[:, k] - slices[:, side] for k in (K_START, K_END) for side in (LO, HI)]
    bends = np.concatenate([slices[:, Q_START], slices[:, Q_END], *corners])
    # Between these rows what a query sees grows evenly; the band's other side ends one row before a corner.
    ends = np.unique(np.clip([bends - 1, bends, bends + 1], 0, mask.num_queries))
    first, size = ends[:-1], np.diff(ends)
    own = mask.area_of_rows(np.sort(np.concatenate([first, first + 1, ends[-1:]])))
    seen, rest = own[0::2], own[1::2]
    slope = (rest - (size - 1) * seen) // np.maximum(size * (size - 1) // 2, 1)
    least, slope = np.minimum(seen, seen + slope * (size - 1)), np.abs(slope)
    growing = (most_keys - least) // np.maximum(slope, 1) + 1
    below = np.clip(np.where(slope > 0, growing, size * (least <= most_keys)), 0, size)
    pairs = below * least + slope * (below * (below - 1) // 2) + (size - below) * most_keys
    return int(pairs.sum())


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
