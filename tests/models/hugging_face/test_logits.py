"""A converted model in megatron-core with our attention computes what ``transformers`` computes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_cp.models.hugging_face.config_file import arguments_of, disagreements, read_config
from tests.mcore.tiny_gpt import Case
from tests.models.hugging_face import in_ranks
from tests.models.hugging_face.tiny_models import (
    LENGTHS,
    MODELS,
    PREDICTING,
    VOCABULARY,
    Predicting,
    expected_logits,
    save_tiny,
    tokens,
)
from tests.ranks import run_on_ranks

# Both compute in fp32. Measured: 2.5e-6 to 6.5e-6 with logits up to 6.
LARGEST_DIFFERENCE = 1e-5
# Four layers, three of them recurrences: 3.5e-5 to 2e-4 with logits up to 10, by processor. Weights changed by a
# ten-millionth change those of transformers by 6e-4, 1.6e-4, 9e-5 and 1.1e-3, of Kimi Linear (1.2e-5) by 3.4e-5: no
# bound is above that.
OF_RECURRENCES = {
    "qwen3_next": 1e-4,
    "qwen3_5": 9e-5,
    "qwen3_5_tied": 9e-5,
    "qwen3_5_moe": 5e-4,
    "kimi_linear": 3e-5,
}

# Latent attention needs TransformerEngine's layers there: Megatron's local ones are refused.
TENSOR_RANKS = (
    "llama3", "phi3", "qwen2", "qwen2_moe_plain", "qwen3", "mixtral", "qwen3_next", "qwen3_5",
    "nemotron_h",
)  # fmt: skip
STAGES = (
    "llama_tied", "ministral3", "smollm3", "qwen3_moe", "qwen3_5_moe", "gpt_oss",
    "deepseek_v3_plain", "nemotron_h",
)  # fmt: skip
EXPERT_RANKS = (
    "qwen2_moe", "qwen3_moe", "qwen3_5_moe", "glm4_moe", "solar_open", "hy_v3", "mixtral",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2",
    "kimi_linear", "glm4_moe_lite", "glm4_moe_lite_groups", "nemotron_h_moe",
    "nemotron_h_latent", "dots1", "exaone_moe",
)  # fmt: skip
# One context rank without other ranks is all that these have of it.
ONE_RANK = [name for name in MODELS if name not in (*TENSOR_RANKS, *STAGES, *EXPERT_RANKS)]
CONTEXT_RANKS = [*((name, 1) for name in ONE_RANK), *((name, 2) for name in MODELS)]


_LONGER_THAN_PRETRAINING = {
    "original_max_position_embeddings": 255,
    "rope_parameters": {"original_max_position_embeddings": 255},
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """Checkpoints of every tiny model, converted with a padded vocabulary."""
    folder = tmp_path_factory.mktemp("converted")
    for name in MODELS:
        source = save_tiny(name, folder / "hf" / name)
        run_on_ranks(1, in_ranks.convert, "megatron", source, folder / name, {})
    return folder


def computed_logits(root: Path, case: Case, task=in_ranks.logits) -> torch.Tensor:
    """Logits [tokens, vocabulary], put together from context and tensor-parallel ranks."""
    world_size = case.tp * case.pp * case.cp * case.ep
    answers = run_on_ranks(world_size, task, root, case, tokens(), LENGTHS, timeout=100)
    answers = [answer for answer in answers if answer is not None]
    padded = VOCABULARY + -VOCABULARY % 128
    whole = torch.full((sum(LENGTHS), padded), float("nan"))
    for place, (rows, part) in enumerate(answers):
        is_token = rows < sum(LENGTHS)
        start = place % case.tp * part.shape[1]
        columns = np.arange(start, start + part.shape[1])
        whole[rows[is_token][:, None], columns] = torch.from_numpy(part[is_token])
    return whole[:, :VOCABULARY]


def assert_same_logits(root: Path, name: str, case: Case) -> None:
    expected, computed = expected_logits(name), computed_logits(root / name, case)
    assert expected.abs().max() > 1
    assert (computed - expected).abs().max() < OF_RECURRENCES.get(name, LARGEST_DIFFERENCE)


@pytest.mark.parametrize(("name", "cp"), CONTEXT_RANKS)
def test_logits_of_packed_documents_equal_transformers(converted: Path, name: str, cp: int):
    assert_same_logits(converted, name, Case(cp=cp))


@pytest.mark.parametrize("name", PREDICTING)
def test_predictions_of_packed_documents_are_those_of_the_layers_parts(tmp_path: Path, name: str):
    predicting = Predicting(name)
    source = predicting.save(tmp_path / "source")
    run_on_ranks(1, in_ranks.convert, "megatron", source, tmp_path / "megatron", {})
    expected = predicting.logits()
    is_there = ~expected.isnan().any(dim=1)
    assert is_there.sum() == sum(LENGTHS) - len(LENGTHS)
    for cp in (1, 2):
        computed = computed_logits(tmp_path / "megatron", Case(cp=cp), in_ranks.predictions)
        largest = OF_RECURRENCES.get(name, LARGEST_DIFFERENCE)
        assert (computed - expected)[is_there].abs().max() < largest


@pytest.mark.parametrize("name", TENSOR_RANKS)
def test_two_tensor_parallel_ranks_load_the_same_checkpoint(converted: Path, name: str):
    assert_same_logits(converted, name, Case(tp=2))


@pytest.mark.parametrize("name", STAGES)
def test_two_pipeline_stages_load_the_same_checkpoint(converted: Path, name: str):
    assert_same_logits(converted, name, Case(pp=2))


@pytest.mark.parametrize("name", EXPERT_RANKS)
def test_two_expert_parallel_ranks_load_the_same_checkpoint(converted: Path, name: str):
    assert_same_logits(converted, name, Case(ep=2))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3", {"rope_parameters": {"factor": 4.0}}),
        ("mistral", {"sliding_window": 9}),
        ("ministral3", {"rope_parameters": {"mscale_all_dim": 0.7}}),
        ("ministral3", {"rope_parameters": {"mscale_all_dim": 0.0}}),
        ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.09}}),
        ("ministral3_unscaled", {"rope_parameters": {"factor": 8.0}}),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
        ("qwen3", {"rms_norm_eps": 1e-2}),
        ("qwen3_yarn", {"rope_parameters": {"factor": 2.0}}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen2_moe", {"num_experts_per_tok": 3}),
        ("qwen3_next", {"norm_topk_prob": False}),
        ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("qwen3_next", {"rms_norm_eps": 1e-2}),
        ("qwen3_5", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
        ("qwen3_5_moe", {"num_experts_per_tok": 3}),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
        ("glm4_moe_lite", {"rms_norm_eps": 1e-2}),
        ("glm4_moe_lite", {"routed_scaling_factor": 1.7}),
        ("glm4_moe_lite_groups", {"n_group": 1, "topk_group": 1}),
        ("glm4_moe_lite_groups", {"rope_parameters": {"mscale_all_dim": 0.5}}),
        ("solar_open", {"n_group": 1, "topk_group": 1}),
        ("hy_v3", {"router_scaling_factor": 2.7}),
        ("gpt_oss", {"sliding_window": 9}),
        ("gpt_oss", {"swiglu_limit": 7.0}),
        ("gpt_oss", {"rope_parameters": {"truncate": True}}),
        ("deepseek_v2", {"routed_scaling_factor": 1.4}),
        ("deepseek_v2_groups", {"topk_method": "greedy"}),
        ("deepseek_v3", {"rope_parameters": {"mscale": 1.0}}),
        ("deepseek_v3", {"rope_parameters": {"mscale_all_dim": 1.0}}),
        ("deepseek_v3", {"routed_scaling_factor": 2.4}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v32", {"index_topk": 10}),
        ("glm_moe_dsa", {"index_topk": 8}),
        ("kimi_k2", {"rope_parameters": {"beta_fast": 32.0}}),
        ("kimi_linear", {"rms_norm_eps": 1e-2}),
        ("kimi_linear", {"routed_scaling_factor": 1.7}),
        ("kimi_k2", {"rope_parameters": {"beta_slow": 0.125}}),
        ("kimi_k2", {"rope_parameters": {"original_max_position_embeddings": 64}}),
        ("nemotron_h_moe", {"routed_scaling_factor": 2.4}),
        ("nemotron_h_moe", {"n_group": 1, "topk_group": 1}),
        ("phi3_long", {"rope_parameters": {"attention_factor": 1.8}}),
        ("phi3_long", {"rope_parameters": {"long_factor": [1.1, 1.6, 2.5, 4.0, 9.0, 25.0]}}),
        ("phi3_short", _LONGER_THAN_PRETRAINING),
        ("cwm", {"sliding_window": 9}),
        ("cwm", {"rope_parameters": {"factor": 8.0}}),
        ("ministral", {"sliding_window": 9}),
        ("dots1", {"sliding_window": 9}),
        ("dots1", {"routed_scaling_factor": 1.4}),
        ("dots1", {"n_group": 1, "topk_group": 1}),
        ("exaone_moe", {"sliding_window": 9}),
        ("exaone_moe", {"routed_scaling_factor": 1.4}),
        ("glm", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
        ("glm", {"rms_norm_eps": 1e-2}),
        ("ernie4_5", {"rope_parameters": {"factor": 8.0}}),
        ("nemotron", {"norm_eps": 1e-2}),
        ("nemotron", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
        ("youtu", {"rope_parameters": {"rope_theta": 9000.0}}),
    ],
    ids=str,
)
def test_a_setting_that_is_a_little_wrong_is_seen(
    converted: Path, tmp_path: Path, name: str, change: dict
):
    root = tmp_path / name
    root.mkdir()
    (root / "iter_0000001").symlink_to(converted / name / "iter_0000001")
    shutil.copytree(converted / name / "hugging_face", root / "hugging_face")
    path = root / "hugging_face" / "config.json"
    config = json.loads(path.read_text())
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    difference = (computed_logits(root, Case()) - expected_logits(name)).abs().max()
    assert difference > 10 * OF_RECURRENCES.get(name, LARGEST_DIFFERENCE)


def test_sinkhorn_weighs_experts_as_a_model_whose_weights_are_not_scaled(converted: Path):
    case = Case().with_options(moe_router_load_balancing_type="sinkhorn")
    for name, is_same in (("qwen3_moe_some_dense", True), ("qwen3_moe", False)):
        difference = (computed_logits(converted / name, case) - expected_logits(name)).abs().max()
        assert (difference < LARGEST_DIFFERENCE) == is_same
        said = arguments_of(read_config(converted / name / "hugging_face"))
        lines = disagreements(said, said | {"moe_router_load_balancing_type": "sinkhorn"})
        assert len(lines) == (not is_same), lines
