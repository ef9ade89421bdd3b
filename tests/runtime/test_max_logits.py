"""The largest logit of each head over the whole context, the same on every rank, for every way of splitting work."""

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from tests.attn.test_max_logits import largest_logits
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEAD_DIM, HEADS, KV_HEADS, local_rows, mask_cases, tensors
from tests.runtime.handmade import random_plan


def attend_on_rank(rank, world_size, plan, inputs):
    """Returns the largest logits, those of a call inside a recomputed function, and whether results changed."""
    q, k, v, *_ = (local_rows(x, plan, rank) for x in inputs)
    group = dist.group.WORLD
    out, lse, found = mcp.cp_attention(q, k, v, plan, group, return_max_logits=True)
    plain = mcp.cp_attention(q, k, v, plan, group)
    close = torch.allclose(out, plain[0], atol=1e-5) and torch.allclose(lse, plain[1], atol=1e-5)
    seen = []

    def layer(x):
        y, _, logits = mcp.cp_attention(x, k, v, plan, group, return_max_logits=True)
        seen.append(logits)
        return y * y  # what is recomputed goes on beyond attention

    mcp.checkpoint(layer, q.clone().requires_grad_()).sum().backward()
    return [found, *seen], close


CONFIG = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


@pytest.mark.parametrize(
    ("cp_size", "plan"),
    [
        (1, lambda mask: make_plan(mask, 1, CONFIG)),
        (3, lambda mask: make_plan(mask, 3, CONFIG)),
        (4, lambda mask: random_plan(mask, 4, 0, CONFIG)),
        (4, lambda mask: random_plan(mask, 4, 1, CONFIG, head_degree=2)),
    ],
    ids=["one rank", "three ranks", "four ranks, by hand", "heads split"],
)
def test_every_rank_has_the_largest_logits_of_the_whole_context(cp_size, plan):
    mask = mask_cases()["documents"]
    plan = plan(mask)
    inputs = tensors(plan.num_tokens)
    expected = largest_logits(inputs[0], inputs[1], mask.to_dense(), HEAD_DIM**-0.5, 0.0)
    for found, close in run_on_ranks(cp_size, attend_on_rank, plan, inputs):
        assert close
        assert len(found) == 3  # once, then first run and replay
        for logits in found:
            assert torch.allclose(logits.double(), expected, rtol=1e-5)
