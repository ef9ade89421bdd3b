"""Linear attention by another's kernels: a stand-in of their operator, on ranks, against the recurrence."""

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.attn import linear_fla
from tests.attn.fla_on_host import chunk_gated_delta_rule, chunk_simple_gla, installed
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows, restore
from tests.runtime.test_linear_attention import (
    LENGTHS,
    NAMES,
    by_recurrence,
    inputs_of,
    outputs_and_gradients,
    plan_of,
)

CASES = [
    (lengths, planner)
    for lengths in LENGTHS.values()
    for planner in ("zigzag", "auto", "random")
    if planner != "random" or sum(lengths) < 100
]


def rounded(lengths, gates="gated delta rule"):
    """Rows in bf16, decays in fp32: q, k, v, g, beta, dout."""
    q, k, v, g, beta, dout = inputs_of(sum(lengths), gates)
    q, k, v, beta, dout = (
        None if x is None else x.to(torch.bfloat16) for x in (q, k, v, beta, dout)
    )
    return q, k, v, g, beta, dout


def attend_on_ranks(rank, world_size, cases, gates):
    """This rank's output and gradients of each (plan, lengths)."""
    results = []
    with installed():
        for plan, lengths in cases:
            *local, dout = (
                None if x is None else local_rows(x, plan, rank) for x in rounded(lengths, gates)
            )

            def attend(q, k, v, g, beta, plan=plan, lengths=lengths):
                return mcp.cp_linear_attention(
                    q, k, v, plan, dist.group.WORLD, document_lengths=lengths, g=g, beta=beta,
                    backend="fla",
                )  # fmt: skip

            results.append(outputs_and_gradients(attend, local, dout))
    return results


@pytest.mark.parametrize("gates", ["gated delta rule", "decay"])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_states_before_and_behind_runs_give_the_recurrence_on_ranks(cp_size, gates):
    cases = [(plan_of(lengths, cp_size, planner), lengths) for lengths, planner in CASES]
    per_rank = run_on_ranks(cp_size, attend_on_ranks, cases, gates)
    names = NAMES if gates == "gated delta rule" else NAMES[:-1]
    for index, (plan, lengths) in enumerate(cases):
        exact = by_recurrence(lengths, rounded(lengths, gates), torch.float64)
        for i, name in enumerate(["out", *(f"d{n}" for n in names)]):
            actual = restore([results[index][i] for results in per_rank], plan)
            # Everything but what is returned in 16 bits, and maps that travel in fp32, is float64 here.
            error, size = (actual - exact[i]).abs().max(), exact[i].abs().max()
            where = f"{name} of {lengths} under {plan.planner} on {cp_size} ranks"
            assert error <= 0.012 * size, where


def one_gradient(rank, world_size, plan, lengths, gates):
    """This rank's gradient of each input where it alone wants one."""
    found = []
    with installed():
        *given, dout = rounded(lengths, gates)
        local = [local_rows(x, plan, rank) for x in given if x is not None]
        dout = local_rows(dout, plan, rank)
        for wanted in range(len(local)):
            leaves = [x.detach().clone().requires_grad_(i == wanted) for i, x in enumerate(local)]
            q, k, v, g, beta = (*leaves, None)[:5]
            out = mcp.cp_linear_attention(
                q, k, v, plan, dist.group.WORLD, document_lengths=lengths, g=g, beta=beta,
                backend="fla",
            )  # fmt: skip
            out.backward(dout)
            found.append(leaves[wanted].grad)
    return found


@pytest.mark.parametrize("gates", ["gated delta rule", "decay"])
@pytest.mark.parametrize("planner", ["contiguous", "zigzag"])
def test_every_input_may_want_a_gradient_alone(planner, gates):
    """One rank tells nothing: whether the way back is taken must not hang on what it tells."""
    lengths = (24,)
    plan = plan_of(lengths, 2, planner)
    per_rank = run_on_ranks(2, one_gradient, plan, lengths, gates)
    exact = by_recurrence(lengths, rounded(lengths, gates), torch.float64)
    for i, name in enumerate(NAMES if gates == "gated delta rule" else NAMES[:-1]):
        actual = restore([results[i] for results in per_rank], plan)
        assert (actual - exact[1 + i]).abs().max() <= 0.012 * exact[1 + i].abs().max(), name


@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, chunk_simple_gla])
def test_an_operator_is_taken_where_it_is_right(rule):
    k, v = torch.zeros(5, 2, 8, dtype=torch.bfloat16), torch.zeros(5, 2, 5, dtype=torch.bfloat16)
    g, beta = torch.zeros(5, 2), torch.zeros(5, 2) if rule is chunk_gated_delta_rule else None
    with installed():
        assert linear_fla.why_not(k, v, g, beta) is None

    def careless(*args, **kwargs):
        """The state before a run is forgotten."""
        kwargs["initial_state"] = kwargs["initial_state"] * 0
        return rule(*args, **kwargs)

    def unwritten(*args, **kwargs):
        """Outputs are right, the states behind the runs are not numbers."""
        out, states = rule(*args, **kwargs)
        return out, states * torch.nan

    for wrong in (careless, unwritten):
        with installed(wrong), pytest.warns(UserWarning, match="flash-linear-attention is off by"):
            assert linear_fla.why_not(k, v, g, beta) == "it failed its test on this device"


def test_an_operator_that_does_not_run_is_not_taken():
    """As flash-linear-attention refuses some versions of Triton: in the backward pass, when training has begun."""
    k, gates = torch.zeros(5, 2, 8, dtype=torch.bfloat16), torch.zeros(5, 2)

    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dout):
            raise RuntimeError("upgrade\nTriton")

    def refusing(q, *args, **kwargs):
        return chunk_gated_delta_rule(Refusing.apply(q), *args, **kwargs)

    with installed(refusing):
        with pytest.warns(UserWarning, match="the plain computation is taken: RuntimeError"):
            said = linear_fla.why_not(k, k, gates, gates)
        assert said == "it does not run here: RuntimeError: upgrade Triton"
        assert linear_fla.why_not(k, k, gates, gates) == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float32}, "takes 16 bits|take 16 bits"),
        ({"g": None}, "one decay for each head"),
        ({"width": 300}, "the key dim is 300"),
        ({"installed": False}, "need a GPU"),
    ],
)
def test_a_wish_that_cannot_be_served_is_refused(change, said):
    dtype, width = change.get("dtype", torch.bfloat16), change.get("width", 8)
    plan = plan_of((5,), 1, "zigzag")
    q = torch.zeros(plan.tokens_per_rank, 2, width, dtype=dtype)
    gates = {"g": q.new_zeros(len(q), 2, dtype=torch.float32), "beta": q.new_zeros(len(q), 2)}
    gates |= {name: change[name] for name in ("g", "beta") if name in change}

    def ask(backend):
        return mcp.cp_linear_attention(
            q, q, q, plan, None, document_lengths=(5,), backend=backend, **gates
        )

    if not change.get("installed", True):
        with pytest.raises(NotImplementedError, match=said):
            ask("fla")
        return
    with installed():
        with pytest.raises(NotImplementedError, match=said):
            ask("fla")
        ask(None)
        with pytest.raises(ValueError, match="must be 'torch', 'fla' or None"):
            ask("triton")
