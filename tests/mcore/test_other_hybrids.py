"""Hybrid models of programs that make specs and cut batches themselves: Megatron-Bridge's Nemotrons, say.

Megatron's own mixer needs kernels of a GPU, so the reference is ours on each document alone, which
`test_mamba_mixer.py` compares with plain loops.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from tests.mcore.engines import HYBRID
from tests.mcore.packs import SEQUENCE, VOCABULARY
from tests.mcore.stock import stock_program
from tests.mcore.test_other_programs import documents, logits_of_stream, of_real_tokens
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.mcore.weights import fill_by_name
from tests.ranks import run_on_ranks


def stock_spec(config):
    """A stack's spec as a program makes it that knows nothing of us: Megatron's attention and mixer."""
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_cp.mcore.hybrid import hybrid_stack_spec_of

    spec = copy.deepcopy(hybrid_stack_spec_of(config))
    attention = spec.submodules.attention_layer.submodules.self_attention
    attention.submodules.core_attention = DotProductAttention
    spec.submodules.mamba_layer.submodules.mixer.module = MambaMixer
    return spec


def hybrid_model(case: Case):
    """The program's model, built where our attention was asked for in every GPT."""
    from megatron_cp.mcore import use_in_every_gpt
    from megatron_cp.mcore.model_hooks import exchange_specs
    from megatron_cp.mcore.versions import hybrid_classes

    parts = hybrid_classes.hybrid_parts()
    config = make_config(case)
    spec = stock_spec(config)
    try:
        use_in_every_gpt(thd_split="per_document")
        model = parts.model(
            config,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **{parts.pattern: "M*-", parts.spec: spec},
        )
    finally:
        exchange_specs(None)
    fill_by_name(model)
    return model.eval()


def logits_alone(rank, world_size, case):
    with stock_program(), parallel_state(case), torch.no_grad():
        model = hybrid_model(case)
        found = []
        for document in documents():
            positions = torch.arange(len(document))[None]
            found.append(model(document[None], positions, None)[0])
        return torch.cat(found).float().numpy()


def logits_of_cut(rank, cp, case):
    """(places in the padded stream, logits) of this rank's rows, cut as the program does."""
    with stock_program(), parallel_state(case), torch.no_grad():
        model = hybrid_model(case)
        mamba, attention, _ = model.decoder.layers
        names = {type(x).__name__ for x in (mamba.mixer, attention.self_attention.core_attention)}
        assert names == {"ContextMambaMixer", "ContextParallelAttention"}
        return logits_of_stream(model, cp, rank, padding_counts=True)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_a_stock_hybrid_whose_program_cuts_each_document_computes_each_alone(cp):
    (expected,) = run_on_ranks(1, logits_alone, Case().with_options(**HYBRID))
    found = of_real_tokens(cp, run_on_ranks(cp, logits_of_cut, Case(cp=cp).with_options(**HYBRID)))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=2e-6)


@dataclasses.dataclass
class Layer:
    """Parts of a layer: its core attention alone."""

    core_attention: object


@dataclasses.dataclass
class StackWithSparseLayers:
    """Parts of a stack's spec since 0.20, of which a pattern has some."""

    attention_layer: object
    dsa_layer: object


def exchanged_beside_sparse_layers(rank, world_size):
    """The core attention after the exchange, and whether the layer of sparse attention is what it was."""
    with parallel_state(Case()):
        from megatron.core.transformer.dot_product_attention import DotProductAttention
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_cp.mcore.spec import with_context_parallel

        sparse = Layer(ModuleSpec(torch.nn.Module, submodules=Layer(None)))
        stack = StackWithSparseLayers(Layer(DotProductAttention), sparse)
        parts = with_context_parallel(ModuleSpec(torch.nn.Module, submodules=stack)).submodules
        core = parts.attention_layer.core_attention
        return core.__name__, parts.dsa_layer == sparse


def test_layers_of_sparse_attention_that_no_pattern_asks_for_stay():
    assert run_on_ranks(1, exchanged_beside_sparse_layers) == [("ContextParallelAttention", True)]
