"""What config.json means where it says nothing, null or zero; what a checkpoint means that says it otherwise."""

import pytest

from megatron_cp.models.hugging_face.config_file import (
    arguments_of,
    config_of,
    disagreements,
    family_of,
)
from megatron_cp.models.hugging_face.refusal import ConversionError
from tests.models.hugging_face.test_config_file import PUBLISHED
from tools.convert_checkpoint import training_flags


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
    with pytest.raises(ValueError, match="no flag for beta_fast=16 and would take 32"):
        training_flags({**arguments, "beta_fast": 16})
    with pytest.raises(
        ValueError, match=r"--rotary-base takes whole numbers, and the model has 12345\.5"
    ):
        training_flags(arguments_of({**PUBLISHED["Llama-3.1-8B"], "rope_theta": 12345.5}))


@pytest.mark.parametrize(
    ("name", "argument", "same", "other"),
    [
        ("Qwen3-30B-A3B", "moe_layer_freq", [1] * 48, [0, *[1] * 47]),
        ("gpt-oss-20b", "window_attn_skip_freq", [1, 0] * 12, [0, 1] * 12),
        ("Qwen3-Next-80B-A3B", "linear_attention_freq", [1, 1, 1, 0] * 12, [1, 0] * 24),
        ("Qwen3-Next-80B-A3B", "experimental_attention_variant", "gdn", "dsa"),
        ("Llama-3.1-8B", "vocab_size", 128000, 128257),
    ],
)
def test_the_same_model_said_otherwise_is_the_same(name: str, argument: str, same, other):
    arguments = arguments_of(PUBLISHED[name])
    assert disagreements(arguments, arguments | {argument: same}) == []
    (line,) = disagreements(arguments, arguments | {argument: other})
    assert line.startswith(f"{argument}: config.json says ")


def test_a_window_of_all_layers_may_be_said_by_its_size_alone():
    config = PUBLISHED["gpt-oss-20b"] | {"layer_types": ["sliding_attention"] * 24}
    arguments = arguments_of(config)
    assert disagreements(arguments, arguments | {"window_attn_skip_freq": None}) == []
