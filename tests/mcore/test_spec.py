"""Specs: only core attention is exchanged, in a copy, and what a spec cannot honour is refused."""

import functools

import pytest

from tests.mcore.tiny_gpt import Case, build_chunks, enter_megatron, make_config, parallel_state
from tests.ranks import run_on_ranks


def _refusal(call) -> str:
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _exchange(rank, world_size):
    with parallel_state(Case()):
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_layer_local_spec,
            get_gpt_mtp_block_spec,
        )
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_cp.mcore import compat
        from megatron_cp.mcore.attention import ContextParallelAttention
        from megatron_cp.mcore.spec import with_context_parallel

        compat.repair_local_moe_and_mla()
        layer = get_gpt_layer_local_spec()
        ours = with_context_parallel(layer)
        config = make_config(Case().with_options(mtp_num_layers=1))
        block = with_context_parallel(get_gpt_decoder_block_spec(config, False))
        mtp = with_context_parallel(get_gpt_mtp_block_spec(config, layer, False))
        mtp_layer = mtp.layer_specs[0].submodules
        inner = getattr(mtp_layer, "transformer_layer", None) or mtp_layer.mtp_model_layer
        mla = with_context_parallel(get_gpt_layer_local_spec(multi_latent_attention=True))

        def attention_of(spec):
            return spec.submodules.self_attention.submodules.core_attention

        chosen = with_context_parallel(layer, backend="reference")
        sparse = get_gpt_layer_local_spec()
        sparse.submodules.self_attention.submodules.core_attention = ModuleSpec(
            module=DotProductAttention, submodules=object()
        )
        from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec

        return {
            "untouched": attention_of(layer) is DotProductAttention,
            "same but for attention": ours.submodules.mlp is layer.submodules.mlp,
            "layer": attention_of(ours) is ContextParallelAttention,
            "twice": attention_of(with_context_parallel(ours)) is ContextParallelAttention,
            "block": all(attention_of(s) is ContextParallelAttention for s in block.layer_specs),
            "mtp": attention_of(inner) is ContextParallelAttention,
            "mla": attention_of(mla) is ContextParallelAttention,
            "options": attention_of(chosen).params == {"backend": "reference"},
        }, {
            "empty": _refusal(lambda: with_context_parallel(ModuleSpec(module=object))),
            "sparse": _refusal(lambda: with_context_parallel(sparse)),
            "cross": _refusal(lambda: with_context_parallel(decoder_model_with_local_spec())),
        }


def test_only_core_attention_is_exchanged_and_only_in_a_copy():
    ((facts, refusals),) = run_on_ranks(1, _exchange)
    assert all(facts.values()), facts
    assert "holds no core_attention" in refusals["empty"]
    assert "has modules of its own" in refusals["sparse"]
    assert "cross attention" in refusals["cross"]


def _command_line_spec(rank, world_size):
    """What `--spec megatron_cp.mcore.spec gpt_layer_spec` builds."""
    with parallel_state(Case()):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.spec_utils import ModuleSpec, import_module
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        spec = import_module(("megatron_cp.mcore.spec", "gpt_layer_spec"))
        assert isinstance(spec, ModuleSpec)
        names = []
        for qk_layernorm in (False, True):
            config = make_config(Case().with_options(qk_layernorm=qk_layernorm))
            model = GPTModel(config, spec, 64, 128, position_embedding_type="rope")
            names.append(sorted(name for name, _ in model.named_parameters()))
        experts = make_config(Case())
        experts.num_moe_experts = 4
        latent = MLATransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0
        )
        refusals = [
            _refusal(functools.partial(GPTModel, refused, spec, 64, 128))
            for refused in (experts, latent)
        ]
        own = [
            sorted(name for name, _ in chunk.named_parameters())
            for case in (Case(), Case().with_options(qk_layernorm=True))
            for chunk in build_chunks(case, make_config(case))
        ]
        return names, own, refusals


def test_the_command_line_spec_follows_the_configuration_or_refuses_it():
    ((names, own, refusals),) = run_on_ranks(1, _command_line_spec)
    assert names == own, "parameters differ from those of Megatron's own layers"
    assert "num_moe_experts=4" in refusals[0] and "multi_latent_attention=True" in refusals[1]


def _checkpoint_keys(rank, world_size, softmax_type):
    keys = []
    for attention in ("megatron", "planned"):
        case = Case(attention=attention, tp=world_size).with_options(softmax_type=softmax_type)
        with parallel_state(case):
            (model,) = build_chunks(case, make_config(case))
            state = model.sharded_state_dict()
            keys.append({
                name: (value.key, value.global_shape, value.global_offset, value.replica_id)
                for name, value in state.items()
                if hasattr(value, "global_shape") and "_extra_state" not in name
            })  # fmt: skip
    return keys


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_a_checkpoint_has_the_same_tensors_as_megatrons(softmax_type: str):
    for own, ours in run_on_ranks(2, _checkpoint_keys, softmax_type):
        assert ours == own
        assert any("softmax_offset" in name for name in ours) == (softmax_type == "learnable")


def _norms(rank, world_size):
    enter_megatron()
    from types import SimpleNamespace

    import torch

    from megatron_cp.mcore.norm import TorchNorm

    def config(**changes):
        fields = {"normalization": "LayerNorm", "sequence_parallel": True, **changes}
        return SimpleNamespace(**fields)

    layer, rms = TorchNorm(config(), 8), TorchNorm(config(normalization="RMSNorm"), 8, 1e-3)
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    marked = [p.sequence_parallel for norm in (layer, rms) for p in norm.parameters()]
    refused = [
        _refusal(lambda: TorchNorm(config(normalization="L2Norm"), 8)),
        _refusal(lambda: TorchNorm(config(persist_layer_norm=True), 8)),
    ]
    return marked, torch.allclose(rms(x), expected, atol=1e-6), refused


def test_norms_are_torchs_and_marked_for_sequence_parallelism():
    ((marked, is_rms, refused),) = run_on_ranks(1, _norms)
    assert marked == [True] * 3 and is_rms
    assert "L2Norm" in refused[0] and "persist_layer_norm" in refused[1]
