"""A mask that no library has a name for: several answers to one question, each with a look-back window.

    torchrun --nproc-per-node 3 examples/your_own_mask.py

Proves: any union of slices is planned, balanced and executed; rows equal a dense computation.
"""

import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.report.one_plan import plan_page

QUESTION, ANSWERS, WINDOW = 400, [250, 33, 512, 120], 64


def question_with_answers():
    """Returns the mask: the question is causal; an answer sees all of it, and its own last 64 tokens."""
    total = QUESTION + sum(ANSWERS)
    slices = [(0, QUESTION, 0, QUESTION, None, 0)]  # (q_start, q_end, k_start, k_end, lo, hi)
    start = QUESTION
    for length in ANSWERS:
        end = start + length
        slices.append((start, end, 0, QUESTION, None, None))  # the whole question
        slices.append((start, end, start, end, -WINDOW + 1, 0))  # -64 < k - q <= 0
        start = end
    return mcp.mask.from_slices(total, total, slices)


def main():
    """Plans the mask, runs it and compares with the dense formula."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    mask = question_with_answers()
    plan = mcp.make_plan(mask, dist.get_world_size(), mcp.CPConfig(num_heads=2, num_kv_heads=1))

    torch.manual_seed(0)
    q, k, v = torch.randn(mask.num_queries, 2, 16), *torch.randn(2, mask.num_queries, 1, 16)
    local = [mcp.dispatch(x, plan, group) for x in (q, k, v)]
    out, _ = mcp.cp_attention(*local, plan, group)
    out = mcp.undispatch(out, plan, group)

    scores = torch.einsum("qnh,kh->nqk", q, k[:, 0]) / 4.0
    scores = scores.masked_fill(~torch.from_numpy(mask.to_dense()), float("-inf"))
    dense = torch.einsum("nqk,kh->qnh", scores.softmax(dim=-1), v[:, 0])
    error = (out - dense).abs().max().item()
    assert error < 1e-4, error
    if rank == 0:
        stats = plan.stats("forward")
        print(f"{mask}: equals the dense formula within {error:.1e}")
        print(f"imbalance {stats['imbalance']:.3f}, {plan.tokens_per_rank} rows on every rank")
        picture = plan_page(plan).write("runs/your_own_mask.html")
        print(f"picture: {picture}\nnext: torchrun --nproc-per-node 2 examples/train_tiny_gpt.py")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
