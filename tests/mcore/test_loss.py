"""The loss is normalised over the context group: every mask gives one loss and one gradient."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.mcore import tiny_gpt
from tests.mcore.tiny_gpt import SEQUENCE, Case, enter_megatron
from tests.ranks import run_on_ranks

NUM_TOKENS, NUM_PACKED = 12, 2  # micro-batches of a step
loss_masks = st.lists(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=NUM_TOKENS, max_size=NUM_TOKENS),
    min_size=NUM_PACKED,
    max_size=NUM_PACKED,
)


class _Group:
    """A context group as far as its size; the counts are given, so nothing is reduced."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def _gradients(rank, world_size, masks, owners, per_token):
    """{cp: (reported loss, gradient)} by Megatron's schedule, rank by rank, and DDP's average."""
    enter_megatron()
    from types import SimpleNamespace

    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

    from megatron_cp.mcore.loss import LOSS_NAME, make_loss_function

    config = SimpleNamespace(
        calculate_per_token_loss=per_token, timers=None, num_moe_experts=None, mtp_num_layers=None
    )
    results = {}
    for cp in (1, 2, 4):
        weight = torch.linspace(-1.0, 1.0, NUM_TOKENS, dtype=torch.float64, requires_grad=True)
        total_tokens, report, gradient = 0, torch.zeros(2), torch.zeros(NUM_TOKENS).double()
        for cp_rank in range(cp):
            rows = torch.tensor([i for i in range(NUM_TOKENS) if owners[i] % cp == cp_rank])
            for mask in masks:
                mask = torch.tensor(mask)
                losses = (weight**2 + weight)[rows] if len(rows) else weight[:0]
                loss_function = make_loss_function(
                    mask[rows] if len(rows) else mask[:0],
                    per_token=per_token,
                    cp_group=_Group(cp),
                    num_loss_tokens=int(mask.sum()),
                )
                stored = []
                loss, num_tokens = forward_step_calc_loss(
                    SimpleNamespace(),
                    losses,
                    loss_function,
                    config,
                    None,
                    False,
                    len(masks),
                    stored,
                    cp_group_size=cp,
                    is_last_stage=True,
                )
                total_tokens += int(num_tokens)
                report += stored[0][LOSS_NAME]
                gradient += torch.autograd.grad(loss, weight)[0]
        # finalize_model_grads divides the sum once; without it DDP averages over the ranks.
        scale = (1.0 / total_tokens if total_tokens else 1.0) if per_token else 1.0 / cp
        results[cp] = (report.tolist(), (gradient * scale).tolist())
    return results


@pytest.mark.parametrize("per_token", [True, False])
@given(masks=loss_masks, owners=st.lists(st.integers(0, 3), min_size=12, max_size=12))
@example(masks=[[0.0] * 11 + [1.0], [0.0] * 12], owners=[0, 1, 2, 3] * 3)  # one valid token
@example(masks=[[0.0] * 12, [0.0] * 12], owners=[0, 1, 2, 3] * 3)  # none at all
@example(masks=[[1.0] * 6 + [0.0] * 6, [1.0] * 12], owners=[0] * 6 + [1] * 6)  # a rank with none
def test_any_loss_mask_gives_the_same_loss_and_gradient_at_every_size(per_token, masks, owners):
    (results,) = run_on_ranks(1, _gradients, masks, owners, per_token)
    weight = np.linspace(-1.0, 1.0, NUM_TOKENS)
    slope, losses = 2 * weight + 1, weight**2 + weight
    counts = np.sum(masks, axis=1, keepdims=True)
    if per_token:
        weights = np.sum(masks, axis=0) / max(counts.sum(), 1)
    else:
        weights = np.sum(np.array(masks) / np.maximum(counts, 1), axis=0) / len(masks)
    for cp, (report, gradient) in results.items():
        np.testing.assert_allclose(gradient, weights * slope, rtol=1e-6, atol=1e-12, err_msg=cp)
        expected = [float((np.sum(masks, axis=0) * losses).sum()), float(counts.sum())]
        np.testing.assert_allclose(report, expected, rtol=1e-5, atol=1e-5, err_msg=cp)


def _train_with_mask(rank, world_size, case, valid_tokens):
    """(loss, gradient norm) of two real steps whose packs count only these tokens."""

    def packs(is_packed):
        for pack in plain(is_packed):
            pack.loss_mask[:] = 0.0
            pack.loss_mask[list(valid_tokens)] = 1.0
            yield pack

    plain, tiny_gpt.endless_packs = tiny_gpt.endless_packs, packs
    try:
        return tiny_gpt.train(rank, world_size, case)
    finally:
        tiny_gpt.endless_packs = plain


@functools.cache
def _on_one_rank(per_token: bool, valid_tokens: tuple[int, ...]):
    case = Case(per_token=per_token, steps=2)
    return run_on_ranks(1, _train_with_mask, case, valid_tokens)[0]


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("valid_tokens", [(), (SEQUENCE - 3,), tuple(range(5))], ids=len)
def test_few_loss_tokens_train_alike_at_every_size(per_token, cp, valid_tokens):
    case = Case(attention="planned", cp=cp, per_token=per_token, steps=2)
    own = _on_one_rank(per_token, valid_tokens)
    for ours in run_on_ranks(cp, _train_with_mask, case, valid_tokens):
        for step in range(2):
            assert ours[step] == pytest.approx(own[step], rel=5e-5, abs=1e-12)
            if not valid_tokens:
                assert ours[step] == (0.0, 0.0), "a mask without tokens must give exactly zero"


def _count_over_group(rank, world_size):
    from megatron_cp.mcore.loss import make_loss_function

    mask = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]][rank])
    weight = torch.arange(3.0, requires_grad=True)
    group = torch.distributed.group.WORLD
    loss, report = make_loss_function(mask, per_token=False, cp_group=group)(weight * 2)
    loss.backward()
    return loss.item(), weight.grad.tolist(), report["lm loss"].tolist()


def test_an_unknown_count_is_added_up_over_the_group():
    """Three, one and no tokens count: every rank divides by four."""
    assert run_on_ranks(3, _count_over_group) == [
        (1.5, [0.5, 0.5, 0.5], [6.0, 3.0]),
        (0.5, [0.0, 0.5, 0.0], [2.0, 1.0]),
        (0.0, [0.0, 0.0, 0.0], [0.0, 0.0]),
    ]
