"""A checkpoint without our manifest, as Megatron-LM saves it, is compared with the arguments that it holds."""

import shlex
from pathlib import Path

import pytest

from megatron_cp.training.arguments.parse import build_parser
from megatron_cp.training.checkpoint.files import MANIFEST
from megatron_cp.training.checkpoint.meaning import (
    another_model,
    changes_of_meaning,
    foreign_meaning,
    meaning_of,
)
from tests.training.commands import SMALL_RUN, stopped, train

OF_LLAMA = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 16,
}


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_other_heads_are_refused_and_another_meaning_is_told(tmp_path, kind):
    run = [*SMALL_RUN, "--run-dir", str(tmp_path / "run"), "--ckpt-format", kind]
    train(1, *run, "--save", str(tmp_path / "ckpt"), "--save-interval", "2", "--exit-interval", "2")
    for manifest in Path(tmp_path, "ckpt").rglob(MANIFEST):
        manifest.unlink()
    load = ["--load", str(tmp_path / "ckpt")]
    heads = ["--num-attention-heads", "8", "--num-query-groups", "4"]
    line = stopped(1, *run, *load, *heads)
    assert "was saved with --num-attention-heads 4, this run has 8; give the checkpoint's" in line
    output = train(1, *run, *load, "--norm-epsilon", "1e-3")
    assert "note: --norm-epsilon was 1e-05, and is 0.001 from here on: the weights of" in output
    assert "compute something else" not in train(1, *run, *load)


@pytest.mark.parametrize(
    ("saved", "refused"),
    [
        ({}, None),
        ({"num_attention_heads": 8}, "--num-attention-heads 8, this run has 4"),
        ({"num_query_groups": 4}, "--num-query-groups 4, this run has 2"),
        ({"group_query_attention": False, "num_query_groups": 1}, "--num-query-groups 4, this run"),
        ({"kv_channels": None}, None),
        ({"kv_channels": 32}, "--kv-channels 32, this run has 16"),
        ({"multi_latent_attention": True, "num_query_groups": 1, "kv_channels": 4}, None),
        ({"use_mup": True}, "--use-mup, with which the same weights are another model"),
        ({"use_mup": False, "apply_residual_connection_post_layernorm": False}, None),
        ({"moe_mlp_glu_interleave_size": 32}, "--moe-mlp-glu-interleave-size, with which"),
    ],
)
def test_heads_are_compared_as_megatron_lm_says_them(tmp_path, saved, refused):
    if refused is None:
        another_model(tmp_path, OF_LLAMA | saved, OF_LLAMA)
        return
    with pytest.raises(ValueError, match=refused):
        another_model(tmp_path, OF_LLAMA | saved, OF_LLAMA)


OF_HYBRID = {
    **OF_LLAMA,
    "hybrid_layer_pattern": "M*",
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
}
OF_DELTA_NET = {
    **OF_LLAMA,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
}


@pytest.mark.parametrize(
    ("run", "saved", "refused"),
    [
        (OF_HYBRID, {}, None),
        (
            OF_HYBRID,
            {"mamba_num_groups": 4, "mamba_state_dim": 8},
            "--mamba-num-groups 4, this run has 2",
        ),
        (OF_HYBRID, {"mamba_state_dim": 8}, "--mamba-state-dim 8, this run has 16"),
        (OF_HYBRID | {"hybrid_layer_pattern": "*-"}, {"mamba_num_groups": 8}, None),
        (OF_LLAMA, {"mamba_num_groups": 8, "linear_num_key_heads": 16}, None),
        (OF_DELTA_NET, {}, None),
        (
            OF_DELTA_NET,
            {"linear_num_key_heads": 4, "linear_key_head_dim": 8},
            "--linear-num-key-heads 4, this run has 2",
        ),
    ],
)
def test_states_of_another_cut_have_the_same_tensors_and_are_refused(tmp_path, run, saved, refused):
    if refused is None:
        another_model(tmp_path, run | saved, run)
        return
    with pytest.raises(ValueError, match=refused):
        another_model(tmp_path, run | saved, run)


HYBRID_RUN = [*SMALL_RUN, *shlex.split("--hybrid-layer-pattern M* --mamba-head-dim 16")]


def test_groups_of_a_hybrid_model_without_our_manifest_are_compared(tmp_path):
    cuts = [["--mamba-num-groups", f"{n}", "--mamba-state-dim", f"{32 // n}"] for n in (2, 4)]
    saves = ["--save", str(tmp_path), "--save-interval", "1", "--exit-interval", "1"]
    train(1, *HYBRID_RUN, *cuts[0], *saves)
    (manifest,) = tmp_path.rglob(MANIFEST)
    manifest.unlink()
    line = stopped(1, *HYBRID_RUN, *cuts[1], "--load", str(tmp_path))
    assert "was saved with --mamba-num-groups 2, this run has 4; give the checkpoint's" in line


def test_what_is_off_or_not_there_says_nothing():
    said = foreign_meaning({"norm_epsilon": 1e-6, "rotary_base": 10000, "qk_l2_norm": False})
    assert said == {"layernorm_epsilon": 1e-6, "rotary_base": 10000}


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        ({"apply_layernorm_1p": True}, "--apply-layernorm-1p was True, and is False"),
        ({"position_embedding_type": "none"}, "--position-embedding-type was none, and is learned"),
        ({"softmax_type": "off-by-one"}, "--softmax-type was off-by-one, and is vanilla"),
        ({"squared_relu": True}, "--squared-relu was True, and is False"),
    ],
)
def test_what_the_tensors_of_megatron_lm_do_not_say_is_told(saved, line):
    defaults = vars(build_parser().parse_args([]))
    (told,) = changes_of_meaning(foreign_meaning(saved), defaults)
    assert told.startswith(line)
    assert changes_of_meaning(foreign_meaning(defaults), defaults) == []


@pytest.mark.parametrize(
    ("off", "on", "flag"),
    [
        (
            {"apply_layernorm_1p": False},
            {"layernorm_zero_centered_gamma": True},
            "--apply-layernorm-1p",
        ),
        ({"window_size": None}, {"window_size": (4, 0)}, "--window-size"),
        ({"rotary_interleaved": False}, {"rotary_interleaved": True}, "--rotary-interleaved"),
        ({"no_rope_freq": None}, {"no_rope_freq": [0, 1]}, "--no-rope-freq"),
        ({"use_rope_scaling": False}, {"use_rope_scaling": True}, "--use-rope-scaling"),
        (
            {"moe_router_pre_softmax": False},
            {"moe_router_pre_softmax": True},
            "--moe-router-pre-softmax",
        ),
        (
            {"rotary_seq_len_interpolation_factor": None},
            {"rotary_seq_len_interpolation_factor": 2},
            "--rotary-seq-len-interpolation-factor",
        ),
    ],
)
def test_what_megatron_lm_had_off_and_is_on_is_told(off, on, flag):
    defaults = vars(build_parser().parse_args([]))
    (told,) = changes_of_meaning(foreign_meaning(off), defaults | on)
    assert told.startswith(f"{flag} was {next(iter(off.values()))}, and is ")
    assert changes_of_meaning(foreign_meaning(off), defaults) == []
    assert changes_of_meaning(foreign_meaning({}), defaults | on) == []


@pytest.mark.parametrize(
    ("was", "now", "are_alike"),
    [
        ({"window_attn_skip_freq": 2}, {"window_attn_skip_freq": [1, 0, 1, 0]}, True),
        ({"window_attn_skip_freq": [1, 0, 1, 0]}, {"window_attn_skip_freq": 4}, False),
        ({"no_rope_freq": [0, 0, 0, 1]}, {"no_rope_freq": 4}, True),
        ({"no_rope_freq": 2}, {"no_rope_freq": 4}, False),
    ],
)
def test_the_same_layers_in_other_words_are_no_change(was, now, are_alike):
    defaults = vars(build_parser().parse_args([])) | {"num_layers": 4}
    for saved in (meaning_of(defaults | was), foreign_meaning(defaults | was)):
        told = changes_of_meaning(saved, defaults | now)
        assert len(told) == (not are_alike)


def test_documents_that_begin_to_see_each_other_are_told():
    """Also where Megatron-LM said that they did, and no longer do."""
    defaults = vars(build_parser().parse_args([]))
    apart = defaults | {"reset_attention_mask": True, "reset_position_ids": True}
    for saved, now in ((defaults, apart), (apart, defaults)):
        told = changes_of_meaning(foreign_meaning(saved), now)
        assert [line.split(" was ")[0] for line in told] == [
            "--reset-attention-mask",
            "--reset-position-ids",
        ]
        assert changes_of_meaning(meaning_of(saved), now) == told
        (line,) = changes_of_meaning(meaning_of(saved), now | {"position_embedding_type": "rope"})
        assert line == told[0]
    others = {"moe_router_load_balancing_type": "sinkhorn", "moe_expert_capacity_factor": 0.5}
    told = changes_of_meaning(foreign_meaning(defaults), defaults | others)
    assert "--moe-expert-capacity-factor was None, and is 0.5 from here on" in told
    assert len(told) == 2
