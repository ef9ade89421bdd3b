"""The language models of Mistral Small 3.1 and Ministral 3, out of models for images too and back."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_cp.models.hugging_face.refusal import ConversionError
from tests.models.hugging_face.test_round_trip import (
    assert_same_folders,
    tensors_of,
    to_hugging_face,
    to_megatron,
)
from tests.models.hugging_face.tiny_models import (
    expected_logits,
    logits_of_folder,
    make_random,
    make_tiny,
)

VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
PUBLISHED = ("vision_tower.*", "multi_modal_projector.*")
IN_MEMORY = tuple(f"model.{pattern}" for pattern in PUBLISHED)


def save_whole(name: str, folder: Path) -> "transformers.PreTrainedModel":
    """The whole model around a tiny language model, under the names that transformers writes: those published."""
    text = make_tiny(name)
    config = transformers.Mistral3Config(
        text_config=text.config.to_dict(),
        vision_config=VISION,
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = transformers.Mistral3ForConditionalGeneration(config)
    make_random(whole, seed=13)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)
    return whole


@pytest.mark.parametrize("name", ["mistral", "ministral3", "ministral3_unscaled"])
def test_the_language_model_comes_back_alone_or_into_the_whole(tmp_path: Path, name: str):
    source, root = tmp_path / "source", tmp_path / "megatron"
    whole = save_whole(name, source)
    names = tensors_of(source).keys()
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in names
    assert ("language_model.lm_head.weight" in names) == (not whole.config.tie_word_embeddings)
    with pytest.raises(
        ConversionError, match=r"'vision_tower\.\*' 'multi_modal_projector\.\*' to con"
    ):
        to_megatron(source, root)
    report = to_megatron(source, root, leave_out=PUBLISHED)
    assert report.arguments["num_layers"] == 2
    assert report.left
    to_hugging_face(root, tmp_path / "back")
    assert torch.equal(logits_of_folder(tmp_path / "back"), expected_logits(name))
    to_hugging_face(root, tmp_path / "whole", hf_folder=source)
    assert_same_folders(source, tmp_path / "whole")


def test_names_of_the_model_in_memory_are_read_and_written_too(tmp_path: Path):
    source = tmp_path / "source"
    whole = save_whole("ministral3", source)
    save_file(whole.state_dict(), source / "model.safetensors")
    assert "model.language_model.norm.weight" in load_file(source / "model.safetensors")
    to_megatron(source, tmp_path / "megatron", leave_out=IN_MEMORY)
    to_hugging_face(tmp_path / "megatron", tmp_path / "whole", hf_folder=source)
    assert_same_folders(source, tmp_path / "whole")
    norm = {"language_model.model.norm.weight": torch.ones(64)}
    save_file(tensors_of(source) | norm, source / "model.safetensors")
    with pytest.raises(ConversionError, match=r"norm.weight under another name .* may be two mod"):
        to_megatron(source, tmp_path / "no", leave_out=IN_MEMORY)


@pytest.mark.parametrize(
    ("outer", "inner", "said"),
    [
        ({}, {"model_type": "llama"}, "text_config of model_type='mistral' or 'ministral3'"),
        ({"quantization_config": {"bits": 8}}, {}, "quantization_config="),
        ({"tie_word_embeddings": True}, {}, "says tie_word_embeddings twice, and differently"),
        ({}, {"attention_bias": True}, "attention_bias=True"),
    ],
    ids=str,
)
def test_what_may_be_another_model_is_refused(tmp_path: Path, outer: dict, inner: dict, said: str):
    source = tmp_path / "source"
    save_whole("ministral3", source)
    path = source / "config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | outer
    content["text_config"] |= {"tie_word_embeddings": False} | inner
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConversionError, match=said):
        to_megatron(source, tmp_path / "megatron", leave_out=PUBLISHED)
