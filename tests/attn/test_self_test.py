"""What the self-test of the kernels lets through, and what is kept of its verdicts."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import (
    AttendOptions,
    attend,
    attend_backward,
    attend_forward,
    merge_rows_,
)
from megatron_cp.attn.attend import attend_forward_last
from megatron_cp.attn.emulated import backend as emulated
from megatron_cp.attn.emulated import machine
from megatron_cp.attn.hopper import gradients, judge, self_test, verdicts
from megatron_cp.attn.merge import merge_span_
from megatron_cp.kernels import cache
from megatron_cp.kernels.driver import CudaError

KIND = judge.Kind(torch.bfloat16, 128, 128, "", True)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PASSED = verdicts.Verdict(True, "out under causal", 0.001, 0.004)
FAILED = verdicts.Verdict(False, "dq under causal", 0.3, 0.004)


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
    verdict = judge.judge(emulated, judge.Kind(dtype, *dims, feature, needs_grad=True), CPU)
    assert verdict.passed, verdict
    assert 0 < verdict.error <= verdict.limit


@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_stages_add_up_as_on_132_multiprocessors(monkeypatch, dims):
    """Where heads of a group are worked on side by side, or apart, as small tiles are on a GPU."""
    monkeypatch.setattr(gradients, "_heads_that_end_sooner", lambda *_: 1)
    kind = judge.Kind(torch.bfloat16, *dims, "", needs_grad=True)
    case = judge._Case.of(kind, "documents", judge.small_masks()["documents"], CPU)
    with torch.no_grad():
        verdicts = list(judge._judged_stages(emulated, case))
    assert len(verdicts) == 10 and all(verdict.passed for verdict in verdicts)


class Defective:
    """Exact passes with one thing wrong in their results, or in what they are told."""

    def __init__(self, scale=1.0, **changes):
        self.scale = scale
        for name in (
            "forward",
            "backward",
            "mask",
            "by_row",
            "added",
            "onto",
            "sink",
            "whole",
            "dq",
            "dkeys",
            "span",
            "held",
            "last_sink",
        ):
            setattr(self, f"change_{name}", changes.get(name, lambda x: x))

    def _told(self, mask, options):
        options = AttendOptions(options.softmax_scale * self.scale, options.softcap, "cpu")
        return self.change_mask(mask), options

    def forward(self, q, k, v, mask, options, max_logits=None):
        told = (*self._told(mask, options), max_logits)
        return self.change_forward(attend_forward(q, k, v, *told))

    def merge_parts_(self, out, lse, part_out, part_lse, by_row=None):
        if by_row is None:
            merge_span_(out, lse, self.change_span(part_out), part_lse)
            return
        rows, begins, parts = self.change_by_row(by_row)
        counts = begins.diff()
        for i in range(int(counts.max())):
            some = counts > i
            one = parts[begins[:-1][some] + i]
            merge_rows_(out, lse, rows[some], part_out[one], part_lse[one])

    def add_parts_(self, total, part, by_row):
        rows, begins, parts = self.change_added(by_row)
        counts = begins.diff()
        total.index_add_(0, rows.repeat_interleave(counts), part[parts])

    def forward_onto_(self, out, lse, q, k, v, mask, options):
        part = attend_forward(q, k, v, *self._told(mask, options))
        merge_span_(out, lse, *self.change_onto(part))

    def forward_last(self, held, q, k, v, mask, options, sink):
        held, told = self.change_held(held), self._told(mask, options)
        return attend_forward_last(held, q, k, v, *told, self.change_last_sink(sink))

    def attend(self, q, k, v, mask, sink, options):
        out, lse = attend(
            *(q, k, v, mask), sink=self.change_sink(sink), softmax_scale=options.softmax_scale,
            softcap=options.softcap, backend="cpu",
        )  # fmt: skip
        return self.change_whole(out), lse

    def backward_onto_(self, dq, dkeys, dout, q, k, v, lse, delta, mask, options):
        told = self._told(mask, options)
        part, *of_keys = attend_backward(dout, q, k, v, lse, delta, *told)
        part = self.change_dq(part / told[1].softmax_scale)
        held = self.change_dkeys(dkeys) or (0.0, 0.0)
        return part if dq is None else dq + part, held[0] + of_keys[0], held[1] + of_keys[1]

    def backward(self, dout, q, k, v, lse, delta, mask, options, rounded):
        told = (*self._told(mask, options), rounded)
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


def _firsts_twice(by_row):
    rows, begins, parts = by_row
    return rows, begins, parts[begins[:-1].repeat_interleave(begins.diff())]


def _last_lost(by_row):
    rows, begins, parts = by_row
    return rows, begins.clamp(max=len(parts) - 1), parts


DEFECTS = {
    "one key too many": Defective(mask=_diagonals_one_further),
    "a scale of 1.05": Defective(scale=1.05),
    "lse in bf16": Defective(forward=lambda x: (x[0], x[1].bfloat16().float())),
    "one row of out 2 % off": Defective(forward=_one_row(0, 1.02)),
    "NaN in one row of out": Defective(forward=_one_row(0, float("nan"))),
    "a row without keys that is not -inf": Defective(
        forward=lambda x: (x[0], x[1].masked_fill(x[1] == -torch.inf, -1e30))
    ),
    "rows merged into others": Defective(by_row=lambda x: (x[0].roll(1), *x[1:])),
    "rows that get the first part twice": Defective(by_row=_firsts_twice),
    "rows that are counted instead of read": Defective(
        by_row=lambda x: (torch.arange(len(x[0])), *x[1:])
    ),
    "parts that are counted instead of read": Defective(
        by_row=lambda x: (*x[:2], torch.arange(len(x[2])))
    ),
    "one part lost": Defective(by_row=_last_lost),
    "parts of the first rows one further": Defective(span=lambda x: x.roll(1, 0)),
    "rows added to others": Defective(added=lambda x: (x[0].roll(1), *x[1:])),
    "rows that get the first gradient twice": Defective(added=_firsts_twice),
    "dq without its scale": Defective(backward=lambda x: (x[0] * 128**0.5, x[1], x[2])),
    "one row of dk twice": Defective(backward=_one_row(1, 2.0)),
    "dv of one row lost": Defective(backward=_one_row(2, 0.0)),
    "the second stage counts twice": Defective(onto=lambda x: (x[0], x[1] + 0.7)),
    "the last stage without the earlier ones": Defective(held=lambda x: None),
    "the last stage without a sink": Defective(last_sink=lambda x: None),
    "dq of the second stage in place of the first's": Defective(dq=lambda x: x * 0.5),
    "dk and dv of the last stage alone": Defective(dkeys=lambda x: None),
    "no sink": Defective(sink=lambda x: x * 0.0 - 1e30),
    "16-bit results cut, not rounded": Defective(whole=lambda x: x * (1 - 2**-6)),
}


def test_what_defects_are_put_into_passes_the_self_test_without_one():
    assert judge.judge(Defective(), KIND, CPU).passed


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_fails_the_self_test_and_is_told_with_its_numbers(defect):
    verdict = judge.judge(DEFECTS[defect], KIND, CPU)
    assert not verdict.passed
    assert "off float64" in str(verdict)


@pytest.mark.parametrize(
    ("dims", "feature"), [((64, 64), ""), ((128, 128), "softcap"), ((256, 256), "")]
)
def test_a_verdict_is_of_every_kernel_that_such_calls_launch(
    untested_key, monkeypatch, dims, feature
):
    """Those that the emulator runs in the test; a changed one, whichever it is, is judged anew."""
    kind = judge.Kind(torch.bfloat16, *dims, feature, needs_grad=True)
    ran = set()
    source_of = machine.source_of
    monkeypatch.setattr(
        machine, "source_of", lambda variant: (ran.add(variant.name), source_of(variant))[1]
    )
    small = masks.documents([40, 30])
    monkeypatch.setattr(judge, "small_masks", lambda: {"documents": small})
    monkeypatch.setattr(judge, "tiles_without_keys", lambda: small)
    assert judge.judge(emulated, kind, CPU).passed
    assert ran == set(self_test.kernels_of(kind))
    first = untested_key(kind)
    for changed in ran:
        assert untested_key(kind, changed) != first
    assert untested_key(kind, "another kernel") == first


@pytest.fixture
def untested_key(monkeypatch):
    """The key of a kind's verdict where one cubin is another."""
    gpu = SimpleNamespace(name="H100", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(self_test, "driver", lambda: SimpleNamespace(version=12040))

    def key(kind, changed=""):
        cubin = lambda name: (name + "2" * (name == changed)).encode()  # noqa: E731
        monkeypatch.setattr(self_test.build, "cubin", cubin)
        return self_test._key(kind, GPU)

    return key


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
    broken = SimpleNamespace(synchronize=lambda: _raise(_AssertError("assert")))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: broken)
    with pytest.raises(_AssertError):
        self_test.find_verdict(KIND, GPU)
    idle = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)
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
