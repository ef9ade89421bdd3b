"""Hugging Face -> Megatron -> Hugging Face gives back every tensor bit for bit, and every file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_cp.models.hugging_face import convert
from megatron_cp.models.hugging_face.refusal import ConversionError
from tests.mcore.tiny_gpt import Case
from tests.models.hugging_face import in_ranks
from tests.models.hugging_face.tiny_models import (
    MODELS,
    PREDICTING,
    Predicting,
    expected_logits,
    logits_of,
    logits_of_folder,
    make_tiny,
    save_tiny,
)
from tests.ranks import run_on_ranks


def to_megatron(load: Path, save: Path, **options) -> convert.Report:
    return convert.to_megatron(
        convert.Request(load=load, save=save, show_progress=False, **options)
    )


def to_hugging_face(load: Path, save: Path, **options) -> dict:
    return run_on_ranks(1, in_ranks.convert, "hf", load, save, options)[0]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_folders(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype, name
        assert torch.equal(first[name], second[name]), name
    for file in one.iterdir():
        if not file.name.startswith("model"):
            assert (other / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(tmp_path: Path, name: str):
    source = save_tiny(name, tmp_path / "source")
    to_megatron(source, tmp_path / "megatron")
    report = to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_folders(source, tmp_path / "back")
    assert report["num_tensors"] == len(tensors_of(source))
    kinds = {line.split(" ")[0] for line in report["left"]}
    assert kinds == {"*._extra_state*"}


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_moe_some_dense", "deepseek_v3", "glm4_moe_lite_groups"]
)
def test_round_trip_is_exact_under_transformer_engines_names(tmp_path: Path, name: str):
    source = save_tiny(name, tmp_path / "source")
    to_megatron(source, tmp_path / "megatron", transformer_engine=True)
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_folders(source, tmp_path / "back")


@pytest.mark.parametrize("transformer_engine", [False, True])
@pytest.mark.parametrize("name", PREDICTING)
def test_prediction_layers_and_their_copies_come_back(
    tmp_path: Path, name: str, transformer_engine: bool
):
    source = Predicting(name).save(tmp_path / "source")
    report = to_megatron(source, tmp_path / "megatron", transformer_engine=transformer_engine)
    assert report.arguments["mtp_num_layers"] == 1
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_folders(source, tmp_path / "back")


def test_a_prediction_layer_that_megatron_saves_comes_back(tmp_path: Path):
    source = Predicting("deepseek_v3").save(tmp_path / "source")
    to_megatron(source, tmp_path / "megatron")
    run_on_ranks(2, in_ranks.load_and_save, tmp_path / "megatron", tmp_path / "saved", Case(ep=2))
    to_hugging_face(tmp_path / "saved", tmp_path / "back", hf_folder=source)
    assert_same_folders(source, tmp_path / "back")
    found = tensors_of(source)
    options = {"hf_folder": source, "leave_out": ("mtp.*",)}
    report = to_hugging_face(tmp_path / "saved", tmp_path / "without", **options)
    assert any(name.startswith("mtp.") for name in report["left"])
    kept = {name for name in found if not name.startswith("model.layers.3.")}
    assert tensors_of(tmp_path / "without").keys() == kept


def test_a_prediction_layer_that_shares_nothing_is_refused_unless_left_out(tmp_path: Path):
    source = Predicting("glm4_moe").save(tmp_path / "source")
    file, name = source / "model.safetensors", "model.layers.3.shared_head.head.weight"
    found = load_file(file)
    found[name][0, 0] += 1
    save_file(found, file)
    with pytest.raises(ConversionError, match=f"{name} differs from lm_head.weight"):
        to_megatron(source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    report = to_megatron(source, tmp_path / "megatron", leave_out=("model.layers.3.*",))
    assert report.arguments["mtp_num_layers"] is None
    assert name in report.left
    path = source / "config.json"
    path.write_text(path.read_text().replace('layers": 1', 'layers": 2'), encoding="utf-8")
    with pytest.raises(ConversionError, match="2 layers of predictions in"):
        to_megatron(source, tmp_path / "two")


def test_many_small_files_on_every_side_hold_the_same(tmp_path: Path):
    source = save_tiny("gpt_oss", tmp_path / "source", max_shard_size="40KB")
    assert len(list(source.glob("model-*.safetensors"))) > 3
    to_megatron(source, tmp_path / "megatron", max_file_bytes=50_000)
    assert len(list((tmp_path / "megatron" / "iter_0000001").glob("*.distcp"))) > 3
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", max_file_bytes=50_000)
    assert_same_folders(source, tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(source).values())
    for tensor, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, framework="pt") as handle:
            assert tensor in handle.keys()  # noqa: SIM118


def test_bfloat16_stays_and_config_says_it(tmp_path: Path):
    source = save_tiny("qwen2", tmp_path / "source")
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors_of(source).items()},
        source / "model.safetensors",
    )
    to_megatron(source, tmp_path / "megatron")
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    back = tensors_of(tmp_path / "back")
    for name, tensor in tensors_of(source).items():
        assert torch.equal(tensor, back[name])


def test_vocabulary_is_padded_with_zeros_and_cut_back(tmp_path: Path):
    source = save_tiny("qwen3", tmp_path / "source")
    report = to_megatron(source, tmp_path / "megatron", make_vocab_size_divisible_by=100)
    assert report.arguments["padded_vocab_size"] == 200
    to_hugging_face(tmp_path / "megatron", tmp_path / "back")
    assert_same_folders(source, tmp_path / "back")


@pytest.mark.parametrize("name", ["llama3", "gpt_oss", "deepseek_v3"])
def test_config_is_recomputed_where_none_was_carried(tmp_path: Path, name: str):
    source = save_tiny(name, tmp_path / "source")
    family = json.loads((source / "config.json").read_text())["model_type"]
    to_megatron(source, tmp_path / "megatron")
    for file in (tmp_path / "megatron" / "hugging_face").iterdir():
        file.unlink()
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", family=family)
    assert torch.equal(logits_of_folder(tmp_path / "back"), expected_logits(name))
    again = to_megatron(tmp_path / "back", tmp_path / "again")
    first = to_megatron(source, tmp_path / "first")
    assert again.arguments == first.arguments
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(tensor, back[key]) for key, tensor in tensors_of(source).items())


@pytest.mark.parametrize("name_of_pattern", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_config_is_recomputed_of_a_pattern_as_megatron_lm_keeps_it(
    tmp_path: Path, name_of_pattern: str
):
    """Under either of its names, with bars, heads that fill twice the hidden size, and predictions left out."""
    source, root = tmp_path / "source", tmp_path / "megatron"
    model = make_tiny("nemotron_h", mamba_num_heads=16)
    assert 16 * model.config.mamba_head_dim == 2 * model.config.hidden_size
    model.save_pretrained(source)
    to_megatron(source, root)
    common = root / "iter_0000001" / "common.pt"
    entries = torch.load(common, weights_only=False)
    pattern = vars(entries["args"]).pop("hybrid_layer_pattern")
    vars(entries["args"]).update({name_of_pattern: f"{pattern[:3]}|{pattern[3:]}/M*"})
    entries["args"].mtp_num_layers = 1
    entries["args"].mamba_num_heads = None
    torch.save(entries, common)
    (root / "hugging_face" / "config.json").unlink()
    to_hugging_face(root, tmp_path / "back", family="nemotron_h")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back["hybrid_override_pattern"] == pattern
    assert back["mamba_num_heads"] == 16
    assert torch.equal(logits_of_folder(tmp_path / "back"), logits_of(model))


def test_a_family_that_the_carried_config_contradicts_is_refused(tmp_path: Path):
    root = tmp_path / "megatron"
    to_megatron(save_tiny("llama3", tmp_path / "source"), root)
    options = {"family": "qwen3"}
    (reasons,) = run_on_ranks(1, in_ranks.refusal, "hf", root, tmp_path / "back", options)
    assert "--family qwen3 is not the model_type='llama' of" in "".join(reasons or ())
    to_hugging_face(root, tmp_path / "back", family="llama")


def test_megatron_lm_names_the_epsilon_of_norms_otherwise(tmp_path: Path):
    """It is in the recomputed config.json, and one that config.json contradicts is told."""
    source, root = save_tiny("llama3", tmp_path / "source"), tmp_path / "megatron"
    to_megatron(source, root)
    common = root / "iter_0000001" / "common.pt"
    entries = torch.load(common, weights_only=False)
    entries["args"].norm_epsilon = 1e-3
    del entries["args"].layernorm_epsilon
    torch.save(entries, common)
    (reasons,) = run_on_ranks(1, in_ranks.refusal, "hf", root, tmp_path / "back", {})
    assert [reason.split(";")[0] for reason in reasons or ()] == [
        "layernorm_epsilon: config.json says 1e-06, the checkpoint 0.001"
    ]
    (root / "hugging_face" / "config.json").unlink()
    to_hugging_face(root, tmp_path / "back", family="llama")
    model = make_tiny("llama3")
    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.variance_epsilon = 1e-3
    assert torch.equal(logits_of_folder(tmp_path / "back"), logits_of(model))


def test_a_tensor_without_a_place_is_refused_and_left_out_only_when_told(tmp_path: Path):
    source = save_tiny("llama3", tmp_path / "source")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tensors_of(source), **extra}, source / "model.safetensors")
    with pytest.raises(ConversionError, match=r"inv_freq of shape \[8\] is not part of"):
        to_megatron(source, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    report = to_megatron(source, tmp_path / "megatron", leave_out=("*.inv_freq",))
    assert report.left == tuple(extra)


def test_transformers_loads_what_came_back_from_many_shards(tmp_path: Path):
    source = save_tiny("gpt_oss", tmp_path / "source")
    to_megatron(source, tmp_path / "megatron")
    to_hugging_face(tmp_path / "megatron", tmp_path / "back", max_file_bytes=50_000)
    assert torch.equal(logits_of_folder(tmp_path / "back"), expected_logits("gpt_oss"))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama3", Case(tp=2)),
        ("deepseek_v3", Case(ep=2)),
        ("qwen3_moe", Case(ep=2)),
        ("gpt_oss", Case(pp=2)),
        ("qwen3_tied", Case(pp=2)),
    ],
    ids=str,
)
def test_what_megatron_saves_at_another_layout_converts_back(tmp_path: Path, name: str, case: Case):
    source = save_tiny(name, tmp_path / "source")
    to_megatron(source, tmp_path / "megatron")
    run_on_ranks(2, in_ranks.load_and_save, tmp_path / "megatron", tmp_path / "saved", case)
    to_hugging_face(tmp_path / "saved", tmp_path / "back", hf_folder=source)
    assert_same_folders(source, tmp_path / "back")
