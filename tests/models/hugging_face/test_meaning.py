"""What config.json means where it says nothing, null or zero, and what pretrain_gpt.py can be told of it."""

import pytest

from megatron_cp.models.hugging_face.config_file import arguments_of, config_of, family_of
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
