"""Documents in a loop of one's own, which knows no flags: a plan that does not reach attention is an error."""

import inspect
import sys

import numpy as np
import pytest
import torch

from tests.mcore.packs import dense_mask
from tests.mcore.stock import stock_program
from tests.mcore.tiny_gpt import Case, Trainer, parallel_state
from tests.ranks import run_on_ranks


def _losses(rank, world_size):
    """The losses of one batch as Megatron cut it, of copies of its tensors, and of the copies with its parameters."""
    case = Case(attention="hooked", cp=world_size)
    with stock_program() as program, parallel_state(case) as groups:
        del sys.modules[program.__name__]  # no program, no flags
        from megatron.core import utils

        from megatron_cp.mcore.cut import params_of_batch

        try:
            model = Trainer(case, groups).chunks[0].eval()
            tokens = (torch.arange(128)[None] * 7) % 64
            batch = {"tokens": tokens, "labels": tokens, "attention_mask": dense_mask((100, 28))}
            batch["position_ids"] = torch.arange(128)[None]
            cut = utils.get_batch_on_this_cp_rank
            cut(
                batch,
                **(
                    {"is_hybrid_cp": False}
                    if "is_hybrid_cp" in inspect.signature(cut).parameters
                    else {}
                ),
            )
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
                # A batch without documents afterwards is Megatron's affair, as before.
                plain = tokens.view(1, 2 * world_size, -1)[:, [rank, 2 * world_size - 1 - rank]]
                plain = plain.reshape(1, -1)
                model(plain, plain, None, labels=plain)
        finally:
            sys.modules[program.__name__] = program
    return found, again


@pytest.mark.parametrize("cp", [1, 2])
def test_copies_of_a_cut_batch_are_refused_unless_its_parameters_come_along(cp):
    for found, again in run_on_ranks(cp, _losses):
        np.testing.assert_array_equal(found, again)
