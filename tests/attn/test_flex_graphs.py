"""How many graphs the flex backend compiles over a run, counted by Dynamo; what it does instead of running uncompiled.

The graphs run on CPU tensors through AOTAutograd without a code generator: forward and backward pass are
torch's dense formulas, so that results are compared, too. Triton's kernels are not built here.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as flex_attention_module

from megatron_cp import mask as masks
from megatron_cp.attn import AttendOptions, attend, attend_backward, attend_forward, device_arrays
from megatron_cp.attn.dropout import Dropout, head_seeds, key_words, row_words
from megatron_cp.attn.flex import backend, kernel, tables
from megatron_cp.plan import make_plan
from tests.attn.formula import assert_attention, random_case
from tests.oracles.dropout import dropout_factors
from tests.plan.cases import config, packed

MAX_GRAPHS = 4
SEED = 2**50 + 3


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Compiled calls on CPU tensors; yields the counter of graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(backend, "COMPILED_ON", ("cpu",))
    monkeypatch.setattr(kernel, "COMPILER", counter)
    monkeypatch.setattr(flex_attention_module, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield counter
    kernel._compiled.cache_clear()
    torch._dynamo.reset()


def _check(mask, heads, *, softcap=0.0, dropout_p=0.0):
    inputs, arguments = random_case(mask.num_queries, mask.num_keys, heads, (8, 8), torch.float32)
    options = AttendOptions(8**-0.5, softcap, "flex", dropout_p=dropout_p)
    if dropout_p:
        places = [torch.arange(len(x)) for x in inputs[:2]]
        seeds = head_seeds(torch.tensor([SEED]), inputs[0])
        dropout = Dropout(dropout_p, row_words(seeds, places[0]), key_words(places[1]))
        options = replace(options, dropout=dropout)
        arguments["factors"] = dropout_factors(SEED, heads[0], *places, dropout_p)
    out, lse = attend_forward(*inputs, mask, options)
    dout, dlse = arguments["dout"], arguments["dlse"]
    delta = (dout * out).sum(dim=-1) - dlse
    gradients = attend_backward(dout, *inputs, lse, delta, mask, options)
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(
        (out, lse, *gradients),
        inputs,
        dense,
        plain_dtype=torch.float32,
        softcap=softcap,
        **arguments,
    )


RUN = {
    "causal documents": packed("log-normal", 768, 7),
    "more causal documents": packed("uniform", 1024, 20),
    "causal": masks.causal(512),
    "sliding window": masks.sliding_window(512, 90),
}
PLANNERS = ("auto", "zigzag", "allgather", "magi", "ring", "contiguous", "dcp")


def test_a_run_over_many_plans_masks_and_head_counts_compiles_at_most_four_graphs(graphs):
    seen = {}
    for planner in PLANNERS:
        for mask in RUN.values():
            plan = make_plan(mask, 4, config(planner))
            for pass_name in ("forward", "backward"):
                stages = plan.get_pass(pass_name).stages
                works = [work for stage in stages for work in stage.work if work.num_slices]
                for work in sorted(works, key=lambda work: -work.num_slices)[:2]:
                    for heads in ((2, 2), (4, 2)):
                        case = (work.digest(), heads)
                        if case not in seen:  # plans share most of their work
                            _check(work, heads)
                        seen[case] = (work.num_queries, work.num_keys, heads)
    assert len(set(seen.values())) > 30
    assert graphs.frame_count <= MAX_GRAPHS, graphs.frame_count


def test_sizes_of_one_row_and_whole_blocks_are_no_new_graphs(graphs):
    for num_queries, num_keys in ((1, 1), (128, 128), (256, 256), (129, 1), (7, 600), (512, 300)):
        _check(masks.causal(num_queries, num_keys), (2, 1))
    assert graphs.frame_count == 1


def test_softcap_and_sinks_are_served(graphs):
    _check(masks.documents([100, 70], "causal"), (4, 2), softcap=2.0)
    mask = masks.causal(40)
    inputs, arguments = random_case(40, 40, (2, 2), (8, 8), torch.float32, sink=True)
    actual = attend(*inputs, mask, backend="flex", sink=arguments["sink"])
    dense = torch.as_tensor(mask.to_dense())
    assert_attention(actual, inputs, dense, plain_dtype=torch.float32, **arguments)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("rate", [0.1, 0.95])
def test_dropout_forward_and_backward_equals_float64(graphs, rate, softcap):
    """At .95 some rows keep no key at all."""
    empty_rows = masks.from_slices(90, 80, [(0, 20, 0, 30, None, 0), (50, 60, 3, 9, None, None)])
    for mask in (masks.documents([100, 1, 70], "causal"), empty_rows):
        _check(mask, (4, 2), softcap=softcap, dropout_p=rate)
    assert graphs.frame_count == 1


def test_dropout_of_rows_of_many_intervals_is_computed_in_parts_of_the_keys(graphs):
    mask = masks.strided(120, 60, 3, 20)
    assert len(tables.parts_of(mask, torch.device("cpu"))) > 1
    _check(mask, (2, 1), dropout_p=0.3)


def test_the_largest_logits_take_one_more_graph_of_a_kind(graphs):
    for size in (40, 300):
        inputs, _ = random_case(size, size, (2, 2), (8, 8), torch.float32)
        attend(*inputs, masks.causal(size), backend="flex")
        attend(*inputs, masks.causal(size), backend="flex", return_max_logits=True)
    assert graphs.frame_count == 2


def test_the_largest_logits_are_those_without_dropout(graphs):
    inputs, _ = random_case(40, 40, (2, 2), (8, 8), torch.float32)
    asked = {"backend": "flex", "return_max_logits": True}
    plain = attend(*inputs, masks.causal(40), **asked)[2]
    assert torch.equal(attend(*inputs, masks.causal(40), **asked, dropout_p=0.7)[2], plain)


def test_rows_of_many_intervals_are_computed_in_parts_of_the_keys(graphs):
    mask = masks.strided(120, 60, 3, 20)
    device = torch.device("cpu")
    assert len(tables.parts_of(mask, device)) > 1
    _check(mask, (2, 1))
    assert graphs.frame_count <= 2


def test_a_mask_s_tables_are_made_and_copied_once_and_go_with_it(graphs, monkeypatch):
    made = []
    original = tables.block_table

    def block_table(mask, *sizes):
        made.append(sizes)
        return original(mask, *sizes)

    monkeypatch.setattr(tables, "block_table", block_table)
    mask = masks.causal(200)
    before = device_arrays.num_cached()
    for _ in range(3):
        _check(mask, (2, 2))
    assert made == [(128, 128)] * 2  # by queries and by keys
    assert device_arrays.num_cached() == before + 1
    del mask
    assert device_arrays.num_cached() == before


def test_with_compilation_switched_off_it_raises_and_computes_nothing(graphs):
    inputs, _ = random_case(40, 40, (2, 2), (8, 8), torch.float32)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(
            NotImplementedError, match=r"torch.compile is switched off here .*'flash' or"
        ),
    ):
        attend(*inputs, masks.causal(40), backend="flex")
    assert graphs.frame_count == 0


def test_past_the_limit_of_graphs_it_raises(graphs, monkeypatch):
    monkeypatch.setattr(kernel, "MAX_GRAPHS", 1)
    _check(masks.causal(40), (2, 2))
    inputs, _ = random_case(40, 40, (4, 2), (8, 8), torch.float32)
    with pytest.raises(
        NotImplementedError, match=r"compiled 1 graphs, as many as allowed, .*reset"
    ):
        attend(*inputs, masks.causal(40), backend="flex")
