"""Kimi delta attention: against its recurrence and `transformers`, document by document, under every layout."""

import dataclasses

import pytest
import torch

from tests.mcore.recurrent import (
    HIDDEN,
    LENGTHS,
    assert_near,
    assert_samples_stay_apart,
    assert_starts_alike,
    assert_stream_lies_column_by_column,
    in_order,
    joined,
    parts_on_ranks,
    rows_and_upstream,
    run_layer,
)
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.oracles.kimi_delta import layer_by_recurrence, layer_of_transformers
from tests.ranks import run_on_ranks

HEADS, KEYS, VALUES = 4, 16, 8
SIZES = {
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": KEYS,
    "linear_value_head_dim": VALUES,
    "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS,
}
OPTIONS = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}


def build_layer(case: Case, **options):
    """Returns our layer as the spec of the first decoder layer has it, with weights that its seed draws."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatron_cp.mcore.spec import gpt_block_spec

    fields = {**OPTIONS, **SIZES, "activation_func": torch.nn.functional.silu, **options}
    config = make_config(dataclasses.replace(case, options=tuple(fields.items())))
    config.experimental_attention_variant = "kimi_delta_attention"
    spec = gpt_block_spec(config).layer_specs[0].submodules.self_attention
    torch.manual_seed(7)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        layer.out_norm.weight.add_(torch.linspace(-0.5, 0.5, len(layer.out_norm.weight)))
        layer.in_proj.weight.mul_(6)
        layer.forget_up.weight.mul_(30)  # channels of a head forget unlike each other
        layer.gate_up.weight.mul_(30)
    return layer


def run(rank, world_size, case: Case, planner: str):
    """What `run_layer` returns, of our layer."""
    return run_layer(rank, world_size, build_layer, case, planner)


def join(parts, name):
    """Returns a weight of all heads from those of the tensor ranks."""
    keys, values = HEADS * KEYS // 2, HEADS * VALUES // 2
    sizes = {
        "in_proj.weight": (keys, keys, values, HEADS // 2, VALUES // 2, VALUES // 2),
        "conv1d.weight": (keys, keys, values),
    }
    return joined(parts, name, sizes.get(name), alike=("out_norm.weight",))


def exact(weights):
    """Returns output, gradient of the rows and of the weights, in float64."""
    whole = {name: weight.double().requires_grad_() for name, weight in weights.items()}
    x, upstream = rows_and_upstream(sum(LENGTHS))[:, :, 0].double()
    x.requires_grad_()
    out = layer_by_recurrence(
        whole, x, LENGTHS, heads=HEADS, key_dim=KEYS, value_dim=VALUES, eps=1e-5
    )
    out.backward(upstream)
    return out.detach(), x.grad, {name: weight.grad for name, weight in whole.items()}


@pytest.mark.parametrize(
    ("case", "planner"),
    [
        (Case(), "auto"),
        (Case(cp=2), "auto"),
        (Case(cp=3), "stripe"),
        (Case(tp=2), "auto"),
        (Case(tp=2, cp=2, sequence_parallel=True), "zigzag"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"tp{value.tp} cp{value.cp}",
)
def test_layer_equals_its_recurrence_document_by_document(case, planner):
    ranks = run_on_ranks(case.tp * case.cp, run, case, planner, timeout=110)
    tensor_ranks = ranks[: case.tp]
    weights = {name: join([r[3] for r in tensor_ranks], name) for name in tensor_ranks[0][3]}
    out, dx, gradients = exact(weights)
    ours_out, ours_dx, order = in_order(ranks, case)
    assert_near(ours_out, out[order])
    assert_near(ours_dx, dx[order])
    for name, wanted in gradients.items():
        assert wanted.abs().max() > 1e-3, name
        assert_near(join([r[4] for r in tensor_ranks], name), wanted)


def test_the_recurrence_is_that_of_transformers():
    torch.manual_seed(3)
    widths = {"in_proj.weight": (4 * 24 + 4 + 16, 20), "conv1d.weight": (96, 1, 4)}
    widths |= {"forget_up.weight": (32, 8), "gate_up.weight": (32, 8), "dt_bias": (32,)}
    widths |= {"A_log": (4,), "out_norm.weight": (8,), "out_proj.weight": (20, 32)}
    weights = {name: torch.randn(shape) * 0.5 for name, shape in widths.items()}
    x = torch.randn(80, 20)
    module = layer_of_transformers(weights, hidden=20, heads=4, head_dim=8, eps=1e-5)
    exact = {name: weight.double() for name, weight in weights.items()}
    ours = layer_by_recurrence(
        exact, x.double(), [50, 30], heads=4, key_dim=8, value_dim=8, eps=1e-5
    )
    theirs = torch.cat([module(part[None])[0] for part in x.split([50, 30])])
    assert (ours - theirs).abs().max() <= 2e-5 * ours.abs().max()


def test_weights_start_the_same_on_any_tensor_parallel_ranks():
    assert_starts_alike(build_layer, join, "dt_bias")


def test_samples_of_megatron_batches_do_not_see_each_other():
    assert_samples_stay_apart(build_layer)


def test_samples_of_one_stream_lie_column_by_column():
    assert_stream_lies_column_by_column(build_layer)


def test_every_section_of_a_weight_is_saved_by_itself():
    alone, of_two = (run_on_ranks(tp, parts_on_ranks, build_layer)[0] for tp in (1, 2))
    assert alone.keys() == of_two.keys()
    shapes = {key: shape for key, (_, shape) in of_two.items() if "_extra_state" not in key}
    assert shapes["x.in_proj.weight.forget"] == (VALUES, HIDDEN)
    assert shapes["x.conv1d.weight.value"] == (HEADS * VALUES, 1, 4)
    assert shapes["x.forget_up.weight"] == (HEADS * KEYS, VALUES)
    assert shapes["x.dt_bias"] == (HEADS * KEYS,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"linear_num_key_heads": 2}, "must be equal in Kimi delta attention"),
        ({"linear_value_head_dim": 9, "tensor_model_parallel_size": 2}, "linear_value_head_dim=9"),
        ({"activation_func": torch.nn.functional.gelu}, "--swiglu"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, words):
    (said,) = run_on_ranks(1, _refusal, options)
    assert words in said


def _refusal(rank, world_size, options):
    with parallel_state(Case()):
        with pytest.raises((ValueError, NotImplementedError)) as refused:
            build_layer(Case(), **options)
        return str(refused.value)
