"""Masks, options and tensors that the distributed tests share; every rank builds the same ones."""

import numpy as np
import torch

from megatron_cp import mask as masks
from tests.oracles.plans import tokens_of

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def mask_cases():
    """Masks by name: odd and prime lengths, empty and one-token documents, rows without keys, bands."""
    return {
        "causal 37": masks.causal(37),
        "full 16": masks.full(16),
        "one token": masks.causal(1),
        "documents": masks.documents([5, 0, 13, 1, 1, 17], within="causal"),
        "bidirectional documents": masks.documents([11, 2, 20], within="full"),
        "window": masks.sliding_window(41, 6),
        "rows without keys": masks.from_slices(
            23, 23, [(0, 7, 0, 7, None, 0), (12, 20, 3, 9, -9, None)]
        ),
        "one long, many short": masks.documents([64] + [1] * 9, within="causal"),
    }


def tensors(
    num_tokens,
    dtype=torch.float32,
    seed=0,
    heads=(HEADS, KV_HEADS),
    dims=(HEAD_DIM, HEAD_DIM),
    num_keys=None,
):
    """Returns q, k, v, dout, dlse in global order, the same on every rank; by default as many keys as tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    head_dim, value_dim = dims

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = randn(num_tokens, num_heads, head_dim)
    num_keys = num_tokens if num_keys is None else num_keys
    k = randn(num_keys, num_kv_heads, head_dim)
    v = randn(num_keys, num_kv_heads, value_dim)
    return q, k, v, randn(num_tokens, num_heads, value_dim), randn(num_tokens, num_heads).float()


def restore(parts, plan, side="q"):
    """Returns the rows of all ranks in global order, padding dropped; plain NumPy indexing."""
    stacked = np.concatenate([np.asarray(part.detach().double()) for part in parts])
    whole = np.empty_like(stacked)
    whole[tokens_of(plan, side).reshape(-1)] = stacked
    return torch.from_numpy(whole[: plan.mask.num_queries if side == "q" else plan.mask.num_keys])


def local_rows(x, plan, rank, side="q"):
    """Returns the rows of `rank`, padding as zeros; plain indexing, no code of the runtime."""
    tokens = tokens_of(plan, side)
    padded = torch.cat([x, x.new_zeros((tokens.size - len(x), *x.shape[1:]))])
    return padded[torch.from_numpy(tokens[rank].copy())].clone()
