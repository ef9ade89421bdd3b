"""A first call's own small case is nothing of its caller's: checkpoints, default devices and dtypes."""

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megatron_cp.attn.emulated import backend as emulated
from megatron_cp.attn.flash import checks, trial
from megatron_cp.attn.hopper import judge, self_test, verdicts
from tests.attn.flash_libraries import flash2, loaded_anew
from tests.attn.flash_on_host import on_host

__all__ = ["flash2", "loaded_anew"]
KIND = judge.Kind(torch.bfloat16, 64, 64, "", True)
CPU = torch.device("cpu")


def _judged(*_):
    """A case with random numbers, products and gradients, as that of the kernels."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((x @ x).sum(), x)
    exact = x.detach().double()
    error = (found - (exact.sum(1) + exact.sum(0)[:, None])).abs().max().item()
    return verdicts.Verdict(error < 1e-4, "dx", error, 1e-4)


@pytest.fixture
def first_call(monkeypatch):
    """Returns a function that asks for a verdict nobody has kept."""
    monkeypatch.setattr(self_test, "judge", _judged)
    monkeypatch.setattr(self_test, "_key", lambda *_: "")
    monkeypatch.setattr(self_test, "kept_verdict", lambda _, judge: judge())
    monkeypatch.setattr(self_test, "_verdicts", {})
    return lambda: self_test.find_verdict(KIND, CPU)


def _saves_products(_, op, *args, **kwargs):
    is_product = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, _saves_products)


@pytest.mark.parametrize("kind", [{}, {"context_fn": SELECTIVE}], ids=["whole", "selective"])
def test_a_checkpoint_around_the_first_call_recomputes_the_same_layer(first_call, kind):
    x, w = (torch.randn(16, 16, requires_grad=True) for _ in range(2))

    def layer(x, w):
        hidden = torch.tanh(x @ w)
        assert first_call().passed
        return torch.sin(hidden @ w)

    found = torch.autograd.grad(checkpoint(layer, x, w, use_reentrant=False, **kind).sum(), (x, w))
    exact = torch.autograd.grad(torch.sin(torch.tanh(x @ w) @ w).sum(), (x, w))
    assert all(torch.equal(*pair) for pair in zip(found, exact, strict=True))


@pytest.mark.parametrize(
    "around", [torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()]
)
def test_the_first_call_is_judged_right_inside_modes_of_torch(first_call, around):
    with around:
        assert first_call().passed


def test_kernels_are_judged_alike_under_another_default_dtype():
    default = torch.get_default_dtype()
    found = []
    for dtype in (default, torch.bfloat16):
        with contextlib.ExitStack() as after, torch.no_grad():
            after.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(dtype)
            case = judge._Case.of(KIND, "documents", judge.small_masks()["documents"], CPU)
            parts = judge._judged_joins(emulated, case), judge._judged_whole(emulated, case)
            found.append([verdict for part in parts for verdict in part])
    assert all(verdict.passed for verdict in found[0])
    assert found[0] == found[1]


def test_an_operator_is_not_passed_over_inside_a_default_device(loaded_anew, flash2):
    q = torch.zeros(24, 4, 16, dtype=torch.bfloat16)
    with on_host((8, 0), trial.find_fault), torch.device("meta"):
        served = checks.check_supported(q, q, 0.25, 0.0, deterministic=False, needs_grad=True)
    assert served.operator.name == "flash-attn 2"
