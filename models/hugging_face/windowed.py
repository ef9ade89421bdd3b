"""Families whose layers see either a window or all: Code World Model, Ministral 8B and K-EXAONE."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face import window_settings as windows
from megatron_cp.models.hugging_face.common import (
    AS_DEEPSEEK_CHOOSES,
    EXPERTS_BY_SIGMOID,
    LLAMA_LIKE,
    NO_BIAS,
    PLAIN,
    SHAPE,
)
from megatron_cp.models.hugging_face.family import Family

CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    weights={"model": w.OUTER, "layer": w.ATTENTION, "dense layer": (*w.DENSE_NORM, *w.DENSE)},
    settings=(*SHAPE, rope.ROPE, windows.WINDOWS_BUT_EVERY_FOURTH),
    constants=LLAMA_LIKE,
    only=PLAIN | NO_BIAS,
)
MINISTRAL = replace(
    CWM,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    settings=(*SHAPE, rope.ROPE, windows.WINDOWS_OF_ALL),
)
EXAONE_MOE = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    weights={
        "model": w.OUTER_ALONE,
        "layer": (*w.ATTENTION, *w.QK_NORM),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
        "expert layer": (*w.EXPERT_NORM, *w.EXAONE_ROUTER, *w.SHARED_EXPERTS),
        "expert": w.QWEN_EXPERTS,
    },
    settings=(
        *SHAPE,
        rope.ROPE,
        windows.WINDOWS_ALONE_ROTATE,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.NAMED_LAYERS_OR_COUNTED,
        experts.SHARED_WIDTH,
        experts.GROUPS_UNLESS_SAID,
        experts.ROUTED_SCALING,
    ),
    constants=LLAMA_LIKE | EXPERTS_BY_SIGMOID | {"qk_layernorm": True},
    only=PLAIN | NO_BIAS | AS_DEEPSEEK_CHOOSES | {"norm_topk_prob": (True,)},
    words={"num_shared_experts": "n_shared_experts"},
)
