"""LongRoPE's frequencies are those of transformers, short or long by the longest sequence of a run."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_cp.mcore.parts.longrope import divide_frequencies
from megatron_cp.models.hugging_face.config_file import arguments_of

CONFIG = Phi3Config(
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=1024,
    original_max_position_embeddings=128,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.25, 1.5, 2.0],
        "long_factor": [1.5, 4.0, 16.0, 64.0],
    },
)


def model_of(num_frequencies: int) -> SimpleNamespace:
    return SimpleNamespace(rotary_pos_emb=SimpleNamespace(inv_freq=torch.ones(num_frequencies)))


@pytest.mark.parametrize("seq_length", [128, 129, None])
def test_a_run_has_the_frequencies_of_its_longest_sequence(seq_length: int | None):
    """And where no length is said those of the model's longest."""
    arguments, model = arguments_of(CONFIG.to_diff_dict()), model_of(4)
    divide_frequencies(model, {**arguments, "seq_length": seq_length})
    longest = seq_length or CONFIG.max_position_embeddings
    expected, scale = ROPE_INIT_FUNCTIONS["longrope"](CONFIG, torch.device("cpu"), seq_len=longest)
    assert torch.equal(model.rotary_pos_emb.inv_freq, expected)
    assert arguments["longrope_attention_factor"] == scale


def test_factors_of_another_model_are_refused():
    with pytest.raises(ValueError, match="LongRoPE has 4 factors; the model has 5 frequencies"):
        divide_frequencies(model_of(5), arguments_of(CONFIG.to_diff_dict()))
