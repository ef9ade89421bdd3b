"""A trace of some steps shows the stages of attention; one that is cut short is written too."""

import json
import signal
from pathlib import Path

import pytest

from tests.faults.program import Kill, Launch, run_program
from tests.training.commands import SMALL_RUN

pytestmark = pytest.mark.timeout(900)


def events_of(trace: Path) -> list[dict]:
    return json.loads(trace.read_text())["traceEvents"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two context ranks that write the trace of steps 2 and 3; one run is told to leave in step 2."""
    root = tmp_path_factory.mktemp("profiles")
    flags = (
        "--context-parallel-size 2 --cp-planner ring --profile --use-pytorch-profiler "
        "--profile-step-start 1 --profile-step-end 3 --profile-ranks 0 1 --no-wandb --eval-iters 0 "
        "--exit-signal-handler"
    )
    leave = Kill(
        0, "megatron_cp.training.bad_steps.check", "StepCheck.compute", 2, signals=(signal.SIGTERM,)
    )
    launches = [
        Launch((*SMALL_RUN, *flags.split(), "--run-dir", str(root / name)), 2, kill=kill)
        for name, kill in {"whole": None, "cut": leave}.items()
    ]
    for ranks in run_program(launches):
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    return root


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_names_the_stages_and_their_transfers(runs: Path, rank: int):
    events = events_of(runs / "whole" / f"rank{rank}.steps2-3.pt.trace.json")
    names = [event["name"] for event in events if str(event.get("name")).startswith("cp ")]
    # Two layers, two micro-batches a step (one replica), two steps.
    for pass_name in ("forward", "backward"):
        for stage in (0, 1):
            for action in ("send rows", "wait for rows", "attend"):
                assert names.count(f"cp {pass_name}: {action}, stage {stage}") == 8


def test_a_run_that_leaves_within_the_trace_writes_what_there_is(runs: Path):
    assert sorted(path.name for path in (runs / "cut").glob("*.trace.json*")) == [
        "rank0.steps2-2.pt.trace.json",
        "rank1.steps2-2.pt.trace.json",
    ]
    assert events_of(runs / "cut" / "rank0.steps2-2.pt.trace.json")


def test_the_page_draws_a_call_as_long_as_the_trace_says(runs: Path):
    """Both ranks on one clock: their ranges overlap, as each waits for the other's rows."""
    from megatron_cp.report.run.page import run_page
    from megatron_cp.report.run.record import read_run
    from megatron_cp.report.run.trace import measured_stages

    run = read_run(runs / "whole")
    passes = measured_stages(run).passes
    for name in ("forward", "backward"):
        one = passes[name]
        assert (one.num_calls, one.ranks) == (8, (0, 1))
        for rank, events in enumerate(one.timeline):
            trace = events_of(runs / "whole" / f"rank{rank}.steps2-3.pt.trace.json")
            found = [e for e in trace if e.get("name") == f"cp {name}: attend, stage 1"]
            chosen = sorted(found, key=lambda e: e["ts"])[one.number - 1]
            (drawn,) = [e for e in events if e.what == "attend, stage 1"]
            assert (drawn.end - drawn.start) * 1e6 == pytest.approx(chosen["dur"], abs=1)
            assert 0 <= drawn.start < drawn.end <= one.seconds
    assert "measured forward (call" in run_page(run)
