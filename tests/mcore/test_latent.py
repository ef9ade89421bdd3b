"""Multi-latent attention against a dense softmax, which Megatron's own local attention cannot do."""

import contextlib
import dataclasses
import functools

import pytest
import torch

from tests.mcore.test_parity import LOSS_DRIFT, NORM_DRIFT
from tests.mcore.tiny_gpt import Case, parallel_state, train
from tests.ranks import run_on_ranks

LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}


def _dense_attention(config, layer_number, attn_mask_type, attention_type, **kwargs):
    """Causal softmax over [t, n, h] or [s, b, n, h], with value heads of their own width."""
    scale = kwargs["softmax_scale"]

    class DenseAttention(torch.nn.Module):
        def forward(self, query, key, value, attention_mask, **kwargs):
            query, key, value = (x.unsqueeze(1) if x.dim() == 3 else x for x in (query, key, value))
            scores = torch.einsum("qbnh,kbnh->bnqk", query, key) * scale
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            return torch.einsum("bnqk,bknh->qbnh", weights, value.transpose(0, 1)).flatten(2)

    return DenseAttention()


class _Dense:
    def __new__(cls, *args, **kwargs):
        return _dense_attention(*args, **kwargs)


@contextlib.contextmanager
def dense_attention_in_place_of_ours():
    """Specs made inside name a dense softmax where they would name our attention."""
    from megatron_cp.mcore import spec

    plain, spec.ContextParallelAttention = spec.ContextParallelAttention, _Dense
    try:
        yield
    finally:
        spec.ContextParallelAttention = plain


def _train_dense(rank, world_size, case):
    """Megatron's spec as it is, but for a core attention that takes latent heads."""
    with parallel_state(case), dense_attention_in_place_of_ours():
        return train(rank, world_size, case)


@functools.cache
def _dense_losses(case: Case):
    (losses,) = run_on_ranks(1, _train_dense, case, timeout=110)
    return losses


def _assert_same(case: Case, reference: Case) -> None:
    world_size = case.cp * case.tp
    ours = run_on_ranks(world_size, train, case, timeout=110)[0]
    for step, (loss, norm) in enumerate(_dense_losses(reference)):
        assert ours[step][0] == pytest.approx(loss, rel=LOSS_DRIFT), step
        assert ours[step][1] == pytest.approx(norm, rel=NORM_DRIFT), step


@pytest.mark.parametrize(
    "options",
    [
        {"q_lora_rank": 32, "qk_layernorm": True},
        {"q_lora_rank": None, "qk_layernorm": False},
        {"q_lora_rank": 24, "qk_layernorm": True, "normalization": "RMSNorm"},
        {"q_lora_rank": 32, "num_moe_experts": 4, "add_bias_linear": False},
    ],
    ids=str,
)
def test_latent_attention_equals_a_dense_softmax(options: dict):
    reference = Case(attention="split", steps=4).with_options(**LATENT, **options)
    for layout in (
        {"attention": "planned", "cp": 4, "command_line": True},
        {"attention": "split", "cp": 2},
    ):
        _assert_same(dataclasses.replace(reference, **layout), reference)
