"""How embeddings are drawn: against the deviation that was asked for, by hand."""

import math

import pytest
import torch

from tests.mcore.tiny_gpt import enter_megatron
from tests.ranks import run_on_ranks

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "init_method_std": 0.02}


def _deviation_of_embeddings(rank, world_size, flags):
    enter_megatron()
    from megatron_cp.models.gpt import transformer_config

    drawn = torch.zeros(512, 64)
    transformer_config({**MODEL, **flags}).embedding_init_method(drawn)
    return drawn.std().item()


@pytest.mark.parametrize(
    ("xavier", "asked", "expected"),
    [
        (False, None, 0.02),
        (False, 0.5, 0.5),
        (True, None, math.sqrt(2 / (512 + 64))),
        (True, 0.02, 0.02),  # that of the other weights, if they were not drawn otherwise
        (True, 0.5, 0.5),
    ],
)
def test_embeddings_have_the_deviation_that_was_asked_for(xavier, asked, expected):
    flags = {"init_method_xavier_uniform": xavier, "embedding_init_method_std": asked}
    (found,) = run_on_ranks(1, _deviation_of_embeddings, flags)
    assert found == pytest.approx(expected, rel=0.03)
