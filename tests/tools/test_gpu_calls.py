"""The parts of the GPU check that try calls and linear attention: what they say, without a GPU."""

import subprocess
import sys
import time

import pytest
import torch

from tests.attn.fla_on_host import chunk_gated_delta_rule, installed
from tests.processes import HANG_SECONDS
from tools.gpu import calls, linear, shares, sparse
from tools.gpu.check import Check, Wishes
from tools.gpu.report import Report
from tools.gpu.watchdog import StopError, Watchdog


def test_a_call_that_is_wrong_somewhere_stops_after_all_were_tried(monkeypatch):
    check = Check(Report("t", {}), Watchdog(print), Wishes(quick=True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def wrong() -> str:
        raise AssertionError("dq differs")

    found = {"a CUDA graph": wrong, "two streams at once": lambda: "the same bits"}
    monkeypatch.setattr(calls, "checks", lambda: found)
    with pytest.raises(StopError, match="1 checks of calls failed"):
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


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(linear, "DEVICE", "cpu")
    monkeypatch.setattr(linear, "DIM", 8)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("is_delta", [True, False])
def test_linear_attention_is_compared_with_the_recurrence(is_delta):
    assert linear.check_values("torch", is_delta).startswith("relative errors ")
    with installed():
        assert linear.check_values("fla", is_delta).startswith("relative errors ")


@pytest.mark.usefixtures("on_host")
@pytest.mark.filterwarnings("ignore:flash-linear-attention is off")
def test_linear_attention_that_is_wrong_is_said_and_stops_nothing(monkeypatch):
    def careless(q, k, v, g, beta, **options):
        return chunk_gated_delta_rule(q, k, v, g * 0, beta, **options)

    check = Check(Report("t", {}), Watchdog(print), Wishes(quick=True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = {"fla": lambda: linear.check_values("fla", True), "torch": lambda: "right"}
    monkeypatch.setattr(linear, "checks", lambda: found)
    monkeypatch.setattr(sparse, "checks", dict)
    with installed(careless):
        check.linear()
    check.watchdog.stop()
    page = check.report.page()
    assert "| fla | FAILED | AssertionError: it failed its test on this device |" in page
    assert "linear attention: 1 checks failed" in page


@pytest.fixture
def sparse_on_host(monkeypatch):
    monkeypatch.setattr(sparse, "DEVICE", "cpu")
    monkeypatch.setattr(sparse, "SIZES", sparse.Sizes(2, 24, 16, 4, 8))


@pytest.mark.usefixtures("sparse_on_host")
def test_sparse_attention_is_compared_with_its_definition():
    assert sparse.check_all_keys().startswith("relative errors ")
    assert sparse.check_few_keys().startswith("0.0% of the queries are off")


@pytest.mark.usefixtures("sparse_on_host")
def test_sparse_attention_that_is_wrong_is_said(monkeypatch):
    plain = sparse._by_us
    monkeypatch.setattr(sparse, "_by_us", lambda *args: [x * 1.05 for x in plain(*args)])
    with pytest.raises(AssertionError, match="off by"):
        sparse.check_all_keys()
    with pytest.raises(AssertionError, match="of the queries are off"):
        sparse.check_few_keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="would check values")
def test_processes_that_share_values_each_say_why_they_stopped():
    found = list(shares.run_all(2, quick=True, seconds=240.0))
    assert [checks for checks, _ in found] == [[], []]
    assert all("sees no CUDA device" in stopped for _, stopped in found)


def test_a_process_that_leaves_no_page_or_does_not_end_is_said(tmp_path):
    for program, code in (("", 0), ("import time; time.sleep(3600)", -9)):
        process = subprocess.Popen([sys.executable, "-c", program])
        limit = HANG_SECONDS if code == 0 else 0.5
        found = shares._result(process, 1, tmp_path, time.monotonic() + limit)
        assert found == ([], f"process 1 of the value checks ended with {code}, no page")
