"""Which backend a GPU call gets, and what is said about it."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.attn import choice
from megatron_cp.attn.flash import checks as flash_checks
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper import self_test, verdicts
from megatron_cp.kernels.compilers import NoCompilerError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PASSED = verdicts.Verdict(True, "out under causal", 0.001, 0.004)
FAILED = verdicts.Verdict(False, "dq under causal", 0.3, 0.004)
ASKED = choice.Asked(0.1, 0.0, False, True)


def _on(device):
    shape = (10, 4, 128)
    return SimpleNamespace(device=device, dtype=torch.bfloat16, shape=shape)


def _refuse(*_):
    raise NotImplementedError("it cannot compute this; use something else")


def _lacks_a_compiler(*_):
    raise NoCompilerError("no compiler here\ninstall one")


def _lacks_a_cache(*_):
    raise PermissionError("cubin cache ~/.cache: others can write")


def _serve(*_):
    return (128, 128)


def _serve_by_torch(*_):
    return flash_checks.Served(SimpleNamespace(name="torch"), (128, 128))


@pytest.fixture
def gpu(monkeypatch):
    """Sets what hopper, its self-test and flash say."""
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_served", {})

    def says(hopper=_serve, verdict=PASSED, flash=_serve_by_torch):
        monkeypatch.setattr(hopper_checks, "check_supported", hopper)
        monkeypatch.setattr(self_test, "find_verdict", lambda *_: verdict)
        monkeypatch.setattr(flash_checks, "check_supported", flash)

    return says


@pytest.mark.parametrize(
    ("says", "backend", "why"),
    [
        ({}, "hopper", ""),
        ({"hopper": _refuse}, "flash", r"it cannot compute this\)"),
        ({"hopper": _refuse, "flash": _refuse}, "flex", "this; it cannot compute this"),
        ({"hopper": _lacks_a_compiler}, "flash", r"no compiler here\)"),
        ({"hopper": _lacks_a_cache}, "flash", r"cache .* others can write\)"),
    ],
    ids=["all serve", "no Hopper", "neither", "no compiler", "no cache"],
)
def test_the_first_backend_that_serves_is_taken_and_one_line_says_why(
    gpu, caplog, says, backend, why
):
    gpu(**says)
    tensor = _on(GPU)
    with caplog.at_level(logging.INFO, logger="megatron_cp"):
        for _ in range(3):
            assert choice.choose_backend(tensor, tensor, ASKED) == backend
    (record,) = caplog.records
    assert f"attention on cuda:0, bfloat16, head_dim 128: backend {backend}" in record.getMessage()
    assert (record.levelno == logging.INFO) == (backend == "hopper")
    assert re.search(why, record.getMessage())


def test_gradients_in_order_are_refused_where_none_has_them_and_chosen_anew_once_torch_has(gpu):
    gpu(hopper=_refuse, flash=_refuse)
    tensor, asked = _on(GPU), ASKED._replace(deterministic=True)
    with pytest.raises(
        NotImplementedError,
        match=r"deterministically on cuda:0: it cannot compute this; it .*use_deterministic_algorit",
    ):
        choice.choose_backend(tensor, tensor, asked)
    gpu(hopper=_refuse)
    assert choice.choose_backend(tensor, tensor, asked) == "flash"


def test_the_choice_depends_on_torch_s_switch(gpu, monkeypatch):
    gpu(hopper=_refuse, flash=_refuse)
    tensor = _on(GPU)
    assert choice.choose_backend(tensor, tensor, ASKED) == "flex"
    gpu(hopper=_refuse)
    assert choice.choose_backend(tensor, tensor, ASKED) == "flex"  # remembered
    monkeypatch.setattr(choice, "torch_wants_determinism", lambda: True)
    assert choice.choose_backend(tensor, tensor, ASKED) == "flash"


def test_a_scale_of_0_is_a_choice_of_its_own(gpu):
    """flash serves scales above 0 alone."""
    gpu(hopper=_refuse)
    tensor = _on(GPU)
    assert choice.choose_backend(tensor, tensor, ASKED) == "flash"
    gpu(hopper=_refuse, flash=_refuse)
    assert choice.choose_backend(tensor, tensor, ASKED._replace(softmax_scale=0.0)) == "flex"


def test_a_failed_self_test_warns_with_the_numbers_and_takes_flash(gpu, caplog):
    gpu(verdict=FAILED)
    tensor = _on(GPU)
    with pytest.warns(UserWarning, match=r"dq under causal is 0\.3 off float64, at most 0\.004"):
        assert choice.choose_backend(tensor, tensor, ASKED) == "flash"
    assert "hopper failed its self-test" in caplog.text


def test_a_failed_self_test_is_an_error_for_who_asked_for_hopper(gpu):
    gpu(verdict=FAILED)
    tensor = _on(GPU)
    with pytest.raises(
        RuntimeError, match=r"fails its self-test on cuda:0 .* use backend='flash' or 'flex'"
    ):
        choice.check_hopper(tensor, tensor, ASKED)


def test_a_cpu_computes_on_the_cpu():
    tensor = _on(CPU)
    assert choice.choose_backend(tensor, tensor, ASKED) == "cpu"


def test_the_choice_for_training_is_told_with_what_kept_others_from_it(gpu):
    gpu(hopper=_refuse)
    made = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *size, device, **kind: made(*size, **kind).to("meta"))
        told = choice.tell_choice(GPU)
    assert told == "cuda:0: flash by torch (it cannot compute this)"
