"""Documents under a stock Megatron-LM: stages without layers, and layers that are not plain attention."""

import numpy as np

from tests.mcore.stock import stock_program
from tests.mcore.tiny_gpt import Case, train
from tests.ranks import run_on_ranks

RESET = {"reset_attention_mask": True, "reset_position_ids": True}


def _train_hooked(rank, world_size, case: Case):
    with stock_program(**RESET):
        return train(rank, world_size, case)


LATENT = (
    ("multi_latent_attention", True), ("q_lora_rank", None), ("kv_lora_rank", 32), ("qk_head_dim", 16),
    ("qk_pos_emb_head_dim", 8), ("v_head_dim", 16), ("rope_type", "rope"), ("apply_rope_fusion", False),
    ("num_query_groups", 4),
)  # fmt: skip


def test_latent_attention_takes_the_documents_of_hooked_batches():
    planned = Case(attention="planned", packed=True, steps=3, options=LATENT)
    expected = run_on_ranks(1, train, planned)[0]
    hooked = Case(
        attention="hooked", documents="positions", packed=True, steps=3, cp=2, options=LATENT
    )
    for steps in run_on_ranks(2, _train_hooked, hooked):
        np.testing.assert_allclose(steps, expected, rtol=2e-5)
