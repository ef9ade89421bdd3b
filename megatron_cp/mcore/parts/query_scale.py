"""Queries that grow with their position, so that attention over long texts stays as sharp as over short ones.

    scale = 1 + beta ln(1 + floor(position / original length))

Within the original length, that before YaRN, it is 1. Megatron-Core has no such scale; the flag is ours.
Source: transformers 5.24, modeling_ministral3.py.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_cp.mcore.batch import ContextParallelParams


def scaled_queries(query: torch.Tensor, config: Any, params: Any) -> torch.Tensor:
    """Returns queries `[s, b, n, h]`, or `[s, n, h]`, times the scale of each row's position, where config has a beta.

    Raises NotImplementedError where `params` say no positions.
    """
    beta = getattr(config, "llama_4_scaling_beta", None)
    if not beta:
        return query
    if not isinstance(params, ContextParallelParams) or params.positions is None:
        raise NotImplementedError(
            f"llama_4_scaling_beta={beta} needs the position of each row; give packed_seq_params of "
            "megatron_cp.mcore.batch.local_batch or context_parallel_params"
        )
    lengths = params.positions // config.yarn_original_max_position_embeddings
    scale = 1 + beta * torch.log1p(lengths.float())
    by_row = scale.view(params.num_samples, -1).t()  # as the rows lie in the model
    return query * by_row.reshape(*query.shape[:-2], 1, 1).to(query.dtype)
