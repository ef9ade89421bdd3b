"""The GPU check without a GPU: its cases, its arithmetic, its page, and that its checks can fail."""

import dataclasses
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.oracles.attention import dense_attention
from tests.processes import HANG_SECONDS
from tools import gpu_check
from tools.gpu import cases, measure, peers, ranks, report, sanitizer, values
from tools.gpu.cases import Case
from tools.gpu.check import PARTS, Check, Wishes
from tools.gpu.measure import Times
from tools.gpu.watchdog import StopError, Watchdog

EXACT = Times(2.0, 1.9, 2.1)


# ---------------------------------------------------------------------- cases


def test_grid_has_twelve_masks_at_six_lengths_longest_first():
    grid = list(cases.grid())
    assert len({case.mask_name for case in grid}) == 12
    lengths = [case.num_tokens for case in grid]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(set(lengths)) == [1024, 2048, 4096, 8192, 16384, 32768]
    assert len(set(grid)) == len(grid) == 72
    assert all((c.num_heads, c.num_kv_heads, c.head_dim) == (64, 8, 128) for c in grid)
    assert set(cases.BARS) <= {case.mask_name for case in grid}


def test_other_head_dims_are_those_of_the_kernels():
    dims = {(case.head_dim, case.value_dim) for case in cases.dims()}
    listed = {
        (int(v.value("MCP_HEAD_DIM")), int(v.value("MCP_VALUE_DIM")))
        for v in values.build.variants().values()
        if v.kernel_pass == "forward"
    }
    assert dims | {(128, 128)} == listed


@pytest.mark.parametrize("mask_name", cases.MASKS)
def test_operations_are_those_of_the_masked_pairs(mask_name):
    case = Case(mask_name, 1024, 64, 32, num_heads=4)
    pairs = int(case.mask().to_dense().sum())
    products = 4 * pairs * (64 + 32)  # q k' and p v
    assert case.tflop("forward", case.mask().area()) == pytest.approx(2 * products / 1e12)
    assert case.tflop("backward", case.mask().area()) == pytest.approx(5 * products / 1e12)


def test_bars_hold_at_32k_only():
    assert Case("full", 32768).bar("forward") == 700
    assert Case("causal", 32768).bar("backward") == 586
    assert Case("full", 32768, 256, 256).bar("backward") == 530
    assert Case("full", 32768, 256, 256).bar("forward") is None
    assert Case("full", 16384).bar("forward") is None
    assert Case("prefix_lm_causal", 32768).bar("forward") is None


# ---------------------------------------------------------------------- peers


@pytest.mark.parametrize("name", ["causal", "sliding_window", "sliding_window_causal"])
def test_closed_form_masks_for_flex_are_the_masks(name):
    case = Case(name, 3 * 1024)
    q, k = torch.arange(3072)[:, None], torch.arange(3072)[None, :]
    assert np.array_equal(peers._closed_form(case)(0, 0, q, k).numpy(), case.mask().to_dense())


def _documented_flash(q, k, v, causal, window_size=(-1, -1)):
    """FlashAttention's interface as documented: row i sees i - left to i + right; -1 is open."""
    distance = torch.arange(k.shape[0])[None, :] - torch.arange(q.shape[0])[:, None]
    left, right = window_size
    allowed = torch.ones_like(distance, dtype=torch.bool)
    allowed &= (distance <= 0) if causal else True
    allowed &= (distance >= -left) if left >= 0 else True
    allowed &= (distance <= right) if right >= 0 else True
    return dense_attention(q, k, v, allowed)[0]


def _dense_flash(q, k, v, **options):
    return _documented_flash(q[0], k[0], v[0], **options)[None], None


def _varlen_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    ends = cu_seqlens_q.tolist()
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    assert max(np.diff(ends)) == max_seqlen_q == max_seqlen_k
    parts = [slice(a, b) for a, b in pairwise(ends)]
    return torch.cat([_documented_flash(q[s], k[s], v[s], causal) for s in parts])


@pytest.mark.parametrize("name", cases.MASKS)
def test_flash_attention_is_asked_for_the_mask_or_left_out(name):
    case = Case(name, 2048, 8, 8, num_heads=1, num_kv_heads=1)
    x = peers.draw(case, "cpu", torch.float32)
    contender = peers._flash("fa", _dense_flash, _varlen_flash, case, x)
    if name in (
        "full", "causal", "full_document", "causal_document", "sliding_window", "sliding_window_causal",
    ):  # fmt: skip
        values.check_rows(contender.rows(contender.forward()), (x.q, x.k, x.v), case.mask())
        gradients = [gradient.view(-1, 1, 8) for gradient in contender.backward()]
        assert [g.shape for g in gradients] == [x.q.shape, x.k.shape, x.v.shape]
    else:
        assert contender is None


class _RawFlash3:
    """FlashAttention-3's operators as documented; the backward pass is autograd of the forward."""

    @staticmethod
    def fwd(q, k, v, is_causal, window_size_left=-1, window_size_right=-1, **lengths):
        if lengths:
            return _varlen_flash(q, k, v, causal=is_causal, **lengths), torch.zeros(1), None, None
        window = (window_size_left, window_size_right)
        return _dense_flash(q, k, v, causal=is_causal, window_size=window)[0], torch.zeros(1)

    @classmethod
    def bwd(cls, dout, q, k, v, out, lse, **options):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            again = cls.fwd(*leaves, **options)[0]
        assert torch.equal(again, out) and lse.shape == (1,)
        return *torch.autograd.grad(again, leaves, dout), None


@pytest.mark.parametrize(
    "name", ["causal", "full_document", "sliding_window", "sliding_window_causal"]
)
def test_flash_attention_3_is_served_from_its_bare_library_too(name):
    case = Case(name, 2048, 8, 8, num_heads=1, num_kv_heads=1)
    x = peers.draw(case, "cpu", torch.float32)
    raw = peers._flash("fa3", *peers.flash3_functions(_RawFlash3), case, x)
    wrapped = peers._flash("fa3", _dense_flash, _varlen_flash, case, x)
    values.check_rows(raw.rows(raw.forward()), (x.q, x.k, x.v), case.mask())
    assert all(torch.equal(a, b) for a, b in zip(raw.backward(), wrapped.backward(), strict=True))


# ---------------------------------------------------------------------- the command


def test_machine_without_a_gpu_is_told_so_in_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "x")])
    assert gpu_check.main() == 1
    (page,) = tmp_path.glob("x_all_*.md")
    assert "sees no CUDA device; run this on an H100 or H200" in page.read_text()
    assert "stopped: torch" in capsys.readouterr().out


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A800")
    with pytest.raises(StopError, match=r"A800 of compute capability 8\.0; .* 9\.0"):
        gpu_check.require_gpu()


def test_check_stops_at_its_deadline():
    check = Check(report.Report("t", {}), Watchdog(print), Wishes(quick=True, seconds=-1.0))
    with pytest.raises(StopError, match="time is up; run the remaining parts with --part"):
        check.values()


def test_step_that_hangs_is_named_in_the_page_and_ends_the_process(tmp_path):
    program = f"""
import threading
from pathlib import Path
from tools import gpu_check
from tools.gpu.report import Report
from tools.gpu.watchdog import Watchdog
report, path = Report("t", {{}}), Path({str(tmp_path)!r}, "x")
dog = Watchdog(lambda why: gpu_check._give_up(report, path, why))
dog.watch("quick step", 3600)
dog.watch("slow step", 0.1)
threading.Event().wait(3600)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=gpu_check.ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert run.returncode == 3, run.stderr
    assert "slow step did not end within 0 s" in (tmp_path / "x.md").read_text()
    assert run.stdout.startswith("stopped: slow step")


def test_long_rounds_become_fewer_but_never_too_few():
    assert [measure.num_rounds(seconds) for seconds in (0.001, 0.15, 0.25, 5.0)] == [20, 20, 12, 7]


def test_failed_values_stop_everything_after_all_were_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        values, "check_small", lambda s: (_ for _ in ()).throw(AssertionError("no"))
    )
    monkeypatch.setattr(values, "check_merge", lambda v: "fine")
    monkeypatch.setattr(values, "check_stages", lambda v: "fine")
    monkeypatch.setattr(values, "check_long", lambda v: "fine")
    monkeypatch.setattr(values, "has_gradients", lambda v: False)
    check = Check(report.Report("t", {}), Watchdog(print), Wishes(quick=True))
    with pytest.raises(StopError, match="value checks failed; speed of a wrong kernel"):
        check.values()
    tried = list(values.small_checks(quick=True))
    check.watchdog.stop()
    failed = [name for name, verdict, _ in check.report.checks if verdict == "FAILED"]
    assert failed == [small.name for small in tried]


def test_what_was_done_before_an_interruption_is_written_and_says_so(tmp_path):
    found = report.Report("t", {})
    with gpu_check.written(found, tmp_path / "x"):
        found.checks.append(("a value", "ok", ""))
        raise KeyboardInterrupt
    page = (tmp_path / "x.md").read_text()
    assert "**Stopped early: interrupted; what stands here was done before**" in page
    assert "| a value | ok |" in page


# ---------------------------------------------------------------------- sanitizer


@pytest.mark.parametrize(
    ("program", "verdict", "detail"),
    [
        ("print('========= ERROR SUMMARY: 0 errors')", "ok", "ERROR SUMMARY: 0 errors"),
        ("print('========= Invalid read'); raise SystemExit(9)", "FAILED", "Invalid read"),
        ("print('Device not supported'); raise SystemExit(1)", "not run", "Device not supported"),
    ],
)
def test_sanitizer_output_is_read(program, verdict, detail, tmp_path):
    found = sanitizer.run_command([sys.executable, "-c", program], 60, tmp_path)
    assert found[0] == verdict
    assert detail in found[1]


def test_missing_sanitizer_is_no_failure_but_said(tmp_path):
    assert sanitizer.run_command(["no-such-sanitizer"], 5, tmp_path)[0] == "not run"


@pytest.fixture
def check(tmp_path):
    made = Check(report.Report("t", {}), Watchdog(print), Wishes(tmp_path / "x"))
    yield made
    made.watchdog.stop()


def _sanitizer_that_reports(monkeypatch, *tools):
    def run_command(command, seconds, folder):
        tool = command[command.index("--tool") + 1]
        return ("FAILED", f"{tool}: Race") if tool in tools else ("ok", "0 errors")

    monkeypatch.setattr(sanitizer, "run_command", run_command)


def test_reports_of_racecheck_and_synccheck_are_notes_and_stop_nothing(check, monkeypatch, capsys):
    _sanitizer_that_reports(monkeypatch, "racecheck", "synccheck")
    check.sanitize()
    assert [verdict for _, verdict, _ in check.report.checks] == ["ok", "reported", "reported"]
    assert [note.split(" reported")[0] for note in check.report.notes] == [
        "compute-sanitizer racecheck", "compute-sanitizer synccheck"
    ]  # fmt: skip
    assert "racecheck: reported: racecheck: Race" in capsys.readouterr().out
    assert "0 failed" in check.report.page()


def test_what_memcheck_finds_is_a_failure(check, monkeypatch):
    _sanitizer_that_reports(monkeypatch, "memcheck")
    with pytest.raises(StopError, match="compute-sanitizer memcheck: memcheck: Race"):
        check.sanitize()
    assert "1 failed" in check.report.page()


def test_values_come_first_then_speed_and_the_sanitizer_last(tmp_path, monkeypatch):
    done = []
    for part in PARTS:
        monkeypatch.setattr(Check, part, lambda self, part=part: done.append(part))
    monkeypatch.setattr(gpu_check, "require_gpu", dict)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "x")])
    assert gpu_check.main() == 0
    expected = "build values calls speed dims stages ranks linear rope training sanitize"
    assert " ".join(done) == expected


def test_named_cases_alone_are_timed_and_without_flex(check, monkeypatch):
    timed = []
    monkeypatch.setattr(Check, "_ask_model", lambda self: None)
    monkeypatch.setattr(measure, "ceilings", dict)
    monkeypatch.setattr(Check, "_time", lambda self, case, flex: timed.append(case.name))
    check.wishes = dataclasses.replace(
        check.wishes, quick=False, cases=("causal 8K D=128", "full 32K D=64")
    )
    check.speed()
    check.dims()
    assert timed == ["causal 8K D=128", "full 32K D=64"]


# ---------------------------------------------------------------------- two ranks


def test_ranks_that_cannot_start_are_said_and_stop_nothing(check, monkeypatch):
    run = ranks.run_all

    def run_few(backend, traces, limit, num_ranks):
        few = num_ranks if backend == "gloo" else 1  # each imports torch and the package
        return run(backend, traces, limit, ("--device", "nowhere"), few)

    monkeypatch.setattr(ranks, "run_all", run_few)
    check.ranks()
    assert [verdict for _, verdict, _ in check.report.checks] == ["not run"] * 3
    assert all("nowhere" in words or "nccl" in words.lower() for *_, words in check.report.checks)


def test_wrong_result_of_two_ranks_stops_the_check(check, monkeypatch):
    monkeypatch.setattr(
        ranks, "run_all", lambda *x, num_ranks: ("FAILED", "gloo: AssertionError: row 3")
    )
    with pytest.raises(StopError, match="2 ranks, gloo: gloo: AssertionError: row 3"):
        check.ranks()
