"""Models for images on Megatron-Core: the language model inside has our attention, the encoder keeps its own.

What the programs do beside a plain GPT is written down here again: Megatron-LM's pretrain_vlm.py, Megatron-Bridge's
Qwen-VL (docs/frameworks.md).
"""

import numpy as np
import pytest
import torch

from tests.mcore.stock import stock_program
from tests.mcore.test_other_programs import stock_model, swapped_model, zigzag
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.ranks import run_on_ranks

LENGTH, REAL = 24, 21


def samples() -> torch.Tensor:
    generator = np.random.default_rng(4)
    return torch.from_numpy(generator.integers(1, 60, size=(2, LENGTH)))


def sbhd_params(*ends: int):
    """What pretrain_vlm.py gives its model beside samples that lie side by side."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor(ends, dtype=torch.int32)
    sizes = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), LENGTH)
    return PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=ends, cu_seqlens_kv=ends, **sizes)


def logits_of_samples(rank, cp, ends):
    """Logits `[2, rows, vocabulary]` of this rank's rows; None: of all rows, with Megatron's own attention."""
    case = Case(cp=cp)
    with stock_program(), parallel_state(case), torch.no_grad():
        rows = torch.from_numpy(zigzag(LENGTH, cp, rank))
        model, params, mask = swapped_model(case) if ends else stock_model(case), None, None
        if ends:
            params = sbhd_params(*ends)
        else:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        tokens, positions = samples()[:, rows], rows.expand(2, -1)
        return model(tokens, positions, mask, packed_seq_params=params).float().numpy()


@pytest.mark.parametrize("length", [REAL, LENGTH])
@pytest.mark.parametrize("cp", [1, 2])
def test_parameters_beside_samples_that_are_not_packed_tell_their_padding(cp, length):
    (expected,) = run_on_ranks(1, logits_of_samples, None)
    found = np.full_like(expected, np.nan)
    for rank, logits in enumerate(run_on_ranks(cp, logits_of_samples, (0, length, 2 * length))):
        found[:, zigzag(LENGTH, cp, rank)] = logits
    np.testing.assert_allclose(found[:, :length], expected[:, :length], atol=2e-6)


def refused_ends(rank, world_size, ends):
    with stock_program(), parallel_state(Case(cp=world_size)):
        from megatron_cp.mcore.documents.split import documents_of_batch

        with pytest.raises(NotImplementedError, match="each one document") as error:
            documents_of_batch(sbhd_params(*ends), LENGTH // world_size, world_size, None)
        return str(error.value)


@pytest.mark.parametrize("ends", [(0, 12, 24), (0, 24, 45), (0, 48)])
def test_documents_inside_samples_that_are_not_packed_are_refused(ends):
    for line in run_on_ranks(2, refused_ends, ends):
        assert "in samples of 24" in line


def documents_beside_padding(rank, world_size):
    with stock_program(), parallel_state(Case(cp=world_size)):
        from megatron_cp.mcore.documents.split import documents_of_batch

        params = sbhd_params(0, REAL, 2 * REAL)
        return documents_of_batch(params, LENGTH // world_size, world_size, None)


def test_no_token_of_a_sample_sees_its_padding_also_where_tokens_see_later_ones():
    assert run_on_ranks(2, documents_beside_padding) == [((0, LENGTH), (REAL,))] * 2


def attention_of_blocks(rank, world_size):
    """Names of the core attention of blocks that are built of a GPT's own spec, beside it and for an encoder."""
    with stock_program(), parallel_state(Case(cp=world_size)):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_block import TransformerBlock

        from megatron_cp.mcore import use_in_every_gpt
        from megatron_cp.mcore.model_hooks import exchange_specs

        spec, config = get_gpt_layer_local_spec(), make_config(Case(cp=world_size))
        try:
            use_in_every_gpt(thd_split="per_document")
            GPTModel(config, spec, vocab_size=64, max_sequence_length=64)
            blocks = [TransformerBlock(one, spec) for one in (config, make_config(Case()))]
        finally:
            exchange_specs(None)
        return [type(block.layers[0].self_attention.core_attention).__name__ for block in blocks]


def test_an_encoder_of_the_same_spec_keeps_its_attention():
    expected = ["ContextParallelAttention", "DotProductAttention"]
    assert run_on_ranks(2, attention_of_blocks) == [expected] * 2


def refusal_of_forward(rank, world_size):
    """What a model says whose program gave a layer its own attention, and calls `forward` by its name."""
    with stock_program(), parallel_state(Case()):
        model = swapped_model(Case())
        other = stock_model(Case()).decoder.layers[1].self_attention.core_attention
        model.decoder.layers[1].self_attention.core_attention = other
        tokens = samples()
        with pytest.raises(
            NotImplementedError, match=r"layers\.1.*is DotProductAttention"
        ) as error:
            model.forward(tokens, torch.zeros_like(tokens), None)
        return str(error.value)


def test_layers_of_another_attention_are_refused_where_forward_is_called_by_name():
    assert "have no attention of ours" in run_on_ranks(1, refusal_of_forward)[0]


def refusal_of_an_encoder(rank, world_size):
    with stock_program(), parallel_state(Case(cp=world_size)) as groups:
        from megatron_cp.mcore.documents.micro_batch import prepare_layer

        with pytest.raises(NotImplementedError, match="in a context group of 2 ranks"):
            prepare_layer(make_config(Case()), None, groups.get_context_parallel_group())
        return True


def test_a_model_whose_configuration_has_no_context_ranks_is_refused_over_some():
    assert run_on_ranks(2, refusal_of_an_encoder) == [True, True]
