"""Linear attention on ranks against the recurrence, token by token: outputs and all gradients."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.attn.linear import decayed_products
from megatron_cp.errors import PlanMismatchError
from megatron_cp.plan import make_plan
from megatron_cp.plan.segments import count_segments
from tests.closeness import assert_within_budget
from tests.oracles.linear_attention import recurrence
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows, restore
from tests.runtime.handmade import random_plan

HEADS, KEYS, VALUES = 2, 8, 5
NAMES = ("q", "k", "v", "g", "beta")
# With the delta rule chunks are solved, tokens are not: of 200 draws (131, 3 and 70 tokens, 2 ranks) the largest error
# was up to 3.9 times that of the recurrence, beyond 2 in one of 300 results; the norm up to 1.41 times (2026-11-26).
MOST_WITH_BETA = 5.0
LENGTHS = {
    "odd documents": (5, 0, 13, 1, 1, 17),
    "longer than chunks and ranks": (131, 3, 70),
    "one long, many short": (64, *[1] * 9),
    "fewer tokens than ranks": (3, 2),
    "one token": (1,),
}
GATES = {
    "plain": (None, False),
    "decay": ("head", False),
    "decay by channel": ("channel", False),
    "delta rule": (None, True),
    "gated delta rule": ("head", True),
    "gated by channel, delta rule": ("channel", True),
}


@functools.cache
def plan_of(lengths, cp_size, planner):
    mask = masks.documents(list(lengths), within="causal")
    if planner == "random":
        return random_plan(mask, cp_size, seed=3)
    if planner == "chunks":
        return make_plan(mask, cp_size, mcp.CPConfig(planner="stripe", chunk_size=2))
    return make_plan(mask, cp_size, mcp.CPConfig(planner=planner))


@functools.cache
def inputs_of(num_tokens, gates, dtype=torch.float32, widths=(KEYS, VALUES)):
    """Returns q, k, v, g, beta (None where the gates have none) and dout in global order."""
    decays, has_beta = GATES[gates]
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values = widths
    q, k, v = (randn(num_tokens, HEADS, width) for width in (keys, keys, values))
    k = k / k.norm(dim=-1, keepdim=True)
    shape = (num_tokens, HEADS) if decays == "head" else (num_tokens, HEADS, keys)
    g = torch.nn.functional.logsigmoid(randn(*shape) + 2) if decays else None
    beta = torch.sigmoid(randn(num_tokens, HEADS)) if has_beta else None
    tensors = (q, k, v, g, beta, randn(num_tokens, HEADS, values))
    return tuple(None if x is None else x.to(dtype) for x in tensors)


def outputs_and_gradients(attend, tensors, dout):
    """Returns [out, then the gradient of each tensor that there is]."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x is not None)]


@functools.cache
def by_recurrence(lengths, inputs, dtype):
    """Returns out and gradients of the recurrence in `dtype`; `inputs` by identity."""
    *tensors, dout = (None if x is None else x.to(dtype) for x in inputs)
    return outputs_and_gradients(
        lambda q, k, v, g, beta: recurrence(q, k, v, lengths, g, beta), tensors, dout
    )


def attend_on_ranks(rank, world_size, cases):
    """Returns this rank's out and gradients, for each (plan, lengths, inputs)."""
    results = []
    for plan, lengths, (*tensors, dout) in cases:
        local = [None if x is None else local_rows(x, plan, rank) for x in tensors]

        def attend(q, k, v, g, beta, plan=plan, lengths=lengths):
            return mcp.cp_linear_attention(
                q, k, v, plan, dist.group.WORLD, document_lengths=lengths, g=g, beta=beta
            )

        results.append(outputs_and_gradients(attend, local, local_rows(dout, plan, rank)))
    return results


def check_against_recurrence(cp_size, cases):
    per_rank = run_on_ranks(cp_size, attend_on_ranks, cases)
    for index, (plan, lengths, inputs) in enumerate(cases):
        exact = by_recurrence(lengths, inputs, torch.float64)
        plain = by_recurrence(lengths, inputs, inputs[0].dtype)
        names = [f"d{n}" for n, x in zip(NAMES, inputs, strict=False) if x is not None]
        for i, name in enumerate(["out", *names]):
            actual = restore([results[index][i] for results in per_rank], plan)
            label = f"{name} of documents {lengths} under {plan.planner} on {cp_size} ranks"
            most = 2.0 if inputs[4] is None else MOST_WITH_BETA
            assert_within_budget(actual, plain[i], exact[i], label, most=most)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_linear_attention_on_ranks_equals_the_recurrence(cp_size, gates):
    cases = [
        (plan_of(lengths, cp_size, planner), lengths, inputs_of(sum(lengths), gates))
        for lengths in LENGTHS.values()
        for planner in ("zigzag", "contiguous", "auto", "chunks", "random")
        if planner in ("zigzag", "auto") or sum(lengths) < 100
    ]
    check_against_recurrence(cp_size, cases)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("cp_size", [1, 3])
def test_the_error_in_every_dtype_keeps_one_budget(cp_size, dtype):
    lengths = LENGTHS["longer than chunks and ranks"]
    plan = plan_of(lengths, cp_size, "zigzag")
    inputs = [inputs_of(sum(lengths), gates, dtype) for gates in GATES]
    check_against_recurrence(cp_size, [(plan, lengths, x) for x in inputs])


def test_wide_heads_and_long_chunks_equal_the_recurrence():
    lengths = (150, 50)
    inputs = [inputs_of(200, gates, widths=(64, 32)) for gates in GATES]
    check_against_recurrence(2, [(plan_of(lengths, 2, "zigzag"), lengths, x) for x in inputs])


@pytest.mark.parametrize("size", [1, 2, 16])
def test_decayed_products_do_not_overflow_under_the_strongest_decay(size):
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randn(2, 3, size, 4, generator=generator)
    g = -200 * torch.rand(3, size, 4, generator=generator) ** 4
    for decay in (g, g[..., :1]):
        exact = torch.zeros(3, size, size, dtype=torch.float64)
        for i in range(size):
            for j in range(i + 1):
                left = decay[:, j + 1 : i + 1].double().sum(1).exp()
                exact[:, i, j] = (x[:, i].double() * y[:, j].double() * left).sum(-1)
        actual = decayed_products(x, y, decay)
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(actual.triu(1), torch.zeros_like(actual))


def attend_with_spoiled_padding(rank, world_size, plan, lengths, inputs):
    """Returns out and gradients where padding rows hold NaN, and which rows are padding."""
    padding = torch.from_numpy(plan.global_from_local[rank] >= plan.num_tokens)
    *local, dout = (local_rows(x, plan, rank) for x in inputs)
    for x in (*local, dout):
        x[padding] = torch.nan

    def attend(q, k, v, g, beta):
        return mcp.cp_linear_attention(
            q, k, v, plan, dist.group.WORLD, document_lengths=lengths, g=g, beta=beta
        )

    return outputs_and_gradients(attend, local, dout), padding


def test_padding_rows_give_zeros_and_influence_nothing():
    lengths = LENGTHS["odd documents"]
    plan = plan_of(lengths, 3, "zigzag")
    inputs = inputs_of(sum(lengths), "gated delta rule")
    clean = run_on_ranks(3, attend_on_ranks, [(plan, lengths, inputs)])
    spoiled = run_on_ranks(3, attend_with_spoiled_padding, plan, lengths, inputs)
    assert any(padding.any() for _, padding in spoiled)
    for (expected,), (results, padding) in zip(clean, spoiled, strict=True):
        for x, y in zip(expected, results, strict=True):
            assert torch.equal(x, y)
            assert not y[padding].any()


@pytest.mark.parametrize("gates", ["decay", "gated delta rule"])
def test_results_and_gradients_repeat_bit_for_bit(gates):
    lengths = LENGTHS["longer than chunks and ranks"]
    cases = [
        (plan_of(lengths, 3, planner), lengths, inputs_of(sum(lengths), gates))
        for planner in ("zigzag", "chunks")
    ]
    first, second = (run_on_ranks(3, attend_on_ranks, cases) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            assert all(map(torch.equal, a, b))


def gradients_of_some(rank, world_size, plan, lengths, inputs):
    """Returns, for each input alone, its gradient; then out without autograd."""
    *local, dout = (local_rows(x, plan, rank) for x in inputs)
    gradients = []
    for wanted in range(5):
        q, k, v, g, beta = (
            x.clone().requires_grad_(index == wanted) for index, x in enumerate(local)
        )
        options = {"document_lengths": lengths, "g": g, "beta": beta}
        out = mcp.cp_linear_attention(q, k, v, plan, dist.group.WORLD, **options)
        gradients += torch.autograd.grad(out, (q, k, v, g, beta)[wanted], dout)
    with torch.no_grad():
        out = mcp.cp_linear_attention(*local[:3], plan, dist.group.WORLD, document_lengths=lengths)
    return [*gradients, out]


def test_a_gradient_of_one_input_alone_is_that_of_all_together():
    """Ranks that receive nothing must take part in the way back all the same; else this hangs."""
    lengths = (70, 5)
    plan = plan_of(lengths, 3, "contiguous")
    inputs = inputs_of(75, "gated delta rule")
    together = run_on_ranks(3, attend_on_ranks, [(plan, lengths, inputs)])
    plain = (*inputs[:3], None, None, inputs[-1])
    without = run_on_ranks(3, attend_on_ranks, [(plan, lengths, plain)])
    alone = run_on_ranks(3, gradients_of_some, plan, lengths, inputs)
    for ((_, *expected),), ((out, *_),), gradients in zip(together, without, alone, strict=True):
        for a, b in zip([*expected, out], gradients, strict=True):
            assert torch.equal(a, b)


def recomputed(rank, world_size, plan, lengths, inputs):
    """Returns the gradients of two layers, kept and recomputed."""
    results = []
    for keep in (True, False):
        q, k, v, g, _, dout = (None if x is None else local_rows(x, plan, rank) for x in inputs)
        v.requires_grad_()

        def layer(v, q=q, k=k, g=g):
            group = dist.group.WORLD
            return mcp.cp_linear_attention(q, k, v, plan, group, document_lengths=lengths, g=g)

        once = layer if keep else functools.partial(mcp.checkpoint, layer)
        once(once(v)).backward(dout)
        results.append(v.grad)
    return results


def test_recomputed_layers_have_the_same_gradients():
    lengths = LENGTHS["odd documents"]
    inputs = inputs_of(sum(lengths), "decay")
    for kept, again in run_on_ranks(3, recomputed, plan_of(lengths, 3, "zigzag"), lengths, inputs):
        assert kept.abs().sum() > 0
        assert torch.equal(kept, again)


def held_without_collections(rank, world_size, plan, lengths, inputs):
    """Returns whether rows outlive a forward pass, and a recomputed layer's backward pass, until Python collects."""
    q, k, v, g, beta, dout = (local_rows(x, plan, rank) for x in inputs)
    v.requires_grad_()

    def layer(rows):
        group, more = dist.group.WORLD, {"document_lengths": lengths, "g": g, "beta": beta}
        return mcp.cp_linear_attention(q, k, rows, plan, group, **more)

    held = []
    gc.disable()
    for recomputes in (False, True):
        rows = v.sin()
        seen = StorageWeakRef(rows.untyped_storage())
        if recomputes:
            mcp.checkpoint(layer, rows).backward(dout)
        else:
            layer(rows)
        del rows
        held.append(not seen.expired())
    gc.enable()
    return held


def test_rows_are_freed_as_soon_as_nothing_wants_them():
    """The exchange of states and its node in the graph held each other: memory grew until Python looked for cycles."""
    lengths = LENGTHS["odd documents"]
    inputs = inputs_of(sum(lengths), "gated delta rule")
    plan = plan_of(lengths, 3, "zigzag")
    assert run_on_ranks(3, held_without_collections, plan, lengths, inputs) == [[False, False]] * 3


def moved_numbers(rank, world_size, plan, lengths, inputs):
    """Returns how many numbers this rank received forward, and sent and received backward."""
    moved, move = [], dist.all_to_all_single

    def counting(received, sent, *args, **options):
        moved.append((received.numel(), sent.numel()))
        return move(received, sent, *args, **options)

    dist.all_to_all_single = counting
    try:
        attend_on_ranks(rank, world_size, [(plan, lengths, inputs)])
    finally:
        dist.all_to_all_single = move
    return moved


@pytest.mark.parametrize("planner", ["zigzag", "contiguous", "chunks"])
@pytest.mark.parametrize("gates", ["decay", "delta rule"])
def test_each_pass_moves_one_map_per_counted_state_and_nothing_else(planner, gates):
    lengths = LENGTHS["longer than chunks and ranks"]
    plan = plan_of(lengths, 3, planner)
    received = count_segments(plan, lengths).received * HEADS * KEYS
    received *= VALUES + (1 if gates == "decay" else KEYS)
    inputs = inputs_of(sum(lengths), gates)
    moved = run_on_ranks(3, moved_numbers, plan, lengths, inputs)
    assert received.sum() > 0
    for rank, ((forward_in, forward_out), (backward_in, backward_out)) in enumerate(moved):
        assert forward_in == backward_out == received[rank]
        assert forward_out == backward_in


def test_whole_documents_on_ranks_move_nothing():
    lengths = (40, 40, 40)
    plan = plan_of(lengths, 3, "contiguous")
    assert not count_segments(plan, lengths).received.any()
    assert run_on_ranks(3, moved_numbers, plan, lengths, inputs_of(120, "plain")) == [[]] * 3


def messages_of_bad_calls(rank, world_size, plan, lengths):
    rows = torch.zeros(plan.tokens_per_rank, HEADS, KEYS)
    gate = torch.zeros(plan.tokens_per_rank, HEADS)
    good = {"q": rows, "k": rows, "v": rows, "document_lengths": lengths}
    changes = {
        "too many": {"document_lengths": [*lengths, 1]},
        "none": {"document_lengths": []},
        "negative": {"document_lengths": [38, -1]},
        "fractions": {"document_lengths": [30.5, 6.5]},
        "dims": {"q": rows[0]},
        "dtype": {"v": rows.double()},
        "integers": {"q": rows.long(), "k": rows.long(), "v": rows.long()},
        "beta dtype": {"beta": gate.long()},
        "scale": {"scale": float("nan")},
        "learned scale": {"scale": torch.nn.Parameter(torch.ones(()))},
        "no tensor": {"q": [[0.0]]},
        "no plan": {"plan": None},
    }
    own_rows = {
        "rows": {"q": rows[1:], "k": rows[1:], "v": rows[1:]},
        "heads": {"v": rows[:, :1]},
        "no key": {"q": rows[..., :0], "k": rows[..., :0]},
        "g": {"g": gate[:, :1]},
        "beta": {"beta": rows},
    }
    messages = []
    for calls in (changes, own_rows):
        messages.append({})
        for name, change in calls.items():
            is_type = name in ("fractions", "learned scale", "no tensor", "no plan")
            with pytest.raises(TypeError if is_type else ValueError) as caught:
                arguments = {"plan": plan, **good, **change}
                mcp.cp_linear_attention(group=dist.group.WORLD, **arguments)
            messages[-1][name] = str(caught.value)
    return messages


def test_bad_calls_raise_the_same_line_on_every_rank_and_rank_count():
    lengths = LENGTHS["odd documents"]
    answers = {
        cp_size: run_on_ranks(
            cp_size, messages_of_bad_calls, plan_of(lengths, cp_size, "zigzag"), list(lengths)
        )
        for cp_size in (1, 3)
    }
    ((alone, _),) = answers[1]
    for of_all, of_this_many in answers[3]:
        assert of_all == alone
        assert of_this_many == answers[3][0][1]
    assert "add up to 38 tokens, the plan has 37" in alone["too many"]
    assert "document_lengths[1]=-1" in alone["negative"]


def attend_with_lengths_of_ones_own(rank, world_size, plan, lengths):
    rows = torch.zeros(plan.tokens_per_rank, HEADS, KEYS)
    with pytest.raises(PlanMismatchError) as caught:
        mcp.cp_linear_attention(
            rows, rows, rows, plan, dist.group.WORLD, document_lengths=lengths[rank]
        )
    return str(caught.value)


def test_different_document_lengths_are_an_error_on_every_rank():
    plan = plan_of((20, 17), 3, "zigzag")
    lengths = [[20, 17], [20, 17], [17, 20]]
    for message in run_on_ranks(3, attend_with_lengths_of_ones_own, plan, lengths):
        assert "ranks [2] of 3" in message
