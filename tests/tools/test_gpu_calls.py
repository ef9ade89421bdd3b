"""The part of the GPU check that tries graphs, streams and compiled functions: what it says, without a GPU."""

import pytest
import torch

from tools import gpu_check
from tools.gpu import calls
from tools.gpu.report import Report


def test_a_call_that_is_wrong_somewhere_stops_after_all_were_tried(monkeypatch):
    check = gpu_check.Check(Report("t", {}), True, gpu_check.Watchdog(print))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def wrong() -> str:
        raise AssertionError("dq differs")

    found = {"a CUDA graph": wrong, "two streams at once": lambda: "the same bits"}
    monkeypatch.setattr(calls, "checks", lambda: found)
    with pytest.raises(gpu_check.StopError, match="1 checks of calls failed"):
        check.calls()
    check.watchdog.stop()
    page = check.report.page()
    assert "| a CUDA graph | FAILED | AssertionError: dq differs |" in page
    assert "| two streams at once | ok | the same bits |" in page


def test_results_of_two_ways_are_judged_by_their_distance():
    ones, near = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1.01])
    assert calls._differences((ones, near), (ones, ones)).endswith("0.0e+00, 5.0e-03")
    with pytest.raises(AssertionError, match=r"results differ by 5.0e-02, at most 1e-02"):
        calls._differences((1.05 * ones,), (ones,))
    with pytest.raises(AssertionError, match="lse differs"):
        calls._assert_same_bits((ones, near, *[ones] * 3), (ones,) * 5)
