"""What config.json means where it says nothing, null or zero; what a checkpoint means that says it otherwise."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from megatron_cp.models.hugging_face.config_file import (
    arguments_of,
    config_of,
    disagreements,
    family_of,
    read_config,
)
from megatron_cp.models.hugging_face.refusal import ConversionError
from megatron_cp.models.hugging_face.torch_dist_folder import under_our_names
from tests.models.hugging_face import in_ranks
from tests.models.hugging_face.published import PUBLISHED
from tests.models.hugging_face.tiny_models import make_tiny
from tests.ranks import run_on_ranks
from tools.convert_checkpoint import training_flags

NANO = PUBLISHED["Nemotron-3-Nano-30B-A3B"]["hybrid_override_pattern"]


def test_what_a_family_means_by_what_is_not_said():
    """As transformers does: Qwen3-Next scales the weights of its experts, and 0 is no mscale."""
    published = {k: v for k, v in PUBLISHED["Qwen3-Next-80B-A3B"].items() if k != "norm_topk_prob"}
    assert arguments_of(published)["moe_router_pre_softmax"] is False
    assert config_of(family_of(published), arguments_of(published))["num_experts"] == 512
    published = dict(PUBLISHED["DeepSeek-V3"])
    scaling = {k: v for k, v in published["rope_scaling"].items() if not k.startswith("mscale")}
    without = arguments_of({**published, "rope_scaling": scaling})
    for nothing in (0, None):
        given = {**scaling, "mscale": nothing, "mscale_all_dim": nothing}
        assert arguments_of({**published, "rope_scaling": given}) == without
    assert arguments_of(config_of(family_of(published), without)) == without
    dense = {**without, "moe_layer_freq": [0] * 61}
    assert config_of(family_of(published), dense)["first_k_dense_replace"] == 61
    for name in ("factor", "beta_fast"):
        with pytest.raises(ConversionError, match=f"{name}=null"):
            arguments_of({**published, "rope_scaling": {**published["rope_scaling"], name: None}})
    with pytest.raises(ConversionError, match="rope_interleave=None"):
        arguments_of({**published, "rope_interleave": None})


def test_the_flags_of_a_published_model_are_told_and_what_has_none_is():
    arguments = arguments_of(PUBLISHED["DeepSeek-V3"])
    assert "--rotary-scaling-factor=40" in training_flags(arguments)
    assert not [flag for flag in training_flags(arguments) if flag.startswith("--beta-")]
    flags = training_flags(arguments_of(PUBLISHED["Kimi-K2-Instruct"]))
    assert "--beta-fast=1.0" in flags
    assert "--original-max-position-embeddings=512" in training_flags(
        {**arguments, "original_max_position_embeddings": 512}
    )
    with pytest.raises(
        ValueError, match=r"--rotary-base takes whole numbers, and the model has 12345\.5"
    ):
        training_flags(arguments_of({**PUBLISHED["Llama-3.1-8B"], "rope_theta": 12345.5}))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_flags_of_a_published_model_make_the_configuration_that_its_weights_were_compared_with(
    name: str,
):
    assert run_on_ranks(1, in_ranks.said_differently, PUBLISHED[name]) == [[]]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_converted_checkpoint_says_of_itself_what_its_flags_say(tmp_path, name: str):
    assert run_on_ranks(1, in_ranks.taken_differently, PUBLISHED[name], tmp_path) == [{}]


@pytest.mark.parametrize(
    ("name", "argument", "same", "other"),
    [
        ("Qwen3-30B-A3B", "moe_layer_freq", [1] * 48, [0, *[1] * 47]),
        ("gpt-oss-20b", "window_attn_skip_freq", [1, 0] * 12, [0, 1] * 12),
        ("Qwen3-Next-80B-A3B", "linear_attention_freq", [1, 1, 1, 0] * 12, [1, 0] * 24),
        ("Qwen3-Next-80B-A3B", "experimental_attention_variant", "gdn", "dsa"),
        ("Llama-3.1-8B", "vocab_size", 128000, 128257),
        ("Nemotron-3-Nano-30B-A3B", "hybrid_layer_pattern", f"{NANO[:20]}|{NANO[20:]}", NANO[::-1]),
        ("Nemotron-H-8B", "mamba_num_heads", None, 64),
    ],
)
def test_the_same_model_said_otherwise_is_the_same(name: str, argument: str, same, other):
    arguments = arguments_of(PUBLISHED[name])
    assert disagreements(arguments, under_our_names(arguments | {argument: same})) == []
    (line,) = disagreements(arguments, under_our_names(arguments | {argument: other}))
    assert line.startswith(f"{argument}: config.json says ")


def test_a_window_of_all_layers_may_be_said_by_its_size_alone():
    config = PUBLISHED["gpt-oss-20b"] | {"layer_types": ["sliding_attention"] * 24}
    arguments = arguments_of(config)
    assert disagreements(arguments, arguments | {"window_attn_skip_freq": None}) == []


_BASE = {"rope_theta": 500000.0}  # of the tiny model, in rope_parameters


@pytest.mark.parametrize(
    ("name", "base", "alone", "older", "is_refused"),
    [
        ("rope_theta", 500000.0, None, None, False),
        ("rope_theta", 500000.0, 500000.0, _BASE, False),
        ("rope_theta", 500000.0, 500000.0, {}, False),
        ("rope_theta", 500000.0, None, _BASE, False),
        ("rope_theta", 10000.0, None, {}, True),  # its default: the other form is not looked at
        ("rope_theta", 77.0, None, {"rope_theta": 77.0}, True),
        ("rope_theta", 500000.0, 123.0, None, True),  # transformers 4 takes 123
        ("partial_rotary_factor", 0.25, None, None, False),
        ("partial_rotary_factor", 0.25, 0.25, None, False),
        ("partial_rotary_factor", 0.25, 0.5, None, True),
    ],
)
def test_numbers_of_rope_in_several_places_are_those_of_transformers_or_refused(
    tmp_path: Path, name: str, base: float, alone: float | None, older: dict | None, is_refused
):
    tiny = "llama3" if name == "rope_theta" else "qwen3_next"
    make_tiny(tiny).config.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    newer = config["rope_parameters"]
    scaling = {key: value for key, value in newer.items() if key != "rope_theta"}
    config |= {} if alone is None else {name: alone}
    config |= {} if older is None else {"rope_scaling": scaling | older}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters[name] == base
    if is_refused:
        with pytest.raises(ConversionError, match=f"more than one {name}"):
            arguments_of(config)
        return
    argument = "rotary_base" if name == "rope_theta" else "rotary_percent"
    assert arguments_of(config)[argument] == base
