"""Timers, slow ranks and speed: against Megatron-Core's own timers, and by hand."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

from megatron_cp.training.logging.lines import training_line
from megatron_cp.training.logging.speed import Speed, peak_tflops
from megatron_cp.training.logging.stragglers import Stragglers, stragglers_line
from tests.faults.program import Launch, run_program
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.ranks import run_on_ranks
from tests.training.commands import SMALL_RUN, metrics, train
from tests.training.test_log import MEGATRONS_LINE, report

SECONDS = {"forward-backward": (0.25, 0.5), "optimizer": (0.0625, 0.125), "all-grads-sync": (0, 1)}


def texts(rank, world_size, option):
    """What Megatron-Core's timers and ours say of the same seconds over four steps."""
    with parallel_state(Case()):
        from megatron.core.timers import Timers as MegatronTimers

        from megatron_cp.training.arguments import parse_arguments
        from megatron_cp.training.logging.timers import NAMES, Timers

        flags = ["--timing-log-level", "1", "--timing-log-option", option]
        ours = Timers(parse_arguments([*SMALL_RUN, *flags, "--log-timers-to-tensorboard"], {}))
        theirs = MegatronTimers(1, option)
        for name, seconds in SECONDS.items():
            ours(name).seconds = seconds[rank]
            theirs(name, log_level=1).set_elapsed(seconds[rank])
        names = [name for name in NAMES[1] if name in SECONDS]
        said = theirs.get_all_timers_string(names, normalizer=4)
        return said, *ours.report(4), ours.report(4)[1]


@pytest.mark.parametrize("option", ["max", "minmax", "all"])
def test_timers_are_printed_as_megatron_core_prints_them(option):
    largest = {f"{name}-time": max(seconds) / 4 for name, seconds in SECONDS.items()}
    for theirs, ours, row, row_after in run_on_ranks(2, texts, option):
        assert ours == theirs
        assert row == largest
        assert row_after == {}, "a report begins anew"


def test_the_slowest_rank_is_named():
    line, row = stragglers_line([20.0, 50.0, 30.0, 20.0], 2)
    assert "slowest: rank 1 50.0, rank 2 30.0 |" in line
    assert "fastest: rank 3 20.0, rank 0 20.0 |" in line
    assert row == {"straggler/rank": 1.0, "straggler/max_over_mean": 50 / 30}


def slow_ranks(looks: list[dict[int, int]], stages: tuple[int, ...]) -> list[list[int]]:
    """Who is named in each look, where ranks are busy for 100 us and those in the look for as long as it says."""
    stragglers = Stragglers()
    told = [[(look.get(rank, 100), stage) for rank, stage in enumerate(stages)] for look in looks]
    return [[slow.rank for slow in stragglers.stay_behind(ranks)] for ranks in told]


def test_a_rank_is_named_once_it_was_behind_its_stage_in_three_looks_in_a_row():
    stages = (0, 0, 0, 1, 1)
    assert slow_ranks([{1: 150}] * 5, stages) == [[], [], [1], [], []]
    assert slow_ranks([{1: 150}, {}, {1: 300}, {1: 300}], stages) == [[]] * 4
    assert slow_ranks([{0: 200, 1: 300}] * 3, stages)[2] == [1], "0 is as the median of 1 and 2"
    assert slow_ranks([{1: 149}] * 5, stages) == [[]] * 5
    assert slow_ranks([{1: 150}] * 3 + [{}] + [{1: 150}] * 3, stages)[6] == [1], "again"


def test_a_stage_that_works_longer_and_a_rank_without_others_are_not_slow():
    assert slow_ranks([{3: 900, 4: 900}] * 5, (0, 0, 0, 1, 1)) == [[]] * 5
    assert slow_ranks([{3: 900}] * 5, (0, 0, 0, 1)) == [[]] * 5


@pytest.mark.timeout(900)
def test_a_slow_rank_is_one_line_and_an_alert():
    flags = ["--train-iters", "32", "--context-parallel-size", "2", "--cp-planner", "zigzag"]
    plant = "tests.faults.plants.slow_clock"
    (ranks,) = run_program([Launch((*SMALL_RUN, *flags), 2, plant=plant)])
    assert [rank.code for rank in ranks] == [0, 0], ranks[1].stderr[-3000:]
    said = [line for rank in ranks for line in rank.stdout.splitlines() if "is slow" in line]
    *alerts, line = sorted(said)
    assert line.startswith("warning: step 30: rank 1 (pipeline stage 0, replica 0, context rank 1")
    text = line.partition("warning: step 30: ")[2]
    assert alerts == [f"alert: a rank is slow: {text}"] * 2, "every rank tells its tracker"
    assert "busy 2000.0 ms a step, 1000.0 ms in the median of the 1 other ranks" in line


def busy_lines(rank, world_size):
    """Rank 1 computes while rank 0 waits for it."""
    import torch
    import torch.distributed as dist

    stragglers, rows = Stragglers(), torch.ones(600, 600)
    with stragglers.computing():
        for _ in range(40 * rank):
            rows = rows @ rows / 600
        dist.barrier()
    return stragglers.report(1, 1)


def test_a_rank_that_waits_for_another_is_not_the_slow_one():
    for line, row in run_on_ranks(2, busy_lines):
        assert "slowest: rank 1" in line
        assert row["straggler/rank"] == 1.0


def test_speed_stands_behind_megatrons_fields():
    speed = Speed(tokens_per_s=1000.4, world_size=4, mfu=0.4217, remaining_s=3725.2)
    now = datetime(2026, 11, 20, 18, 52, 28, 793548)
    line = training_line(report(speed=speed.fields()), now)
    assert line == MEGATRONS_LINE + (
        " tokens per second: 1000 | tokens per second per device: 250 | MFU: 42.2% | "
        "remaining: 1:02:05 |"
    )
    assert speed.row()["tokens-per-second-per-device"] == 250.1


def test_the_peak_is_known_for_known_gpus_alone():
    assert peak_tflops("NVIDIA H100 80GB HBM3", bf16=True) == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", bf16=True) == 756.0
    assert peak_tflops("NVIDIA H100 80GB HBM3", bf16=False) is None
    assert peak_tflops("cpu", bf16=True) is None


@pytest.mark.timeout(900)
def test_a_run_says_where_its_time_goes(tmp_path: Path):
    flags = (
        "--context-parallel-size 2 --timing-log-level 2 --log-timers-to-tensorboard --log-straggler "
        "--log-throughput --log-memory-interval 2 --log-interval 2 --save-interval 2 --eval-interval 2 "
        "--no-wandb"
    )
    output = train(2, *SMALL_RUN, *flags.split(), "--save", str(tmp_path / "run"))
    said = output[output.index("iteration        4/") :]
    for name in ("batch-generator", "forward-backward", "optimizer", "forward-compute"):
        assert len(re.findall(rf"^    {name} \.+: \([\d.]+, [\d.]+\)$", said, re.MULTILINE)) == 1
    assert len(re.findall(r"^    (evaluate|save-checkpoint) \.+:", said, re.MULTILINE)) == 2
    assert re.search(r"^ stragglers: busy .* slowest: rank [01] [\d.]+ \|", said, re.MULTILINE)
    assert re.search(r"tokens per second: \d+ \| .* remaining: 0:00:00 \|$", said, re.MULTILINE)
    assert "memory (MB) | max resident:" in said
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    row = {key: value for row in rows if row["iteration"] == 4 for key, value in row.items()}
    # Least and most over ranks, in ms, means since the last line. The least of all parts fit into a step of every rank.
    spans = {
        name: [
            float(x)
            for x in re.search(rf"^    {name} \.+: \(([\d.]+), ([\d.]+)\)", said, re.M).groups()
        ]
        for name in ("forward-backward", "optimizer", "batch-generator")
    }
    for name, (_, most) in spans.items():
        assert row[f"{name}-time"] * 1e3 == pytest.approx(most, abs=0.01), name
    steps = metrics(tmp_path / "run", "iteration-time")
    shortest = sum(least for least, _ in spans.values())
    assert 0 < shortest <= (steps[3] + steps[4]) / 2 * 1e3 + 0.03
    assert row["tokens-per-second-per-device"] == row["tokens-per-second"] / 2
    assert row["remaining-seconds"] == 0
