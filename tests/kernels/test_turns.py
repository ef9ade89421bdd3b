"""The turns of the deterministic backward pass are fenced: what the emulator's bits cannot show, its counts can.

Adding to dq goes through the asynchronous unit, taking and giving turns through ordinary memory. Each turn that is
taken and each that is given needs a fence between the two; the emulator has no shadow of global memory and would
not miss one.
"""

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.emulated.backend import Settings, running
from megatron_cp.attn.emulated.kernels import EmulatedKernel
from tests.attn.formula import random_case

FENCE = "fence.acq_rel.gpu"


def counts_of_backward(size, heads, *, deterministic, monkeypatch):
    """How often each instruction of the main kernel of the backward pass ran, and its tile of queries and keys."""
    shapes = []
    made = EmulatedKernel.__init__

    def noting(self, variant):
        made(self, variant)
        shapes.append((self.tile_rows, self.tile_keys))

    monkeypatch.setattr(EmulatedKernel, "__init__", noting)
    inputs, _ = random_case(*size, heads, (64, 64), torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]
    with running(Settings(seed=1, num_blocks=1, host_threads=1)) as session:
        mask = masks.full(*size)
        out, _ = attend(*leaves, mask, backend="emulated", deterministic=deterministic)
        out.sum().backward()
    main = 2  # forward, preprocess, main, postprocess
    return session.runs[main].counts, shapes[main]


@pytest.mark.parametrize("num_keys", [1, 200])
def test_every_turn_that_is_taken_and_every_one_that_is_given_is_fenced(num_keys, monkeypatch):
    size, heads = (300, num_keys), (2, 1)
    plain, _ = counts_of_backward(size, heads, deterministic=False, monkeypatch=monkeypatch)
    turns, shape = counts_of_backward(size, heads, deterministic=True, monkeypatch=monkeypatch)
    query_tiles, key_tiles = (-(-length // tile) for length, tile in zip(size, shape, strict=True))
    taken = heads[0] * key_tiles * query_tiles
    given = heads[0] * key_tiles * (query_tiles + 1)  # one tile late, and the rest at the end
    assert turns[FENCE] - plain.get(FENCE, 0) == taken + given
