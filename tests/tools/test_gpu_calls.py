"""The parts of the GPU check that try calls and linear attention: what they say, without a GPU."""

import pytest
import torch

from tests.attn.fla_on_host import chunk_gated_delta_rule, installed
from tools import gpu_check
from tools.gpu import calls, linear
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


@pytest.fixture
def on_host(monkeypatch):
    monkeypatch.setattr(linear, "DEVICE", "cpu")
    monkeypatch.setattr(linear, "DIM", 8)


@pytest.mark.usefixtures("on_host")
def test_linear_attention_is_compared_with_the_recurrence():
    assert linear.check_values("torch").startswith("relative errors ")
    with installed():
        assert linear.check_values("fla").startswith("relative errors ")


@pytest.mark.usefixtures("on_host")
@pytest.mark.filterwarnings("ignore:flash-linear-attention is off")
def test_linear_attention_that_is_wrong_is_said_and_stops_nothing(monkeypatch):
    def careless(q, k, v, g, beta, **options):
        return chunk_gated_delta_rule(q, k, v, g * 0, beta, **options)

    check = gpu_check.Check(Report("t", {}), True, gpu_check.Watchdog(print))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = {"fla": lambda: linear.check_values("fla"), "torch": lambda: "right"}
    monkeypatch.setattr(linear, "checks", lambda: found)
    with installed(careless):
        check.linear()
    check.watchdog.stop()
    page = check.report.page()
    assert "| fla | FAILED | AssertionError: it failed its test on this device |" in page
    assert "linear attention: 1 checks failed" in page
