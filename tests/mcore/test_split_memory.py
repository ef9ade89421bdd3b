"""What is kept beside a batch's parameters is read again when they change."""

import copy

import torch

from megatron_cp.config import CPConfig
from tests.mcore.tiny_gpt import enter_megatron
from tests.ranks import run_on_ranks


def packed(bounds):
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


def documents(params):
    from megatron_cp.mcore.documents import split

    return split.documents_of(params)[1]


def after_changes(rank, world_size):
    """The documents after each way to give parameters other ones."""
    enter_megatron()
    params = packed(torch.tensor([0, 10, 32], dtype=torch.int32))
    found = [documents(params), documents(params)]
    params.cu_seqlens_q.copy_(torch.tensor([0, 20, 32]))
    found.append(documents(params))
    params.cu_seqlens_q = params.cu_seqlens_kv = torch.tensor([0, 5, 32], dtype=torch.int32)
    found.append(documents(params))
    other = copy.copy(params)
    other.cu_seqlens_q = other.cu_seqlens_kv = torch.tensor([0, 32], dtype=torch.int32)
    found.append(documents(other))
    with torch.inference_mode():
        inside = packed(torch.tensor([0, 8, 32], dtype=torch.int32))
        found.append(documents(inside))
        inside.cu_seqlens_q.copy_(torch.tensor([0, 9, 32]))
        found.append(documents(inside))
    return found


def test_documents_are_those_of_the_tensors_as_they_are():
    (found,) = run_on_ranks(1, after_changes)
    assert found == [(10, 22), (10, 22), (20, 12), (5, 27), (32,), (8, 24), (9, 23)]


def masks_of_inference(rank, world_size):
    """Whether a causal mask passes, and another is refused, where both are made in inference mode."""
    enter_megatron()
    from megatron_cp.mcore.documents import split

    config = CPConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    with torch.inference_mode():
        plan = split.plan_of_split((0, 16), (16,), 1, (None, 0), config)
        mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
        split.check_mask_is_causal(mask, plan, 0, (None, 0))
        mask[..., 3, 0] = True
        try:
            split.check_mask_is_causal(mask, plan, 0, (None, 0))
        except NotImplementedError:
            return True
    return False


def test_masks_of_inference_mode_are_looked_at_each_time():
    assert run_on_ranks(1, masks_of_inference) == [True]
