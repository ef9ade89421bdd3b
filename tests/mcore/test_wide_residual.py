"""--fp32-residual-connection: between layers of 16 bits the stream of sums stays in fp32."""

import torch

from tests.mcore.tiny_gpt import Case, enter_megatron, parallel_state
from tests.ranks import run_on_ranks

MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "ffn_hidden_size": 64,
    "max_position_embeddings": 16,
    "position_embedding_type": "rope",
    "mtp_num_layers": 1,
    "bf16": True,
    "fp32_residual_connection": True,
}


def _added(output):
    """What a branch of a layer gives to the stream, in fp32: its rows and its bias."""
    rows, bias = output
    return rows.float() + bias.float()


def _streams(rank, world_size):
    """(stream behind each layer, the sum of the stream before it and what its branches gave), and what stages send."""
    enter_megatron()
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_cp.models.gpt import build_gpt, transformer_config

    with parallel_state(Case()):
        config = transformer_config(MODEL, dtype=torch.bfloat16)
        model = build_gpt(config, MODEL, vocab_size=64).bfloat16().eval()
        layers = [one for one in model.modules() if isinstance(one, TransformerLayer)]
        parts, found = {}, []
        for layer in layers:
            for name in ("self_attention", "mlp"):
                getattr(layer, name).register_forward_hook(
                    lambda _, __, output, key=(layer, name): parts.update({key: _added(output)})
                )

            def compare(layer, args, kwargs, output):
                before = (args[0] if args else kwargs["hidden_states"]).float()
                expected = before + parts[layer, "self_attention"] + parts[layer, "mlp"]
                found.append((output[0].detach(), expected.detach()))

            layer.register_forward_hook(compare, with_kwargs=True)
        tokens = torch.arange(16)[None]
        model(tokens, tokens, None, labels=tokens, loss_mask=torch.ones(1, 16))
        return found, config.pipeline_dtype


def test_no_layer_rounds_the_stream_and_stages_send_it_whole():
    ((found, sent),) = run_on_ranks(1, _streams)
    assert len(found) == 3 and sent == torch.float32  # two layers and that of a prediction
    for stream, expected in found:
        assert stream.dtype == torch.float32
        torch.testing.assert_close(stream, expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(stream, stream.bfloat16().float())
