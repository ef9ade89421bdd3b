"""Documents in a loop of one's own, which knows no flags: a plan that does not reach attention is an error."""

import sys

import numpy as np
import pytest
import torch

from tests.mcore.packs import dense_mask
from tests.mcore.stock import cut_by_megatron, stock_program
from tests.mcore.tiny_gpt import Case, Trainer, parallel_state
from tests.ranks import run_on_ranks


def _losses(rank, world_size):
    """The losses of one batch as Megatron cut it, of copies of its tensors, and of the copies with its parameters."""
    case = Case(attention="hooked", cp=world_size)
    with stock_program() as program, parallel_state(case) as groups:
        del sys.modules[program.__name__]  # no program, no flags

        from megatron_cp.mcore.documents.cut import forget_batch, params_of_batch

        try:
            model = Trainer(case, groups).chunks[0].eval()
            tokens = (torch.arange(128)[None] * 7) % 64
            batch = {"tokens": tokens, "labels": tokens, "attention_mask": dense_mask((100, 28))}
            batch["position_ids"] = torch.arange(128)[None]
            cut_by_megatron(batch)
            names = ("tokens", "position_ids", "attention_mask")
            inputs = [batch[name] for name in names]
            copies = [None if tensor is None else tensor.clone() for tensor in inputs]
            labels = batch["labels"]
            with torch.no_grad():
                with pytest.raises(RuntimeError, match="attention was given no plan"):
                    model(*copies, labels=labels.clone())
                found = model(*inputs, labels=labels)
                params = params_of_batch(batch)
                again = model(*copies, labels=labels.clone(), packed_seq_params=params)
                # Also a second model must not take copies for rows that Megatron has cut.
                with pytest.raises(RuntimeError, match=r"no plan: .* say thd_split='per_document'"):
                    model(*copies, labels=labels.clone())
                # Other rows, a batch without documents, and one that is said to be none, are Megatron's affair.
                model(*(x if x is None else x[:, :32] for x in copies), labels=labels[:, :32])
                cut_by_megatron(
                    plain := {"tokens": tokens, "position_ids": torch.arange(128)[None]}
                )
                model(plain["tokens"], plain["position_ids"], None, labels=plain["tokens"])
                cut_by_megatron(batch | {"tokens": tokens, "attention_mask": dense_mask((128,))})
                forget_batch()
                model(*copies, labels=labels.clone())
        finally:
            sys.modules[program.__name__] = program
    return found, again


@pytest.mark.parametrize("cp", [1, 2])
def test_copies_of_a_cut_batch_are_refused_unless_its_parameters_come_along(cp):
    for found, again in run_on_ranks(cp, _losses):
        np.testing.assert_array_equal(found, again)


def _cut_with_more(rank, world_size):
    """A batch with a tensor of the user's own for each token, and what became of it."""
    with stock_program(reset_attention_mask=True), parallel_state(Case(cp=world_size)) as groups:
        Trainer(Case(attention="hooked", cp=world_size), groups)
        tokens = torch.arange(32).view(1, 32)
        weights = torch.stack([tokens[0], -tokens[0]], dim=-1)[None]
        batch = {
            "tokens": tokens, "attention_mask": dense_mask((20, 12)), "weights": weights, "dataset_id": torch.ones(1),
        }  # fmt: skip
        cut_by_megatron(batch)
        return batch["tokens"][0], batch["weights"][0], batch["dataset_id"]


def test_whatever_has_a_value_for_each_token_is_cut_with_the_tokens():
    for tokens, weights, dataset in run_on_ranks(2, _cut_with_more):
        assert len(tokens) == 16 and dataset.tolist() == [1.0]
        assert torch.equal(weights, torch.stack([tokens, -tokens], dim=-1))


def _bad_positions(rank, world_size):
    """What each tensor rank says of a batch whose positions jump, which only the first one sees."""
    flags = {"reset_attention_mask": True, "reset_position_ids": True}
    with (
        stock_program(**flags, seq_length=4, micro_batch_size=1),
        parallel_state(Case(tp=world_size)) as groups,
    ):
        from megatron_cp.mcore import hooks

        Trainer(Case(attention="hooked", tp=world_size), groups)
        tell = hooks._tell_documents(lambda batch: batch or {})
        try:
            tell({"position_ids": torch.tensor([[0, 1, 7, 8]])} if rank == 0 else {})
        except ValueError as error:
            return str(error)
        return "no error"


def test_a_batch_without_documents_is_an_error_on_every_tensor_rank():
    first, second = run_on_ranks(2, _bad_positions)
    assert "position_ids[0, 2]=7" in first
    assert "the first tensor rank found none" in second
