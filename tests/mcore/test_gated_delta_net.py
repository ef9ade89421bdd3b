"""The gated delta net layer: against that of `transformers` document by document, under every layout and cut."""

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
    parts_of_checkpoint,
    refusal,
    rows_and_upstream,
    run_layer,
)
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.oracles.gated_delta_net import (
    gradient_of_in_proj,
    layer_of_transformers,
    outputs_of_documents,
)
from tests.ranks import run_on_ranks

SIZES = {
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
OPTIONS = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}


def config_of(case: Case, **options):
    """Returns Megatron's configuration with linear layers, as `models.gpt.transformer_config` makes it."""
    fields = {**OPTIONS, **SIZES, "activation_func": torch.nn.functional.silu, **options}
    config = make_config(dataclasses.replace(case, options=tuple(fields.items())))
    config.experimental_attention_variant = "gated_delta_net"
    return config


def build_layer(case: Case, **options):
    """Returns our layer as the spec of the first decoder layer has it, with weights that its seed draws."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megatron_cp.mcore.spec import gpt_block_spec

    config = config_of(case, **options)
    spec = gpt_block_spec(config).layer_specs[0].submodules.self_attention
    torch.manual_seed(7)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        layer.out_norm.weight.add_(torch.linspace(-0.5, 0.5, len(layer.out_norm.weight)))
        layer.dt_bias.add_(0.25)
        layer.A_log.sub_(4)  # states that last for tens of tokens
        layer.in_proj.weight.mul_(6)
    return layer


def run(rank, world_size, case: Case, planner: str):
    """What `run_layer` returns, of our layer."""
    return run_layer(rank, world_size, build_layer, case, planner)


def join(parts, name):
    """Returns a weight of all heads from those of the tensor ranks."""
    sizes = {"in_proj.weight": (16, 16, 16, 16, 2, 2), "conv1d.weight": (16, 16, 16)}
    return joined(parts, name, sizes.get(name), alike=("out_norm.weight",))


def exact(weights, lengths=LENGTHS):
    """Returns output, gradient of the rows and of the weights by `transformers`, in float64."""
    whole = {name: weight.detach() for name, weight in weights.items()}
    module = layer_of_transformers(
        whole, hidden=HIDDEN, key_heads=2, value_heads=4, key_dim=16, value_dim=8, eps=1e-5
    )
    x, upstream = rows_and_upstream(sum(lengths))[:, :, 0].double()
    x.requires_grad_()
    out = outputs_of_documents(module, x, lengths)
    out.backward(upstream)
    gradients = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if name in ("conv1d.weight", "dt_bias", "A_log", "out_proj.weight", "norm.weight")
    }
    gradients["out_norm.weight"] = gradients.pop("norm.weight")
    gradients["in_proj.weight"] = gradient_of_in_proj(module)
    return out.detach(), x.grad, gradients


@pytest.mark.parametrize(
    ("case", "planner"),
    [
        (Case(), "auto"),
        (Case(cp=2), "auto"),
        (Case(cp=2), "zigzag"),
        (Case(cp=3), "stripe"),
        (Case(tp=2), "auto"),
        (Case(tp=2, sequence_parallel=True), "auto"),
        (Case(tp=2, cp=2, sequence_parallel=True), "zigzag"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"tp{value.tp} cp{value.cp}",
)
def test_layer_equals_that_of_transformers_document_by_document(case, planner):
    ranks = run_on_ranks(case.tp * case.cp, run, case, planner, timeout=110)
    tensor_ranks = ranks[: case.tp]
    weights = {name: join([r[3] for r in tensor_ranks], name) for name in tensor_ranks[0][3]}
    out, dx, gradients = exact(weights)
    ours_out, ours_dx, order = in_order(ranks, case)
    assert_near(ours_out, out[order])
    assert_near(ours_dx, dx[order])
    assert gradients.keys() == weights.keys()
    for name, wanted in gradients.items():
        assert_near(join([r[4] for r in tensor_ranks], name), wanted)


def test_weights_start_the_same_on_any_tensor_parallel_ranks():
    assert_starts_alike(build_layer, join, "A_log")


def test_samples_of_megatron_batches_do_not_see_each_other():
    assert_samples_stay_apart(build_layer)


def test_samples_of_one_stream_lie_column_by_column():
    assert_stream_lies_column_by_column(build_layer)


def keys_of_checkpoint(rank, world_size):
    """(names and shapes of weights, keys of the sharded checkpoint) of our layer and of Megatron's own."""
    with parallel_state(Case()):
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.ssm import gated_delta_net as megatrons

        ours = build_layer(Case())
        home = getattr(megatrons, "common", megatrons)  # in 0.20 the module is a package
        plain = {name: getattr(home, name) for name in ("HAVE_FLA", "chunk_gated_delta_rule")}
        home.HAVE_FLA, home.chunk_gated_delta_rule = True, print
        try:
            config = config_of(Case(), deterministic_mode=True)
            parts = megatrons.GatedDeltaNetSubmodules(
                in_proj=type(ours.in_proj), out_norm=_PlainNorm, out_proj=type(ours.out_proj)
            )
            theirs = megatrons.GatedDeltaNet(
                config,
                parts,
                layer_number=1,
                pg_collection=ProcessGroupCollection.use_mpu_process_groups(
                    required_pgs=["tp", "cp"]
                ),
            )
        finally:
            vars(home).update(plain)
        return [_described(layer) for layer in (ours, theirs)]


class _PlainNorm:
    def __new__(cls, config, hidden_size, eps):
        return torch.nn.RMSNorm(hidden_size, eps=eps)


def _described(layer):
    shapes = {name: tuple(x.shape) for name, x in layer.state_dict().items() if x is not None}
    return shapes, parts_of_checkpoint(layer)


def test_checkpoints_are_those_of_megatrons_layer():
    (((our_shapes, our_parts), (shapes, parts)),) = run_on_ranks(1, keys_of_checkpoint, timeout=110)
    assert our_shapes == shapes
    assert our_parts == parts
    assert any(key.endswith("in_proj.weight.alpha") for key in parts)


@pytest.mark.parametrize(
    ("mask_name", "options", "said"),
    [
        ("causal", {}, None),
        ("one question, two answers", {}, "does not see all before it"),
        ("window", {}, "does not see all before it"),
        ("causal", {"activation_func": torch.nn.functional.gelu}, "--swiglu"),
        ("causal", {"linear_attention_freq": 0}, "must say of each of 2 layers"),
        ("causal", {"linear_attention_freq": [1, 0, 1]}, "must say of each of 2 layers"),
        ("causal", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads"),
        ("causal", {"flash_decode": True}, "flash_decode=True is not served"),
    ],
)
def test_what_a_state_would_show_and_sizes_that_do_not_fit_are_refused(mask_name, options, said):
    (line,) = run_on_ranks(1, refusal, build_layer, mask_name, options, timeout=110)
    assert line is None if said is None else said in line
