"""The operation count against a count by hand and against torch's own counter."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp import mask as masks
from megatron_cp.training.logging.flops import ModelFlops, gpt_flops


def test_a_tiny_gpt_counted_by_hand():
    model = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 2,
        "swiglu": True,
    }
    flops = gpt_flops(model, num_layers={"full": 2, "window": 0}, vocab_size=10)
    # A layer: queries 8x8, keys and values 2 x 8x4, output 8x8, MLP 3 x 8x16. Output layer 8x10.
    per_layer = 64 + 64 + 64 + 384
    matrices = 2 * per_layer + 80
    # Documents of 3 and 2 tokens, causal: 6 + 3 pairs; per pair and layer 4 heads x (2 + 2) x 2.
    expected = 3 * (2 * 5 * matrices + 2 * 9 * 4 * 4 * 2)
    assert flops.of_step(5, {"full": 9}) == expected


def test_linear_layers_counted_by_hand():
    model = {
        "num_layers": 3,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 2,
        "swiglu": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1, 0, 1],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
    }
    flops = gpt_flops(model, num_layers={"full": 1, "window": 0}, vocab_size=10)
    # q and k 2x5, v and z 6x3, beta and alpha 6, out 18x8; taps of 4; a state of 5x3 read, written and read.
    linear = 8 * (10 + 10 + 18 + 18 + 6 + 6) + 18 * 8 + 4 * (10 + 10 + 18) + 6 * 3 * 5 * 3
    softmax, mlp = 4 * 8 * 8, 3 * 8 * 16
    assert flops.matrix_parameters == 2 * linear + softmax + 3 * mlp + 80
    assert flops.num_layers == {"full": 1}
    kimi = {"experimental_attention_variant": "kimi_delta_attention", "linear_num_key_heads": 6}
    flops = gpt_flops({**model, **kimi}, num_layers={"full": 1, "window": 0}, vocab_size=10)
    # q and k 6x5, v 6x3, beta 6, forget and gate 3, which open to 6x5 and 6x3; out 18x8; taps of 4; the state.
    linear = 8 * (30 + 30 + 18 + 6 + 3 + 3) + 3 * (30 + 18) + 18 * 8 + 4 * (30 + 30 + 18)
    assert flops.matrix_parameters == 2 * (linear + 6 * 3 * 5 * 3) + softmax + 3 * mlp + 80


def test_hybrid_layers_counted_by_hand():
    model = {
        "num_layers": 5,
        "hybrid_layer_pattern": "M-M*E",
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 2,
        "squared_relu": True,
        "mamba_num_heads": 6,
        "mamba_head_dim": 3,
        "mamba_num_groups": 2,
        "mamba_state_dim": 5,
        "num_experts": 16,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 7,
        "moe_shared_expert_intermediate_size": 9,
        "moe_latent_size": 4,
    }
    flops = gpt_flops(model, num_layers={"full": 1, "window": 0}, vocab_size=10)
    # z and x 6x3, B and C 2x5, dt 6, out 18x8; taps of 4 on x, B, C; a state of 3x5 written and read.
    mamba = 8 * (18 + 18 + 10 + 10 + 6) + 18 * 8 + 4 * (18 + 10 + 10) + 2 * 6 * 3 * 5
    softmax, mlp = 4 * 8 * 8, 2 * 8 * 16
    experts = 2 * 4 * 3 * 7 + 2 * 8 * 9 + 8 * 16 + 2 * 8 * 4
    assert flops.matrix_parameters == 2 * mamba + softmax + mlp + experts + 80
    assert flops.num_layers == {"full": 1}


def test_predictions_of_a_hybrid_model_counted_by_hand():
    model = {
        "num_layers": 1,
        "hybrid_layer_pattern": "-/*-/*-",
        "mtp_num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 2,
    }
    softmax, mlp, joined, output = 4 * 8 * 8, 2 * 8 * 16, 2 * 8 * 8, 80
    for repeated in (False, True):  # the same weights are multiplied once for each prediction
        arguments = {**model, "mtp_use_repeated_layer": repeated}
        flops = gpt_flops(arguments, num_layers={"full": 2, "window": 0}, vocab_size=10)
        assert flops.matrix_parameters == mlp + output + 2 * (softmax + mlp + joined + output)
        assert flops.num_layers == {"full": 2}


def test_experts_latent_attention_and_prediction_counted_by_hand():
    model = {
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 16,
        "num_attention_heads": 4,
        "swiglu": True,
        "multi_latent_attention": True,
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 4,
        "num_experts": 16,
        "moe_layer_freq": [0, 1],
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 7,
        "moe_shared_expert_intermediate_size": 9,
        "mtp_num_layers": 1,
    }
    flops = gpt_flops(model, num_layers={"full": 3, "window": 0}, vocab_size=10)
    # Queries 8x6 and 6 x 4x5; keys and values 8 x (5 + 2) and 5 x 4x(3 + 4); output 4x4 x 8.
    attention = 48 + 120 + 56 + 140 + 128
    dense, experts = 3 * 8 * 16, 3 * 8 * (3 * 7 + 9) + 8 * 16
    predicted = attention + experts + 16 * 8 + 80
    matrices = 2 * attention + dense + experts + 80 + predicted
    assert flops.matrix_parameters == matrices
    assert flops.score_width == 4 * (5 + 4)
    assert flops.num_layers == {"full": 3}


class ProductCounter(TorchDispatchMode):
    """Counts the operations of every matrix product that autograd's engine really runs."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.total += 2 * out.numel() * args[0].shape[-1]
        return out


def forward(tokens_SH: torch.Tensor, shape: dict, layers: int) -> torch.Tensor:
    """The matrix products of a GPT with full attention, and nothing else."""
    size, hidden = tokens_SH.shape
    heads, width = shape["num_heads"], shape["head_dim"]
    x = tokens_SH
    for _ in range(layers):
        q, k, v = (x @ torch.ones(hidden, heads * width, requires_grad=True) for _ in range(3))
        q, k, v = (t.view(size, heads, width).transpose(0, 1) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2))
        x = torch.bmm(scores, v).transpose(0, 1).reshape(size, heads * width)
        x = x @ torch.ones(heads * width, hidden, requires_grad=True)
        x = x @ torch.ones(hidden, shape["ffn_hidden_size"], requires_grad=True)
        x = x @ torch.ones(shape["ffn_hidden_size"], hidden, requires_grad=True)
    return x @ torch.ones(hidden, shape["vocab_size"], requires_grad=True)


def test_a_full_mask_equals_the_products_that_torch_runs_in_forward_and_backward():
    shape = {"num_heads": 3, "head_dim": 4, "ffn_hidden_size": 20, "vocab_size": 30}
    model = {
        "num_layers": 2,
        "hidden_size": 10,
        "ffn_hidden_size": 20,
        "num_attention_heads": 3,
        "num_query_groups": 3,
        "kv_channels": 4,
    }
    tokens = torch.ones(7, 10, requires_grad=True)
    with ProductCounter() as counter:
        forward(tokens, shape, layers=2).sum().backward()
    flops = gpt_flops(model, num_layers={"full": 2}, vocab_size=30)
    assert flops.of_step(7, {"full": 49}) == counter.total


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 8))
def test_attention_is_counted_by_the_area_of_its_mask(lengths: list[int], window: int):
    mask = masks.documents(lengths, within="causal")
    pairs = int(np.count_nonzero(mask.to_dense()))
    count = ModelFlops(matrix_parameters=0, score_width=5, num_layers={"full": 3, "window": 2})
    narrow = mask & masks.sliding_window(sum(lengths), window)
    dense = int(np.count_nonzero(narrow.to_dense()))
    found = count.of_step(sum(lengths), {"full": mask.area(), "window": narrow.area()})
    assert found == 3 * 2 * 5 * (3 * pairs + 2 * dense)


def test_an_unknown_mask_name_is_not_counted_as_zero():
    with pytest.raises(KeyError):
        ModelFlops(matrix_parameters=1, score_width=1, num_layers={"window": 1}).of_step(1, {})
