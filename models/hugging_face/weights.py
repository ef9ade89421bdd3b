"""Tables of weights: which tensors of Hugging Face make which of Megatron, by kind of layer.

Names and shapes are those of the families' published checkpoints as `transformers` saves them;
Megatron's are the sharded keys of megatron-core's layer specs. Shapes are in letters: "QH" is
query heads x head width by hidden (the legend of all of them stands in rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_cp.models.hugging_face.orders import (
    Sizes,
    by_group,
    by_group_with_gate,
    evens_then_odds,
    of_key_heads,
    section_of,
)
from megatron_cp.models.hugging_face.rows import Row


def row(megatron: str, *hf: tuple[str, str], **properties: Any) -> Row:
    """Returns a row of a table: Megatron's name, and (name, shape in letters) of what it is made of."""
    return Row(megatron=megatron, hf=hf, **properties)


def where(argument: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Returns rows that are there where an argument is on."""
    return tuple(replace(one, needs=(argument, True)) for one in rows)


def renamed(rows: tuple[Row, ...], start: str, other: str) -> tuple[Row, ...]:
    """Returns rows whose names in Hugging Face's folders begin otherwise."""
    return tuple(
        replace(one, hf=tuple((other + name.removeprefix(start), text) for name, text in one.hf))
        for one in rows
    )


OUTER = (
    row(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight", "VH"),
        padded=True,
        copy="embed_tokens.weight",
    ),
    row("decoder.final_layernorm.weight", ("model.norm.weight", "H")),
    row(
        "output_layer.weight",
        ("lm_head.weight", "VH"),
        padded=True,
        needs=("untie_embeddings_and_output_weights", True),
        copy="shared_head.head.weight",
    ),
)
PREDICTION = (
    row("enorm.weight", ("enorm.weight", "H")),
    row("hnorm.weight", ("hnorm.weight", "H")),
    row("eh_proj.weight", ("eh_proj.weight", "Hh")),
    row("final_layernorm.weight", ("shared_head.norm.weight", "H")),
)
# Embeddings and output layer are the model's, without copies.
OUTER_ALONE = tuple(replace(one, copy=None) for one in OUTER)
QWEN_PREDICTION = (
    row("enorm.weight", ("pre_fc_norm_embedding.weight", "H")),
    row("hnorm.weight", ("pre_fc_norm_hidden.weight", "H")),
    row("eh_proj.weight", ("fc.weight", "Hh")),
    row("final_layernorm.weight", ("norm.weight", "H")),
)
ATTENTION = (
    row("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight", "H")),
    row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "QH"),
        ("self_attn.k_proj.weight", "KH"),
        ("self_attn.v_proj.weight", "KH"),
        order=by_group,
    ),
    row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "HQ")),
)
JOINED_ATTENTION = (
    ATTENTION[0],
    row("self_attention.linear_qkv.weight", ("self_attn.qkv_proj.weight", "qH"), order=by_group),
    ATTENTION[2],
)
QKV_BIAS = (
    row(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "Q"),
        ("self_attn.k_proj.bias", "K"),
        ("self_attn.v_proj.bias", "K"),
        order=by_group,
    ),
)
QK_NORM = (
    row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", "D")),
    row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", "D")),
)
SINKS = (
    row("self_attention.linear_proj.bias", ("self_attn.o_proj.bias", "H")),
    row("self_attention.core_attention.softmax_offset", ("self_attn.sinks", "N")),
)
LATENT_ATTENTION = (
    row("input_layernorm.weight", ("input_layernorm.weight", "H")),
    row(
        "self_attention.linear_q_proj.weight",
        ("self_attn.q_proj.weight", "UH"),
        needs=("q_lora_rank", False),
    ),
    row(
        "self_attention.linear_q_down_proj.weight",
        ("self_attn.q_a_proj.weight", "AH"),
        needs=("q_lora_rank", True),
    ),
    row(
        "self_attention.q_layernorm.weight",
        ("self_attn.q_a_layernorm.weight", "A"),
        needs=("q_lora_rank", True),
        fused="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    row(
        "self_attention.linear_q_up_proj.weight",
        ("self_attn.q_b_proj.weight", "UA"),
        needs=("q_lora_rank", True),
    ),
    row(
        "self_attention.linear_kv_down_proj.weight",
        ("self_attn.kv_a_proj_with_mqa.weight", "BH"),
    ),
    row(
        "self_attention.kv_layernorm.weight",
        ("self_attn.kv_a_layernorm.weight", "C"),
        fused="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    row("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight", "TC")),
    row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "HO")),
)
_INDEX = "self_attention.core_attention.indexer."
INDEX = (
    row(f"{_INDEX}linear_wq_b.weight", ("self_attn.indexer.wq_b.weight", "xA")),
    row(f"{_INDEX}linear_wk.weight", ("self_attn.indexer.wk.weight", "iH")),
    row(f"{_INDEX}k_norm.weight", ("self_attn.indexer.k_norm.weight", "i")),
    row(f"{_INDEX}k_norm.bias", ("self_attn.indexer.k_norm.bias", "i")),
    row(f"{_INDEX}linear_weights_proj.weight", ("self_attn.indexer.weights_proj.weight", "jH")),
)
GATED_ATTENTION = (
    ATTENTION[0],
    row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "PH"),
        ("self_attn.k_proj.weight", "KH"),
        ("self_attn.v_proj.weight", "KH"),
        order=by_group_with_gate,
    ),
    ATTENTION[2],
    *QK_NORM,
)


def sections(
    megatron: str,
    names: tuple[str, ...],
    hf: tuple[str, str],
    rows_of: Callable[[int], Callable[[Sizes], np.ndarray]],
) -> tuple[Row, ...]:
    """Returns a row for each section of one tensor of Hugging Face."""
    return tuple(
        row(f"{megatron}.{name}", hf, rows=rows_of(section)) for section, name in enumerate(names)
    )


# All norms of the family but the last one store their weights minus 1; Megatron's switch is for all.
_DELTA_NET_STATES = (
    *sections(
        "self_attention.conv1d.weight",
        ("query", "key", "value"),
        ("linear_attn.conv1d.weight", "Z1W"),
        lambda section: section_of(section, "L", "L", "R"),
    ),
    row("self_attention.dt_bias", ("linear_attn.dt_bias", "J")),
    row("self_attention.A_log", ("linear_attn.A_log", "J")),
    row("self_attention.out_norm.weight", ("linear_attn.norm.weight", "I"), less=1.0),
    row("self_attention.out_proj.weight", ("linear_attn.out_proj.weight", "HR")),
)
GATED_DELTA_NET = (
    row("self_attention.in_proj.layer_norm_weight", ("input_layernorm.weight", "H")),
    *sections(
        "self_attention.in_proj.weight",
        ("query", "key", "value", "z"),
        ("linear_attn.in_proj_qkvz.weight", "XH"),
        lambda section: of_key_heads(section, "L", "L", "R", "R"),
    ),
    *sections(
        "self_attention.in_proj.weight",
        ("beta", "alpha"),
        ("linear_attn.in_proj_ba.weight", "YH"),
        lambda section: of_key_heads(section, "J", "J"),
    ),
    *_DELTA_NET_STATES,
)
GATED_DELTA_NET_BY_KIND = (
    GATED_DELTA_NET[0],
    *sections(
        "self_attention.in_proj.weight",
        ("query", "key", "value"),
        ("linear_attn.in_proj_qkv.weight", "ZH"),
        lambda section: section_of(section, "L", "L", "R"),
    ),
    row("self_attention.in_proj.weight.z", ("linear_attn.in_proj_z.weight", "RH")),
    row("self_attention.in_proj.weight.beta", ("linear_attn.in_proj_b.weight", "JH")),
    row("self_attention.in_proj.weight.alpha", ("linear_attn.in_proj_a.weight", "JH")),
    *_DELTA_NET_STATES,
)
_DELTA = "self_attention."
_CHANNELS = (("query", "q", "L"), ("key", "k", "L"), ("value", "v", "R"))
KIMI_DELTA_ATTENTION = (
    GATED_DELTA_NET[0],
    *(
        row(f"{_DELTA}in_proj.weight.{ours}", (f"self_attn.{theirs}_proj.weight", f"{rows}H"))
        for ours, theirs, rows in (
            *_CHANNELS,
            ("beta", "b", "J"),
            ("forget", "f_a", "I"),
            ("gate", "g_a", "I"),
        )
    ),
    *(
        row(f"{_DELTA}conv1d.weight.{ours}", (f"self_attn.{theirs}_conv1d.weight", f"{rows}1W"))
        for ours, theirs, rows in _CHANNELS
    ),
    row(f"{_DELTA}A_log", ("self_attn.A_log", "11J1"), flat=True),
    row(f"{_DELTA}dt_bias", ("self_attn.dt_bias", "L")),
    row(f"{_DELTA}forget_up.weight", ("self_attn.f_b_proj.weight", "LI")),
    row(f"{_DELTA}gate_up.weight", ("self_attn.g_b_proj.weight", "RI")),
    row(f"{_DELTA}out_norm.weight", ("self_attn.o_norm.weight", "I")),
    row(f"{_DELTA}out_proj.weight", ("self_attn.o_proj.weight", "HR")),
)
DENSE_NORM = (row("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight", "H")),)
DENSE = (
    row(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "FH"),
        ("mlp.up_proj.weight", "FH"),
    ),
    row("mlp.linear_fc2.weight", ("mlp.down_proj.weight", "HF")),
)
UNGATED_DENSE = (row("mlp.linear_fc1.weight", ("mlp.up_proj.weight", "FH")), DENSE[1])
JOINED_DENSE = (row("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight", "fH")), DENSE[1])
# The same where the norm before the MLP is a module of its own in local layers.
DENSE_BEHIND_OWN_NORM = (
    row(
        "pre_mlp_layernorm.weight",
        ("post_attention_layernorm.weight", "H"),
        fused="mlp.linear_fc1.layer_norm_weight",
    ),
    *DENSE,
)
OWN_NORM_BEFORE_EXPERTS = (
    row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "H")),
)
# The local layer spec stores the norm before experts under the name that a dense layer has with
# Transformer Engine; Transformer Engine's spec does not fuse it there.
EXPERT_NORM = (
    row(
        "mlp.linear_fc1.layer_norm_weight",
        ("post_attention_layernorm.weight", "H"),
        fused="pre_mlp_layernorm.weight",
    ),
)


def _experts(gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Experts that are stored one by one."""
    return (
        row("linear_fc1.weight", (gate, "MH"), (up, "MH")),
        row("linear_fc2.weight", (down, "HM")),
    )


QWEN_EXPERTS = _experts(
    *(f"mlp.experts.{{e}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
)
STACKED_EXPERTS = (
    row("linear_fc1.weight", ("mlp.experts.gate_up_proj", "GH")),
    row("linear_fc2.weight", ("mlp.experts.down_proj", "HM")),
)
# As Qwen 3 VL's published folders have them; transformers reads these and writes the others.
TURNED_STACKED_EXPERTS = (
    row("linear_fc1.weight", ("mlp.experts.gate_up_proj", "HG"), transposed=True),
    row("linear_fc2.weight", ("mlp.experts.down_proj", "MH"), transposed=True),
)
MIXTRAL_EXPERTS = _experts(
    *(f"block_sparse_moe.experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2"))
)
GPT_OSS_EXPERTS = (
    row(
        "linear_fc1.weight",
        ("mlp.experts.gate_up_proj", "HG"),
        order=evens_then_odds,
        transposed=True,
    ),
    row("linear_fc1.bias", ("mlp.experts.gate_up_proj_bias", "G"), order=evens_then_odds),
    row("linear_fc2.weight", ("mlp.experts.down_proj", "MH"), transposed=True),
    row("linear_fc2.bias", ("mlp.experts.down_proj_bias", "H")),
)
GPT_OSS_ROUTER = (
    row("mlp.router.weight", ("mlp.router.weight", "EH")),
    row("mlp.router.bias", ("mlp.router.bias", "E")),
)
DEEPSEEK_ROUTER = (
    row("mlp.router.weight", ("mlp.gate.weight", "EH")),
    row("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias", "E")),
)
SHARED_EXPERTS = (
    row(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "SH"),
        ("mlp.shared_experts.up_proj.weight", "SH"),
    ),
    row("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_experts.down_proj.weight", "HS")),
)
HUNYUAN_ROUTER = (
    row("mlp.router.weight", ("mlp.router.gate.weight", "EH")),
    row("mlp.router.expert_bias", ("mlp.expert_bias", "E")),
)
NORM_BIASES = {  # of LayerNorm, beside the weights
    "model": row("decoder.final_layernorm.bias", ("model.norm.bias", "H")),
    "layer": row("self_attention.linear_qkv.layer_norm_bias", ("input_layernorm.bias", "H")),
    "dense layer": row("mlp.linear_fc1.layer_norm_bias", ("post_attention_layernorm.bias", "H")),
}
EXAONE_ROUTER = (
    DEEPSEEK_ROUTER[0],
    row("mlp.router.expert_bias", ("mlp.e_score_correction_bias", "E")),
)
HUNYUAN_SHARED_EXPERTS = renamed(SHARED_EXPERTS, "mlp.shared_experts.", "mlp.shared_mlp.")

GATED_SHARED_EXPERT = (
    row(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_expert.gate_proj.weight", "SH"),
        ("mlp.shared_expert.up_proj.weight", "SH"),
    ),
    row("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_expert.down_proj.weight", "HS")),
    row("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight", "1H")),
)
