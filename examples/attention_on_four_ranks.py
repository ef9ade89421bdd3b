"""Attention over a whole context of which each of four ranks holds a quarter.

    torchrun --nproc-per-node 4 examples/attention_on_four_ranks.py

Proves: the distributed result and gradients equal attention on one device, for documents of any length.
"""

import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.report.one_plan import plan_page

DOCUMENTS = [1370, 5041, 89, 1, 1700]  # no padding, no multiple of anything
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 32


def main():
    """Runs both, compares, prints the plan and the largest difference."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()

    mask = mcp.mask.documents(DOCUMENTS, within="causal")
    config = mcp.CPConfig(num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
    plan = mcp.make_plan(mask, dist.get_world_size(), config)  # pure data, the same on every rank
    if rank == 0:
        print(plan)

    torch.manual_seed(0)  # every rank makes the whole tensors, to have something to compare with
    q = torch.randn(plan.num_tokens, NUM_HEADS, HEAD_DIM, requires_grad=True)
    k = torch.randn(plan.num_tokens, NUM_KV_HEADS, HEAD_DIM, requires_grad=True)
    v = torch.randn(plan.num_tokens, NUM_KV_HEADS, HEAD_DIM, requires_grad=True)

    local = [mcp.dispatch(x.detach(), plan, group).requires_grad_() for x in (q, k, v)]
    out_local, _ = mcp.cp_attention(*local, plan, group)
    out = mcp.undispatch(out_local, plan, group)
    out.square().sum().backward()
    gradients = [mcp.undispatch(x.grad, plan, group) for x in local]

    whole, _ = mcp.attend(q, k, v, mask)  # the same on one device
    whole.square().sum().backward()

    pairs = [(out, whole), *zip(gradients, (x.grad for x in (q, k, v)), strict=True)]
    for name, (ours, theirs) in zip(("out", "dq", "dk", "dv"), pairs, strict=True):
        error = (ours - theirs).abs().max().item()
        assert error < 1e-4, f"{name} differs by {error}"
        if rank == 0:
            print(f"{name:3s}: {dist.get_world_size()} ranks equal one device within {error:.1e}")
    if rank == 0:
        picture = plan_page(plan).write("runs/attention_on_four_ranks.html")
        print(f"picture: {picture}\nnext: torchrun --nproc-per-node 2 examples/packed_documents.py")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
