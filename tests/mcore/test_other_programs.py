"""Programs on Megatron-Core that make specs and cut batches themselves: each document zigzag, thd parameters beside.

Megatron-Bridge, verl and Megatron-SWIFT do (docs/frameworks.md); how each of them cuts is written down here again.
"""

import inspect
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.mcore.packs import SEQUENCE, VOCABULARY
from tests.mcore.stock import cut_by_megatron, stock_program
from tests.mcore.tiny_gpt import Case, make_config, parallel_state
from tests.mcore.weights import fill_by_name
from tests.ranks import run_on_ranks

LENGTHS = (5, 22, 1, 16, 9)  # some no multiple of twice the context ranks
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12, "rotary_percent": 1.0, "rope_type": "rope", "num_query_groups": 4,
}  # fmt: skip


def documents() -> list[torch.Tensor]:
    generator = np.random.default_rng(3)
    return [torch.from_numpy(generator.integers(1, VOCABULARY, size=n)) for n in LENGTHS]


def stock_model(case: Case):
    """A GPT as a program builds it that knows nothing of us."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = make_config(case)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    fill_by_name(model)
    return model.eval()


def logits_alone(rank, world_size, options):
    """Logits of each document by itself, with Megatron's own attention; of latent attention with ours, not packed."""
    case = Case().with_options(**options)
    with stock_program(), parallel_state(case), torch.no_grad():
        model = swapped_model(case) if options else stock_model(case)
        found = []
        for document in documents():
            mask = torch.ones(len(document), len(document), dtype=torch.bool).triu(1)[None, None]
            positions = torch.arange(len(document))[None]
            found.append(model(document[None], positions, mask)[0])
        return torch.cat(found).float().numpy()


def swapped_model(case: Case):
    """The same where our attention was asked for in every GPT."""
    from megatron_cp.mcore import use_in_every_gpt
    from megatron_cp.mcore.model_hooks import exchange_specs

    try:
        use_in_every_gpt(thd_split="per_document")
        return stock_model(case)
    finally:
        exchange_specs(None)


def zigzag(length: int, cp: int, rank: int) -> np.ndarray:
    if cp == 1:
        return np.arange(length)
    pieces = np.arange(length).reshape(2 * cp, -1)
    return np.concatenate([pieces[rank], pieces[2 * cp - 1 - rank]])


def padded_stream(cp: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Tokens of all documents, padded to multiples of twice the ranks; their starts without padding, and with it."""
    unit = 2 * cp if cp > 1 else 1  # alone, these programs pad nothing
    padded = [torch.nn.functional.pad(one, (0, -len(one) % unit)) for one in documents()]
    ends = np.cumsum([0, *map(len, padded)])
    return torch.cat(padded), np.cumsum([0, *LENGTHS]), ends


def logits_of_cut(rank, cp, padding_counts, options):
    """(places in the padded stream, logits) of this rank's rows; a stock model in which our attention stands."""
    case = Case(cp=cp).with_options(**options)
    with stock_program() as program, parallel_state(case), torch.no_grad():
        del program
        model = swapped_model(case)
        names = {
            type(layer.self_attention.core_attention).__name__ for layer in model.decoder.layers
        }
        assert names == {"ContextParallelAttention"}
        return logits_of_stream(model, cp, rank, padding_counts)


def logits_of_stream(model, cp: int, rank: int, padding_counts: bool):
    """(places in the padded stream, logits) of this rank's rows: each document cut zigzag, with thd parameters."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, real, padded = padded_stream(cp)
    rows = np.concatenate([s + zigzag(e - s, cp, rank) for s, e in itertools.pairwise(padded)])
    ends = torch.tensor(padded if padding_counts else real, dtype=torch.int32)
    whole = torch.tensor(padded, dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=int(np.diff(padded).max()),
        max_seqlen_kv=int(np.diff(padded).max()),
    )
    positions = torch.zeros(1, len(rows), dtype=torch.long)
    logits = model(tokens[rows][None], positions, None, packed_seq_params=params)
    return rows, logits[0].float().numpy()


def of_real_tokens(cp: int, results) -> np.ndarray:
    """Logits of all documents, without padding, in their order: those of all ranks put together."""
    _, _, padded = padded_stream(cp)
    whole = np.full((padded[-1], VOCABULARY), np.nan, dtype=np.float32)
    for rows, logits in results:
        whole[rows] = logits
    return np.concatenate([whole[s : s + n] for s, n in zip(padded[:-1], LENGTHS, strict=True)])


@pytest.mark.parametrize("options", [{}, LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize("padding_counts", [False, True])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_a_stock_gpt_whose_program_cuts_each_document_computes_each_alone(
    cp, padding_counts, options
):
    (expected,) = run_on_ranks(1, logits_alone, options)
    found = of_real_tokens(cp, run_on_ranks(cp, logits_of_cut, padding_counts, options))
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=2e-6)


def contiguous_rows(rank, world_size):
    with parallel_state(Case(cp=world_size)) as groups:
        from megatron.core.packed_seq_params import PackedSeqParams

        from megatron_cp.mcore.documents.micro_batch import prepare_layer
        from megatron_cp.mcore.documents.split import documents_of_batch

        ends = torch.tensor([0, 8, 16], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        params.cp_partition_mode = "zigzag"
        found = documents_of_batch(params, 8, world_size, "per_document")
        params.cp_partition_mode = "contiguous"
        documents_of_batch(params, 16, 1, "per_document")  # one rank has all rows in any case
        with pytest.raises(NotImplementedError, match="cp_partition_mode='contiguous'"):
            documents_of_batch(params, 8, world_size, "per_document")
        config = make_config(Case(cp=world_size))
        config.cp_partition_mode = "contiguous"  # whole sequences have no parameters that say it
        with pytest.raises(NotImplementedError, match=r"config.cp_partition_mode='contiguous'"):
            prepare_layer(config, None, groups.get_context_parallel_group())
        return found


def test_rows_that_are_cut_contiguously_are_refused():
    assert run_on_ranks(2, contiguous_rows) == [((0, 8, 16), (8, 8))] * 2


def a_row_that_slime_cuts_contiguously(rank, world_size):
    """The documents of a batch where the program's arguments say how it cuts: on one rank, and in words on two."""
    with stock_program(allgather_cp=True), parallel_state(Case(cp=world_size)):
        from megatron.core.packed_seq_params import PackedSeqParams

        from megatron_cp.mcore.documents.split import documents_of_batch

        ends = torch.tensor([0, 8, 16], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
        with pytest.raises(NotImplementedError, match="--allgather-cp cuts the row"):
            documents_of_batch(params, 8, 2, "per_document")
        return documents_of_batch(params, 16, 1, "per_document")


def test_samples_that_slime_cuts_as_one_row_are_refused():
    assert run_on_ranks(1, a_row_that_slime_cuts_contiguously) == [((0, 8, 16), (8, 8))]


def specs_that_are_left(rank, world_size):
    """The attention of a GPT after the first call, after it was taken back, and of an empty stage's spec."""
    with stock_program(), parallel_state(Case(cp=world_size)):
        from megatron_cp.mcore import use_in_every_gpt
        from megatron_cp.mcore.model_hooks import exchange_specs

        with pytest.raises(ValueError, match="thd_split='by_magic'"):
            use_in_every_gpt(thd_split="by_magic")
        try:
            use_in_every_gpt()
            first = stock_model(Case(cp=world_size))
        finally:
            exchange_specs(None)
        second = stock_model(Case(cp=world_size))
        return [
            type(model.decoder.layers[0].self_attention.core_attention).__name__
            for model in (first, second)
        ]


def test_what_is_taken_back_is_taken_back_and_a_cut_that_nobody_knows_is_refused():
    ((first, second),) = run_on_ranks(1, specs_that_are_left)
    assert (first, second) == ("ContextParallelAttention", "DotProductAttention")


def indices_of_each(ends, num_tokens, cp, rank):
    """What Transformer Engine's function of the name gives, written down again."""
    assert ends[-1] == num_tokens
    rows = [s + zigzag(e - s, cp, rank) for s, e in itertools.pairwise(ends.tolist())]
    return torch.from_numpy(np.concatenate(rows))


def cut_of_documents(rank, world_size, thd_split):
    """Rows of this rank as `get_batch_on_this_cp_rank` gives them for thd: Megatron's own, or those of a plan."""
    case = Case(cp=world_size)
    with stock_program() as program, parallel_state(case) as groups:
        from megatron.core import utils

        from megatron_cp.mcore import use_in_every_gpt
        from megatron_cp.mcore.model_hooks import exchange_specs

        del sys.modules[program.__name__]  # no program, no flags
        try:
            use_in_every_gpt(thd_split=thd_split)
            stock_model(case)
            _, _, padded = padded_stream(world_size)
            batch = {
                "tokens": torch.arange(padded[-1])[None],
                "cu_seqlens": torch.tensor(padded, dtype=torch.int32)[None],
                "cu_seqlens_padded": None,
            }
            group = groups.get_context_parallel_group()
            if utils.tex is None:  # Transformer Engine's, which needs a GPU
                utils.tex = SimpleNamespace(thd_get_partitioned_indices=indices_of_each)
            cut = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
            return cut["tokens"][0].numpy()
        finally:
            exchange_specs(None)
            sys.modules[program.__name__] = program


def cuts_thd_itself(rank, world_size):
    with parallel_state(Case()):
        from megatron.core import utils

        return "is_hybrid_cp" in inspect.signature(utils.get_batch_on_this_cp_rank).parameters


def test_megatrons_own_cut_of_each_document_stays_where_the_layers_know_it():
    if not run_on_ranks(1, cuts_thd_itself)[0]:
        pytest.skip("Megatron-Core before 0.18 cuts thd batches elsewhere, with Transformer Engine")
    found = run_on_ranks(2, cut_of_documents, "per_document")
    _, _, padded = padded_stream(2)
    for rank, rows in enumerate(found):
        pairs = itertools.pairwise(padded)
        expected = np.concatenate([s + zigzag(e - s, 2, rank) for s, e in pairs])
        np.testing.assert_array_equal(rows, expected)
    planned = run_on_ranks(2, cut_of_documents, None)
    assert not all(np.array_equal(one, other) for one, other in zip(found, planned, strict=True))
    assert sorted(np.concatenate(planned)) == list(range(padded[-1]))


def what_a_stage_without_layers_knows(rank, world_size):
    with stock_program(), parallel_state(Case(cp=world_size)):
        from megatron.core.models.gpt import GPTModel
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        from megatron_cp.mcore import layers, use_in_every_gpt
        from megatron_cp.mcore.model_hooks import exchange_specs

        try:
            use_in_every_gpt(thd_split="per_document")
            GPTModel(
                make_config(Case(cp=world_size)),
                transformer_layer_spec=TransformerBlockSubmodules(layer_specs=[]),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                post_process=False,
            )
        finally:
            exchange_specs(None)
        return layers.are_ours(), layers.cuts_each_document()


def test_a_stage_without_layers_leaves_batches_as_they_are_cut_too():
    assert run_on_ranks(1, what_a_stage_without_layers_knows) == [(True, True)]


def rows_of_embeddings(rank, world_size):
    """Rows of this rank of a batch that holds embeddings alone, cut by Megatron's function."""
    with stock_program() as program, parallel_state(Case(cp=world_size)):
        del sys.modules[program.__name__]  # no program, no flags
        swapped_model(Case(cp=world_size))
        empty = dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"))
        batch = {**empty, "decoder_input": torch.arange(16.0).view(1, 16, 1)}
        cut_by_megatron(batch)
        sys.modules[program.__name__] = program
        return batch["decoder_input"][0, :, 0].numpy()


def test_embeddings_alone_are_cut_too():
    for rank, rows in enumerate(run_on_ranks(2, rows_of_embeddings)):
        np.testing.assert_array_equal(rows, zigzag(16, 2, rank))


def ends_that_are_filled_up(rank, world_size):
    with stock_program() as program, parallel_state(Case()):
        from megatron.core import utils

        del sys.modules[program.__name__]
        swapped_model(Case())
        tokens = torch.arange(16)[None]
        ends = torch.tensor([[0, 6, 16, -1, -1]], dtype=torch.int32)
        batch = {"tokens": tokens, "cu_seqlens": ends}
        utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False)
        sys.modules[program.__name__] = program
        return [batch["tokens"][0].tolist(), batch["cu_seqlens"][0].tolist()]


def test_one_rank_leaves_ends_to_the_program_that_filled_them_up():
    if not run_on_ranks(1, cuts_thd_itself)[0]:
        pytest.skip("Megatron-Core before 0.18 cuts thd batches elsewhere, with Transformer Engine")
    assert run_on_ranks(1, ends_that_are_filled_up) == [[list(range(16)), [0, 6, 16, -1, -1]]]


def what_is_said_of_packed_parameters(rank, world_size):
    """The line on documents where a batch comes with packed parameters, and where it comes without."""
    from megatron_cp.mcore import hooks

    said = []
    for more in ({}, {"cu_seqlens_q": torch.tensor([[0, 6, 16]], dtype=torch.int32)}):
        with stock_program() as program, parallel_state(Case()):
            del sys.modules[program.__name__]
            swapped_model(Case())
            cut_by_megatron({"tokens": torch.arange(16)[None], "cu_seqlens_q": None, **more})
            sys.modules[program.__name__] = program
            said += hooks._said
    return said


def test_documents_of_packed_parameters_are_not_said_to_be_none():
    ((without, packed),) = run_on_ranks(1, what_is_said_of_packed_parameters)
    assert "none are asked for" in without and "as the program gives them" in packed


def decoders_built_again(rank, world_size):
    """The attention of a decoder that a subclass builds again of the spec it was given; another spec is refused."""
    with stock_program(), parallel_state(Case()), torch.no_grad():
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.transformer.transformer_block import TransformerBlock

        from megatron_cp.mcore import use_in_every_gpt
        from megatron_cp.mcore.model_hooks import exchange_specs

        class BuildingAgain(GPTModel):
            def __init__(self, config, spec, again):
                super().__init__(config, spec, VOCABULARY, SEQUENCE)
                self.decoder = TransformerBlock(config=config, spec=again)

        config = make_config(Case())
        specs = [get_gpt_decoder_block_spec(config, use_transformer_engine=False) for _ in "ab"]
        try:
            use_in_every_gpt()
            same = BuildingAgain(config, specs[0], specs[0])
            place = r"decoder.layers.0.self_attention.core_attention of BuildingAgain is DotProduct"
            with pytest.raises(NotImplementedError, match=place):
                BuildingAgain(config, specs[0], specs[1])
            other = TransformerBlock(config=config, spec=specs[1])  # of an encoder, say
            late = BuildingAgain(config, specs[0], specs[0])
            late.decoder.layers = other.layers
        finally:
            exchange_specs(None)
        tokens = torch.arange(8)[None]
        mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
        same(tokens, tokens, mask)
        with pytest.raises(NotImplementedError, match=place):
            late(tokens, tokens, mask)
        plain = BuildingAgain(
            config, specs[0], specs[1]
        )  # nothing is exchanged, or refused, any more
        plain(tokens, tokens, mask)
        return type(same.decoder.layers[0].self_attention.core_attention).__name__


def test_a_decoder_that_is_built_again_has_our_attention_or_is_refused():
    assert run_on_ranks(1, decoders_built_again) == ["ContextParallelAttention"]
