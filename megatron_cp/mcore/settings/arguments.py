"""Our few flags beside Megatron-LM's, whose names and meanings stay as they are."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from megatron_cp.config import CPConfig
from megatron_cp.mcore.settings.mixers import linear_state_bytes
from megatron_cp.mcore.settings.sparse_settings import planner_of
from megatron_cp.plan.hardware.speeds import read_rank_speeds
from megatron_cp.plan.hardware.topology import read_topology

ATTENTION_BACKENDS = ("reference", "cpu", "flex", "flash", "hopper", "emulated")


def add_context_parallel_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Returns the parser with our flags added; fit as Megatron-LM's `extra_args_provider`."""
    group = parser.add_argument_group("context parallel")
    group.add_argument(
        "--cp-planner",
        default="auto",
        help="How work and transfers are laid out over the context ranks: auto (predicted "
        "fastest) or the name of a published scheme, e.g. zigzag, allgather, ring, ulysses.",
    )
    group.add_argument(
        "--cp-chunk-size",
        type=int,
        default=None,
        metavar="TOKENS",
        help="Tokens per unit of dispatch. Default: chosen from length and ranks.",
    )
    group.add_argument(
        "--cp-topology",
        default=None,
        metavar="NAME",
        help="Hardware row of the cost model: cpu, a800, h100, h200, or a measured profile (.json, "
        "docs/simulate.md). Default: by device.",
    )
    group.add_argument(
        "--cp-rank-speeds",
        default=None,
        metavar="N,N,...",
        help="How fast each context rank computes, as 1,1,0.5,1: a slow one gets less of the attention, tokens stay "
        "equal. Default: those of the profile, else all equal.",
    )
    group.add_argument(
        "--cp-max-received-mb",
        type=int,
        default=None,
        metavar="MB",
        help="Most megabytes that a rank holds because others sent them, in a pass of a layer. Default: no limit.",
    )
    group.add_argument(
        "--cp-backend",
        choices=ATTENTION_BACKENDS,
        default=None,
        help="Kernel of attention. Default: chosen by device; a wish it cannot serve is an error.",
    )
    return parser


def rows_multiple(settings: Any, tp: int) -> int:
    """Returns what the rows of a rank must be a multiple of, by Megatron's configuration or by arguments.

    Sequence parallelism splits them over the tensor-parallel ranks. An fp8 matrix product needs a
    multiple of 16 rows, with block scaling of 32 (documentation of Transformer Engine).
    """
    split = tp if getattr(settings, "sequence_parallel", False) else 1
    return split * (32 if getattr(settings, "fp8", None) else 1)


def head_sizes(settings: Any) -> tuple[int, int]:
    """Returns the head size of queries and keys, and that of values, by Megatron's configuration or by arguments."""
    if getattr(settings, "multi_latent_attention", False):
        return settings.qk_head_dim + settings.qk_pos_emb_head_dim, settings.v_head_dim
    size = settings.kv_channels or settings.hidden_size // settings.num_attention_heads
    return size, size


def cp_config_from_arguments(args: Namespace, *, on_cuda: bool) -> CPConfig:
    """Returns the planner's settings that these arguments (Megatron-LM's names and ours) mean.

    Args:
        args: parsed and completed arguments.
        on_cuda: decides the default topology.
    """
    tp = getattr(args, "tensor_model_parallel_size", 1)
    heads = args.num_attention_heads
    kv_heads = args.num_query_groups if getattr(args, "group_query_attention", False) else heads
    head_dim, value_head_dim = head_sizes(args)
    half = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    settings: dict[str, Any] = {
        "planner": planner_of(args, args.cp_planner),
        "chunk_size": args.cp_chunk_size,
        "num_heads": heads // tp,
        "num_kv_heads": max(1, kv_heads // tp),
        "head_dim": head_dim,
        "value_head_dim": None if value_head_dim == head_dim else value_head_dim,
        "topology": read_topology(args.cp_topology or ("h100" if on_cuda else "cpu")),
        # Runs recorded before these flags existed are reported all the same.
        "rank_speeds": read_rank_speeds(getattr(args, "cp_rank_speeds", None)),
        "max_received_mb": getattr(args, "cp_max_received_mb", None),
        "linear_state_bytes": linear_state_bytes(args, tp),
        "token_multiple": rows_multiple(args, tp),
        "element_bytes": 2 if half else 4,
    }
    return CPConfig(**settings)
