"""Clips of video look at their captions, as a diffusion transformer or a vision-language model does.

    torchrun --nproc-per-node 4 examples/cross_attention.py

Proves: queries and keys are different tokens on different ranks, the clips stay where their self attention has them,
and results and gradients equal those of one device.
"""

import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.report.one_plan import plan_page

CLIPS, CAPTIONS = [1500, 320, 64, 901], [60, 12, 31, 7]  # tokens; clip i sees caption i
NUM_HEADS, HEAD_DIM = 4, 32


def main():
    """Runs self and cross attention on ranks, compares the second, prints its plan."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    config = mcp.CPConfig(num_heads=NUM_HEADS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM)
    clips = mcp.make_plan(mcp.mask.documents(CLIPS, within="full"), size, config)
    ends = [[0, *torch.tensor(lengths).cumsum(0).tolist()] for lengths in (CLIPS, CAPTIONS)]
    mask = mcp.mask.from_cu_seqlens(ends[0], "full", cu_seqlens_k=ends[1])
    plan = mcp.make_plan(mask, size, config, queries=clips)  # queries stay where `clips` has them
    if rank == 0:
        print(plan)

    torch.manual_seed(0)  # every rank makes the whole tensors, to have something to compare with
    q = torch.randn(sum(CLIPS), NUM_HEADS, HEAD_DIM, requires_grad=True)
    k, v = (torch.randn(sum(CAPTIONS), NUM_HEADS, HEAD_DIM, requires_grad=True) for _ in "kv")

    q_local = mcp.dispatch(q.detach(), plan, group, side="q").requires_grad_()
    k_local, v_local = (
        mcp.dispatch(x.detach(), plan, group, side="k").requires_grad_() for x in (k, v)
    )
    mixed, _ = mcp.cp_attention(q_local, q_local, q_local, clips, group)  # within a clip
    out_local, _ = mcp.cp_attention(mixed, k_local, v_local, plan, group)  # with its caption
    (out_local.square().sum() / sum(CLIPS)).backward()

    whole, _ = mcp.attend(q, q, q, clips.mask)  # the same on one device
    whole, _ = mcp.attend(whole, k, v, mask)
    (whole.square().sum() / sum(CLIPS)).backward()
    pairs = {
        "out": (out_local, whole, "q"),
        "dq": (q_local.grad, q.grad, "q"),
        "dk": (k_local.grad, k.grad, "k"),
        "dv": (v_local.grad, v.grad, "k"),
    }
    for name, (local, expected, side) in pairs.items():
        error = (mcp.undispatch(local, plan, group, side=side) - expected).abs().max().item()
        assert error < 1e-4, f"{name} differs by {error}"
        if rank == 0:
            print(f"{name:3s}: {size} ranks equal one device within {error:.1e}")
    if rank == 0:
        picture = plan_page(plan).write("runs/cross_attention.html")
        print(f"picture: {picture}\nnext: docs/plan.md, Cross attention")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
