"""A function under `torch.compile` that calls ours: the same values and gradients, by a break of the graph."""

import pytest
import torch

import megatron_cp as mcp
from megatron_cp import mask as masks

MASK = masks.causal(64)
PLAN = mcp.make_plan(MASK, 1)


def attention(rows):
    return mcp.cp_attention(rows, rows, rows, PLAN, None)[0]


CALLS = {
    "cp_attention": attention,
    "attend": lambda rows: mcp.attend(rows, rows, rows, MASK)[0],
    "checkpoint": lambda rows: mcp.checkpoint(lambda x: attention(x.sin()) * 2, rows),
    "dispatch and undispatch": lambda rows: mcp.undispatch(mcp.dispatch(rows, PLAN, None), PLAN, None),
    "roll": lambda rows: mcp.roll(rows, PLAN, None),
    "position_ids": lambda rows: rows * mcp.position_ids(PLAN, 0)[:, None, None],
    "linear attention": lambda rows: mcp.cp_linear_attention(
        rows, rows, rows, PLAN, None, document_lengths=[64]
    ),
    "convolution": lambda rows: mcp.cp_causal_conv1d(
        rows.flatten(1), torch.ones(16, 4), PLAN, None, document_lengths=[64]
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_around_a_call_gives_what_eager_code_gives(name):
    def layer(x):
        return CALLS[name]((x * 0.5).view(64, 2, 8)).cos().sum()

    torch.compiler.reset()
    x = torch.randn(64, 16)
    found = []
    for function in (layer, torch.compile(layer, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        loss = function(leaf)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[1], found[0])
