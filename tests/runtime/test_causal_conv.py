"""The short causal convolution on ranks against its definition, token by token: outputs and all gradients."""

import functools

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from tests.closeness import assert_within_budget
from tests.oracles.linear_attention import convolution, recurrence
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows, restore
from tests.runtime.test_linear_attention import LENGTHS, outputs_and_gradients, plan_of

CHANNELS = 6


@functools.cache
def inputs_of(num_tokens, num_taps, dtype=torch.float32):
    """Returns x, weight, bias and dy in global order."""
    generator = torch.Generator().manual_seed(num_taps)
    shapes = ((num_tokens, CHANNELS), (CHANNELS, num_taps), (CHANNELS,), (num_tokens, CHANNELS))
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


@functools.cache
def by_definition(lengths, inputs, options, dtype):
    has_bias, activation = options
    x, weight, bias, dy = (tensor.to(dtype) for tensor in inputs)
    return outputs_and_gradients(
        lambda x, w, b: convolution(x, w, lengths, b, activation == "silu"),
        (x, weight, bias if has_bias else None),
        dy,
    )


@functools.cache
def sizes_of_terms(lengths, inputs, options):
    """Returns the largest sum of absolute terms of y and of each gradient: they cancel, their rounding does not."""
    has_bias, activation = options
    x, weight, bias, dy = (tensor.double().abs() for tensor in inputs)
    leaves = [x, weight, bias if has_bias else None]
    y, *_ = by_definition(lengths, inputs, (has_bias, None), torch.float64)
    share = torch.sigmoid(y)
    slope = share * (1 + y.abs() * (1 - share)) if activation else 1.0
    sums = outputs_and_gradients(lambda x, w, b: convolution(x, w, lengths, b), leaves, dy * slope)
    return [total.max().item() for total in sums]


def convolve_on_ranks(rank, world_size, cases):
    """Returns this rank's y and gradients of x, weight and bias, for each case."""
    results = []
    for plan, lengths, (x, weight, bias, dy), (has_bias, activation) in cases:

        def convolve(x, w, b, plan=plan, lengths=lengths, activation=activation):
            options = {"document_lengths": lengths, "bias": b, "activation": activation}
            return mcp.cp_causal_conv1d(x, w, plan, dist.group.WORLD, **options)

        local = (local_rows(x, plan, rank), weight, bias if has_bias else None)
        results.append(outputs_and_gradients(convolve, local, local_rows(dy, plan, rank)))
    return results


def check_against_definition(cp_size, cases):
    per_rank = run_on_ranks(cp_size, convolve_on_ranks, cases)
    for index, (plan, lengths, inputs, options) in enumerate(cases):
        exact = by_definition(lengths, inputs, options, torch.float64)
        plain = by_definition(lengths, inputs, options, inputs[0].dtype)
        for i, name in enumerate(["y", "dx", "dweight", "dbias"][: len(exact)]):
            parts = [results[index][i] for results in per_rank]
            shares = torch.stack([part.double() for part in parts]).sum(0)
            actual = restore(parts, plan) if i < 2 else shares
            label = f"{name} of {lengths} under {plan.planner} on {cp_size} ranks, {options}"
            size = sizes_of_terms(lengths, inputs, options)[i]
            assert_within_budget(actual, plain[i], exact[i], label, size=size)


# On eight ranks seven taps reach over whole shards.
@pytest.mark.parametrize(
    ("cp_size", "num_taps"), [(1, 4), (2, 1), (2, 7), (3, 2), (3, 7), (8, 1), (8, 4), (8, 7)]
)
def test_convolution_on_ranks_equals_its_definition(cp_size, num_taps):
    options = ((False, None), (True, "silu"))
    cases = [
        (plan_of(lengths, cp_size, planner), lengths, inputs_of(sum(lengths), num_taps), option)
        for lengths in LENGTHS.values()
        for planner in ("zigzag", "contiguous", "auto", "chunks", "random")
        for option in options
        if planner in ("zigzag", "auto") or sum(lengths) < 100
    ]
    check_against_definition(cp_size, cases)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_the_error_in_every_dtype_keeps_one_budget(dtype):
    lengths = LENGTHS["odd documents"]
    inputs = inputs_of(sum(lengths), 4, dtype)
    plans = [plan_of(lengths, 3, planner) for planner in ("zigzag", "random")]
    check_against_definition(3, [(plan, lengths, inputs, (True, "silu")) for plan in plans])


def test_convolutions_repeat_bit_for_bit():
    lengths = LENGTHS["one long, many short"]
    inputs = inputs_of(sum(lengths), 4, torch.bfloat16)
    cases = [(plan_of(lengths, 3, "random"), lengths, inputs, (True, "silu"))]
    first, second = (run_on_ranks(3, convolve_on_ranks, cases) for _ in range(2))
    for (one,), (two,) in zip(first, second, strict=True):
        assert all(map(torch.equal, one, two))


def test_padding_rows_of_the_convolution_are_zero():
    lengths = LENGTHS["odd documents"]
    plan = plan_of(lengths, 8, "contiguous")
    inputs = inputs_of(sum(lengths), 4)
    results = run_on_ranks(8, convolve_on_ranks, [(plan, lengths, inputs, (True, "silu"))])
    padding = torch.from_numpy(plan.global_from_local >= plan.num_tokens)
    assert padding.any()
    for ((y, dx, *_),), is_padding in zip(results, padding, strict=True):
        assert not y[is_padding].any()
        assert not dx[is_padding].any()


def layer_on_ranks(rank, world_size, plan, lengths, tensors, dout):
    """Returns out and gradients of three convolutions and the gated delta rule behind them."""

    def layer(q, k, v, g, beta, weight):
        options = {"plan": plan, "group": dist.group.WORLD, "document_lengths": lengths}
        q, k, v = (
            mcp.cp_causal_conv1d(x.flatten(1), weight, activation="silu", **options).view_as(x)
            for x in (q, k, v)
        )
        return mcp.cp_linear_attention(q, k, v, g=g, beta=beta, **options)

    *rows, weight = tensors
    local = [*(local_rows(x, plan, rank) for x in rows), weight]
    return outputs_and_gradients(layer, local, local_rows(dout, plan, rank))


@pytest.mark.parametrize(
    ("lengths", "planner"), [((29, 1, 12), "zigzag"), ((5, 1), "contiguous"), ((42,), "random")]
)
def test_a_layer_of_convolutions_and_linear_attention_equals_its_definition(lengths, planner):
    """Four exchanges in one graph: every rank must reverse them in one order, also one without tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (sum(lengths), 2, 4)
    random = {
        "generator": generator,
        "dtype": torch.float64,
    }  # so few numbers are no sample of fp32
    *rows, dout = (torch.randn(*shape, **random) / 2 for _ in range(4))
    g, beta = (torch.rand(shape[:2], **random) for _ in range(2))
    tensors = (*rows, -g, beta, torch.randn(8, 4, **random))

    def layer(q, k, v, g, beta, weight):
        q, k, v = (
            convolution(x.flatten(1), weight, lengths, None, True).view_as(x) for x in (q, k, v)
        )
        return recurrence(q, k, v, lengths, g, beta)

    exact = outputs_and_gradients(layer, tensors, dout)
    plan = plan_of(lengths, 8, planner)
    per_rank = run_on_ranks(8, layer_on_ranks, plan, lengths, tensors, dout)
    for i, expected in enumerate(exact):
        parts = [results[i] for results in per_rank]
        is_share = i == len(exact) - 1
        actual = torch.stack(parts).double().sum(0) if is_share else restore(parts, plan)
        assert_within_budget(actual, expected, expected, f"tensor {i} of {lengths} under {planner}")


def messages_of_bad_calls(rank, world_size, plan, lengths):
    x, weight = torch.zeros(plan.tokens_per_rank, CHANNELS), torch.zeros(CHANNELS, 4)
    good = {"x": x, "weight": weight, "document_lengths": lengths}
    changes = {
        "lengths": {"document_lengths": [1]},
        "rows": {"x": x[1:]},
        "channels": {"weight": weight[1:]},
        "taps": {"weight": weight[:, :0]},
        "middle": {"weight": weight[:, None]},
        "bias": {"bias": weight},
        "dtype": {"bias": torch.zeros(CHANNELS, dtype=torch.long)},
        "activation": {"activation": "gelu"},
    }
    messages = {}
    for name, change in changes.items():
        with pytest.raises(ValueError) as caught:
            mcp.cp_causal_conv1d(plan=plan, group=dist.group.WORLD, **{**good, **change})
        messages[name] = str(caught.value)
    return messages


def test_bad_calls_raise_the_same_line_on_every_rank_and_rank_count():
    lengths = LENGTHS["odd documents"]
    first, second = run_on_ranks(
        2, messages_of_bad_calls, plan_of(lengths, 2, "contiguous"), lengths
    )
    (alone,) = run_on_ranks(1, messages_of_bad_calls, plan_of(lengths, 1, "contiguous"), lengths)
    assert first == second
    del first["rows"], alone["rows"]  # it names the rows of a rank
    assert first == alone
    assert "'gelu' must be None or 'silu'" in first["activation"]
