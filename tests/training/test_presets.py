"""Presets against published sizes, and against the model that Megatron builds from them."""

from dataclasses import replace

import pytest

from megatron_cp.models.presets import GPT_OSS_20B_DENSE, PRESETS, TINY
from megatron_cp.training.arguments import parse_arguments
from tests.ranks import run_on_ranks

# Parameters as their makers publish them (Hugging Face model cards: 8,030,261,248 and 8,190,735,360;
# GPT-3 table 2.1 says 125M, which with 2048 positions and GPT-2's vocabulary is 125,226,240).
PUBLISHED = {"llama3-8b": 8_030_261_248, "qwen3-8b": 8_190_735_360, "gpt-125m": 125_226_240}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_the_published_number_of_parameters(name: str):
    assert PRESETS[name].num_parameters() == PUBLISHED[name]


def test_gpt_oss_alternates_window_and_full_layers_with_sinks():
    assert GPT_OSS_20B_DENSE.window == (127, 0)  # 128 keys: itself and 127 before
    assert GPT_OSS_20B_DENSE.full_attention_every == 2
    assert GPT_OSS_20B_DENSE.softmax == "learnable"


SMALL = {"num_layers": 2, "vocab_size": 128, "max_positions": 64}
SHAPES = {
    "tiny": replace(TINY, **SMALL),
    "biased": replace(
        TINY, **SMALL, linear_bias=True, normalization="LayerNorm", activation="gelu"
    ),
    "qwen": replace(TINY, **SMALL, qk_norm=True, tied_embeddings=False),
    "oss": replace(
        TINY, **SMALL, qkv_bias=True, softmax="learnable", window=(7, 0), full_attention_every=2
    ),
    "learned": replace(TINY, **SMALL, position="learned_absolute", activation="squared_relu"),
}


def parameters_built(rank: int, world_size: int) -> dict[str, int]:
    """Parameters of every shape's model; one call, because each set of Megatron's groups costs threads."""
    from megatron_cp.mcore import compat, cpu

    compat.silence_known_warnings()
    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    from megatron_cp.models.gpt import build_gpt, transformer_config

    parallel_state.initialize_model_parallel()
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        models = {
            name: build_gpt(transformer_config(shape), shape, vocab_size=shape.vocab_size)
            for name, shape in SHAPES.items()
        }
        return {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    finally:
        parallel_state.destroy_model_parallel()


def test_the_model_that_megatron_builds_has_the_counted_parameters():
    built = run_on_ranks(1, parameters_built)[0]
    assert built == {name: shape.num_parameters() for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_flags_of_a_preset_describe_the_same_model(name: str):
    shape = PRESETS[name]
    flags = [*shape.flags(), f"--vocab-size={shape.vocab_size}", "--mock-data", "--seq-length=128"]
    args = parse_arguments([*flags, "--plan-only"], {}).namespace()
    assert (args.num_layers, args.hidden_size, args.kv_channels) == (
        shape.num_layers,
        shape.hidden_size,
        shape.head_dim,
    )
    assert args.num_query_groups == shape.num_kv_heads
    assert args.layernorm_epsilon == shape.norm_epsilon
    assert args.untie_embeddings_and_output_weights == (not shape.tied_embeddings)
    assert (args.window_size, args.softmax_type) == (shape.window, shape.softmax)
