"""Nemotron-H and Nemotron 3: hybrids of Mamba-2, attention, MLPs and experts, each layer one of them.

Published folders say the layers by letters (`hybrid_override_pattern`), `transformers` by words (`layers_block_type`).
Attention does not rotate, whatever config.json says of angles. `transformers` (5.24) holds steps above `time_step_min`;
Megatron-Core and the models' own code do not.
"""

from __future__ import annotations

import math

from megatron_cp.mcore.settings.hybrid_pattern import EXPERTS, hybrid_layers
from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.common import LLAMA_LIKE, NO_BIAS
from megatron_cp.models.hugging_face.family import Family
from megatron_cp.models.hugging_face.orders import by_group, section_of
from megatron_cp.models.hugging_face.settings import Arguments, Config, Setting, same

_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
_NORM = ("norm.weight", "H")

_OUTER = (
    w.row("embedding.word_embeddings.weight", ("backbone.embeddings.weight", "VH"), padded=True),
    w.row("decoder.final_norm.weight", ("backbone.norm_f.weight", "H")),
    w.row(
        "output_layer.weight",
        ("lm_head.weight", "VH"),
        padded=True,
        needs=("untie_embeddings_and_output_weights", True),
    ),
)
_ATTENTION = (
    w.row("self_attention.linear_qkv.layer_norm_weight", _NORM),
    w.row(
        "self_attention.linear_qkv.weight",
        ("mixer.q_proj.weight", "QH"),
        ("mixer.k_proj.weight", "KH"),
        ("mixer.v_proj.weight", "KH"),
        order=by_group,
    ),
    w.row("self_attention.linear_proj.weight", ("mixer.o_proj.weight", "HQ")),
)
_MAMBA = (
    w.row("mixer.in_proj.layer_norm_weight", _NORM),
    *w.sections(
        "mixer.in_proj.weight",
        ("z", "x", "B", "C", "dt"),
        ("mixer.in_proj.weight", "eH"),
        lambda section: section_of(section, "b", "b", "c", "c", "a"),
    ),
    *(
        row
        for name, letters in (("weight", "d1w"), ("bias", "d"))
        for row in w.sections(
            f"mixer.conv1d.{name}",
            ("x", "B", "C"),
            (f"mixer.conv1d.{name}", letters),
            lambda section: section_of(section, "b", "c", "c"),
        )
    ),
    w.row("mixer.A_log", ("mixer.A_log", "a")),
    w.row("mixer.D", ("mixer.D", "a")),
    w.row("mixer.dt_bias", ("mixer.dt_bias", "a")),
    w.row("mixer.norm.weight", ("mixer.norm.weight", "b")),
    w.row("mixer.out_proj.weight", ("mixer.out_proj.weight", "Hb")),
)
_MLP = (
    w.row("mlp.linear_fc1.layer_norm_weight", _NORM),
    w.row("mlp.linear_fc1.weight", ("mixer.up_proj.weight", "FH")),
    w.row("mlp.linear_fc2.weight", ("mixer.down_proj.weight", "HF")),
)
_EXPERT_LAYER = (
    w.row("mlp.linear_fc1.layer_norm_weight", _NORM, fused="pre_mlp_layernorm.weight"),
    w.row("mlp.router.weight", ("mixer.gate.weight", "EH")),
    w.row("mlp.router.expert_bias", ("mixer.gate.e_score_correction_bias", "E")),
    *w.where(
        "moe_latent_size",
        (
            w.row("mlp.fc1_latent_proj.weight", ("mixer.fc1_latent_proj.weight", "kH")),
            w.row("mlp.fc2_latent_proj.weight", ("mixer.fc2_latent_proj.weight", "Hk")),
        ),
    ),
    w.row("mlp.shared_experts.linear_fc1.weight", ("mixer.shared_experts.up_proj.weight", "SH")),
    w.row("mlp.shared_experts.linear_fc2.weight", ("mixer.shared_experts.down_proj.weight", "HS")),
)
_EXPERTS = (
    w.row("linear_fc1.weight", ("mixer.experts.{e}.up_proj.weight", "Mk")),
    w.row("linear_fc2.weight", ("mixer.experts.{e}.down_proj.weight", "kM")),
)


def _layers_of_letters(letters: object) -> str:
    said = f"hybrid_override_pattern={letters!r} in config.json"
    if not isinstance(letters, str):
        raise ValueError(f"{said} must be letters; correct it")
    try:
        return hybrid_layers(letters)
    except ValueError as problem:
        raise ValueError(f"{said} is not served: {problem}; convert another model") from None


def _pattern_from_config(config: Config) -> Arguments:
    """Returns the pattern, said by letters or by words; where by both, they must agree."""
    said, letters = [], config.get("hybrid_override_pattern")
    if letters is not None:
        said.append(_layers_of_letters(letters))
    words = config.get("layers_block_type")
    if words is not None or not said:
        words = config["layers_block_type"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(
                f"layers_block_type={words!r} in config.json must be a list of words; correct it"
            )
        unknown = sorted(set(words) - set(_LETTERS))
        if unknown:
            raise NotImplementedError(
                f"layers_block_type={unknown} in config.json is not served; layers may be {', '.join(_LETTERS)}; "
                "convert a model of such layers"
            )
        said.append("".join(_LETTERS[word] for word in words))
    if len(set(said)) > 1:
        raise ValueError(
            "hybrid_override_pattern and layers_block_type in config.json say other layers; correct one"
        )
    pattern, count = said[0], config.get("num_hidden_layers")
    if count not in (None, len(pattern)):
        raise ValueError(
            f"num_hidden_layers={count} in config.json is not the {len(pattern)} layers that it names; correct it"
        )
    return {"hybrid_layer_pattern": pattern, "num_layers": len(pattern), "is_hybrid_model": True}


_PATTERN = Setting(
    keys=("hybrid_override_pattern", "layers_block_type", "num_hidden_layers"),
    to_arguments=_pattern_from_config,
    to_config=lambda arguments: {
        "hybrid_override_pattern": arguments["hybrid_layer_pattern"],
        "num_hidden_layers": arguments["num_layers"],
    },
)

_EXPERT_SETTINGS = (
    experts.ROUTED_EXPERTS,
    experts.TOP_K,
    experts.EXPERT_WIDTH,
    same("moe_shared_expert_intermediate_size"),
    experts.LATENT_SIZE,
    experts.GROUPS,
    experts.ROUTED_SCALING,
)
_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
}


def _experts_from_config(config: Config) -> Arguments:
    """Returns what a layer of experts is made of; config.json says it of models without one too."""
    if EXPERTS not in _pattern_from_config(config)["hybrid_layer_pattern"]:
        return {"num_experts": None}
    arguments = dict(_ROUTER)
    for setting in _EXPERT_SETTINGS:
        arguments |= setting.to_arguments(config)
    return arguments


def _no_limit_from_config(config: Config) -> Arguments:
    """Refuses bounds on steps: Megatron-Core has none."""
    limit = config.get("time_step_limit")
    written = ([0, math.inf], [0, {"__float__": "Infinity"}])
    if limit is not None and list(limit) not in written:
        raise NotImplementedError(
            f"time_step_limit={limit} in config.json is not served: steps have no bounds in Megatron-Core; convert a "
            "model with [0, Infinity]"
        )
    return {}


_NO_LIMIT = Setting(
    keys=("time_step_limit",), to_arguments=_no_limit_from_config, to_config=lambda arguments: {}
)

_OF_EXPERTS = Setting(
    keys=tuple(key for setting in _EXPERT_SETTINGS for key in setting.keys),
    to_arguments=_experts_from_config,
    to_config=lambda arguments: {
        key: value
        for setting in (_EXPERT_SETTINGS if arguments.get("num_experts") else ())
        for key, value in setting.to_config(arguments).items()
    },
)

# Of a Mamba-2 mixer they set where training starts, how a kernel cuts its work, or a cache. The others say of
# predictions, whose tensors are refused by name, or of rotation, which there is not.
_WITHOUT_EFFECT = """
    chunk_size expand mamba_ssm_cache_dtype mamba_ssm_dtype moe_shared_expert_overlap mtp_hybrid_override_pattern
    mtp_layers_block_type num_logits_to_keep partial_rotary_factor rescale_prenorm_residual rope_theta time_step_floor
    time_step_max time_step_min time_step_rank use_mamba_kernels
"""

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    layers_at="backbone.layers.",
    weights={
        "model": _OUTER,
        "layer": _ATTENTION,
        "mamba layer": _MAMBA,
        "dense layer": _MLP,
        "expert layer": _EXPERT_LAYER,
        "expert": _EXPERTS,
    },
    settings=(
        _PATTERN,
        same("hidden_size"),
        same("vocab_size"),
        same("max_position_embeddings"),
        same("layer_norm_epsilon", "layernorm_epsilon"),
        same("intermediate_size", "ffn_hidden_size"),
        s.heads_of_width(128),
        s.TIED,
        same("ssm_state_size", "mamba_state_dim"),
        same("mamba_head_dim"),
        same("n_groups", "mamba_num_groups"),
        same("mamba_num_heads"),
        _NO_LIMIT,
        _OF_EXPERTS,
    ),
    constants={name: value for name, value in LLAMA_LIKE.items() if name != "num_experts"}
    | {"swiglu": False, "squared_relu": True, "position_embedding_type": "none"},
    only={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", None),
        **NO_BIAS,
        "use_bias": (False, None),
        "mamba_proj_bias": (False, None),
        "use_conv_bias": (True, None),
        "conv_kernel": (4, None),
        "attention_dropout": (0, None),
        "hidden_dropout": (0, None),
        "sliding_window": (None,),
        "residual_in_fp32": (False, None),
        "norm_topk_prob": (True,),
        "n_shared_experts": (1, None),
        # The mixer's own norm has 1e-5 in Megatron-Core whatever the configuration says.
        "layer_norm_epsilon": (1e-5,),
        "rms_norm_eps": (1e-5, None),
        "norm_eps": (1e-5, None),
    },
    changes_nothing=frozenset(_WITHOUT_EFFECT.split()),
    always={"mlp_hidden_act": "relu2", "norm_topk_prob": True},
)
"""Source: config.json and tensors of nvidia/Nemotron-H-8B-Base-8K and nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16."""
