"""A plan as a table for people."""

from collections.abc import Sequence

import numpy as np

from megatron_cp.config import Topology
from megatron_cp.plan.hardware.makespan import stage_areas
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PassName, PlanData
from megatron_cp.plan.stats import pass_stats, traffic

MAX_RANKS_SHOWN = 16
MAX_STAGES_SHOWN = 8


def explain(plan: PlanData) -> str:
    """Returns a few lines: what the plan is, then one block per pass with a row per rank."""
    mask = plan.mask
    padding = plan.global_from_local.size - plan.num_tokens
    size, rows = f"{plan.num_tokens} tokens", f"{plan.tokens_per_rank} rows each ({padding} padding"
    if plan.key_tokens is not None:
        size = f"{plan.num_tokens} queries and {mask.num_keys} keys"
        more = plan.key_tokens.size - mask.num_keys
        rows = f"{plan.own_rows.q} and {plan.own_rows.k} rows each ({padding} and {more} padding"
    head = [
        f"plan {plan.digest()[:12]} by planner {plan.planner!r}: {size} on {plan.cp_size} ranks, {rows} at the tail)",
        f"mask: {mask.area():,} pairs in {mask.num_slices} slices, density {mask.density():.4f}",
    ]
    return "\n".join(head + _explain_pass(plan, "forward") + _explain_pass(plan, "backward"))


def over_bound(predicted_ms: float, bound_ms: float, topology: str | Topology) -> str:
    """Returns how far a prediction lies above its bound: in times, or where these would say nothing in milliseconds.

    Where no row must move the bound leaves out what a message costs at least. Beside few tokens that is nearly all.
    """
    if bound_ms < 1e-3 * get_topology(topology).latency_us and predicted_ms > bound_ms:
        return f"{predicted_ms - bound_ms:.3g} ms"
    return f"{predicted_ms / bound_ms if bound_ms else 1.0:.2f} x"


def _explain_pass(plan: PlanData, name: PassName) -> list[str]:
    stats, moved = pass_stats(plan, name), traffic(plan, name)
    areas = stage_areas(plan, name)
    pass_ = plan.get_pass(name)
    split = f", head split {pass_.head_split.degree}" if pass_.head_split else ""
    gap = over_bound(stats["makespan_ms"], stats["bound_ms"], plan.config.topology)
    num_stages = len(pass_.stages)
    shown = min(num_stages, MAX_STAGES_SHOWN)
    more = f" (first {shown} of {num_stages})" if shown < num_stages else ""
    speeds = rank_speeds(plan.config, plan.cp_size)
    fair = np.maximum(areas.sum() / speeds.sum(), 1e-9) * speeds
    is_even = bool((speeds == 1).all())
    rows = []
    for rank in range(min(plan.cp_size, MAX_RANKS_SHOWN)):
        total = areas[:, rank].sum()
        slices = sum(stage.work[rank].num_slices for stage in pass_.stages)
        rows.append(
            [
                f"{rank:5d}",  # a line per rank begins with blanks
                *([] if is_even else [f"{speeds[rank]:g}"]),
                f"{total:.0f}",
                f"{total / fair[rank]:.3f}",
                f"{moved[:, rank].sum():.2f}",
                f"{moved[rank].sum():.2f}",
                str(slices),
                *(f"{area:.4g}" for area in areas[:shown, rank]),
            ]
        )
    heads = ["rank", *([] if is_even else ["speed"]), "pairs", "share", "in", "out", "slices"]
    heads.append(f"pairs per stage{more}")
    lines = [
        f"{name}: {num_stages} stages{split}, imbalance {stats['imbalance']:.3f}",
        f"  rows received per rank, over its own query rows: mean {stats['volume_mean']:.2f}, largest "
        f"{stats['volume_max']:.2f}; any plan with these pair counts receives at least "
        f"{stats['volume_bound']:.2f} on average",
        f"  predicted {stats['makespan_ms']:.3f} ms per layer on {get_topology(plan.config.topology).name}; "
        f"no plan is predicted below {stats['bound_ms']:.3f} ms (pairs alone {stats['load_bound_ms']:.3f}): "
        f"gap {gap}",
        f"  memory: a rank allocates at most {stats['peak_mb_max']:.1f} MB at once, of it at most "
        f"{stats['received_mb_max']:.1f} MB received",
        *_columns(heads, rows),
    ]
    if plan.cp_size > MAX_RANKS_SHOWN:
        lines.append(f"  ... {plan.cp_size - MAX_RANKS_SHOWN} more ranks")
    return lines


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with right-aligned columns, two blanks apart; the last head names all further columns."""
    last = len(heads) - 1
    table = [heads[:last], *rows]
    count = max(map(len, table))
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(count)]
    lines = [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
        for row in table
    ]
    lines[0] += "  " + heads[last]
    return lines
