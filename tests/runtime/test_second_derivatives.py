"""A gradient of a gradient: refused where it goes through attention, right through everything else."""

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.attn import attend
from tests.oracles.linear_attention import convolution
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows, restore

LENGTHS = (20, 17)
REFUSED = "has no gradient itself: no second derivative through attention"


def penalty(output, x):
    """A loss with a gradient penalty, of which attention is one path among two."""
    (first,) = torch.autograd.grad(output.square().sum() + x.pow(3).sum(), x, create_graph=True)
    return first.square().sum()


def refusal_of(make):
    """How the second derivative is refused, by both of torch's ways to ask for it; the first is allowed."""
    answers = []
    for ask in (lambda loss, x: torch.autograd.grad(loss, x), lambda loss, x: loss.backward()):
        x = torch.randn(37, 2, 8, requires_grad=True)
        loss = penalty(make(x), x)
        assert torch.isfinite(loss)
        try:
            ask(loss, x)
        except NotImplementedError as refusal:
            answers.append(str(refusal))
    return answers


@pytest.mark.parametrize("place", ["q", "k", "v", "sink"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "emulated"])
def test_attend_refuses(backend, place):
    def make(x):
        inputs = {name: torch.randn(37, 2, 8) for name in "qkv"}
        sink = x.mean((0, 2)) if place == "sink" else None
        inputs.update({} if place == "sink" else {place: x})
        if backend == "emulated":
            inputs = {
                name: torch.nn.functional.pad(t, (0, 56)).half() for name, t in inputs.items()
            }
        return attend(*inputs.values(), masks.causal(37), sink=sink, backend=backend)[0].float()

    answers = refusal_of(make)
    assert len(answers) == 2
    assert all(REFUSED in answer for answer in answers)


@pytest.mark.parametrize("place", ["around attention", "around all"])
def test_attention_inside_a_checkpoint_refuses_too(place):
    plan = mcp.make_plan(masks.causal(37), 1)

    def attention(x):
        return mcp.cp_attention(x, x, x, plan, None)[0]

    def make(x):
        if place == "around attention":
            return mcp.checkpoint(attention, x.sin())
        return mcp.checkpoint(lambda y: attention(y.sin()).cos(), x)

    answers = refusal_of(make)
    assert len(answers) == 2
    assert all(REFUSED in answer for answer in answers)


def refusals_of_cp_attention(rank, world_size, plan):
    group = dist.group.WORLD

    def through_attention(x):
        rows = mcp.dispatch(x, plan, group)
        return mcp.undispatch(mcp.cp_attention(rows, rows, rows, plan, group)[0], plan, group)

    torch.manual_seed(0)
    return refusal_of(through_attention)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_cp_attention_refuses_on_every_rank(cp_size):
    plan = mcp.make_plan(masks.causal(37), cp_size)
    for answers in run_on_ranks(cp_size, refusals_of_cp_attention, plan):
        assert len(answers) == 2
        assert all("cp_attention" in answer and REFUSED in answer for answer in answers)


def penalized_convolution(rank, world_size, plan, x, weight):
    group = dist.group.WORLD
    local = local_rows(x, plan, rank).requires_grad_()
    y = mcp.cp_causal_conv1d(local, weight, plan, group, document_lengths=LENGTHS)
    return torch.autograd.grad(penalty(y, local), local)[0]


@pytest.mark.parametrize("cp_size", [1, 3])
def test_the_causal_convolution_has_a_second_derivative(cp_size):
    plan = mcp.make_plan(masks.documents(LENGTHS), cp_size)
    x, weight = torch.randn(37, 6), torch.randn(6, 4)
    found = restore(run_on_ranks(cp_size, penalized_convolution, plan, x, weight), plan)
    leaf = x.double().requires_grad_()
    loss = penalty(convolution(leaf, weight.double(), LENGTHS), leaf)
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-4, atol=1e-4 * expected.abs().max()
    )
