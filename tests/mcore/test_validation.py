"""Wrong settings are refused in one line that names the value and a way out."""

import json
from argparse import ArgumentParser, Namespace

import pytest

from megatron_cp.mcore.settings.arguments import (
    add_context_parallel_arguments,
    cp_config_from_arguments,
)
from megatron_cp.mcore.settings.validation import check_samples, validate_arguments, validate_config

GOOD_ARGUMENTS = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 2,
    "num_attention_heads": 8,
    "seq_length": 128,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
}

GOOD_CONFIG = {
    "attention_dropout": 0.0,
    "window_size": None,
    "softmax_type": "vanilla",
    "context_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": None,
    "overlap_p2p_comm": False,
    "apply_rope_fusion": False,
}


@pytest.mark.parametrize(
    ("change", "world_size", "parts"),
    [
        ({}, 6, ["world size 6", "2 x 1 x 2 = 4", "start 4 ranks"]),
        ({"num_attention_heads": 7}, 4, ["--num-attention-heads 7", "size 2", "give 8 heads"]),
        ({"seq_length": 1}, 4, ["--seq-length 1", "--seq-length 2"]),
        ({"attention_dropout": 1.0}, 4, ["attention_dropout=1.0", "[0, 1)"]),
        ({"window_size": (4, 4)}, 4, ["window_size=(4, 4)", "--window-size 4,0"]),
        ({"fp8": "hybrid"}, 4, ["fp8='hybrid'", "not installed", "bf16"]),
        ({"fp4": "e2m1"}, 4, ["fp4='e2m1'", "--fp8-format"]),
        ({"hybrid_context_parallel": True}, 4, ["--hybrid-context-parallel", "drop"]),
        ({"hierarchical_context_parallel_sizes": [2, 2]}, 4, ["--cp-topology"]),
        ({"transformer_impl": "inference_optimized"}, 4, ["inference_optimized", "'local'"]),
        ({"position_embedding_type": "mrope"}, 4, ["--position-embedding-type mrope", "rope"]),
    ],
    ids=str,
)
def test_arguments_that_cannot_run_are_refused_in_one_line(change, world_size, parts):
    validate_arguments(Namespace(**GOOD_ARGUMENTS), world_size=4)
    with pytest.raises((ValueError, NotImplementedError)) as refusal:
        validate_arguments(Namespace(**{**GOOD_ARGUMENTS, **change}), world_size=world_size)
    message = str(refusal.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"attention_dropout": 1.5}, ["attention_dropout=1.5"]),
        ({"window_size": (-2, 0)}, ["window_size=(-2, 0)"]),
        ({"softmax_type": "tanh"}, ["softmax_type='tanh'", "learnable"]),
        ({"fp8_multi_head_attention": True}, ["fp8_multi_head_attention"]),
        ({"fp8_dot_product_attention": True}, ["fp8_dot_product_attention", "switch it off"]),
        (
            {"num_moe_experts": 4, "moe_expert_capacity_factor": 1.5},
            ["moe_expert_capacity_factor=1.5", "context_parallel_size=2"],
        ),
        (
            {
                "num_moe_experts": 4,
                "context_parallel_size": 1,
                "sequence_parallel": True,
                "tensor_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
            },
            ["expert_tensor_parallel_size=1", "tensor_model_parallel_size=2", "leave it out"],
        ),
        (
            {
                "num_moe_experts": 4,
                "moe_expert_capacity_factor": 1.5,
                "context_parallel_size": 1,
                "sequence_parallel": True,
                "tensor_model_parallel_size": 2,
            },
            ["moe_expert_capacity_factor=1.5", "tensor_model_parallel_size=2"],
        ),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "quantile"]},
            ["'quantile'", "seq_aux_loss"],
        ),
        (
            {
                "multi_latent_attention": True,
                "tensor_model_parallel_size": 2,
                "transformer_impl": "local",
            },
            ["tensor_model_parallel_size=2", "transformer_impl='transformer_engine'"],
        ),
        ({"cuda_graph_impl": "local"}, ["--cuda-graph-impl none"]),
        (
            {"multi_latent_attention": True, "apply_rope_fusion": True},
            ["apply_rope_fusion=True", "--no-rope-fusion"],
        ),
        ({"cp_comm_type": ["p2p", "a2a"]}, ["cp_comm_type=['p2p', 'a2a']", "--cp-planner"]),
        ({"virtual_pipeline_model_parallel_size": 2}, ["overlap_p2p_comm=True"]),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_honoured_are_refused_in_one_line(change, parts):
    validate_config(Namespace(**GOOD_CONFIG))
    validate_config(Namespace(**{**GOOD_CONFIG, "window_size": (16, 0)}))
    with pytest.raises((ValueError, NotImplementedError)) as refusal:
        validate_config(Namespace(**{**GOOD_CONFIG, **change}))
    message = str(refusal.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("has_engine", [False, True])
@pytest.mark.parametrize("engine", ["local", "transformer_engine"])
@pytest.mark.parametrize(
    "precision", [{}, {"fp8": "hybrid"}, {"fp4": "e2m1"}, {"fp8_dot_product_attention": True}]
)
def test_the_swap_in_and_the_loop_give_one_verdict_on_low_precision(
    monkeypatch, precision, engine, has_engine
):
    def verdict(check, settings) -> str:
        try:
            check(Namespace(**settings, **precision))
        except (ValueError, NotImplementedError) as refusal:
            return type(refusal).__name__
        return "accepted"

    monkeypatch.setattr(
        "megatron_cp.mcore.versions.compat.has_transformer_engine", lambda: has_engine
    )
    config = {**GOOD_CONFIG, "transformer_impl": engine}
    arguments = {**GOOD_ARGUMENTS, "transformer_impl": engine}
    swap_in = verdict(validate_config, config)
    assert swap_in == verdict(lambda args: validate_arguments(args, world_size=4), arguments)
    if "fp8" in precision:
        is_served = has_engine and engine == "transformer_engine"
        assert swap_in == ("accepted" if is_served else "ValueError")
    else:
        assert swap_in == ("NotImplementedError" if precision else "accepted")


def test_fp8_rows_are_a_multiple_that_matrix_products_take():
    parser = add_context_parallel_arguments(ArgumentParser())
    model = {"num_attention_heads": 8, "kv_channels": 16, "hidden_size": 128, "fp8": "hybrid"}
    args = Namespace(**vars(parser.parse_args([])), **model)
    assert cp_config_from_arguments(args, on_cuda=False).token_multiple == 32
    args.sequence_parallel, args.tensor_model_parallel_size = True, 2
    assert cp_config_from_arguments(args, on_cuda=False).token_multiple == 64


@pytest.mark.parametrize("on_cuda", [False, True])
def test_fusions_are_megatrons_on_cuda_where_their_kernels_are_and_off_on_a_cpu(
    monkeypatch, on_cuda
):
    import torch

    from megatron_cp.mcore.versions import compat
    from megatron_cp.models.gpt import fusions_of
    from megatron_cp.models.presets import GPT_125M, LLAMA3_8B

    def on(model):
        return {name for name, is_on in fusions_of(model).items() if is_on}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_cuda)
    loss = {"cross_entropy_loss_fusion"} if on_cuda else set()
    plain = {"bias_activation_fusion", "bias_dropout_fusion", *loss} if on_cuda else set()
    rope = {"apply_rope_fusion"} if on_cuda else set()
    assert on(LLAMA3_8B) == plain | rope
    assert on(GPT_125M) == plain
    for name in ("has_apex_norm", "has_apex_weight_gradients"):
        monkeypatch.setattr(compat, name, lambda: True)
    weights = {"gradient_accumulation_fusion"} if on_cuda else set()
    assert on(LLAMA3_8B) == plain | weights | rope
    assert on(GPT_125M) == plain | weights | ({"persist_layer_norm"} if on_cuda else set())
    monkeypatch.setattr(compat, "has_transformer_engine", lambda: True)
    assert on(LLAMA3_8B) == plain | weights | rope
    assert on(GPT_125M) == plain | weights
    for unfused in ({"activation_func_clamp_value": 7.0}, {"glu_linear_offset": 1.0}):
        assert on({**LLAMA3_8B, **unfused}) == (plain | weights | rope) - {"bias_activation_fusion"}
    experts = {"num_experts": 4}
    assert on({**LLAMA3_8B, **experts}) == plain | weights | rope
    for in_experts in ({**GPT_125M, **experts}, {**LLAMA3_8B, **experts, "add_bias_linear": True}):
        assert "bias_activation_fusion" not in on(in_experts)
    unwanted = ("bias_swiglu_fusion", "bias_dropout_fusion", "apply_rope_fusion")
    off = dict.fromkeys((*unwanted, "gradient_accumulation_fusion"), False)
    assert on({**LLAMA3_8B, **off}) == loss
    assert on({**LLAMA3_8B, **off, "cross_entropy_loss_fusion": True}) >= {
        "cross_entropy_loss_fusion"
    }


def test_flags_become_the_planners_settings_per_tensor_parallel_rank():
    parser = ArgumentParser()
    add_context_parallel_arguments(parser)
    flags = (
        "--cp-planner zigzag --cp-chunk-size 64 --cp-topology h200 --cp-backend cpu "
        "--cp-max-received-mb 300 --cp-rank-speeds 1,.5"
    )
    args = parser.parse_args(flags.split())
    assert args.cp_backend == "cpu"
    model = {
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "kv_channels": None,
        "hidden_size": 256,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "bf16": True,
    }
    config = cp_config_from_arguments(Namespace(**vars(args), **model), on_cuda=False)
    assert (config.planner, config.chunk_size, config.topology) == ("zigzag", 64, "h200")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 32)
    assert (config.token_multiple, config.element_bytes) == (2, 2)
    assert config.max_received_mb == 300
    assert config.rank_speeds == (1.0, 0.5)
    defaults = Namespace(**vars(parser.parse_args([])), **{**model, "bf16": False})
    config = cp_config_from_arguments(defaults, on_cuda=False)
    assert (config.planner, config.topology, config.element_bytes) == ("auto", "cpu", 4)
    assert (config.max_received_mb, config.rank_speeds) == (None, None)
    assert cp_config_from_arguments(defaults, on_cuda=True).topology == "h100"


def test_rows_of_latent_attention_are_as_wide_as_its_heads():
    parser = add_context_parallel_arguments(ArgumentParser())
    model = {"num_attention_heads": 8, "kv_channels": 16, "hidden_size": 128}
    latent = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
    for values, size in ((128, 128), (192, None)):  # None: as wide as keys
        args = Namespace(**vars(parser.parse_args([])), **model, **latent, v_head_dim=values)
        config = cp_config_from_arguments(args, on_cuda=False)
        assert (config.num_kv_heads, config.head_dim, config.value_head_dim) == (8, 192, size)


def test_a_measured_profile_serves_as_topology(tmp_path):
    cell = {"rows": 128, "keys": 128, "forward_tflops": 90, "backward_tflops": 70}
    links = {"node_size": 4, "inner_gbytes_per_s": 300, "outer_gbytes_per_s": 40, "latency_us": 9}
    path = tmp_path / "ours.json"
    path.write_text(json.dumps({"name": "ours", "kernel": [cell], **links}))
    parser = add_context_parallel_arguments(ArgumentParser())
    args = parser.parse_args(["--cp-topology", str(path)])
    model = {"num_attention_heads": 8, "kv_channels": 16, "hidden_size": 128}
    topology = cp_config_from_arguments(Namespace(**vars(args), **model), on_cuda=True).topology
    assert (topology.name, topology.node_size, topology.backward_tflops) == ("ours", 4, 70)


def test_experts_are_not_balanced_by_sample_on_rows_that_mix_the_samples():
    config = Namespace(
        num_moe_experts=4, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"]
    )
    with pytest.raises(NotImplementedError, match="give --micro-batch-size 1"):
        check_samples(config, 2, 2)
    for num_samples, cp_size in ((1, 2), (2, 1)):
        check_samples(config, num_samples, cp_size)
    check_samples(Namespace(num_moe_experts=4, moe_router_load_balancing_type="aux_loss"), 2, 2)
