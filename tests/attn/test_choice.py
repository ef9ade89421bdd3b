"""Which backend a GPU call gets, what its self-test lets through, and what is said about it."""

import errno
import logging
import os
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.attn import (
    AttendOptions,
    attend_backward,
    attend_forward,
    choice,
    merge_rows_,
)
from megatron_cp.attn.emulated import backend as emulated
from megatron_cp.attn.flash import checks as flash_checks
from megatron_cp.attn.hopper import checks as hopper_checks
from megatron_cp.attn.hopper import self_test, verdicts
from megatron_cp.kernels import cache
from megatron_cp.kernels.compilers import NoCompilerError
from megatron_cp.kernels.driver import CudaError

KIND = self_test.Kind(torch.bfloat16, 128, 128, "", True)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PASSED = self_test.Verdict(True, "out under causal", 0.001, 0.004)
FAILED = self_test.Verdict(False, "dq under causal", 0.3, 0.004)
ASKED = choice.Asked(0.1, 0.0, False, True)


# ---------------------------------------------------------------------- the self-test


@pytest.mark.parametrize(
    ("dtype", "dims", "feature"),
    [
        (torch.bfloat16, (128, 128), ""),
        (torch.float16, (64, 64), "softcap"),
        (torch.bfloat16, (64, 64), "dropout"),
    ],
    ids=str,
)
def test_the_kernels_source_in_the_emulator_passes(dtype, dims, feature):
    verdict = self_test.judge(emulated, self_test.Kind(dtype, *dims, feature, needs_grad=True), CPU)
    assert verdict.passed, verdict
    assert 0 < verdict.error <= verdict.limit


class Defective:
    """Exact passes with one thing wrong in their results, or in what they are told."""

    def __init__(self, scale=1.0, **changes):
        self.scale = scale
        for name in ("forward", "backward", "mask", "rows"):
            setattr(self, f"change_{name}", changes.get(name, lambda x: x))

    def _told(self, mask, options):
        options = AttendOptions(options.softmax_scale * self.scale, options.softcap, "cpu")
        return self.change_mask(mask), options

    def forward(self, q, k, v, mask, options, max_logits=None):
        told = (*self._told(mask, options), max_logits)
        return self.change_forward(attend_forward(q, k, v, *told))

    def merge_rows_(self, out, lse, rows, *part):
        merge_rows_(out, lse, self.change_rows(rows), *part)

    def backward(self, dout, q, k, v, lse, delta, mask, options):
        told = self._told(mask, options)
        return self.change_backward(attend_backward(dout, q, k, v, lse, delta, *told))


def _one_row(which, factor):
    def change(results):
        results[which][77] *= factor
        return results

    return change


def _diagonals_one_further(mask):
    rows = mask.array.copy()
    cut = rows[:, 5] < rows[:, 3] - 1 - rows[:, 0]
    rows[cut, 5] += 1  # rows see one key behind the diagonal, inside the box
    return type(mask)(mask.num_queries, mask.num_keys, rows)


DEFECTS = {
    "one key too many": Defective(mask=_diagonals_one_further),
    "a scale of 1.05": Defective(scale=1.05),
    "lse in bf16": Defective(forward=lambda x: (x[0], x[1].bfloat16().float())),
    "one row of out 2 % off": Defective(forward=_one_row(0, 1.02)),
    "NaN in one row of out": Defective(forward=_one_row(0, float("nan"))),
    "a row without keys that is not -inf": Defective(
        forward=lambda x: (x[0], x[1].masked_fill(x[1] == -torch.inf, -1e30))
    ),
    "rows merged into others": Defective(rows=lambda rows: rows.roll(1)),
    "dq without its scale": Defective(backward=lambda x: (x[0] * 128**0.5, x[1], x[2])),
    "one row of dk twice": Defective(backward=_one_row(1, 2.0)),
    "dv of one row lost": Defective(backward=_one_row(2, 0.0)),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails_the_self_test_and_is_told_with_its_numbers(defect):
    assert self_test.judge(Defective(), KIND, CPU).passed
    verdict = self_test.judge(DEFECTS[defect], KIND, CPU)
    assert not verdict.passed
    assert "off float64" in str(verdict)


@pytest.fixture
def untested(monkeypatch, tmp_path):
    """A GPU whose kernels were never judged; yields the list of judgements."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_test, "_verdicts", {})
    monkeypatch.setattr(self_test, "_key", lambda kind, device: f"{hash(kind)}-{device.index}")
    judged = []

    def judge(passes, kind, device):
        judged.append((kind, device))
        return PASSED

    monkeypatch.setattr(self_test, "judge", judge)
    return judged


def test_a_verdict_is_found_once_per_gpu_and_build_and_kept_for_other_processes(untested):
    for _ in range(2):
        assert self_test.find_verdict(KIND, GPU) == PASSED
    self_test._verdicts.clear()  # another process
    assert self_test.find_verdict(KIND, GPU) == PASSED
    assert untested == [(KIND, GPU)]
    self_test.find_verdict(KIND, torch.device("cuda", 1))
    assert len(untested) == 2


class _FaultError(CudaError):
    """An instruction that the GPU does not know, as the driver tells it."""

    def __init__(self):
        super().__init__("cuLaunchKernel: an illegal instruction was encountered", 715)


def _raise(error):
    raise error


class _AssertError(torch.AcceleratorError):
    """A device-side assertion, as torch tells it."""

    error_code = 710


@pytest.mark.parametrize("fault", [_FaultError(), _AssertError("CUDA error: device-side assert")])
def test_kernels_whose_test_ends_in_a_fault_are_not_tried_by_the_next_process(
    untested, monkeypatch, fault
):
    monkeypatch.setattr(self_test, "judge", lambda *_: _raise(fault))
    with pytest.raises(RuntimeError, match=r"fault of the GPU: .* start again: it goes on with"):
        self_test.find_verdict(KIND, GPU)
    monkeypatch.setattr(self_test, "judge", lambda *_: PASSED)
    verdict = self_test.find_verdict(KIND, GPU)
    assert not verdict.passed
    assert "(delete /" in str(verdict)


def test_what_the_caller_broke_before_is_no_verdict(untested, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: _raise(_AssertError("assert")))
    with pytest.raises(_AssertError):
        self_test.find_verdict(KIND, GPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert self_test.find_verdict(KIND, GPU) == PASSED


def _die(*_):
    os._exit(1)


def test_kernels_that_ended_two_processes_of_their_test_are_not_tried_again(untested, monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(self_test, "judge", _die)
        child = os.fork()
        if child == 0:
            self_test.find_verdict(KIND, GPU)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    monkeypatch.setattr(self_test, "judge", lambda *_: PASSED)
    verdict = self_test.find_verdict(KIND, GPU)
    assert not verdict.passed
    assert "2 processes that tested them did not end it (delete " in str(verdict)


def test_one_process_that_was_killed_by_chance_condemns_nothing(untested, monkeypatch):
    monkeypatch.setattr(self_test, "judge", _die)
    child = os.fork()
    if child == 0:
        self_test.find_verdict(KIND, GPU)
    os.waitpid(child, 0)
    monkeypatch.setattr(self_test, "judge", lambda *_: PASSED)
    assert self_test.find_verdict(KIND, GPU) == PASSED


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        torch.OutOfMemoryError("no memory"),
        torch.AcceleratorError("CUDA error: out of memory"),
        CudaError("no image", 200),
    ],
)
def test_a_test_that_was_stopped_by_something_else_is_done_again(untested, monkeypatch, error):
    judge = self_test.judge
    monkeypatch.setattr(self_test, "judge", lambda *_: _raise(error))
    with pytest.raises(type(error)):
        self_test.find_verdict(KIND, GPU)
    monkeypatch.setattr(self_test, "judge", judge)
    assert self_test.find_verdict(KIND, GPU) == PASSED


@pytest.mark.parametrize("broken", ["begun", "json"])
def test_a_full_disk_costs_a_warning_and_one_test(untested, monkeypatch, broken):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if broken == "json":
        monkeypatch.setattr(cache, "write_whole", full)
    else:
        monkeypatch.setattr(verdicts.Path, "open", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert self_test.find_verdict(KIND, GPU) == PASSED
    assert len(untested) == 1


def test_a_cache_that_cannot_be_used_costs_a_warning_and_a_test_in_every_process(
    untested, monkeypatch, tmp_path
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is repeated in every process"):
        assert self_test.find_verdict(KIND, GPU) == PASSED
    assert self_test.find_verdict(KIND, GPU) == PASSED
    assert len(untested) == 1


def test_tools_that_judge_kernels_themselves_skip_it(untested):
    with self_test.skipped():
        assert self_test.find_verdict(KIND, GPU) is None
    assert untested == []


def test_all_kinds_are_told_in_one_line(untested, monkeypatch):
    assert (
        self_test.tell_all(GPU)
        == f"all {len(untested)} kinds of kernels agree with float64 on this GPU"
    )
    assert {kind.head_dim for kind, _ in untested} == {64, 96, 128, 192, 256}
    monkeypatch.setattr(self_test, "judge", lambda *_: FAILED)
    monkeypatch.setattr(self_test, "_key", lambda kind, device: f"new {hash(kind)}")
    self_test._verdicts.clear()
    with pytest.raises(
        SystemExit, match=r"28 of 28 kinds of kernels are wrong: .*dq under causal is 0\.3"
    ):
        self_test.tell_all(GPU)


# ---------------------------------------------------------------------- the choice


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


@pytest.fixture
def gpu(monkeypatch):
    """Sets what hopper, its self-test and flash say."""
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_served", {})

    def says(hopper=_serve, verdict=PASSED, flash=_serve):
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
    assert told == "cuda:0: flash (it cannot compute this)"
