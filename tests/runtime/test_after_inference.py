"""A call under `torch.inference_mode`, then one that trains with the same plan: nothing kept stands in its way."""

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp import mask as masks
from tests.ranks import run_on_ranks

LENGTHS = (20, 17)


def attention(plan, group, x, backend):
    return mcp.cp_attention(x, x, x, plan, group, backend=backend)[0]


def attention_on_one_device(plan, group, x, backend):
    return mcp.attend(x, x, x, plan.mask.crop(q=(0, len(x)), k=(0, len(x))), backend=backend)[0]


def linear_attention(plan, group, x, backend):
    return mcp.cp_linear_attention(x, x, x, plan, group, document_lengths=LENGTHS)


def convolution(plan, group, x, backend):
    rows = x.flatten(1)
    weight = torch.ones(rows.shape[1], 4, requires_grad=True)
    return mcp.cp_causal_conv1d(rows, weight, plan, group, document_lengths=LENGTHS)


CALLS = {
    "cp_attention": (attention, "reference"),
    "cp_attention, cpu": (attention, "cpu"),
    "attend, emulated": (attention_on_one_device, "emulated"),
    "linear attention": (linear_attention, None),
    "convolution": (convolution, None),
}


def infer_then_train(rank, world_size, plan, call, backend):
    """The result under inference mode, and then with a gradient."""
    torch.manual_seed(rank)
    dtype, head_dim = (torch.float16, 64) if backend == "emulated" else (torch.float32, 8)
    x = torch.randn(plan.tokens_per_rank, 2, head_dim).to(dtype)
    with torch.inference_mode():
        inferred = call(plan, dist.group.WORLD, x, backend)
    leaf = x.clone().requires_grad_()
    trained = call(plan, dist.group.WORLD, leaf, backend)
    trained.float().square().sum().backward()
    return torch.equal(inferred, trained), bool(torch.isfinite(leaf.grad).all())


@pytest.mark.parametrize("name", CALLS)
def test_training_goes_on_after_inference(name):
    call, backend = CALLS[name]
    plan = mcp.make_plan(masks.documents(LENGTHS), 2)
    for answer in run_on_ranks(2, infer_then_train, plan, call, backend):
        assert answer == (True, True)
