"""Rows that fill up documents are no tokens of experts, at every context size: Megatron-Bridge gives a padding mask.

Documents are padded to multiples of twice the context ranks and cut zigzag, so one rank may hold more padding.
"""

import itertools

import numpy as np
import pytest
import torch

from tests.mcore.stock import stock_program
from tests.mcore.test_experts import EXPERTS
from tests.mcore.test_other_programs import swapped_model, zigzag
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.ranks import run_on_ranks

STARTS = (0, 16, 24, 40)
LENGTHS = (13, 8, 2)  # two context ranks hold 16 and 7 tokens, four hold 5, 6, 7 and 5 of them


def gradient_of_routers(rank, cp, kind):
    """The sum over ranks of the routers' gradient of the auxiliary loss alone, of one and the same stream."""
    case = Case(cp=cp).with_options(
        **EXPERTS, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5
    )
    assert case.per_token
    with stock_program(), parallel_state(case):
        from megatron.core.packed_seq_params import PackedSeqParams

        model = swapped_model(case).train()
        places = np.arange(STARTS[-1])
        of_document = np.searchsorted(STARTS, places, side="right") - 1
        is_padding = places - np.array(STARTS)[of_document] >= np.array(LENGTHS)[of_document]
        rows = np.concatenate([s + zigzag(e - s, cp, rank) for s, e in itertools.pairwise(STARTS)])
        real = torch.tensor(np.cumsum([0, *LENGTHS]), dtype=torch.int32)
        whole = torch.tensor(STARTS, dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=whole,
            cu_seqlens_kv_padded=whole,
            max_seqlen_q=16,
            max_seqlen_kv=16,
        )
        tokens = torch.from_numpy((7 * places + 3) % 60)[rows][None]
        mask = torch.from_numpy(is_padding)[rows][None]
        logits = model(
            tokens, torch.zeros_like(tokens), None, packed_seq_params=params, padding_mask=mask
        )
        (logits.sum() * 0).backward()
        gradient = torch.stack([layer.mlp.router.weight.grad for layer in model.decoder.layers])
        torch.distributed.all_reduce(gradient)
        return gradient.numpy(), int((~mask).sum())


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_auxiliary_losses_weigh_the_same_where_ranks_hold_unequal_padding(kind):
    ((expected, num_tokens),) = run_on_ranks(1, gradient_of_routers, kind)
    assert num_tokens == sum(LENGTHS)
    assert np.abs(expected).max() > 1e-3
    for cp in (2, 4):
        found = run_on_ranks(cp, gradient_of_routers, kind)
        assert len({count for _, count in found}) > 1, "ranks hold as many tokens: nothing is tried"
        for gradient, _ in found:
            np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-6)
