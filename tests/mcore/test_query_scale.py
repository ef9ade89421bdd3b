"""Queries grow with their position: every row by the scale of its own."""

import math
from types import SimpleNamespace

import pytest
import torch

CONFIG = SimpleNamespace(llama_4_scaling_beta=0.3, yarn_original_max_position_embeddings=5)


def scaled_by(query: torch.Tensor, config: SimpleNamespace, **said: object) -> torch.Tensor:
    from megatron_cp.mcore.batch import ContextParallelParams  # after the stand-ins of conftest.py
    from megatron_cp.mcore.parts.query_scale import scaled_queries

    return scaled_queries(query, config, ContextParallelParams(**said) if said else None)


@pytest.mark.parametrize("num_samples", [1, 2])
def test_each_row_and_its_gradient_are_scaled_by_its_position(num_samples: int):
    """Rows lie as in the model: the first column holds the first sample."""
    positions = [0, 4, 5, 9, 10, 3, 24, 25]
    rows = len(positions) // num_samples
    query = torch.randn(rows, num_samples, 3, 2, dtype=torch.float64, requires_grad=True)
    scaled = scaled_by(query, CONFIG, positions=torch.tensor(positions), num_samples=num_samples)
    scaled.sum().backward()
    for place, position in enumerate(positions):
        at = (place % rows, place // rows)
        scale = 1 + 0.3 * math.log(1 + position // 5)
        for found, plain in ((scaled, query), (query.grad, torch.ones_like(query))):
            torch.testing.assert_close(found[at], plain[at] * scale, rtol=1e-6, atol=0)
    assert torch.equal(scaled[0, 0], query[0, 0])


def test_without_a_beta_queries_are_the_same_tensor_and_without_positions_one_is_refused():
    query = torch.randn(2, 1, 1, 1)
    assert scaled_by(query, SimpleNamespace()) is query
    for said in ({}, {"num_samples": 1}):
        with pytest.raises(NotImplementedError, match=r"llama_4_scaling_beta=0\.3 needs the pos"):
            scaled_by(query, CONFIG, **said)
