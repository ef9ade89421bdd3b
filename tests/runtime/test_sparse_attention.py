"""Sparse attention on ranks against its definition in float64: outputs, divergences and all gradients."""

import dataclasses
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.errors import PlanMismatchError
from megatron_cp.plan import make_plan
from megatron_cp.runtime import sparse_attention
from tests.ranks import run_on_ranks
from tests.runtime.handmade import random_plan

HEADS, WIDTH, VALUES, INDEX_HEADS, INDEX_WIDTH = 3, 10, 6, 2, 4
TOPK, SCALE = 5, 0.3
NAMES = ("q", "latent", "index_q", "index_k", "index_weights")
MASKS = {
    "odd documents": lambda: masks.documents([5, 0, 13, 1, 1, 17], within="causal"),
    "one token": lambda: masks.causal(1),
    "fewer tokens than ranks": lambda: masks.documents([3, 2], within="causal"),
    "window and sinks": lambda: masks.sliding_window(37, 9, 0, num_sink=2),
    "prefix": lambda: masks.prefix_lm(31, 7),
    "dilated": lambda: masks.dilated(29, 12, 0, 3),
    "some see nothing": lambda: (
        masks.from_slices(40, 40, [(0, 40, 0, 40, None, 0)])
        & masks.from_slices(40, 40, [(5, 20, 0, 20, None, None), (30, 40, 0, 40, None, None)])
    ),
}


@functools.cache
def plan_of(name, cp_size, planner):
    mask = MASKS[name]()
    if planner == "random":
        return random_plan(mask, cp_size, seed=3)
    return make_plan(mask, cp_size, mcp.CPConfig(planner=planner))


@functools.cache
def inputs_of(num_tokens, dtype=torch.float64):
    """Returns the five inputs, and gradients of out and of the divergence, of all tokens."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = {
        "q": (HEADS, WIDTH),
        "latent": (WIDTH,),
        "index_q": (INDEX_HEADS, INDEX_WIDTH),
        "index_k": (INDEX_WIDTH,),
        "index_weights": (INDEX_HEADS,),
        "d_out": (HEADS, VALUES),
        "d_divergence": (),
    }
    drawn = (torch.randn(num_tokens, *shape, generator=generator) for shape in shapes.values())
    *inputs, d_out, d_divergence = (x.to(dtype) for x in drawn)
    return tuple(inputs), d_out, d_divergence


def by_definition(inputs, visible, loss):
    """Returns out and divergence of all tokens, from whole matrices of pairs."""
    q, latent, index_q, index_k, weights = inputs
    products = torch.einsum("tji,si->tjs", index_q, index_k).clamp(min=0)
    scores = (products * weights[:, :, None]).sum(1).masked_fill(~visible, -math.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :TOPK]
    picked = torch.zeros_like(visible).scatter(1, order, True) & visible
    logits = torch.einsum("tnl,sl->nts", q, latent) * SCALE
    attention = logits.masked_fill(~picked, -math.inf).softmax(-1).masked_fill(~picked, 0)
    out = torch.einsum("nts,sv->tnv", attention, latent[:, :VALUES])
    if loss is None:
        return out, out.new_zeros(len(out))
    seen = picked if loss == "picked" else visible
    logits = logits.detach()
    target = logits.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0).mean(0)
    guess = scores.masked_fill(~seen, -math.inf).log_softmax(-1).masked_fill(~seen, 0)
    return out, (torch.special.xlogy(target, target) - target * guess).sum(1)


def expected(inputs, visible, d_out, d_divergence, loss):
    inputs = [x.double().clone().requires_grad_() for x in inputs]
    out, divergence = by_definition(inputs, visible, loss)
    ((out * d_out).sum() + (divergence * d_divergence).sum()).backward()
    found = (x.new_zeros(x.shape) if x.grad is None else x.grad for x in inputs)
    return [out.detach(), divergence.detach(), *found]


def run(rank, world_size, name, planner, loss, most_bytes=None, dtype=torch.float64):
    """The whole results, put together on this rank: out, divergence, gradients of all inputs."""
    plan = plan_of(name, world_size, planner)
    group = dist.group.WORLD if world_size > 1 else None
    inputs, *upstream = inputs_of(plan.num_tokens, dtype)
    local = [mcp.dispatch(x, plan, group).requires_grad_() for x in inputs]
    before = sparse_attention.MOST_BYTES
    sparse_attention.MOST_BYTES = most_bytes or before
    try:
        results = mcp.cp_sparse_attention(
            *local, plan, group, topk=TOPK, value_dim=VALUES, softmax_scale=SCALE, index_loss=loss
        )[:2]
        given = [mcp.dispatch(x, plan, group) for x in upstream]
        torch.autograd.backward(
            results, [g.to(r.dtype) for g, r in zip(given, results, strict=True)]
        )
    finally:
        sparse_attention.MOST_BYTES = before
    found = [*(x.detach() for x in results), *(x.grad for x in local)]
    return [mcp.undispatch(x, plan, group) for x in found]


def assert_is(found, wanted, tolerance=1e-13):
    for name, ours, exact in zip(("out", "divergence", *NAMES), found, wanted, strict=True):
        assert ours.shape == exact.shape, name
        assert (ours - exact).abs().max() <= tolerance * max(1, exact.abs().max()), name


def wanted_of(name, loss):
    mask = MASKS[name]()
    visible = torch.from_numpy(mask.to_dense())
    inputs, d_out, d_divergence = inputs_of(mask.num_queries)
    return expected(inputs, visible, d_out, d_divergence, loss)


@pytest.mark.parametrize("loss", [None, "picked", "visible"])
@pytest.mark.parametrize("planner", ["auto", "zigzag", "random"])
@pytest.mark.parametrize("name", MASKS)
def test_sparse_attention_is_its_definition(name, planner, loss):
    wanted = wanted_of(name, loss)
    assert loss is None or wanted[4].abs().max() > 0 or name == "one token"
    for found in run_on_ranks(3, run, name, planner, loss, timeout=60):
        assert_is(found, wanted)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loss", ["picked", "visible"])
def test_chunks_of_a_few_pairs_give_the_same(ranks, loss):
    name = "odd documents"
    for found in run_on_ranks(ranks, run, name, "auto", loss, 1000, timeout=60):
        assert_is(found, wanted_of(name, loss))


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if torch.is_tensor(x):
                self.num_bytes = max(self.num_bytes, x.numel() * x.element_size())
        return result


@pytest.mark.parametrize("loss", ["picked", "visible"])
def test_neither_scores_nor_picked_rows_exceed_their_bytes(monkeypatch, loss):
    monkeypatch.setattr(sparse_attention, "MOST_BYTES", 1 << 20)
    tokens, width = 512, 64  # picked rows of all tokens at once: 8 MB
    plan = make_plan(masks.causal(tokens), 1, mcp.CPConfig())
    shapes = [(2, width), (width,), (1, 4), (4,), (1,)]
    inputs = [torch.randn(tokens, *shape).requires_grad_() for shape in shapes]
    with Largest() as largest:
        results = mcp.cp_sparse_attention(
            *inputs, plan, None, topk=64, value_dim=32, index_loss=loss
        )
        torch.autograd.backward(results[:2], [torch.ones_like(x) for x in results[:2]])
    assert largest.num_bytes <= 1 << 20


def equal_scores(rank, world_size):
    """Every key has the same score: the first ones are picked, wherever they lie."""
    plan = plan_of("odd documents", world_size, "zigzag")
    group = dist.group.WORLD if world_size > 1 else None
    inputs, *_ = inputs_of(plan.num_tokens)
    inputs = [*inputs[:2], *(torch.zeros_like(x) for x in inputs[2:])]
    local = [mcp.dispatch(x, plan, group) for x in inputs]
    out, *_ = mcp.cp_sparse_attention(
        *local, plan, group, topk=TOPK, value_dim=VALUES, softmax_scale=SCALE
    )
    return mcp.undispatch(out, plan, group), by_definition(
        inputs, torch.from_numpy(plan.mask.to_dense()), None
    )[0]


def test_of_equal_scores_the_first_keys_are_picked():
    for ranks in (1, 3):
        for found, wanted in run_on_ranks(ranks, equal_scores, timeout=60):
            assert (found - wanted).abs().max() <= 1e-13


def run_with_poison(rank, world_size):
    """Tokens of the second document are no numbers."""
    plan = plan_of("odd documents", world_size, "auto")
    inputs, *_ = inputs_of(plan.num_tokens)
    inputs = [x.clone() for x in inputs]
    for x in inputs:
        x[5:18] = math.nan
    local = [mcp.dispatch(x, plan, dist.group.WORLD) for x in inputs]
    out, divergence, _ = mcp.cp_sparse_attention(
        *local, plan, dist.group.WORLD, topk=TOPK, value_dim=VALUES, index_loss="visible"
    )
    return [mcp.undispatch(x, plan, dist.group.WORLD) for x in (out, divergence)]


def test_what_is_no_number_stays_in_its_document_and_shows():
    for out, divergence in run_on_ranks(2, run_with_poison, timeout=60):
        hit = torch.zeros(37, dtype=torch.bool)
        hit[5:18] = True
        assert out[hit].isnan().all() and not out[~hit].isnan().any()
        assert not divergence[~hit].isnan().any()


def test_16_bits_are_near_and_gradients_travel_in_fp32():
    name = "odd documents"
    wanted = wanted_of(name, "visible")
    for found in run_on_ranks(3, run, name, "zigzag", "visible", None, torch.float32, timeout=60):
        assert_is(found, wanted, tolerance=3e-6)


def run_with_taken_picks(rank, world_size, name):
    """Out and gradients of q and latent where the index of another call has picked, with other queries and rows."""
    plan = plan_of(name, world_size, "random")
    group = dist.group.WORLD if world_size > 1 else None
    (q, latent, *index), d_out, _ = inputs_of(plan.num_tokens)
    sizes = {"topk": TOPK, "value_dim": VALUES, "softmax_scale": SCALE}
    other = [mcp.dispatch(x, plan, group) for x in (q.flip(0), latent.flip(0), *index)]
    picked = mcp.cp_sparse_attention(*other, plan, group, **sizes).picked
    local = [mcp.dispatch(x, plan, group).requires_grad_() for x in (q, latent)]
    out, divergence, again = mcp.cp_sparse_attention(
        *local, None, None, None, plan, group, picked=picked, **sizes
    )
    out.backward(mcp.dispatch(d_out, plan, group))
    assert again is picked
    assert not divergence.any()
    return [mcp.undispatch(x, plan, group) for x in (out.detach(), *(x.grad for x in local))]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["odd documents", "fewer tokens than ranks", "some see nothing"])
def test_keys_that_another_call_has_picked_are_attended_to(name, ranks):
    out, _, d_q, d_latent, *_ = wanted_of(name, None)
    for found in run_on_ranks(ranks, run_with_taken_picks, name, timeout=60):
        for ours, exact in zip(found, (out, d_q, d_latent), strict=True):
            assert (ours - exact).abs().max() <= 1e-13 * max(1, exact.abs().max())


def test_picks_of_another_call_are_refused():
    plan, other = (plan_of(name, 1, "auto") for name in ("odd documents", "prefix"))
    inputs, *_ = inputs_of(plan.num_tokens)
    picked = mcp.cp_sparse_attention(*inputs, plan, None, topk=TOPK, value_dim=VALUES).picked
    none = dict.fromkeys(NAMES[2:])
    good = {"picked": picked, "topk": TOPK, "value_dim": VALUES}
    rows = dict(zip(NAMES[:2], inputs[:2], strict=True))
    for change, words in (
        ({"topk": 4}, "and topk=5, this call of plan"),
        ({"index_loss": "picked"}, "pass None for index_q"),
        ({"index_k": inputs[3]}, "pass None for index_q"),
        ({"picked": dataclasses.replace(picked, parts=[])}, "its call did not end"),
    ):
        with pytest.raises(ValueError, match=words):
            mcp.cp_sparse_attention(plan=plan, group=None, **{**rows, **none, **good, **change})
    rows = {name: x[: other.num_tokens] for name, x in rows.items()}
    with pytest.raises(ValueError, match="give what a call like it returned"):
        mcp.cp_sparse_attention(plan=other, group=None, **rows, **none, **good)


def differing(rank, world_size, what):
    plan = plan_of("odd documents", world_size, "auto")
    inputs, *_ = inputs_of(plan.num_tokens)
    local = [mcp.dispatch(x, plan, dist.group.WORLD) for x in inputs]
    settings = {"topk": TOPK, "value_dim": VALUES}
    if rank:
        settings |= what
    mcp.cp_sparse_attention(*local, plan, dist.group.WORLD, **settings)


@pytest.mark.parametrize(
    "what", [{"topk": 4}, {"index_loss": "picked"}, {"softmax_scale": 0.1}], ids=str
)
def test_ranks_that_ask_for_different_things_are_told(what):
    answers = run_on_ranks(2, differing, what, timeout=60, return_exceptions=True)
    assert all(isinstance(answer, PlanMismatchError) for answer in answers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"q": torch.zeros(37, HEADS, WIDTH + 1, dtype=torch.float64)},
            "rows of latent are 10 wide, heads of q 11",
        ),
        ({"latent": torch.zeros(36, WIDTH, dtype=torch.float64)}, "the 37 rows"),
        ({"index_k": torch.zeros(37, 2, 4, dtype=torch.float64)}, "it must have 2 dimensions"),
        ({"index_weights": torch.zeros(37, 1, dtype=torch.float64)}, "one weight a head"),
        ({"q": torch.zeros(37, HEADS, WIDTH)}, "must be equal; cast"),
        ({"topk": 0}, "topk=0 must be a positive integer"),
        ({"value_dim": 11}, "at most the 10 columns"),
        ({"softmax_scale": math.inf}, "must be finite"),
        ({"index_loss": "all"}, "must be 'picked', 'visible' or None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused(change, words):
    plan = plan_of("odd documents", 1, "auto")
    inputs, *_ = inputs_of(plan.num_tokens)
    given = {**dict(zip(NAMES, inputs, strict=True)), "topk": TOPK, "value_dim": VALUES, **change}
    with pytest.raises(ValueError, match=words):
        mcp.cp_sparse_attention(plan=plan, group=None, **given)
