"""What --hybrid-context-parallel cannot be combined with: whatever is counted over one replica's packs.

Under it the context ranks of a replica hold rows of any replica's packs. Sums over all ranks stay what they are; means
over a replica, and what each rank decides by its own rows, would change with the layout.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator

from megatron_cp.config import MAX_RANKS, Topology
from megatron_cp.plan.hardware.topology import read_topology

_FLAG = "--hybrid-context-parallel"


def check_hybrid(args: Namespace) -> Iterator[str]:
    """The hybrid layout: loss per token, and nothing that is counted over a replica's rows."""
    if not args.spans_replicas:
        return
    if not args.calculate_per_token_loss:
        yield (
            f"{_FLAG} without --calculate-per-token-loss is not served: a mean over each replica's packs would "
            f"depend on the layout; drop {_FLAG}, or give --calculate-per-token-loss, as Megatron-LM asks for too: "
            "every token then counts alike in the loss, instead of every micro-batch"
        )
    if args.mtp_num_layers:
        yield (
            f"{_FLAG} with --mtp-num-layers {args.mtp_num_layers} is not served: the loss of predictions is a mean "
            f"over each replica's packs; drop {_FLAG}, which changes results by rounding alone"
        )
    if args.use_tp_pp_dp_mapping and args.pipeline_model_parallel_size > 1:
        yield (
            f"{_FLAG} with --use-tp-pp-dp-mapping and --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} is not served: the planner takes the ranks of neighbouring replicas "
            "for neighbours in a node; drop --use-tp-pp-dp-mapping"
        )
    num_ranks = args.data_parallel_size * args.context_parallel_size
    if num_ranks > MAX_RANKS:
        yield (
            f"{_FLAG} makes one plan for {num_ranks} ranks, and at most {MAX_RANKS} are allowed; drop {_FLAG}, which "
            "changes results by rounding alone"
        )
    if _knows_speeds(args):
        yield (
            f"{_FLAG} with --cp-rank-speeds, or a --cp-topology profile with rank_speeds, is not served: they name the "
            "ranks of one replica, and a plan spans all; drop one of the two"
        )
    for words in _counted_by_replica(args) if args.num_experts else ():
        yield (
            f"{_FLAG} with --num-experts {args.num_experts} and {words} is not served: it is counted over the rows of "
            f"a replica or rank, which the layout chooses; experts without it are allowed: drop {_FLAG}, which changes "
            "results by rounding alone"
        )
    if args.data_parallel_size == 1:
        args.notes.append(f"{_FLAG} changes nothing here: there is one replica")


def _knows_speeds(args: Namespace) -> bool:
    """Returns whether ranks have speeds; a profile that cannot be read is refused elsewhere."""
    with contextlib.suppress(ValueError, OSError):
        topology = None if args.cp_topology is None else read_topology(args.cp_topology)
        if isinstance(topology, Topology) and topology.rank_speeds is not None:
            return True
    return args.cp_rank_speeds is not None


def _counted_by_replica(args: Namespace) -> Iterator[str]:
    """Yields the flags of experts that look at the rows of a replica or of a rank."""
    coefficients = args.moe_aux_loss_coeff
    if any(coefficients if isinstance(coefficients, list) else [coefficients]):
        yield "--moe-aux-loss-coeff"
    if "sinkhorn" in args.moe_router_load_balancing_type:
        yield "--moe-router-load-balancing-type sinkhorn"
    if args.moe_z_loss_coeff:
        yield f"--moe-z-loss-coeff {args.moe_z_loss_coeff}"
    if args.moe_expert_capacity_factor is not None:
        yield f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor}"
