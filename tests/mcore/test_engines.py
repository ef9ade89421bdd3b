"""Transformer Engine and apex, through stand-ins of both packages: what is chosen where they are.

The stand-ins compute with plain torch; nothing here says that the real packages work on a GPU.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STUBS = Path(__file__).parent / "stubs"


@functools.cache
def _answers(engine: str) -> dict:
    search = os.pathsep.join([str(STUBS / engine), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.mcore.engines"],
        env={**os.environ, "PYTHONPATH": search},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_transformer_impl_chooses_the_layers_and_attention_stays_ours():
    answers = _answers("te")
    for name in ("te", "command line", "te experts"):
        assert answers[name]["qkv"] == "TELayerNormColumnParallelLinear", name
    assert answers["te"]["fc1"] == "TELayerNormColumnParallelLinear"
    assert answers["local"]["qkv"] == answers["local"]["fc1"] == "ColumnParallelLinear"
    for name in ("te", "command line", "te experts", "local"):
        assert answers[name]["attention"] == "ContextParallelAttention", name


def test_checkpoints_of_either_engine_have_the_keys_of_megatrons_own():
    answers = _answers("te")
    assert answers["te keys"] == answers["command line keys"] == answers["megatron's keys"]
    assert answers["te keys"] == answers["local keys"]
    assert any(key.endswith("linear_qkv._extra_state") for key in answers["te keys"])


def test_linear_layers_have_the_parts_and_keys_of_megatrons_own():
    answers = _answers("te")
    on_te, local = answers["linear te"], answers["linear local"]["our block"]
    megatrons, exchanged, ours = (
        on_te[name] for name in ("megatron's", "megatron's, exchanged", "our block")
    )
    assert megatrons["class"] == "GatedDeltaNet"
    assert {x["class"] for x in (exchanged, ours, local)} == {"ContextGatedDeltaNet"}
    assert {x["attention"] for x in (exchanged, ours, local)} == {"ContextParallelAttention"}
    for built in (megatrons, exchanged, ours):
        assert built["parts"] == ["IdentityOp", "TELayerNormColumnParallelLinear"]
    assert local["parts"] == ["RMSNorm", "ColumnParallelLinear"]
    assert ours["keys"] == exchanged["keys"] == megatrons["keys"]
    # The norm of local layers lies where the fused one does; which modules have extra states is the engine's affair.
    local_keys, keys = (
        [key for key in built["keys"] if "_extra_state" not in key] for built in (local, ours)
    )
    assert local_keys == keys
    assert any(key.endswith("in_proj.layer_norm_weight") for key in local["keys"])


def test_hybrid_stacks_have_the_parts_and_keys_of_megatrons_own():
    answers = _answers("te")
    on_te, local = answers["hybrid te"], answers["hybrid local"]["our stack"]
    megatrons = on_te.pop("megatron's")
    assert megatrons["class"] == "MambaMixer"
    assert megatrons["parts"] == [
        "IdentityOp", "TELayerNormColumnParallelLinear", "TELayerNormColumnParallelLinear", "TransformerLayer"
    ]  # fmt: skip
    assert len(on_te) == 3
    for ours in on_te.values():
        assert ours["class"] == "ContextMambaMixer"
        assert ours["attention"] == "ContextParallelAttention"
        assert ours["parts"] == megatrons["parts"]
        assert ours["keys"] == megatrons["keys"]
    assert local["parts"][:3] == ["RMSNorm", "ColumnParallelLinear", "ColumnParallelLinear"]
    local_keys, keys = (
        [key for key in built["keys"] if "_extra_state" not in key] for built in (local, megatrons)
    )
    assert local_keys == keys
    assert "decoder.layers.0.mixer.in_proj.layer_norm_weight" in keys
    assert "decoder.final_norm.weight" in keys


def test_fp8_is_on_in_linear_layers_and_attention_computes_in_its_own_precision():
    answers = _answers("te")
    assert answers["fp8 layers"] == [
        ["TELayerNormColumnParallelLinear", True],
        ["TERowParallelLinear", True],
    ]
    # Attention runs inside the context, which only Transformer Engine's modules ask for.
    assert answers["attention in fp8"] == [[True, "torch.float32"]]
    # The stand-in's fp8 rounds nothing: the same losses show that the context changes nothing else.
    assert answers["fp8"]["losses"] == answers["bf16"]["losses"]


@pytest.mark.parametrize("engine", ["te", "apex"])
def test_the_fused_adam_of_an_engine_is_never_replaced(engine: str):
    answers = _answers(engine)
    runs = [answers["bf16"], answers["fp8"]] if engine == "te" else [answers["train"]]
    module = {"te": "transformer_engine.pytorch.optimizers", "apex": "apex.optimizers"}[engine]
    for run in runs:
        assert run["adam"] == f"{module}.FusedAdam"
        assert run["losses"][-1] < run["losses"][0]


def test_apex_norms_are_chosen_for_layer_norm_alone():
    answers = _answers("apex")
    for name in ("LayerNorm", "LayerNorm command line"):
        assert answers[name]["input norm"] == answers[name]["final norm"] == "FusedLayerNorm"
    for name in ("RMSNorm", "RMSNorm command line"):
        assert answers[name]["input norm"] == answers[name]["final norm"] == "RMSNorm"
