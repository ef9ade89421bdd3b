"""What cannot be converted is refused with its name before anything is written."""

import dataclasses
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_cp.models.hugging_face import convert, torch_dist_folder
from megatron_cp.models.hugging_face.refusal import ConversionError
from tests.models.hugging_face import in_ranks
from tests.models.hugging_face.tiny_models import (
    expected_logits,
    logits_of_folder,
    make_tiny,
    save_tiny,
)
from tests.ranks import run_on_ranks


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama3", tmp_path / "source")


def reasons_of(load: Path, **options) -> tuple[str, ...]:
    """Why it is refused to convert to Megatron; nothing may be left of the attempt."""
    save = load.parent / "megatron"
    request = convert.Request(load=load, save=save, show_progress=False, **options)
    with pytest.raises(ConversionError) as caught:
        convert.to_megatron(request)
    assert sorted(path.name for path in load.parent.iterdir()) == [load.name]
    return caught.value.reasons


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in config.items() if value != "REMOVE"}
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bert"}, "model_type='bert' .* served are llama, mistral,"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] .* served are llama, mistral,"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' in config.json must be an object"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 .* up to 10000"),
        ({"num_hidden_layers": True}, "num_layers=True of config.json must be positive whole"),
        ({"rms_norm_eps": None}, "layernorm_epsilon=None of config.json must be positive and"),
        ({"rope_parameters": {"rope_theta": "nan"}}, "rotary_base='nan' of config.json must be"),
        ({"hidden_size": "REMOVE"}, "hidden_size is missing"),
        ({"hidden_size": "many"}, "'many'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 .* multiple of num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* served is 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"resid_scale": 2.0}, "resid_scale=2.0.*--ignore-config-keys resid_scale"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "say different things"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": None}},
            "factor=null",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1.0,
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor=2.0",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_is_not_served_is_named(llama: Path, changes: dict, said: str):
    change_config(llama, **changes)
    reasons = reasons_of(llama)
    assert len(reasons) == 1
    assert re.search(said, reasons[0]), reasons[0]


def test_all_reasons_come_at_once(llama: Path):
    change_config(llama, hidden_act="gelu", mlp_bias=True, num_hidden_layers="REMOVE", other=1)
    assert len(reasons_of(llama)) == 4


def test_an_unknown_key_passes_when_told_that_it_changes_nothing(llama: Path, tmp_path: Path):
    change_config(llama, note="mine")
    convert.to_megatron(
        convert.Request(
            load=llama, save=tmp_path / "out", ignored_keys=("note",), show_progress=False
        )
    )


def test_a_folder_without_config_or_weights_is_named(tmp_path: Path, llama: Path):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "neither model.safetensors nor" in reasons_of(llama)[0]
    (llama / "config.json").write_text("{")
    assert "is not JSON" in reasons_of(llama)[0]
    (llama / "config.json").unlink()
    assert "config.json is missing" in reasons_of(llama)[0]


def test_a_missing_shard_is_named(tmp_path: Path):
    source = save_tiny("llama3", tmp_path / "source", max_shard_size="40KB")
    shard = sorted(source.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name};" in reasons_of(source)[0]


def test_an_index_that_contradicts_its_files_is_refused(tmp_path: Path):
    source = save_tiny("llama3", tmp_path / "source", max_shard_size="40KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.more.weight"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    assert "contradict each other about model.more.weight" in reasons_of(source)[0]
    path.write_text('{"weight_map": []}')
    assert "cannot be read" in reasons_of(source)[0]


def test_weights_of_two_models_in_one_folder_are_refused_until_one_is_removed(tmp_path: Path):
    """transformers leaves the file of an earlier save beside its shards, and an index beside its file."""
    source = save_tiny("llama3", tmp_path / "source", max_shard_size="40KB")
    model = make_tiny("llama3")
    model.model.norm.weight.data *= 3.0
    model.save_pretrained(tmp_path / "other")
    shutil.move(tmp_path / "other" / "model.safetensors", source / "model.safetensors")
    shutil.rmtree(tmp_path / "other")
    read = AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(read.model.norm.weight, model.model.norm.weight)
    assert (
        "which transformers would read alone, and model.safetensors.index.json"
        in reasons_of(source)[0]
    )
    (source / "model.safetensors.index.json").unlink()
    request = convert.Request(load=source, save=tmp_path / "megatron", show_progress=False)
    report = convert.to_megatron(request)
    assert report.left_files == tuple(sorted(p.name for p in source.glob("model-*.safetensors")))
    run_on_ranks(1, in_ranks.convert, "hf", request.save, tmp_path / "back", {})
    norm = load_file(tmp_path / "back" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(norm, model.model.norm.weight.data)


def test_an_adapter_beside_the_weights_is_refused(llama: Path):
    (llama / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "holds adapter_config.json" in reasons_of(llama)[0]


def test_a_truncated_file_is_named(llama: Path):
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be read" in reasons_of(llama)[0]
    path.write_bytes(b"")
    assert "of 0 bytes cannot be read" in reasons_of(llama)[0]


def test_every_wrong_tensor_is_listed(llama: Path):
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors[
        "model.layers.1.self_attn.k_proj.weight"
    ].half()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(3, 2)
    save_file(tensors, llama / "model.safetensors")
    reasons = reasons_of(llama)
    for said in (
        "model.norm.weight has shape [65]; config.json asks for [64]",
        "lm_head.weight has type I8",
        "linear_qkv.weight would be joined from tensors of types",
        "model.layers.0.mlp.up_proj.weight is missing",
        "model.layers.2.mlp.up_proj.weight of shape [3, 2] is not part",
    ):
        assert any(said in reason for reason in reasons), said
    assert len(reasons) == 5


def test_a_copy_of_tied_embeddings_is_left_out_and_another_output_layer_is_not(tmp_path: Path):
    source = save_tiny("llama_tied", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    changed = embeddings.clone()
    changed[130, 63] += 1e-3
    for other in (changed, embeddings.bfloat16(), embeddings[:-1].clone()):
        save_file({**tensors, "lm_head.weight": other}, source / "model.safetensors")
        (reason,) = reasons_of(source, leave_out=("lm_head.*",))
        assert reason.startswith("lm_head.weight differs from model.embed_tokens.weight")
    # transformers computes with it: what leaving it out would have changed
    save_file(
        {**tensors, "lm_head.weight": -embeddings}, source / "model.safetensors", {"format": "pt"}
    )
    assert torch.allclose(logits_of_folder(source), -expected_logits("llama_tied"))
    save_file({**tensors, "lm_head.weight": embeddings.clone()}, source / "model.safetensors")
    request = convert.Request(
        load=source, save=tmp_path / "out", leave_out=("lm_head.*",), show_progress=False
    )
    assert convert.to_megatron(request).left == ("lm_head.weight",)


def test_an_existing_output_is_never_touched(llama: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    request = convert.Request(load=llama, save=tmp_path / "out", show_progress=False)
    for direction in (convert.to_megatron, convert.to_hugging_face):
        with pytest.raises(ConversionError, match="exists"):
            direction(request)
    assert not list((tmp_path / "out").iterdir())


def test_a_stored_tensor_without_a_place_is_listed_and_left_out_when_told(
    llama: Path, tmp_path: Path
):
    root = tmp_path / "megatron"
    convert.to_megatron(convert.Request(load=llama, save=root, show_progress=False))
    change_config(root / "hugging_face", tie_word_embeddings=True)
    forget_arguments(root)
    (reasons,) = run_on_ranks(1, in_ranks.refusal, "hf", root, tmp_path / "back", {})
    assert reasons
    assert "output_layer.weight, of shape [256, 64], is not part" in reasons[0]
    (report,) = run_on_ranks(
        1,
        in_ranks.convert,
        "hf",
        root,
        tmp_path / "back",
        {"leave_out": ("output_layer.*",)},
    )
    assert "output_layer.weight" in report["left"]


def forget_arguments(root: Path) -> None:
    """Lets the checkpoint's own arguments say nothing."""
    path = root / "iter_0000001" / "common.pt"
    torch.save({"iteration": 0}, path)


def test_an_interrupted_conversion_leaves_nothing_and_a_killed_one_is_replaced(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    request = convert.Request(load=llama, save=tmp_path / "out", show_progress=False)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch_dist_folder, "write_common", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert.to_megatron(request)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    (tmp_path / "out.unfinished" / "iter_0000001").mkdir(parents=True)
    convert.to_megatron(request)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def remove_tracker(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").unlink()


def write_nonsense_into_tracker(root: Path) -> None:
    (root / "latest_checkpointed_iteration.txt").write_text("soon")


def remove_metadata(root: Path) -> None:
    (root / "iter_0000001" / ".metadata").unlink()


def damage_metadata(root: Path) -> None:
    (root / "iter_0000001" / ".metadata").write_bytes(b"no pickle")


def lose_a_place(root: Path) -> None:
    path = root / "iter_0000001" / ".metadata"
    index = pickle.loads(path.read_bytes())
    first = next(iter(index.storage_data))
    index.storage_data[first] = dataclasses.replace(index.storage_data[first], offset=None)
    path.write_bytes(pickle.dumps(index))


def truncate_tensors(root: Path) -> None:
    path = root / "iter_0000001" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])


def remove_tensors(root: Path) -> None:
    (root / "iter_0000001" / "__0_0.distcp").unlink()


def damage_arguments(root: Path) -> None:
    (root / "iter_0000001" / "common.pt").write_bytes(b"no pickle")


def remove_arguments(root: Path) -> None:
    (root / "iter_0000001" / "common.pt").unlink()


def damage_a_tensor(root: Path) -> None:
    path = root / "iter_0000001" / "__0_0.distcp"
    path.write_bytes(b"x" * path.stat().st_size)


def remove_config(root: Path) -> None:
    (root / "hugging_face" / "config.json").unlink()


def give_other_config(root: Path) -> None:
    change_config(root / "hugging_face", intermediate_size=128, rms_norm_eps=1e-3)


def give_other_family(root: Path) -> None:
    change_config(root / "hugging_face", model_type="qwen3")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove_tracker, ["latest_checkpointed_iteration.txt is missing"]),
        (write_nonsense_into_tracker, ["holds 'soon'"]),
        (remove_metadata, [".metadata is missing"]),
        (damage_metadata, [".metadata cannot be read"]),
        (lose_a_place, [".metadata cannot be read", "a piece without its place"]),
        (truncate_tensors, ["__0_0.distcp is", "bytes"]),
        (remove_tensors, ["__0_0.distcp is missing"]),
        (damage_arguments, ["the arguments of", "cannot be read"]),
        (remove_arguments, ["the arguments of", "cannot be read"]),
        (damage_a_tensor, ["cannot be read", "the file is damaged"]),
        (remove_config, ["config.json is missing", "--hf-folder"]),
        (give_other_config, ["ffn_hidden_size: config.json says 128", "layernorm_epsilon"]),
        (give_other_family, ["qk_layernorm: config.json says True, the checkpoint False"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_megatron_folder_that_cannot_be_read_is_named(
    llama: Path, tmp_path: Path, damage, said: list[str]
):
    root = tmp_path / "megatron"
    convert.to_megatron(convert.Request(load=llama, save=root, show_progress=False))
    damage(root)
    (reasons,) = run_on_ranks(1, in_ranks.refusal, "hf", root, tmp_path / "back", {})
    assert reasons
    assert all(words in "".join(reasons) for words in said), reasons
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "back.unfinished").exists()
