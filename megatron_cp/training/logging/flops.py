"""Floating-point operations of one training step, with attention counted by the area of its mask.

Megatron-LM counts half of seq_length^2 whatever the mask; packed documents look at far fewer pairs,
so that count would claim work that nobody did. Here a pair (query, key) that the mask allows costs
2 x (head size of keys + head size of values) per head in forward (scores and weighted values, a
multiplication and an addition each), a parameter of a matrix 2 per real token that it multiplies, a
number of a linear layer's state 2 each time that a token reads or writes it, and backward twice as
much as forward. Of experts the active ones count. Recomputed activations, norms, softmax and
embeddings' look-ups are not counted ("model FLOPs").

Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix, with the area of the mask in place of
s^2.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_cp.mcore.settings.arguments import head_sizes
from megatron_cp.mcore.settings.hybrid_pattern import hybrid_pattern
from megatron_cp.mcore.settings.layer_patterns import expert_layers, has_mlps
from megatron_cp.mcore.settings.mixers import (
    DELTA,
    KDA,
    MAMBA,
    MAMBA_TAPS,
    SOFTMAX,
    layer_mixers_of,
    mamba_sizes,
)
from megatron_cp.mcore.settings.sparse_settings import is_sparse, num_indexes

_PASSES = 3  # forward, and backward with respect to the inputs and to the weights


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What the count needs to know of a model."""

    matrix_parameters: int
    """Parameters of all matrices that a token multiplies, output layer included.

    Embedding look-up excluded.
    """

    score_width: int
    """Query heads x (head size of keys + head size of values)."""

    index_width: int = 0
    """Heads x head size of every index of sparse attention, which scores all pairs that the full mask allows."""

    most_keys: int | None = None
    """Keys of a token that attention reads at most; None: all that it sees."""

    num_layers: dict[str, int]
    """Layers per mask name, e.g. `{"full": 2, "window": 22}`."""

    def of_step(
        self, num_tokens: int, area: dict[str, int], read: dict[str, int] | None = None
    ) -> int:
        """Returns the operations of forward and backward over `num_tokens` real tokens.

        `area` says how many pairs the mask of each name allows, `read` how many of them attention reads (None: all).
        """
        read = area if read is None else read
        pairs = sum(read[name] * layers for name, layers in self.num_layers.items())
        scores = pairs * self.score_width + area.get("full", 0) * self.index_width
        return _PASSES * 2 * (num_tokens * self.matrix_parameters + scores)


def gpt_flops(
    arguments: Mapping[str, Any], *, num_layers: Mapping[str, int], vocab_size: int
) -> ModelFlops:
    """Returns the count for a GPT.

    Args:
        arguments: the model under Megatron-LM's names, completed.
        num_layers: layers by the name of their mask, those of predictions too.
        vocab_size: columns of the output layer.
    """
    hidden = arguments["hidden_size"]
    layers = _parameters_of_layers(arguments)
    of_prediction = layers[-1:]
    pattern = arguments.get("hybrid_layer_pattern")
    if pattern is not None and arguments.get("mtp_num_layers"):
        letters = {"hybrid_layer_pattern": hybrid_pattern(pattern).prediction}
        of_prediction = _parameters_of_layers({**arguments, **letters})
    extra = (arguments.get("mtp_num_layers") or 0) * (
        sum(of_prediction) + 2 * hidden * hidden + hidden * vocab_size
    )
    flops = ModelFlops(
        matrix_parameters=sum(layers) + hidden * vocab_size + extra,
        score_width=arguments["num_attention_heads"] * sum(head_sizes(Namespace(**arguments))),
        num_layers={name: count for name, count in num_layers.items() if count},
    )
    return _of_sparse(flops, arguments) if is_sparse(Namespace(**arguments)) else flops


def _of_sparse(flops: ModelFlops, arguments: Mapping[str, Any]) -> ModelFlops:
    """Returns the count of the same model with sparse attention, whose heads read latent rows as they are.

    Layers that pick, and predictions, have an index.
    """
    rank, turning = arguments["kv_lora_rank"], arguments["qk_pos_emb_head_dim"]
    heads, width = arguments["dsa_indexer_n_heads"], arguments["dsa_indexer_head_dim"]
    num_indices = num_indexes(arguments)
    hidden = arguments["hidden_size"]
    index = arguments["q_lora_rank"] * heads * width + hidden * (heads + width)
    return replace(
        flops,
        matrix_parameters=flops.matrix_parameters + num_indices * index,
        score_width=arguments["num_attention_heads"] * (2 * rank + turning),
        index_width=num_indices * heads * width,
        most_keys=arguments["dsa_indexer_topk"],
    )


def _parameters_of_layers(arguments: Mapping[str, Any]) -> list[int]:
    """Returns for each decoder layer the parameters that a token multiplies."""
    kinds = (layer_mixers_of(arguments), has_mlps(arguments), expert_layers(arguments))
    return [
        (0 if mixer is None else _MIXERS[mixer](arguments))
        + (_mlp(arguments, is_expert=expert) if mlp else 0)
        for mixer, mlp, expert in zip(*kinds, strict=True)
    ]


def _attention(arguments: Mapping[str, Any]) -> int:
    """Returns the parameters of a layer's projections."""
    hidden, heads = arguments["hidden_size"], arguments["num_attention_heads"]
    key_size, value_size = head_sizes(Namespace(**arguments))
    if not arguments.get("multi_latent_attention"):
        gate = bool(arguments.get("attention_output_gate"))
        return int(hidden * key_size * ((2 + gate) * heads + 2 * arguments["num_query_groups"]))
    query_rank, rank = arguments.get("q_lora_rank"), arguments["kv_lora_rank"]
    queries = (hidden + heads * key_size) * query_rank if query_rank else hidden * heads * key_size
    keys = hidden * (rank + arguments["qk_pos_emb_head_dim"])
    up = rank * heads * (arguments["qk_head_dim"] + value_size)
    return int(queries + keys + up + heads * value_size * hidden)


def _gated_delta_net(arguments: Mapping[str, Any]) -> int:
    """Returns the parameters of a layer's projections and taps, and what a token costs its states.

    A state of K x V numbers is read, written to and read again, a multiplication and an addition each.
    """
    heads, value_size = arguments["linear_num_value_heads"], arguments["linear_value_head_dim"]
    key_size = arguments["linear_key_head_dim"]
    keys, values = arguments["linear_num_key_heads"] * key_size, heads * value_size
    projections = arguments["hidden_size"] * (2 * keys + 3 * values + 2 * heads)
    taps = arguments["linear_conv_kernel_dim"] * (2 * keys + values)
    return int(projections + taps + 3 * heads * key_size * value_size)


def _kimi_delta(arguments: Mapping[str, Any]) -> int:
    """Returns the same of Kimi delta attention, whose forget gate and output gate are narrow first."""
    heads, value_size = arguments["linear_num_value_heads"], arguments["linear_value_head_dim"]
    keys, values = heads * arguments["linear_key_head_dim"], heads * value_size
    projections = arguments["hidden_size"] * (2 * keys + 2 * values + heads + 2 * value_size)
    taps = arguments["linear_conv_kernel_dim"] * (2 * keys + values)
    return int(projections + value_size * (keys + values) + taps + 3 * keys * value_size)


def _mamba(arguments: Mapping[str, Any]) -> int:
    """Returns the same of a Mamba-2 layer, whose states are written to and read."""
    heads, head_dim, groups, state_dim = mamba_sizes(Namespace(**arguments))
    inner, shared = heads * head_dim, groups * state_dim
    projections = arguments["hidden_size"] * (3 * inner + 2 * shared + heads)
    return int(projections + MAMBA_TAPS * (inner + 2 * shared) + 2 * heads * head_dim * state_dim)


_MIXERS = {SOFTMAX: _attention, DELTA: _gated_delta_net, KDA: _kimi_delta, MAMBA: _mamba}


def _mlp(arguments: Mapping[str, Any], *, is_expert: bool) -> int:
    """Returns the parameters of a layer's MLP that one token multiplies."""
    hidden = arguments["hidden_size"]
    matrices = 3 if arguments.get("swiglu") or arguments.get("quick_geglu") else 2
    if not is_expert:
        return int(matrices * hidden * arguments["ffn_hidden_size"])
    latent = arguments.get("moe_latent_size")
    routed = arguments["moe_router_topk"] * arguments["moe_ffn_hidden_size"] * (latent or hidden)
    shared = (arguments.get("moe_shared_expert_intermediate_size") or 0) * hidden
    around = hidden * arguments["num_experts"] + 2 * hidden * (latent or 0)
    return int(matrices * (routed + shared) + around)
