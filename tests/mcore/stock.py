"""A process that looks to the hooks as if Megatron-LM ran in it, and batches as its get_batch makes them."""

import contextlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from tests.mcore.packs import dense_mask


@contextlib.contextmanager
def stock_program(**flags):
    """Makes this process Megatron-LM with these flags, as far as the hooks can see."""
    from tests.mcore.tiny_gpt import enter_megatron

    enter_megatron()
    from megatron_cp.mcore import hooks, layers
    from megatron_cp.mcore.documents import cut

    program = ModuleType("megatron.training.global_vars")
    program._GLOBAL_ARGS = SimpleNamespace(**({"micro_batch_size": 1, "seq_length": 128} | flags))
    program.get_args = lambda: program._GLOBAL_ARGS
    layers.forget()
    cut.forget_batch()
    hooks._said.clear()
    hooks.install()
    sys.modules[program.__name__] = program
    try:
        yield program
    finally:
        del sys.modules[program.__name__]
        layers.forget()
        cut.forget_batch()


def cut_by_megatron(batch) -> None:
    """Calls Megatron-Core's own cut, with whatever hooks it has; newer versions ask for one more word."""
    from megatron.core import utils

    cut = utils.get_batch_on_this_cp_rank
    is_newer = "is_hybrid_cp" in inspect.signature(cut).parameters
    cut(batch, **({"is_hybrid_cp": False} if is_newer else {}))


def stock_batch(case, pack) -> SimpleNamespace:
    """This rank's inputs as Megatron-LM's get_batch makes them, with the functions as they stand in their module."""
    names = ("tokens", "labels", "loss_mask", "position_ids")
    batch = {name: torch.from_numpy(getattr(pack, name).copy())[None] for name in names}
    if case.documents == "mask":
        batch["attention_mask"] = dense_mask(pack.lengths)
    elif case.documents == "cu_seqlens":
        batch["cu_seqlens"] = torch.tensor([[0, *np.cumsum(pack.lengths)]], dtype=torch.int32)
    cut_by_megatron(batch)
    for name in ("attention_mask", "cu_seqlens"):
        batch.setdefault(name, None)
    return SimpleNamespace(params=None, **batch)


def loss_of_rank(loss_mask, losses):
    """What Megatron-LM's own loss function gives: the sum and the count of this rank alone."""
    mask = loss_mask.view(-1)
    loss, count = (losses.view(-1).float() * mask).sum(), mask.sum()
    report = {"lm loss": torch.stack((loss.detach(), count))}
    return loss, count.to(torch.int), report
