"""What is built and computed where Transformer Engine or apex is installed; prints JSON.

Run as `python -m tests.mcore.engines` with the stand-ins of stubs/ on PYTHONPATH: a process has
either engine from its first import on.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.mcore.tiny_gpt import Case, Trainer, build_chunks, make_config, parallel_state


def _layer(model) -> dict[str, str]:
    """Class of each part of the last layer and of the final norm."""
    layer = model.decoder.layers[-1]
    parts = {
        "qkv": layer.self_attention.linear_qkv,
        "fc1": getattr(layer.mlp, "linear_fc1", None),
        "attention": layer.self_attention.core_attention,
        "input norm": layer.input_layernorm,
        "final norm": model.decoder.final_layernorm,
    }
    return {name: type(part).__name__ for name, part in parts.items()}


def _keys(model) -> list[str]:
    """Names under which the model's tensors and extra states lie in a checkpoint."""
    return sorted(value.key for value in model.sharded_state_dict().values())


def _built(case: Case) -> tuple[dict[str, str], list[str]]:
    with parallel_state(case):
        (model,) = build_chunks(case, make_config(case))
        return _layer(model), _keys(model)


def _megatrons_keys(case: Case, uses_te: bool) -> list[str]:
    """Checkpoint keys of Megatron's own layers."""
    with parallel_state(case):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        config = make_config(case)
        spec = get_gpt_decoder_block_spec(config, uses_te)
        options = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}
        model = GPTModel(config, spec, 64, 128, **options)
        return _keys(model)


def _trained(case: Case) -> dict[str, object]:
    """Losses of three steps, and the optimizer's class."""
    with parallel_state(case) as groups:
        trainer = Trainer(case, groups)
        inner = trainer.optimizer.chained_optimizers[0].optimizer
        return {
            "losses": [trainer.step()[0] for _ in range(3)],
            "adam": f"{type(inner).__module__}.{type(inner).__name__}",
        }


LINEAR = {
    "linear_attention_freq": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "activation_func": torch.nn.functional.silu,
}


def _linear(case: Case) -> dict[str, object]:
    """A linear and a softmax layer: our block, that of Megatron's spec, and what Megatron alone would keep."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.ssm import gated_delta_net as megatrons

    from megatron_cp.mcore.spec import gpt_block_spec, with_context_parallel

    answers: dict[str, object] = {}
    with parallel_state(case):
        config = make_config(case)
        config.experimental_attention_variant = "gated_delta_net"
        own = {"our block": gpt_block_spec(config)}
        if config.transformer_impl == "transformer_engine":
            home = getattr(megatrons, "common", megatrons)  # in 0.20 the module is a package
            home.HAVE_FLA, home.chunk_gated_delta_rule = True, print
            config.deterministic_mode = True  # then Megatron's layer asks for no kernel
            os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # what its attention wants for it
            spec = variants.get_transformer_block_with_experimental_attention_variant_spec(config)
            own |= {"megatron's": spec, "megatron's, exchanged": with_context_parallel(spec)}
        options = {"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"}
        for name, spec in own.items():
            layer, other = (model := GPTModel(config, spec, 64, 128, **options)).decoder.layers
            mixer = layer.self_attention
            answers[name] = {
                "class": type(mixer).__name__,
                "parts": [type(x).__name__ for x in (layer.input_layernorm, mixer.in_proj)],
                "attention": type(other.self_attention.core_attention).__name__,
                "keys": _parts(model),
            }
    return answers


HYBRID = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 16,
    "num_layers": 3,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}


def _hybrid(case: Case) -> dict[str, object]:
    """A layer of each dense kind: our stack, that of Megatron's spec, and what Megatron alone would keep."""
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    from megatron_cp.mcore.hybrid import hybrid_stack_spec, hybrid_stack_spec_of
    from megatron_cp.mcore.spec import with_context_parallel
    from megatron_cp.mcore.versions import hybrid_classes
    from tests.mcore.test_mamba_mixer import LentNorm

    answers: dict[str, object] = {}
    megatrons = hybrid_classes.hybrid_parts()
    with parallel_state(case):
        config = make_config(case)
        own = {"our stack": hybrid_stack_spec_of(config), "command line": hybrid_stack_spec}
        if config.transformer_impl == "transformer_engine":
            mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = True
            mamba_context_parallel.HAVE_EINOPS, mamba_mixer.ExtendedRMSNorm = True, LentNorm
            exchanged = with_context_parallel(mamba_stack_spec)
            own |= {"megatron's": mamba_stack_spec, "megatron's, exchanged": exchanged}
        for name, spec in own.items():
            options = {megatrons.pattern: "M*-", megatrons.spec: spec}
            model = megatrons.model(config, vocab_size=64, max_sequence_length=128, **options)
            mamba, attention, mlp = model.decoder.layers
            answers[name] = {
                "class": type(mamba.mixer).__name__,
                "parts": [
                    type(x).__name__
                    for x in (mamba.norm, mamba.mixer.in_proj, mlp.mlp.linear_fc1, attention)
                ],
                "attention": type(attention.self_attention.core_attention).__name__,
                "keys": _parts(model),
            }
    return answers


def _parts(model) -> list[str]:
    """Names of all pieces in which a model's tensors lie in a checkpoint."""
    found: list[str] = []
    for value in model.sharded_state_dict().values():
        pieces = value.build() if hasattr(value, "build") else [value]
        found += [piece.key for piece in pieces]
    return sorted(found)


def _transformer_engine() -> dict[str, object]:
    import transformer_engine

    from megatron_cp.runtime import dist_attn

    on_te = Case(attention="planned").with_options(transformer_impl="transformer_engine")
    answers = {}
    for name, case in {
        "te": on_te,
        "local": Case(attention="planned"),
        "command line": Case(attention="planned", command_line=True, options=on_te.options),
        "te experts": on_te.with_options(num_moe_experts=2, add_bias_linear=False),
    }.items():
        answers[name], answers[f"{name} keys"] = _built(case)
    answers["megatron's keys"] = _megatrons_keys(on_te, uses_te=True)
    answers["linear te"] = _linear(on_te.with_options(**LINEAR))
    answers["linear local"] = _linear(Case(attention="planned").with_options(**LINEAR))
    answers["hybrid te"] = _hybrid(on_te.with_options(**HYBRID))
    answers["hybrid local"] = _hybrid(Case(attention="planned").with_options(**HYBRID))
    answers["bf16"] = _trained(on_te)

    seen: list[tuple[bool, str]] = []
    plain = dist_attn.attend_forward_last  # of one rank

    def recorded(held, query, *args):
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        seen.append((FP8GlobalStateManager.is_fp8_enabled(), str(query.dtype)))
        return plain(held, query, *args)

    dist_attn.attend_forward_last = recorded
    transformer_engine.events.clear()
    answers["fp8"] = _trained(on_te.with_options(fp8="hybrid", fp8_recipe="delayed"))
    answers["fp8 layers"] = sorted(set(transformer_engine.events))
    answers["attention in fp8"] = sorted(set(seen))
    return answers


def _apex() -> dict[str, object]:
    answers = {}
    for kind in ("LayerNorm", "RMSNorm"):
        case = Case(attention="planned").with_options(normalization=kind)
        answers[kind], _ = _built(case)
        case = Case(attention="planned", command_line=True, options=case.options)
        answers[f"{kind} command line"], _ = _built(case)
    answers["train"] = _trained(Case(attention="planned"))
    return answers


def main() -> None:
    import importlib.util

    has_te = importlib.util.find_spec("transformer_engine") is not None
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        answers = _transformer_engine() if has_te else _apex()
        torch.distributed.destroy_process_group()
    sys.stdout.write(json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
