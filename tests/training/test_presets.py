"""Presets against published sizes, and their flags against the model they describe."""

import json

import pytest

from megatron_cp.models.presets import GPT_OSS_20B, PRESETS
from megatron_cp.training.arguments import flags_of, parse_arguments
from tests.faults.program import Launch, run_program

# Parameters as their makers publish them: Hugging Face model cards and safetensors indices; GPT-3 table 2.1
# says 125M, which with 2048 positions and GPT-2's vocabulary is 125,226,240.
PUBLISHED = {
    "gpt-125m": 125_226_240,
    "llama3-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "kimi-linear-48b-a3b": 49_122_675_072,  # without the biases of its routers, which are no parameters
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,  # the same
}


@pytest.fixture(scope="module")
def built() -> dict[str, int]:
    """Parameters of every preset's model, built without memory."""
    ((rank,),) = run_program([Launch((), plant="tests.training.count_presets.count")])
    assert rank.code == 0, rank.stderr
    counts: dict[str, int] = json.loads(rank.stdout.splitlines()[-1])
    return counts


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_the_published_number_of_parameters(built, name: str):
    assert built[name] == PUBLISHED[name]


def test_gpt_oss_alternates_window_and_full_layers_with_sinks():
    assert GPT_OSS_20B["window_size"] == (127, 0)  # 128 keys: itself and 127 before
    assert GPT_OSS_20B["window_attn_skip_freq"] == 2
    assert GPT_OSS_20B["softmax_type"] == "learnable"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_flags_of_a_preset_say_the_same_again(name: str):
    words = [*flags_of(PRESETS[name]), "--mock-data", "--seq-length=128", "--plan-only"]
    arguments = parse_arguments(words, {}).arguments
    said = {key: arguments[key] for key in PRESETS[name]}
    assert said == PRESETS[name]


def test_a_name_that_no_flag_sets_is_refused():
    with pytest.raises(ValueError, match="no_such_name"):
        flags_of({"no_such_name": 1})
