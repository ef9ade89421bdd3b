"""Tiny random models of every family, made and computed by ``transformers``: the oracle.

Nothing of ours is imported here, and everything runs in the parent process.
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCABULARY = 131  # no multiple of anything
LENGTHS = (37, 21, 6)
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


PREDICTING = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
_HYBRID = [*["linear_attention"] * 3, "full_attention"]
_DELTA_NETS = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_GATED_EXPERTS = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_QWEN3_5 = {**_DELTA_NETS, "pad_token_id": None}


def _layers(pattern: str) -> list[str]:
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [words[letter] for letter in pattern]


_NEMOTRON = {
    "layers_block_type": _layers("M-M*-M"),
    "num_hidden_layers": 6,
    "head_dim": 32,
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "time_step_min": 1e-9,  # transformers holds steps above it, Megatron and the models' own code do not
}


@dataclass(frozen=True)
class Tiny:
    """A model of ``transformers``: its class name without ForCausalLM, and what differs."""

    kind: str
    options: dict = field(default_factory=dict)
    is_dense: bool = False
    model_type: str | None = None
    """What config.json calls it, where transformers has no class of that name."""


MODELS = {
    "llama3": Tiny("Llama", {"rope_parameters": _LLAMA3}, is_dense=True),
    "llama_tied": Tiny("Llama", {"tie_word_embeddings": True}, is_dense=True),
    "mistral": Tiny("Mistral", {"head_dim": 32, "sliding_window": 8}, is_dense=True),
    "mistral_full": Tiny("Mistral", {"sliding_window": None}, is_dense=True),
    "phi3": Tiny(
        "Phi3",
        {
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
        is_dense=True,
    ),
    "smollm3": Tiny(
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "pad_token_id": None},
        is_dense=True,
    ),
    "qwen2": Tiny("Qwen2", {"tie_word_embeddings": True}, is_dense=True),
    "qwen3": Tiny("Qwen3", {"head_dim": 32}, is_dense=True),
    "qwen3_tied": Tiny("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, is_dense=True),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_some_dense": Tiny(
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_next": Tiny("Qwen3Next", {**_DELTA_NETS, **_GATED_EXPERTS, "norm_topk_prob": True}),
    "qwen3_5": Tiny("Qwen3_5", _QWEN3_5, is_dense=True),
    "qwen3_5_tied": Tiny("Qwen3_5", {**_QWEN3_5, "tie_word_embeddings": True}, is_dense=True),
    "qwen3_5_moe": Tiny("Qwen3_5Moe", {**_QWEN3_5, **_GATED_EXPERTS}),
    "nemotron_h": Tiny("NemotronH", _NEMOTRON, is_dense=True),
    "nemotron_h_moe": Tiny(
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": _layers("MEM*EM-*E"),
            "num_hidden_layers": 9,
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_latent": Tiny(
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": _layers("ME*EM-"),
            "n_routed_experts": 4,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 24,
            "num_experts_per_tok": 2,
        },
    ),
    "glm4_moe": Tiny(
        "Glm4Moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Tiny(
        "GptOss",
        {
            "head_dim": 32,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 0.75,  # so that it is reached
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek_v3_plain": Tiny(
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "num_hidden_layers": 2,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "kimi_k2": Tiny(
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "n_shared_experts": 1,
            "q_lora_rank": 24,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                **_YARN,
                "rope_theta": 50000.0,
                "beta_fast": 1.0,
                "original_max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        model_type="kimi_k2",
    ),
}


def make_tiny(name: str, **options: object) -> "transformers.PreTrainedModel":
    """The model with every parameter random, also norms, biases and sinks, which start constant."""
    tiny = MODELS[name]
    of_text = getattr(transformers, f"{tiny.kind}TextConfig", None)
    make_config = of_text or getattr(transformers, f"{tiny.kind}Config")
    config = make_config(**_SIZES | tiny.options | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{tiny.kind}ForCausalLM")(config).eval()
    make_random(model, seed=11)
    return model


def make_random(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in module.state_dict().items():
            is_norm = "norm" in key and key.endswith("weight")
            value.copy_(torch.randn(value.shape, generator=generator) * 0.15 + is_norm)


def save_tiny(name: str, folder: Path, *, max_shard_size: str = "5GB") -> Path:
    """A Hugging Face folder of the model, with files that stand for a tokenizer's."""
    make_tiny(name).save_pretrained(folder, max_shard_size=max_shard_size)
    path, model_type = folder / "config.json", MODELS[name].model_type
    if model_type is not None:
        content = json.loads(path.read_text(encoding="utf-8")) | {"model_type": model_type}
        path.write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 256}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


def tokens() -> np.ndarray:
    """One pack of documents of ``LENGTHS``."""
    return np.random.default_rng(5).integers(VOCABULARY, size=sum(LENGTHS))


def expected_logits(name: str) -> torch.Tensor:
    """Logits [tokens, vocabulary] of the pack; each document is computed by itself."""
    return logits_of(make_tiny(name))


def logits_of_folder(folder: Path) -> torch.Tensor:
    """The same of the model that transformers loads from a folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return logits_of(model.eval())


def logits_of(model: "transformers.PreTrainedModel") -> torch.Tensor:
    """The same of a model."""
    with torch.no_grad():
        documents = torch.from_numpy(tokens()).split(LENGTHS)
        return torch.cat([model(document[None]).logits[0] for document in documents])


class Predicting:
    """A model and its prediction layer, which transformers drops: an ordinary layer between norms of its own.

    Source: arXiv 2412.19437, section 2.2; names and the order of the joined halves are those with which vLLM
    (glm4_moe_mtp.py, qwen3_next_mtp.py) and SGLang (deepseek_nextn.py) read the published weights.
    """

    def __init__(self, name: str) -> None:
        self.number = MODELS[name].options["num_hidden_layers"]
        self.of_qwen = name.startswith("qwen")
        kinds = {"layer_types": [*_HYBRID, "full_attention"]} if self.of_qwen else {}
        self.model = make_tiny(name, num_hidden_layers=self.number + 1, **kinds)
        config = self.model.config
        size = config.hidden_size
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        if self.of_qwen:
            names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        norm = partial(type(self.model.model.norm), eps=config.rms_norm_eps)
        join = torch.nn.Linear(2 * size, size, bias=False)
        self.parts = dict(zip(names, (norm(size), norm(size), join, norm(size)), strict=True))
        make_random(torch.nn.ModuleList(self.parts.values()), seed=12)

    def save(self, folder: Path) -> Path:
        """A Hugging Face folder as those published, with the layer's copies of what it shares, or with none."""
        self.model.save_pretrained(folder)
        file, behind = folder / "model.safetensors", f"model.layers.{self.number}."
        found = load_file(file)
        norms = "mtp." if self.of_qwen else behind
        found |= {
            f"{norms}{name}.weight": part.weight.detach() for name, part in self.parts.items()
        }
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["num_hidden_layers"] = self.number
        if self.of_qwen:
            found = {name.replace(behind, "mtp.layers.0."): value for name, value in found.items()}
            del config["layer_types"][self.number]
            if config["model_type"] != "qwen3_next":  # whose configuration does not say it
                config["mtp_num_hidden_layers"] = 1
        else:
            found[f"{behind}embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
            found[f"{behind}shared_head.head.weight"] = found["lm_head.weight"].clone()
            config["num_nextn_predict_layers"] = 1
        save_file(found, file)
        path.write_text(json.dumps(config), encoding="utf-8")
        return folder

    def logits(self) -> torch.Tensor:
        """What each token but the last of its document predicts of the one after next; NaN there."""
        inner = self.model.model
        found = []
        for document in torch.from_numpy(tokens()).split(LENGTHS):
            with torch.no_grad():
                hidden = self._run(slice(self.number), inner.norm, document[None])[:, :-1]
                of_embedding, of_hidden, join, norm = self.parts.values()
                halves = [of_embedding(inner.embed_tokens(document[None, 1:])), of_hidden(hidden)]
                joined = join(torch.cat(halves, dim=-1))
                last = self._run(slice(self.number, None), norm, inputs_embeds=joined)[0]
                nothing = torch.full((1, VOCABULARY), float("nan"))
                found += [self.model.lm_head(last), nothing]
        return torch.cat(found)

    def _run(self, chosen: slice, norm: torch.nn.Module, *rows, **named) -> torch.Tensor:
        """What some of the layers and a norm make of rows."""
        inner, config = self.model.model, self.model.config
        whole = inner.layers, inner.norm, getattr(config, "layer_types", None)
        try:
            inner.layers, inner.norm = inner.layers[chosen], norm
            if whole[2] is not None:  # each layer's mask is chosen by its place
                config.layer_types = whole[2][chosen]
            return inner(*rows, use_cache=False, **named).last_hidden_state
        finally:
            inner.layers, inner.norm = whole[:2]
            if whole[2] is not None:
                config.layer_types = whole[2]
