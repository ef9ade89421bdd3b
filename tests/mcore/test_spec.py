"""Specs: only core attention is exchanged, in a copy, and what a spec cannot honour is refused."""

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

        from megatron_cp.mcore.mixing.attention import ContextParallelAttention
        from megatron_cp.mcore.spec import with_context_parallel

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
            "twice, options kept": attention_of(with_context_parallel(chosen)).params
            == attention_of(with_context_parallel(ours, backend="reference")).params
            == {"backend": "reference"},
            "block": all(attention_of(s) is ContextParallelAttention for s in block.layer_specs),
            "mtp": attention_of(inner) is ContextParallelAttention,
            "mla": attention_of(mla) is ContextParallelAttention,
            "options": attention_of(chosen).params == {"backend": "reference"},
        }, {
            "two options": _refusal(lambda: with_context_parallel(chosen, backend="cpu")),
            "empty": _refusal(lambda: with_context_parallel(ModuleSpec(module=object))),
            "sparse": _refusal(lambda: with_context_parallel(sparse)),
            "cross": _refusal(lambda: with_context_parallel(decoder_model_with_local_spec())),
        }


def test_only_core_attention_is_exchanged_and_only_in_a_copy():
    ((facts, refusals),) = run_on_ranks(1, _exchange)
    assert all(facts.values()), facts
    assert "options {'backend': 'reference'} already" in refusals["two options"]
    assert "spec=ModuleSpec (object) holds no core_attention" in refusals["empty"]
    assert "has modules of its own" in refusals["sparse"]
    assert "cross attention" in refusals["cross"]


def _replace_others(rank, world_size):
    """What becomes of core attention with parameters, and of a class of a team's own."""
    with parallel_state(Case()):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_cp.mcore.spec import with_context_parallel

        class CappedAttention(DotProductAttention):
            """Caps logits, say."""

        def replaced(core_attention, **options):
            spec = get_gpt_layer_local_spec()
            spec.submodules.self_attention.submodules.core_attention = core_attention
            spec = with_context_parallel(spec, **options)
            return spec.submodules.self_attention.submodules.core_attention

        undropped = ModuleSpec(DotProductAttention, params={"attention_dropout": 0.0})
        odd = ModuleSpec(DotProductAttention, params={"logit_cap": 5.0})
        return (
            replaced(undropped, backend="cpu").params,
            replaced(CappedAttention, replaces=(CappedAttention,)).__name__,
            _refusal(lambda: replaced(CappedAttention)),
            _refusal(lambda: replaced(ModuleSpec(CappedAttention))),
            _refusal(lambda: replaced(odd)),
        )


def test_what_another_attention_computes_is_never_lost_without_a_word():
    (found,) = run_on_ranks(1, _replace_others)
    params, named, *refused, unknown = found
    assert params == {"attention_dropout": 0.0, "backend": "cpu"}
    assert named == "ContextParallelAttention"
    for refusal in refused:
        assert "core_attention=CappedAttention is neither" in refusal
        assert "replaces=(CappedAttention,)" in refusal
    assert "parameters that ours does not know: logit_cap" in unknown


EXPERTS = {"num_moe_experts": 4, "add_bias_linear": False, "moe_layer_freq": (0, 1)}
LATENT = {"multi_latent_attention": True, "apply_rope_fusion": False, "num_query_groups": 4}
MODELS = (
    {},
    {"qk_layernorm": True, "normalization": "RMSNorm"},
    {**EXPERTS, "moe_shared_expert_intermediate_size": 32},
    {**LATENT, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_layernorm": True},
    {**LATENT, **EXPERTS, "q_lora_rank": None, "kv_lora_rank": 32},
)


def _command_line_spec(rank, world_size):
    """Parameters of what `--spec megatron_cp.mcore.spec gpt_layer_spec` builds, and two others."""
    with parallel_state(Case()):
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.transformer.spec_utils import ModuleSpec, import_module

        from megatron_cp.mcore.spec import gpt_block_spec, with_context_parallel

        spec = import_module(("megatron_cp.mcore.spec", "gpt_layer_spec"))
        assert isinstance(spec, ModuleSpec)
        names = []
        for options in MODELS:
            config = make_config(Case().with_options(**options))
            megatrons = get_gpt_decoder_block_spec(config, False, config.normalization)
            specs = (spec, gpt_block_spec(config), with_context_parallel(megatrons))
            names.append([_parameters(config, each) for each in specs])
        backend = _model(make_config(Case()), with_context_parallel(spec, backend="reference"))
        return names, [layer.self_attention.core_attention.backend for layer in backend]


def _model(config, spec):
    from megatron.core.models.gpt import GPTModel

    return GPTModel(config, spec, 64, 128, position_embedding_type="rope").decoder.layers


def _parameters(config, spec):
    layers = _model(config, spec)
    return sorted((name, tuple(value.shape)) for name, value in layers.named_parameters())


def test_the_command_line_spec_follows_the_configuration():
    ((names, backends),) = run_on_ranks(1, _command_line_spec)
    for options, (command_line, block, exchanged) in zip(MODELS, names, strict=True):
        assert command_line == block == exchanged, options
    assert any("1.mlp.experts" in name for name, _ in names[2][0])
    assert not any("0.mlp.experts" in name for name, _ in names[2][0])
    assert any("linear_q_up_proj" in name for name, _ in names[3][0])
    assert any("linear_q_proj" in name for name, _ in names[4][0])
    assert backends == ["reference"] * 2


def _predictions(rank, world_size):
    """Of a model whose program builds its predictions without us: parameters, and what computes attention."""
    with parallel_state(Case()):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_mtp_block_spec,
        )

        from megatron_cp.mcore.spec import gpt_layer_spec, with_context_parallel

        plain = get_gpt_layer_local_spec()
        told = with_context_parallel(gpt_layer_spec, backend="reference")
        found = []
        for spec in (plain, gpt_layer_spec, told):
            config = make_config(Case().with_options(mtp_num_layers=2))
            theirs = get_gpt_mtp_block_spec(config, plain, False)
            model = GPTModel(
                config, spec, 64, 128, position_embedding_type="rope", mtp_block_spec=theirs
            )
            cores = [m.core_attention for m in model.modules() if hasattr(m, "core_attention")]
            found.append(
                (
                    sorted((name, tuple(x.shape)) for name, x in model.named_parameters()),
                    [(type(core).__name__, getattr(core, "backend", None)) for core in cores],
                )
            )
        return found


def test_the_command_line_spec_takes_the_predictions_along():
    (((names, megatrons), (same, ours), (again, told)),) = run_on_ranks(1, _predictions)
    assert names == same == again and any(name.startswith("mtp.layers.1.") for name, _ in names)
    assert set(megatrons) == {("DotProductAttention", None)}
    assert set(ours) == {("ContextParallelAttention", None)} and len(ours) == len(megatrons)
    assert set(told) == {("ContextParallelAttention", "reference")} and len(told) == len(megatrons)


def _engines(rank, world_size):
    """What becomes of `transformer_impl` where Transformer Engine is not installed."""
    import logging

    import torch

    with parallel_state(Case()):
        from megatron_cp.mcore import spec as specs
        from megatron_cp.mcore.parts.norm import LocalNorm
        from megatron_cp.mcore.settings.validation import check_engine

        def model(**options):
            return _model(make_config(Case().with_options(**options)), specs.gpt_layer_spec)

        notes = []
        handler = logging.Handler()
        handler.emit = lambda record: notes.append(record.getMessage())
        specs._log.addHandler(handler)
        specs._note_local_layers.cache_clear()
        layer = model(transformer_impl="transformer_engine")[0]
        model(transformer_impl="transformer_engine")
        specs._log.removeHandler(handler)
        kinds = type(layer.self_attention.linear_qkv).__name__, layer.config.transformer_impl
        refused = {
            "heterogeneous_block_specs": _refusal(lambda: _check(heterogeneous_block_specs=True)),
            "use_kitchen": _refusal(lambda: _check(use_kitchen=True)),
            "moe_grouped_gemm": _refusal(lambda: _check(moe_grouped_gemm=True)),
            "inference": _refusal(lambda: check_engine("inference_optimized")),
        }
        without, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            refused["cuda"] = _refusal(lambda: model(transformer_impl="transformer_engine"))
        finally:
            torch.cuda.is_available = without
        from megatron.core.transformer import transformer_block

        return kinds, notes, refused, transformer_block.LayerNormImpl is LocalNorm


def _check(**fields):
    from types import SimpleNamespace

    from megatron_cp.mcore.settings.validation import check_spec

    check_spec(SimpleNamespace(transformer_impl="local", **fields))


def test_without_transformer_engine_a_cpu_runs_local_layers_and_a_gpu_refuses():
    ((kinds, notes, refused, has_norm),) = run_on_ranks(1, _engines)
    assert kinds == ("ColumnParallelLinear", "local")
    assert len(notes) == 1 and "local layers" in notes[0]
    assert (
        refused["cuda"].startswith("ValueError") and "--transformer-impl local" in refused["cuda"]
    )
    for name in ("heterogeneous_block_specs=True", "use_kitchen=True", "moe_grouped_gemm=True"):
        assert name in refused[name.split("=")[0]]
    assert "inference_optimized" in refused["inference"]
    assert has_norm, "a block made from a layer spec would refuse sequence parallelism"


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

    from megatron_cp.mcore.parts.norm import TorchNorm

    def config(**changes):
        fields = {"normalization": "LayerNorm", "sequence_parallel": True, **changes}
        return SimpleNamespace(**fields, layernorm_epsilon=1e-5)

    layer, rms = TorchNorm(config(), 8), TorchNorm(config(normalization="RMSNorm"), 8, 1e-3)
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    marked = [p.sequence_parallel for norm in (layer, rms) for p in norm.parameters()]
    is_centred = []
    for kind, plain in (
        ("LayerNorm", layer),
        ("RMSNorm", TorchNorm(config(normalization="RMSNorm"), 8)),
    ):
        centred = TorchNorm(config(normalization=kind, layernorm_zero_centered_gamma=True), 8)
        is_centred.append(torch.allclose(centred(x), plain(x), atol=1e-6))
        assert not centred.weight.any()
        with torch.no_grad():
            centred.weight += 0.5
        is_centred.append(torch.allclose(centred(x), 1.5 * plain(x), atol=1e-6))
    refused = [
        _refusal(lambda: TorchNorm(config(normalization="L2Norm"), 8)),
        _refusal(lambda: TorchNorm(config(persist_layer_norm=True), 8)),
    ]
    is_rms = torch.allclose(rms(x), expected, atol=1e-6)
    return marked, is_rms, all(is_centred), refused


def _norms_of_wide_rows(rank, world_size):
    enter_megatron()
    from types import SimpleNamespace

    import torch

    from megatron_cp.mcore.parts.norm import TorchNorm

    x, same = torch.randn(3, 8), []
    for kind in ("LayerNorm", "RMSNorm"):
        for centred in (False, True):
            config = SimpleNamespace(
                normalization=kind, sequence_parallel=False, layernorm_zero_centered_gamma=centred
            )
            norm = TorchNorm(config, 8, 1e-5)
            expected = norm(x).to(torch.bfloat16)
            same.append(torch.equal(norm.to(torch.bfloat16)(x), expected))
    return same


def test_a_norm_in_bf16_takes_rows_in_fp32_as_the_fp32_residual_stream_has_them():
    assert run_on_ranks(1, _norms_of_wide_rows) == [[True] * 4]


def test_norms_are_torchs_and_marked_for_sequence_parallelism():
    ((marked, is_rms, is_centred, refused),) = run_on_ranks(1, _norms)
    assert marked == [True] * 3 and is_rms and is_centred
    assert "L2Norm" in refused[0] and "persist_layer_norm" in refused[1]
