"""A plan as a table for people."""

from megatron_cp.plan.cost import stage_areas
from megatron_cp.plan.schema import AttentionPlan, PassName
from megatron_cp.plan.stats import pass_stats, traffic

MAX_RANKS_SHOWN = 16


def explain(plan: AttentionPlan) -> str:
    """Returns a few lines: what the plan is, then one block per pass with a row per rank."""
    mask = plan.mask
    padding = plan.global_from_local.size - plan.num_tokens
    head = [
        f"plan {plan.digest()[:12]} by planner {plan.planner!r}: {plan.num_tokens} tokens on "
        f"{plan.cp_size} ranks, {plan.tokens_per_rank} rows each ({padding} padding at the tail)",
        f"mask: {mask.area():,} pairs in {mask.num_slices} slices, density {mask.density():.4f}",
    ]
    return "\n".join(head + _explain_pass(plan, "forward") + _explain_pass(plan, "backward"))


def _explain_pass(plan: AttentionPlan, name: PassName) -> list[str]:
    stats, moved = pass_stats(plan, name), traffic(plan, name)
    areas = stage_areas(plan, name)
    pass_ = plan.get_pass(name)
    split = f", head split {pass_.head_split.degree}" if pass_.head_split else ""
    gap = stats["makespan_ms"] / stats["bound_ms"] if stats["bound_ms"] else 1.0
    lines = [
        f"{name}: {len(pass_.stages)} stages{split}, imbalance {stats['imbalance']:.3f}, volume mean "
        f"{stats['volume_mean']:.2f} max {stats['volume_max']:.2f} (units of a rank's query rows)",
        f"  predicted {stats['makespan_ms']:.3f} ms per layer on {_topology_name(plan)}, load bound "
        f"{stats['bound_ms']:.3f} ms, gap {gap:.2f}x",
        "  rank         pairs   share      in     out  slices  pairs per stage",
    ]
    mean = max(areas.sum() / plan.cp_size, 1e-9)
    for rank in range(min(plan.cp_size, MAX_RANKS_SHOWN)):
        total = areas[:, rank].sum()
        slices = sum(stage.work[rank].num_slices for stage in pass_.stages)
        by_stage = " ".join(f"{area:.3g}" for area in areas[:, rank])
        lines.append(
            f"  {rank:4d} {total:13.0f} {total / mean:7.3f} {moved[:, rank].sum():7.2f} "
            f"{moved[rank].sum():7.2f} {slices:7d}  {by_stage}"
        )
    if plan.cp_size > MAX_RANKS_SHOWN:
        lines.append(f"  ... {plan.cp_size - MAX_RANKS_SHOWN} more ranks")
    return lines


def _topology_name(plan: AttentionPlan) -> str:
    topology = plan.config.topology
    return topology if isinstance(topology, str) else topology.name
