"""The families of Qwen, from 2 to 3.6: dense models, experts, and hybrids of gated delta nets and gated attention."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.common import (
    ANY_SHARE_ROTATES,
    EXPERTS_AFTER_SOFTMAX,
    LLAMA_LIKE,
    NO_BIAS,
    NO_WINDOW,
    PLAIN,
    SHAPE,
)
from megatron_cp.models.hugging_face.family import Family, Tables, images_too

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QKV_BIAS),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
    },
    settings=(*SHAPE, rope.ROPE),
    constants=LLAMA_LIKE | {"add_qkv_bias": True},
    only=PLAIN | NO_WINDOW,
)
_EXPERT_LAYER = (
    *w.EXPERT_NORM,
    w.row("mlp.router.weight", ("mlp.gate.weight", "EH")),
    *w.GATED_SHARED_EXPERT,
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.where("add_qkv_bias", w.QKV_BIAS)),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
        "expert layer": _EXPERT_LAYER,
        "expert": w.QWEN_EXPERTS,
    },
    settings=(
        *SHAPE,
        rope.ROPE,
        s.QKV_BIASES_UNLESS_SAID,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.GATED_SHARED_WIDTH,
        experts.SPARSE_LAYERS,
        experts.RENORMALISED,
    ),
    constants=LLAMA_LIKE | EXPERTS_AFTER_SOFTMAX | {"moe_shared_expert_gate": True},
    only=PLAIN | NO_WINDOW,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QK_NORM),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
    },
    settings=(*SHAPE, rope.ROPE),
    constants=LLAMA_LIKE | {"qk_layernorm": True},
    only=PLAIN | NO_WINDOW | NO_BIAS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QK_NORM),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
        "expert layer": (*w.EXPERT_NORM, w.row("mlp.router.weight", ("mlp.gate.weight", "EH"))),
        "expert": w.QWEN_EXPERTS,
    },
    settings=(
        *SHAPE,
        rope.ROPE,
        experts.NUM_EXPERTS,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.SPARSE_LAYERS,
        experts.RENORMALISED,
    ),
    constants=LLAMA_LIKE | EXPERTS_AFTER_SOFTMAX | {"qk_layernorm": True},
    only=PLAIN | NO_WINDOW | NO_BIAS,
)


QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl_text",
    wrapper=images_too("qwen3_vl"),
    alone=QWEN3,
    settings=QWEN3.settings_with({rope.ROPE: rope.ROPE_OF_TEXTS}),
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    wrapper=images_too("qwen3_vl_moe"),
    alone=QWEN3_MOE,
    weights={
        **QWEN3_MOE.weights,
        "stacked expert": w.STACKED_EXPERTS,
        "turned stacked expert": w.TURNED_STACKED_EXPERTS,
    },
    settings=QWEN3_MOE.settings_with({rope.ROPE: rope.ROPE_OF_TEXTS, experts.RENORMALISED: None}),
    # Its chosen experts' weights sum to 1 in any case: its class has no word for it.
    constants={**QWEN3_MOE.constants, "moe_router_pre_softmax": False},
    only={**QWEN3_MOE.only, "norm_topk_prob": (True,)},
)
_QWEN_LINEAR: Tables = {
    "model": w.OUTER_ALONE,
    "layer": w.GATED_ATTENTION,
    "linear layer": w.GATED_DELTA_NET_BY_KIND,
    "dense layer": (*w.DENSE_NORM, *w.DENSE),
    "expert layer": _EXPERT_LAYER,
    "expert": w.QWEN_EXPERTS,
    "stacked expert": w.STACKED_EXPERTS,
    "prediction layer": w.QWEN_PREDICTION,
}
_QWEN_PREDICTIONS = ("mtp.", "mtp.layers.{number}.")
_GATED_DELTA_NETS = {
    "qk_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    weights={**_QWEN_LINEAR, "linear layer": w.GATED_DELTA_NET},
    predictions_at=_QWEN_PREDICTIONS,
    settings=(
        *SHAPE,
        rope.partial_rope(0.25),
        *s.LINEAR_LAYERS,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.GATED_SHARED_WIDTH,
        experts.SPARSE_LAYERS,
        experts.RENORMALISED_UNLESS_SAID,
        s.A_PREDICTION_LAYER,
    ),
    constants=LLAMA_LIKE
    | EXPERTS_AFTER_SOFTMAX
    | _GATED_DELTA_NETS
    | {"moe_shared_expert_gate": True},
    only=ANY_SHARE_ROTATES | NO_BIAS | {"use_sliding_window": (False, None)},
)
_ONLY_OF_QWEN3_5 = (
    ANY_SHARE_ROTATES
    | NO_BIAS
    | {
        "attn_output_gate": (True, None),
        "output_gate_type": ("swish", None),
        "mamba_ssm_dtype": ("float32", None),
        "mlp_only_layers": (None,),
        "mtp_use_dedicated_embeddings": (False, None),
    }
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    wrapper=images_too("qwen3_5"),
    architecture="Qwen3_5ForCausalLM",
    weights=_QWEN_LINEAR,
    predictions_at=_QWEN_PREDICTIONS,
    settings=(*SHAPE, rope.PARTIAL_ROPE_OF_TEXTS, *s.LINEAR_LAYERS, s.MTP_LAYERS),
    constants=LLAMA_LIKE | _GATED_DELTA_NETS,
    only=_ONLY_OF_QWEN3_5,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    wrapper=images_too("qwen3_5_moe"),
    architecture="Qwen3_5MoeForCausalLM",
    weights=_QWEN_LINEAR,
    predictions_at=_QWEN_PREDICTIONS,
    settings=(
        *s.SIZES_OF_EXPERTS_ALONE,
        s.TIED,
        experts.NO_DENSE_LAYERS,
        rope.PARTIAL_ROPE_OF_TEXTS,
        *s.LINEAR_LAYERS,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.GATED_SHARED_WIDTH,
        s.MTP_LAYERS,
    ),
    constants=LLAMA_LIKE
    | EXPERTS_AFTER_SOFTMAX
    | _GATED_DELTA_NETS
    | {"moe_layer_freq": 1, "moe_router_pre_softmax": False, "moe_shared_expert_gate": True},
    only=_ONLY_OF_QWEN3_5,
)
