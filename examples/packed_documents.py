"""One pack, documents of different kinds: causal text, a prompt with an answer, an image.

    torchrun --nproc-per-node 2 examples/packed_documents.py

Proves: no document sees another (a changed token moves its own document only), and RoPE positions restart
in every document, wherever its tokens were dispatched to.
"""

import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.report.one_plan import plan_page

TEXT, PROMPT_AND_ANSWER, IMAGE = 300, 211, 256
PROMPT = 70


def main():
    """Changes one token of the second document and reports which documents moved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()

    parts = [
        mcp.mask.causal(TEXT),
        mcp.mask.prefix_lm(PROMPT_AND_ANSWER, PROMPT),  # the prompt sees itself in both directions
        mcp.mask.full(IMAGE),
    ]
    mask = mcp.mask.concat(parts)
    plan = mcp.make_plan(mask, dist.get_world_size(), mcp.CPConfig(num_heads=4, head_dim=16))

    torch.manual_seed(0)
    x = torch.randn(plan.num_tokens, 4, 16)
    changed = x.clone()
    changed[TEXT + 5] += 1.0  # a token of the prompt

    outs = []
    for tokens in (x, changed):
        local = mcp.dispatch(tokens, plan, group)
        out, _ = mcp.cp_attention(local, local, local, plan, group)
        outs.append(mcp.undispatch(out, plan, group))
    moved = (outs[0] != outs[1]).flatten(1).any(dim=1)
    text, answer, image = moved.split([TEXT, PROMPT_AND_ANSWER, IMAGE])
    assert answer.all() and not text.any() and not image.any()

    positions = mcp.position_ids(plan, rank, relative=True)
    whole = mcp.undispatch(positions, plan, group)
    lengths = (TEXT, PROMPT_AND_ANSWER, IMAGE)
    assert torch.equal(whole, torch.cat([torch.arange(n) for n in lengths]))
    if rank == 0:
        print(
            f"rows that moved: text {text.sum()}, prompt and answer {answer.sum()}, image {image.sum()}"
        )
        print("RoPE positions restart in every document")
        picture = plan_page(plan).write("runs/packed_documents.html")
        print(f"picture: {picture}\nnext: torchrun --nproc-per-node 3 examples/your_own_mask.py")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
