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
    flops = gpt_flops(
        num_layers={"full": 2},
        hidden_size=8,
        ffn_hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=2,
        vocab_size=10,
        gated_mlp=True,
    )
    # A layer: queries 8x8, keys and values 2 x 8x4, output 8x8, MLP 3 x 8x16. Output layer 8x10.
    per_layer = 64 + 64 + 64 + 384
    matrices = 2 * per_layer + 80
    # Documents of 3 and 2 tokens, causal: 6 + 3 pairs; per pair and layer 4 heads x (2 + 2) x 2.
    expected = 3 * (2 * 5 * matrices + 2 * 9 * 4 * 4 * 2)
    assert flops.of_step(5, {"full": 9}) == expected


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
    tokens = torch.ones(7, 10, requires_grad=True)
    with ProductCounter() as counter:
        forward(tokens, shape, layers=2).sum().backward()
    flops = gpt_flops(
        num_layers={"full": 2}, hidden_size=10, num_kv_heads=3, gated_mlp=False, **shape
    )
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
