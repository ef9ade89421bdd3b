"""Families that rotate neighbouring channels of a head, not its halves: GLM-4 and ERNIE 4.5."""

from __future__ import annotations

from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.common import (
    ANY_SHARE_ROTATES,
    LLAMA_LIKE,
    PLAIN,
    SHAPE,
)
from megatron_cp.models.hugging_face.family import Family

_NEIGHBOURS = {"rotary_interleaved": True}
GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.where("add_qkv_bias", w.QKV_BIAS)),
        "dense layer": (*w.DENSE_NORM, *w.JOINED_DENSE),
    },
    settings=(*SHAPE, rope.HALF_ROPE, s.ATTENTION_BIASES_UNLESS_SAID),
    constants=LLAMA_LIKE | _NEIGHBOURS,
    only=ANY_SHARE_ROTATES,
)
ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    weights={"model": w.OUTER, "layer": w.ATTENTION, "dense layer": (*w.DENSE_NORM, *w.DENSE)},
    settings=(*s.SIZES, s.TIED_UNLESS_SAID, rope.ROPE_BUT_YARN),
    constants=LLAMA_LIKE | _NEIGHBOURS,
    only=PLAIN | {"use_bias": (False, None)},
)
