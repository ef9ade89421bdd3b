"""RoPE by position id, against Megatron's own table of positions in order."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.mcore.tiny_gpt import Case, make_config, parallel_state, train
from tests.ranks import run_on_ranks

KINDS = {
    "plain": {},
    "interleaved": {"rotary_interleaved": True},
    "half of the width": {"rotary_percent": 0.5},
    "interpolated": {"seq_len_interpolation_factor": 4.0},
    "llama 3 scaling": {"rope_scaling": True},
    "yarn": {"scaling_factor": 8.0, "original_max_position_embeddings": 32},
}


def _angles(rank, world_size, kind, positions, is_sharded=False):
    """(ours at the positions, Megatron's whole table), for [s, b, n, d] and for MLA's [t, n, d]."""
    with parallel_state(Case(cp=world_size)):
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
            YarnRotaryEmbedding,
        )

        from megatron_cp.mcore.batch import ContextParallelParams
        from megatron_cp.mcore.parts.rope import install_position_rotary

        cls = YarnRotaryEmbedding if kind == "yarn" else RotaryEmbedding
        options = {"kv_channels": 16, "rotary_percent": 1.0, "use_cpu_initialization": True}
        owner = torch.nn.Module()
        owner.rotary_pos_emb = cls(**{**options, **KINDS[kind]})
        table = owner.rotary_pos_emb.get_emb(128)
        if is_sharded:
            fully_shard(owner.rotary_pos_emb, mesh=init_device_mesh("cpu", (world_size,)))
        assert install_position_rotary(owner) == install_position_rotary([owner]) == 1
        rotary = owner.rotary_pos_emb
        params = ContextParallelParams(
            positions=torch.tensor(positions), max_seqlen_q=128, max_seqlen_kv=128
        )
        length = rotary.get_rotary_seq_len(None, None, None, make_config(Case()), params)
        assert length == 128
        return rotary(length, packed_seq=False, cp_group=None), table


@pytest.mark.parametrize(
    ("kind", "is_sharded"), [*((kind, False) for kind in KINDS), ("plain", True), ("yarn", True)]
)
def test_angles_are_the_rows_of_megatrons_table(kind: str, is_sharded: bool):
    """FSDP2 (Megatron-LM's --use-torch-fsdp2) wraps rotary embeddings, which then have a class of its own."""
    positions = [0, 3, 4, 7, 1, 1, 127]
    ((ours, table),) = run_on_ranks(1, _angles, kind, positions, is_sharded)
    if kind == "yarn":
        (ours, our_scale), (table, scale) = ours, table
        assert our_scale == scale
    assert ours.shape == (len(positions), 1, 1, table.shape[-1])
    torch.testing.assert_close(ours, table[positions], rtol=3e-7, atol=0)


def _yarn_of_66_positions(rank, world_size):
    """Megatron's rows 0 to 3 of angles where 66 positions cannot be cut into 2 x `world_size` parts."""
    with parallel_state(Case(cp=world_size)) as groups:
        from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
            YarnRotaryEmbedding,
        )

        import megatron_cp.mcore.spec  # noqa: F401  it repairs Megatron

        rotary = YarnRotaryEmbedding(
            kv_channels=16,
            scaling_factor=8.0,
            original_max_position_embeddings=66,
            use_cpu_initialization=True,
            cp_group=groups.get_context_parallel_group(),
        )
        return rotary.get_emb(4)


def test_yarn_is_made_at_context_sizes_that_do_not_divide_its_positions():
    ((alone, scale),) = run_on_ranks(1, _yarn_of_66_positions)
    for angles, our_scale in run_on_ranks(2, _yarn_of_66_positions):
        assert our_scale == scale
        torch.testing.assert_close(angles, alone, rtol=0, atol=0)


def _positions_of_dispatched_documents(rank, world_size):
    """Rows and angles of this rank for documents of 4 and 4 tokens, split zigzag one by one."""
    with parallel_state(Case(cp=world_size)):
        import numpy as np
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        from megatron_cp.mask import packed
        from megatron_cp.mcore.batch import context_parallel_params
        from megatron_cp.mcore.parts.rope import install_position_rotary
        from megatron_cp.plan.placement.placement import per_document_zigzag
        from megatron_cp.plan.planner import CPConfig, plan_on_placement

        placement = per_document_zigzag(np.diff([0, 4, 8]).tolist(), world_size)
        plan = plan_on_placement(packed.documents([4, 4]), placement, CPConfig())
        params = context_parallel_params({"full": plan}, rank, "cpu")
        owner = torch.nn.Module()
        owner.rotary_pos_emb = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
        install_position_rotary(owner)
        rotary = owner.rotary_pos_emb
        length = rotary.get_rotary_seq_len(None, None, None, None, params)
        return params.positions.tolist(), rotary(length)[:, 0, 0, 0].tolist()


def test_cu_seqlens_0_4_8_on_two_ranks_uses_positions_0_3_4_7_on_rank_0():
    (rows_0, angles_0), (rows_1, angles_1) = run_on_ranks(2, _positions_of_dispatched_documents)
    assert rows_0 == [0, 3, 4, 7] and rows_1 == [1, 2, 5, 6]
    # The first frequency of RoPE is one: its angle is the position.
    assert angles_0 == [0.0, 3.0, 4.0, 7.0] and angles_1 == [1.0, 2.0, 5.0, 6.0]


def _without_positions(rank, world_size):
    with parallel_state(Case()):
        from megatron.core.models.common.embeddings.rotary_pos_embedding import (
            MultimodalRotaryEmbedding,
            RotaryEmbedding,
        )

        from megatron_cp.mcore.batch import ContextParallelParams
        from megatron_cp.mcore.parts.rope import install_position_rotary

        owner = torch.nn.Module()
        owner.rotary_pos_emb = MultimodalRotaryEmbedding(8, 1.0)
        messages = []
        try:
            install_position_rotary(owner)
        except NotImplementedError as error:
            messages.append(str(error))
        owner.rotary_pos_emb = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
        plain = owner.rotary_pos_emb.get_emb(6)
        install_position_rotary(owner)
        try:
            owner.rotary_pos_emb.get_rotary_seq_len(
                None, None, None, None, ContextParallelParams(max_seqlen_q=4, max_seqlen_kv=4)
            )
        except ValueError as error:
            messages.append(str(error))
        return messages, torch.equal(owner.rotary_pos_emb(6), plain)


def test_multimodal_rope_and_missing_positions_are_refused_and_plain_calls_stay_megatrons():
    (((multimodal, missing), is_plain),) = run_on_ranks(1, _without_positions)
    assert "multimodal RoPE" in multimodal and "positions=None" in missing
    assert is_plain


def _train_mla(rank, world_size, case):
    """Losses of a multi-latent attention model; `tiny_gpt` builds plain layers only."""
    from tests.mcore import tiny_gpt

    plain_config, plain_chunks = tiny_gpt.make_config, tiny_gpt.build_chunks
    tiny_gpt.make_config, tiny_gpt.build_chunks = _mla_config, _mla_chunks
    try:
        return train(rank, world_size, case)
    finally:
        tiny_gpt.make_config, tiny_gpt.build_chunks = plain_config, plain_chunks


def _mla_config(case):
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    fields = {
        field: getattr(make_config(case), field)
        for field in (
            "num_layers", "hidden_size", "num_attention_heads", "hidden_dropout",
            "attention_dropout", "transformer_impl", "context_parallel_size", "use_cpu_initialization",
            "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion",
            "bias_dropout_fusion", "persist_layer_norm", "calculate_per_token_loss",
        )
    }  # fmt: skip
    return MLATransformerConfig(
        **fields, q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8,
        v_head_dim=24, rope_type=case.position, apply_rope_fusion=False,
    )  # fmt: skip


def _mla_chunks(case, config):
    from megatron.core.models.gpt import GPTModel

    from megatron_cp.mcore.parts.rope import install_position_rotary
    from megatron_cp.mcore.spec import gpt_block_spec
    from tests.mcore.tiny_gpt import SEQUENCE, VOCABULARY, fill_by_name

    model = GPTModel(
        config, gpt_block_spec(config), VOCABULARY, SEQUENCE, position_embedding_type="rope"
    )
    if case.attention == "planned":
        install_position_rotary(model)
    fill_by_name(model)
    return [model]


@pytest.mark.parametrize("rope_type", ["rope", "yarn"])
def test_multi_latent_attention_is_the_same_at_every_context_parallel_size(rope_type: str):
    steps, position = 4, rope_type
    # One rank, nothing dispatched: positions and squeezing are Megatron's own here.
    own = run_on_ranks(1, _train_mla, Case(attention="split", steps=steps, position=position))[0]
    for attention, cp in (("planned", 1), ("planned", 2), ("split", 2)):
        case = Case(attention=attention, cp=cp, steps=steps, position=position)
        ours = run_on_ranks(cp, _train_mla, case)[0]
        for step in range(steps):
            assert ours[step] == pytest.approx(own[step], rel=2e-5), (attention, cp, step)
