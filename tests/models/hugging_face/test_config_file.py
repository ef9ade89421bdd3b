"""config.json to Megatron-LM's arguments: published models, and the way back."""

import json
import math
from pathlib import Path

import pytest
import transformers

from megatron_cp.models.hugging_face.config_file import (
    arguments_of,
    config_of,
    disagreements,
    family_of,
    read_config,
)
from megatron_cp.models.hugging_face.refusal import ConversionError
from megatron_cp.models.hugging_face.rows import pieces_of
from megatron_cp.models.hugging_face.settings import SHARED_PICKS
from tests.models.hugging_face.published import PARAMETERS, PUBLISHED
from tests.models.hugging_face.refused import MORE_REFUSED
from tests.models.hugging_face.tiny_models import MODELS, make_tiny

KIMI_LINEAR = "Kimi-Linear-48B-A3B-Instruct"


@pytest.mark.parametrize("name", PUBLISHED)
def test_pieces_of_a_published_model_have_as_many_elements_as_it_has_parameters(name: str):
    arguments = arguments_of(PUBLISHED[name]) | {"mtp_num_layers": None}
    pieces = family_of(PUBLISHED[name]).pieces(arguments)
    assert sum(piece.num_elements for piece in pieces) == PARAMETERS[name]
    sources = {(source.name, str(source.at)) for piece in pieces for source in piece.sources}
    assert len(sources) == sum(len(piece.sources) for piece in pieces)
    assert sum(math.prod(s.shape) for piece in pieces for s in piece.sources) == PARAMETERS[name]


def test_the_files_of_deepseek_v3_have_the_elements_of_its_model_and_of_its_prediction_layer():
    """The layer's own have 11.5B (README_WEIGHTS.md of the model); the joined projection and three norms come to it.

    By type: 680,571,043,840 in 8 bits; in 16 bits embeddings and output layers, routers, the joined projection and
    norms, counted by hand; biases of 59 routers in fp32.
    """
    config = PUBLISHED["DeepSeek-V3"]
    pieces = list(pieces_of(family_of(config).weights, arguments_of(config)))
    copied = [(name, piece.num_elements) for piece in pieces for name in piece.copies]
    assert [name for name, _ in copied] == [
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    ]
    of_layer = (p for p in pieces if p.keys[0].startswith("mtp.layers.0.transformer_layer."))
    assert round(sum(piece.num_elements for piece in of_layer) / 1e9, 1) == 11.5
    width = 7168
    tables, routers = 4 * 129280 * width, 59 * 256 * width
    norms = 62 * (2 * width + 1536 + 512) + 4 * width
    assert tables + routers + 2 * width * width + norms == 3_918_786_560
    elements = sum(piece.num_elements for piece in pieces) + sum(count for _, count in copied)
    assert elements == 680_571_043_840 + 3_918_786_560 + 59 * 256


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_comes_back_from_the_arguments(name: str):
    arguments = arguments_of(PUBLISHED[name])
    recomputed = config_of(family_of(PUBLISHED[name]), arguments)
    assert arguments_of(recomputed) == arguments
    for key in recomputed.keys() & PUBLISHED[name].keys():
        if key != "rope_scaling":  # its type was called type once
            assert recomputed[key] == PUBLISHED[name][key], key


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_of_transformers_comes_back_from_the_arguments(tmp_path: Path, name: str):
    make_tiny(name).config.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    arguments = arguments_of(config, make_vocab_size_divisible_by=64)
    assert arguments["padded_vocab_size"] == 192
    again = arguments_of(config_of(family_of(config), arguments), make_vocab_size_divisible_by=64)
    assert again == arguments
    assert disagreements(arguments, again) == []


def test_a_checkpoint_of_another_model_is_told_by_every_argument_that_differs():
    arguments = arguments_of(PUBLISHED["Llama-3.1-8B"])
    changed = arguments | {"rotary_base": 10000, "num_layers": 30, "padded_vocab_size": 1}
    lines = disagreements(arguments, changed)
    assert [line.split(":")[0] for line in lines] == ["num_layers", "rotary_base"]
    assert disagreements(arguments, {"num_layers": 32}) == []


ANOTHER_MODEL = {
    "layernorm_zero_centered_gamma": True,
    "apply_layernorm_1p": True,
    "rotary_interleaved": True,
    "rotary_percent": 0.5,
    "rotary_seq_len_interpolation_factor": 2,
    "no_rope_freq": [0, 1],
    "llama_4_scaling_beta": 0.2,
    "longrope_attention_factor": 1.5,
    "position_embedding_type": "none",
    "qk_l2_norm": True,
    "qk_layernorm": "other",
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "squared_relu": True,
    "glu_linear_offset": 0.5,
    "activation_func_clamp_value": 0.5,
    "softmax_type": "off-by-one",
    "window_size": (5, 0),
    "use_mup": True,
}


OTHER_EXPERTS = {
    "moe_router_topk_scaling_factor": 7.5,
    "moe_router_num_groups": 3,
    "moe_router_pre_softmax": "other",
    "moe_shared_expert_gate": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_shared_expert_glu_interleave_size": 32,
}


def another(arguments, argument, value):
    """The arguments with a value that they do not have; a switch that is on goes off."""
    said = "layernorm_zero_centered_gamma" if argument == "apply_layernorm_1p" else argument
    return arguments | {argument: None if arguments.get(said) == value else value}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("argument", OTHER_EXPERTS)
def test_experts_that_config_json_cannot_describe_are_told(name, argument):
    arguments = arguments_of(PUBLISHED[name])
    lines = disagreements(arguments, another(arguments, argument, OTHER_EXPERTS[argument]))
    assert [line.split(":")[0] for line in lines] == [argument] * bool(arguments["num_experts"])


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "GLM-4.5-Air"])
def test_a_factor_of_one_is_none(name):
    arguments = arguments_of(PUBLISHED[name])
    neutral = {"moe_router_topk_scaling_factor": 1.0, "rotary_seq_len_interpolation_factor": 1}
    assert disagreements(arguments, arguments | neutral | {"moe_router_num_groups": 1}) == []
    assert disagreements(arguments, arguments | {"moe_router_topk_scaling_factor": None}) == []


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("argument", ANOTHER_MODEL)
def test_a_model_that_config_json_cannot_describe_is_told(name, argument):
    """Megatron's flags that change what the same tensors compute, whether or not the family has a word for them."""
    arguments = arguments_of(PUBLISHED[name])
    (line,) = disagreements(arguments, another(arguments, argument, ANOTHER_MODEL[argument]))
    assert line.startswith(f"{argument}: config.json ")


def test_ungrouped_attention_says_nothing_by_its_number_of_groups():
    config = PUBLISHED["Llama-3.1-8B"]
    ungrouped = arguments_of(config | {"num_key_value_heads": 32})
    saved = ungrouped | {"num_query_groups": 1}  # Megatron-LM's default
    assert disagreements(ungrouped, saved) == []
    assert disagreements(arguments_of(config), saved) != []


def test_layers_with_windows_may_lie_anywhere():
    config = PUBLISHED["gpt-oss-20b"] | {"num_hidden_layers": 3}
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    arguments = arguments_of(config | {"layer_types": kinds})
    assert arguments["window_size"] == (127, 0)
    assert arguments["window_attn_skip_freq"] == [0, 1, 1]
    assert config_of(family_of(config), arguments)["layer_types"] == kinds


def test_what_transformers_takes_for_granted_is_said():
    silent = {
        name: {key: value for key, value in PUBLISHED[name].items() if key not in left_out}
        for name, left_out in {
            "Mistral-7B-v0.1": ("sliding_window",),
            "SmolLM3-3B": ("no_rope_layers", "no_rope_layer_interval"),
            "GLM-4.5-Air": ("partial_rotary_factor", "use_qk_norm"),
            **dict.fromkeys(("cwm", "ministral"), ("layer_types",)),
            "dots1": ("layer_types", "n_group", "topk_group"),
            "exaone_moe": ("layer_types", "mlp_layer_types", "n_group", "topk_group"),
            "ernie4_5": ("tie_word_embeddings", "use_bias"),
            "glm": ("attention_bias",),
            "youtu": ("tie_word_embeddings",),
        }.items()
    }
    for name, config in silent.items():
        assert arguments_of(config) == arguments_of(PUBLISHED[name])
    assert (
        arguments_of(PUBLISHED["Mistral-7B-v0.1"] | {"sliding_window": None})["window_size"] is None
    )
    every_second = silent["SmolLM3-3B"] | {"no_rope_layer_interval": 2}
    assert arguments_of(every_second)["no_rope_freq"] == [0, 1] * 18


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("DeepSeek-V3", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("DeepSeek-V3", {"topk_group": 2}, "num_experts_per_tok=8 with topk_group=2"),
        ("DeepSeek-V3", {"num_key_value_heads": 8}, "num_key_value_heads=8"),
        ("DeepSeek-V3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave=False"),
        ("DeepSeek-V3", {"n_shared_experts": 0}, "n_shared_experts=0"),
        ("DeepSeek-V3.2-Exp", {"index_topk_freq": 4}, "index_topk_freq=4"),
        ("DeepSeek-V3.2-Exp", {"indexer_types": ["full", "shared"]}, "indexer_types="),
        ("gpt-oss-20b", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ("gpt-oss-20b", {"rope_scaling": None}, "rope_type='default'"),
        ("gpt-oss-20b", {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        ("GLM-4.5-Air", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("Mistral-7B-v0.1", {"layer_types": ["sliding_attention"] * 32}, "layer_types=['sliding_"),
        ("Ministral-3-8B-Base-2512", {"layer_types": ["sliding_attention"] * 34}, "layer_types=["),
        ("SmolLM3-3B", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("SmolLM3-3B", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers of 4"),
        ("Mixtral-8x7B", {"sliding_window": 4096}, "sliding_window=4096"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("Qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, "use_sliding_window=True"),
        (
            "Qwen1.5-MoE-A2.7B",
            {"layer_types": ["sliding_attention"] * 24},
            "layer_types=['sliding_",
        ),
        ("Qwen1.5-MoE-A2.7B", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ("GLM-4.7-Flash", {"first_k_dense_replace": 2}, "first_k_dense_replace=2"),
        (
            "GLM-4.7-Flash",
            {"mlp_layer_types": ["sparse"] * 47},
            "first_k_dense_replace=1 in config.json says other layers",
        ),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["sparse"] * 46}, "for each of num_hidden_layers=47"),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["moe"] * 47}, "must be dense or sparse"),
        ("GLM-4.7-Flash", {"attention_bias": True}, "attention_bias=True"),
        ("GLM-4.7-Flash", {"rope_interleave": False}, "rope_interleave=False"),
        ("GLM-4.7-Flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("GLM-4.7-Flash", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("Kimi-K2-Instruct", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        (
            KIMI_LINEAR,
            {"num_experts_per_tok": 4},
            "has num_experts_per_tok under two names, 8 and 4",
        ),
        (KIMI_LINEAR, {"layer_types": ["linear_attention"] * 27}, "say different things"),
        (KIMI_LINEAR, {"linear_num_heads": 16}, "linear_num_heads=16 and linear_attn_config"),
        (KIMI_LINEAR, {"linear_attn_config": None}, "layer_types is missing"),
        (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope=False"),
        (KIMI_LINEAR, {"moe_renormalize": False}, "norm_topk_prob=False"),
        (KIMI_LINEAR, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func="),
        (KIMI_LINEAR, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
        ("Kimi-K2-Instruct", {"n_group": 8, "topk_group": 1}, "=8 with topk_group=1"),
        ("Kimi-K2-Instruct", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("Nemotron-H-8B", {"layers_block_type": ["mamba"] * 52}, "say other layers; correct one"),
        ("Nemotron-H-8B", {"num_hidden_layers": 51}, "num_hidden_layers=51"),
        (
            "Nemotron-H-8B",
            {"hybrid_override_pattern": "M-G"},
            "hybrid_override_pattern='M-G' in config.json is not served: 'G' is a gated delta net",
        ),
        (
            "Nemotron-H-8B",
            {"hybrid_override_pattern": ""},
            "='' in config.json is not served: it has no",
        ),
        (
            "Nemotron-H-8B",
            {"hybrid_override_pattern": ["M"]},
            "=['M'] in config.json must be letters",
        ),
        (
            "Nemotron-H-8B",
            {"layers_block_type": "mamba"},
            "='mamba' in config.json must be a list of",
        ),
        (
            "Nemotron-H-8B",
            {"layers_block_type": [["mlp"]]},
            "=[['mlp']] in config.json must be a list",
        ),
        ("Nemotron-H-8B", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ("Nemotron-H-8B", {"time_step_limit": [0.001, 0.1]}, "time_step_limit="),
        ("Nemotron-H-8B", {"time_step_limit": [float("inf"), 0]}, "time_step_limit=[inf, 0]"),
        ("Nemotron-H-8B", {"conv_kernel": 3}, "conv_kernel=3"),
        ("Nemotron-3-Nano-30B-A3B", {"n_shared_experts": 2}, "n_shared_experts=2"),
        ("Qwen3-8B", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic'"),
        (
            "Qwen3-8B",
            {"rope_scaling": {"type": "linear", "factor": 2.5}},
            "factor=2.5 of rope type",
        ),
        (
            "Qwen3-8B",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings is missing",
        ),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        (
            "DeepSeek-V2-Lite",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
            "num_experts_per_tok=6 with topk_group=3",
        ),
        ("Seed-OSS-36B-Base", {"attention_out_bias": True}, "attention_out_bias=True"),
        *MORE_REFUSED,
    ],
)
def test_what_a_family_does_not_serve_is_named(name: str, change: dict, said: str):
    with pytest.raises(ConversionError) as caught:
        arguments_of(PUBLISHED[name] | change)
    assert len(caught.value.reasons) == 1
    assert said in caught.value.reasons[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"llama_4_scaling_beta": None}, "llama_4_scaling_beta=None"),
        ({"llama_4_scaling_beta": -0.1}, "llama_4_scaling_beta=-0.1"),
        ({"llama_4_scaling_beta": "REMOVE"}, "llama_4_scaling_beta is missing"),
        ({"attention_factor": 1.5}, "attention_factor=1.5"),
        ({"rope_type": "default", "type": "default"}, "rope_type='default'"),
        (
            {"original_max_position_embeddings": "REMOVE"},
            "original_max_position_embeddings is missi",
        ),
    ],
)
def test_positions_of_ministral_that_are_not_served_are_named(change: dict, said: str):
    published = PUBLISHED["Ministral-3-8B-Base-2512"]
    positions = published["rope_parameters"] | change
    kept = {key: value for key, value in positions.items() if value != "REMOVE"}
    with pytest.raises(ConversionError) as caught:
        arguments_of(published | {"rope_parameters": kept})
    assert len(caught.value.reasons) == 1
    assert said in caught.value.reasons[0]


@pytest.mark.parametrize(
    ("name", "key", "argument"),
    [
        ("Nemotron-H-8B", "mamba_num_heads", "mamba_num_heads"),
        ("Nemotron-H-8B", "n_groups", "mamba_num_groups"),
        ("Nemotron-H-8B", "ssm_state_size", "mamba_state_dim"),
        ("Qwen3-Next-80B-A3B", "linear_num_key_heads", "linear_num_key_heads"),
        ("Qwen3-Next-80B-A3B", "linear_value_head_dim", "linear_value_head_dim"),
    ],
)
@pytest.mark.parametrize("value", ["8", 8.0, 0, -8, True, None])
def test_sizes_of_states_are_positive_whole_numbers(
    name: str, key: str, argument: str, value: object
):
    with pytest.raises(ConversionError) as caught:
        arguments_of(PUBLISHED[name] | {key: value})
    (line,) = caught.value.reasons
    assert line == f"{argument}={value!r} of config.json must be positive whole numbers; correct it"


def test_configurations_are_json_afterwards():
    for config in PUBLISHED.values():
        json.dumps(config_of(family_of(config), arguments_of(config)))


@pytest.mark.parametrize(
    ("said", "kinds"),
    [
        ({}, "FFFFF"),
        ({"index_topk_freq": 2}, "FFSFS"),  # from the second layer on
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, "FSSFS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSS"),
        ({"index_topk_pattern": "FSFSF"}, "FSFSF"),
        ({"indexer_types": ["full", "full", "full", "shared", "full"]}, "FFFSF"),
        ({"index_topk_pattern": "SFSFS"}, None),
        ({"index_topk_pattern": "FSSFF"}, None),
        ({"index_topk_pattern": "FSF"}, None),
        ({"indexer_types": ["full", "full", "none", "full", "full"]}, None),
    ],
)
def test_which_layers_pick_keys_is_said_in_four_ways(said: dict, kinds: str | None):
    config = {"num_hidden_layers": 5, **said}
    if kinds is None:
        with pytest.raises(NotImplementedError, match="every so many layers a full one"):
            SHARED_PICKS.read(config)
        return
    arguments = {"num_layers": 5, **SHARED_PICKS.read(config)}
    words = {"F": "full", "S": "shared"}
    assert SHARED_PICKS.to_config(arguments) == {"indexer_types": [words[one] for one in kinds]}
    if not said:
        assert arguments["dsa_indexer_topk_freq"] == 1


@pytest.mark.parametrize("name", ["Qwen3-8B", "Seed-OSS-36B-Base"])
def test_a_whole_share_that_rotates_may_be_said_where_transformers_puts_it(tmp_path: Path, name):
    published = {**PUBLISHED[name], "partial_rotary_factor": 1.0}
    transformers.AutoConfig.for_model(**published).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config["rope_parameters"]["partial_rotary_factor"] == 1.0
    assert arguments_of(config) == arguments_of(PUBLISHED[name])
    config["rope_parameters"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ConversionError, match=r"partial_rotary_factor=0\.5"):
        arguments_of(config)
