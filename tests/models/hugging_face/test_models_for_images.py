"""Of a model for images too the language model is converted: names, stacked experts and config.json as published."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_cp.models.hugging_face.refusal import ConversionError
from tests.models.hugging_face import in_ranks
from tests.models.hugging_face.test_round_trip import (
    assert_same_folders,
    tensors_of,
    to_hugging_face,
    to_megatron,
)
from tests.models.hugging_face.tiny_models import (
    Predicting,
    expected_logits,
    logits_of,
    logits_of_folder,
    make_random,
    make_tiny,
    rename_tensors,
)
from tests.ranks import run_on_ranks

NAMES = ("qwen3_5", "qwen3_5_moe")
# Around models of other families; each with the section of angles that transformers has for its heads.
KINDS = {
    "qwen3": "Qwen3VL",
    "qwen3_moe": "Qwen3VLMoe",
    "glm4_moe": "Glm4vMoe",
    "kimi_k2": "Kimi_K25",
}
SECTIONS = {"glm4_moe": [4, 2, 2]}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
VISION_BY_KIND = {
    "Qwen3VL": {"deepstack_visual_indexes": []},
    "Qwen3VLMoe": {"deepstack_visual_indexes": []},
    "Glm4vMoe": {"image_size": 28},
    "Kimi_K25": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
}
OPTIONS = {"glm4_moe": {"use_qk_norm": False}}
WITHOUT_IMAGES = {"leave_out": ("model.visual.*",)}


def save_whole(name: str, folder: Path) -> Path:
    """The whole model around a tiny language model, in the names that transformers computes with: those published."""
    text = make_tiny(name)
    kind = type(text).__name__.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(
        text_config=text.config.to_dict(), vision_config=VISION
    )
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    config.architectures = [type(whole).__name__]
    config.save_pretrained(folder)
    save_file(whole.state_dict(), folder / "model.safetensors")
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["text_config"]["rope_parameters"] |= {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
    content["text_config"]["dtype"] = "float32"
    content.pop("dtype", None)
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def text_type(name: str) -> str:
    """What config.json of the language model alone calls it."""
    return make_tiny(name).config.model_type


def save_other_whole(name: str, folder: Path) -> "transformers.PreTrainedModel":
    """The whole model around a tiny one of another family, as transformers writes it."""
    text = make_tiny(name, **OPTIONS.get(name, {}))
    said, kind = text.config.to_dict(), KINDS[name]
    if kind != "Kimi_K25":
        for key in ("model_type", "architectures"):
            said.pop(key, None)
        said["rope_parameters"]["mrope_section"] = SECTIONS.get(name, [8, 4, 4])
    config = getattr(transformers, f"{kind}Config")(
        text_config=said, vision_config=VISION | VISION_BY_KIND[kind], tie_word_embeddings=False
    )
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    make_random(whole, seed=13)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder)
    if (
        kind == "Kimi_K25"
    ):  # whose layers transformers writes as those of images; published are these
        rename_tensors(folder, r"^language_model\.model\.blocks\.", "language_model.model.layers.")
    return whole


@pytest.mark.parametrize("name", KINDS)
def test_a_language_model_of_another_family_comes_back_alone_or_into_the_whole(
    tmp_path: Path, name: str
):
    source = tmp_path / "source"
    whole = save_other_whole(name, source)
    with pytest.raises(ConversionError, match=r"is for images") as caught:
        to_megatron(source, tmp_path / "megatron")
    patterns = re.findall(r"'([^']*)'", caught.value.reasons[0])
    to_megatron(source, tmp_path / "megatron", leave_out=patterns)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    back = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert back["model_type"] == text_type(name)
    text = make_tiny(name, **OPTIONS.get(name, {}))
    assert (logits_of_folder(tmp_path / "back") - logits_of(text)).abs().max() < 1e-5
    assert (logits_of(whole.eval()) - logits_of(text)).abs().max() < 1e-5
    to_hugging_face(tmp_path / "megatron", tmp_path / "whole", hf_folder=source)
    assert_same_folders(source, tmp_path / "whole")


def test_experts_that_lie_turned_as_in_published_folders_are_the_same(tmp_path: Path):
    source = tmp_path / "source"
    save_other_whole("qwen3_moe", source)
    turned = {
        one: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in one else tensor
        for one, tensor in tensors_of(source).items()
    }
    to_megatron(source, tmp_path / "one", **WITHOUT_IMAGES)
    save_file(turned, source / "model.safetensors", metadata={"format": "pt"})
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(source)
    to_megatron(source, tmp_path / "other", **WITHOUT_IMAGES)
    for folder in ("one", "other"):
        to_hugging_face(tmp_path / folder, tmp_path / "back" / folder)
    one, other = (tensors_of(tmp_path / "back" / folder) for folder in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    expected = again.model.language_model.layers[1].mlp.experts.down_proj[3]
    assert torch.equal(one["model.layers.1.mlp.experts.3.down_proj.weight"], expected)
    to_hugging_face(tmp_path / "other", tmp_path / "whole", hf_folder=source)
    assert_same_folders(source, tmp_path / "whole")
    bad = {key: value for key, value in turned.items() if "layers.1.mlp.experts.down" not in key}
    save_file(bad, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConversionError, match=r"layers.1.mlp.experts.down_proj is missing"):
        to_megatron(source, tmp_path / "no", **WITHOUT_IMAGES)


def test_weights_of_chosen_experts_sum_to_one_where_config_json_is_silent(tmp_path: Path):
    source = tmp_path / "source"
    whole = save_other_whole("qwen3_moe", source)
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    content["text_config"].pop("norm_topk_prob", None)  # the class has none
    (source / "config.json").write_text(json.dumps(content), encoding="utf-8")
    report = to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)
    assert not report.arguments["moe_router_pre_softmax"]
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    expected = logits_of(whole.eval())
    assert (logits_of_folder(tmp_path / "back") - expected).abs().max() < 1e-5
    change_config(source, {}, {"norm_topk_prob": False})
    with pytest.raises(ConversionError, match="norm_topk_prob=False"):
        to_megatron(source, tmp_path / "no", **WITHOUT_IMAGES)


def test_biases_are_there_where_config_json_of_glm_is_silent(tmp_path: Path):
    source = tmp_path / "source"
    whole = save_other_whole("glm4_moe", source)
    path = source / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (
        content["text_config"].pop("attention_bias") is True
    )  # what transformers takes without it
    path.write_text(json.dumps(content), encoding="utf-8")
    report = to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)
    assert report.arguments["add_qkv_bias"]
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert (logits_of_folder(tmp_path / "back") - logits_of(whole.eval())).abs().max() < 1e-5


def change_config(folder: Path, outer: dict, inner: dict) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content |= outer
    content["text_config"] |= inner
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_language_model_comes_back_alone_or_into_the_whole(tmp_path: Path, name: str):
    source = save_whole(name, tmp_path / "source")
    names = load_file(source / "model.safetensors").keys()
    assert any(one.startswith("model.visual.") for one in names)
    assert any("mlp.experts.gate_up_proj" in one for one in names) == ("moe" in name)
    report = to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)
    assert all(one.startswith("model.visual.") for one in report.left)
    make_tiny(name).save_pretrained(tmp_path / "alone")
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    found, alone = tensors_of(tmp_path / "back"), tensors_of(tmp_path / "alone")
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[one], alone[one]) for one in alone)
    # The weights are the same bits; where they lie in memory decides how a processor cuts its sums.
    assert (logits_of_folder(tmp_path / "back") - expected_logits(name)).abs().max() < 1e-4
    to_hugging_face(tmp_path / "megatron", tmp_path / "whole", hf_folder=source)
    assert_same_folders(source, tmp_path / "whole")
    kind = type(make_tiny(name)).__name__.removesuffix("ForCausalLM")
    again = getattr(transformers, f"{kind}ForConditionalGeneration").from_pretrained(
        tmp_path / "whole"
    )
    assert all(torch.equal(again.state_dict()[one], tensors_of(source)[one]) for one in names)


def test_a_whole_model_in_parts_and_in_another_type_is_put_together(tmp_path: Path):
    source = save_whole("qwen3_5_moe", tmp_path / "source")
    whole = {one: tensor.bfloat16() for one, tensor in tensors_of(source).items()}
    to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)
    save_file(whole, source / "model.safetensors")
    change_config(source, {"dtype": "bfloat16"}, {"dtype": "bfloat16"})
    options = {"hf_folder": source, "max_file_bytes": 50_000}
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", **options)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 3
    found = tensors_of(tmp_path / "back")
    assert found.keys() == whole.keys()
    for one, tensor in found.items():
        is_image = one.startswith("model.visual.")
        assert tensor.dtype == (torch.bfloat16 if is_image else torch.float32)
        assert torch.equal(tensor.bfloat16(), whole[one])
    content = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert (content["dtype"], content["text_config"]["dtype"]) == ("float32", "float32")
    (source / "model.safetensors").unlink()
    (reasons,) = run_on_ranks(
        1, in_ranks.refusal, "hf", tmp_path / "megatron", tmp_path / "no", {"hf_folder": source}
    )
    assert "holds neither model.safetensors nor" in reasons[0]


@pytest.mark.parametrize("name", NAMES)
def test_its_prediction_layer_is_converted_beside_stacked_experts(tmp_path: Path, name: str):
    source = save_whole(name, tmp_path / "source")
    predicting = Predicting(name).save(tmp_path / "predicting")
    layer = {k: v for k, v in tensors_of(predicting).items() if k.startswith("mtp.")}
    save_file(tensors_of(source) | layer, source / "model.safetensors")
    change_config(source, {}, {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False})
    to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    found = {k: v for k, v in tensors_of(tmp_path / "back").items() if k.startswith("mtp.")}
    assert found.keys() == layer.keys()
    assert all(torch.equal(found[one], layer[one]) for one in layer)


def test_what_may_be_another_model_is_refused(tmp_path: Path):
    source = save_whole("qwen3_5", tmp_path / "source")
    whole = tensors_of(source)
    count = sum(one.startswith("model.visual.") for one in whole)
    with pytest.raises(ConversionError, match=rf"^model.visual.\* \({count} tensors\) is for im"):
        to_megatron(source, tmp_path / "megatron")
    save_file(whole | {"model.norm.weight": torch.ones(64)}, source / "model.safetensors")
    with pytest.raises(
        ConversionError, match=r"model.language_model.norm.weight under another name .* two mod"
    ):
        to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)
    save_file(whole, source / "model.safetensors")
    path = source / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["tie_word_embeddings"]  # said once is enough
    path.write_text(json.dumps(content), encoding="utf-8")
    to_megatron(source, tmp_path / "said_once", **WITHOUT_IMAGES)
    for outer, inner, said in (
        ({}, {"mrope_section": [4]}, "keys that qwen3_5_text is not known to have: mrope_section"),
        ({}, {"attn_output_gate": False}, "attn_output_gate=False"),
        ({"quantization_config": {"bits": 8}}, {"attn_output_gate": True}, "quantization_config="),
        ({"tie_word_embeddings": True}, {}, "says tie_word_embeddings twice, and differently"),
        ({}, {"model_type": "qwen3"}, "must have a text_config of model_type='qwen3_5_text'"),
    ):
        change_config(source, outer, inner)
        with pytest.raises(ConversionError, match=said):
            to_megatron(source, tmp_path / "megatron", **WITHOUT_IMAGES)


def test_a_prediction_layer_behind_a_linear_one_is_refused_unless_left_out(tmp_path: Path):
    predicting = Predicting("qwen3_next").save(tmp_path / "source")
    path = predicting / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    kinds = content["layer_types"]
    content["layer_types"] = [kinds[0], kinds[0], kinds[3], kinds[0]]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(
        ConversionError, match=r"the last of the model, which is linear; .*'mtp.\*'"
    ):
        to_megatron(predicting, tmp_path / "megatron")
