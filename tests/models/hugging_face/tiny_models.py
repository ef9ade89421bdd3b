"""Tiny random models of every family, made and computed by ``transformers``: the oracle.

Nothing of ours is imported here, and everything runs in the parent process.
"""

import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.hugging_face import tiny_configs
from tests.models.hugging_face.more_tiny_configs import MORE
from tests.models.hugging_face.tiny_configs import HYBRID, SIZES, VOCABULARY

MODELS = {**tiny_configs.MODELS, **MORE}

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LENGTHS = (37, 21, 6)
PREDICTING = (
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa_shared",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)


def make_tiny(name: str, **options: object) -> "transformers.PreTrainedModel":
    """The model with every parameter random, also norms, biases and sinks, which start constant."""
    tiny = MODELS[name]
    of_text = getattr(transformers, f"{tiny.kind}TextConfig", None)
    make_config = of_text or getattr(transformers, f"{tiny.kind}Config")
    config = make_config(**SIZES | tiny.options | options)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{tiny.kind}ForCausalLM")(config).eval()
    make_random(model, seed=11)
    if tiny.kind == "Nemotron":  # whose norms store their weights minus 1
        for norm in model.modules():
            if "LayerNorm" in type(norm).__name__:
                norm.weight.data -= 1
    if tiny.kind in (
        "Glm4MoeLite",
        "GlmMoeDsa",
        "KimiLinear",
    ):  # whose two norms transformers gives 1e-6 whatever the configuration says
        for name, norm in model.named_modules():
            if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
                norm.variance_epsilon = config.rms_norm_eps
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
    if (
        name == "kimi_linear"
    ):  # of a dense layer transformers writes the names of experts, which none publishes
        rename_tensors(folder, r"\.block_sparse_moe\.((gate|up|down)_proj)", r".mlp.\1")
    path, model_type = folder / "config.json", MODELS[name].model_type
    if model_type is not None:
        content = json.loads(path.read_text(encoding="utf-8")) | {"model_type": model_type}
        path.write_text(json.dumps(content), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 256}', encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder


def rename_tensors(folder: Path, pattern: str, other: str) -> None:
    """Gives the tensors of a folder other names."""
    for path in folder.glob("model*.safetensors"):
        tensors = {re.sub(pattern, other, key): tensor for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] = {
            re.sub(pattern, other, key): file for key, file in content["weight_map"].items()
        }
        index.write_text(json.dumps(content), encoding="utf-8")


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
        kinds = {"layer_types": [*HYBRID, "full_attention"]} if self.of_qwen else {}
        if (
            name == "glm_moe_dsa_shared"
        ):  # the decoder's last layer has no index, the prediction layer has
            kinds = {"indexer_types": ["full", "full", "shared", "full"]}
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
            if "indexer_types" in config:
                del config["indexer_types"][self.number]
            if config.pop("mlp_layer_types", None):
                config["first_k_dense_replace"] = 1
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
