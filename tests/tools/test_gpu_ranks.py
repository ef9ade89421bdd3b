"""Two ranks of the GPU check, on a CPU, and how their traces are read."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import HANG_SECONDS
from tools.gpu import ranks


def _event(name, cat, start_us, duration_us):
    return {"ph": "X", "name": name, "cat": cat, "ts": start_us, "dur": duration_us}


def test_overlap_is_the_time_of_transfers_under_attention():
    events = [
        _event("mcp_attention_forward", "kernel", 1000, 2000),
        _event("mcp_attention_backward", "kernel", 5000, 1000),
        _event("ncclDevKernel_SendRecv", "kernel", 0, 2000),  # half before
        _event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 1500, 1000),  # beside both
        _event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 5000, 1000),  # no transfer
        _event("nccl:all_to_all", "cpu_op", 5000, 1000),
        _event("elementwise_kernel", "kernel", 5000, 1000),
        {"ph": "M", "name": "mcp_attention_forward"},
    ]
    found = ranks.overlap(events)
    assert (found.attention_ms, found.transfer_ms, found.both_ms) == pytest.approx((3.0, 2.5, 1.5))
    assert str(found) == "attention 3.00 ms, transfers 2.50 ms, 60% of them under attention"


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(1, 15)), max_size=12),
)
def test_overlap_counts_every_microsecond_once(drawn):
    events = [
        _event("mcp_attention_forward" if ours else "ncclKernel", "kernel", start, length)
        for ours, start, length in drawn
    ]
    busy = {
        ours: {t for kind, a, n in drawn if kind is ours for t in range(a, a + n)}
        for ours in (True, False)
    }
    found = ranks.overlap(events)
    expected = (len(busy[True]), len(busy[False]), len(busy[True] & busy[False]))
    actual = (found.attention_ms, found.transfer_ms, found.both_ms)
    assert [1e3 * x for x in actual] == pytest.approx(expected)


ON_CPU = ("--device", "cpu", "--attention", "reference", "--tokens", "1024", "--heads", "2")


def test_two_ranks_run_to_the_end_on_a_cpu_and_leave_their_traces(tmp_path):
    verdict, words = ranks.run_all("gloo", tmp_path / "x", HANG_SECONDS, ON_CPU)
    assert verdict == "ok", words
    none = "attention 0.00 ms, transfers 0.00 ms, none of them under attention"
    ranks_said, _, planners = words.partition("; plans with the results of one rank: ")
    assert ranks_said == f"rank 0: {none}; rank 1: {none}"
    expected = {"auto", "ring", "ulysses", "usp", "zigzag", "cross attention to few keys"}
    assert expected <= set(planners.split(", "))
    for rank in range(2):
        trace = json.loads(gzip.decompress((tmp_path / f"x_rank{rank}.json.gz").read_bytes()))
        assert any("all_to_all" in str(event.get("name")) for event in trace["traceEvents"])
