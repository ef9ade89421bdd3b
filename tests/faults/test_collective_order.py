"""Ranks never wait for one another for ever, whatever runs side by side: judged on the strictest machine."""

import shlex
from pathlib import Path

import pytest

from tests.faults.collective_order import FOLDER, record, recorded, stuck
from tests.faults.program import Launch, run_program
from tests.training.commands import AUTO, SMALL_RUN, even_topology

pytestmark = pytest.mark.timeout(1800)

# Those that had not ended on one H100 when its time was up (docs/gpu.md).
RUNS = {  # ranks, flags
    "interleaved stages of context ranks": (
        4,
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 4",
    ),
    "stages of context ranks, experts": (
        4,
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --global-batch-size 4 "
        "--num-experts 4 --moe-ffn-hidden-size 48",
    ),
    "joined packs of replicas": (
        4,
        "--context-parallel-size 2 --hybrid-context-parallel --micro-batch-size 2 "
        "--calculate-per-token-loss --global-batch-size 4 --cp-topology",
    ),
    "gated delta nets": (
        2,
        "--context-parallel-size 2 --experimental-attention-variant gated_delta_net "
        "--linear-attention-freq [1,0] --linear-key-head-dim 16 --linear-value-head-dim 8 "
        "--linear-num-key-heads 2 --linear-num-value-heads 4",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_rank_waits_for_ever(tmp_path: Path, name: str):
    world_size, flags = RUNS[name]
    more = [str(even_topology(tmp_path / "even.json"))] if flags.endswith("--cp-topology") else []
    steps = ("--train-iters", "2", "--no-wandb", "--run-dir", str(tmp_path / "run"))
    launch = Launch(
        (*SMALL_RUN, *AUTO, *shlex.split(flags), *more, *steps),
        world_size,
        plant=f"{record.__module__}.{record.__name__}",
        environment={FOLDER: str(tmp_path)},
    )
    (outcomes,) = run_program([launch])
    assert [one.code for one in outcomes] == [0] * world_size, outcomes[0].stderr[-2000:]
    ranks = recorded(tmp_path, world_size)
    assert stuck(ranks) == []
    names = {call[0] for calls in ranks for call in calls}
    assert "all_to_all_single" in names and "new_group" in names
    assert {"send", "recv"} <= names or "--pipeline" not in flags
    assert {call[5] for calls in ranks for call in calls} == {"MainThread"}


def _call(name, group, ranks, peer=None, batch=None):
    return [name, group, ranks, peer, batch, "MainThread"]


JUDGED = {
    "one order": ([["A", "B"], ["A", "B"]], []),
    "two orders": ([["A", "B"], ["B", "A"]], [0, 1]),
    "three in a ring": ([["A", "C"], ["B", "A"], ["C", "B"]], [0, 1, 2]),
    "one fewer": ([["A", "A"], ["A"]], [0]),
}
MEMBERS = {"A": [0, 1], "B": [0, 1], "C": [0, 2]}
RING = MEMBERS | {"B": [1, 2]}


@pytest.mark.parametrize("name", JUDGED)
def test_collectives_in_an_order(name):
    orders, expected = JUDGED[name]
    members = RING if len(orders) == 3 else MEMBERS
    ranks = [[_call("allreduce", group, members[group]) for group in order] for order in orders]
    assert [int(line.split()[1]) for line in stuck(ranks)] == expected


def test_both_send_first_and_only_a_batch_lets_them():
    apart = [[_call(name, "01", [0, 1], 1 - rank) for name in ("send", "recv")] for rank in (0, 1)]
    assert len(stuck(apart)) == 2
    assert stuck([apart[0], apart[1][::-1]]) == []
    batched = [[[*call[:4], 1, call[5]] for call in calls] for calls in apart]
    assert stuck(batched) == []


def test_the_first_batch_of_a_group_waits_for_all_of_its_ranks():
    members = [0, 1, 2]
    pair = [[_call("send", "P", members, 1)], [_call("recv", "P", members, 0)]]
    assert len(stuck([*pair, []])) == 2
    pair[1].append(_call("send", "P", members, 2))
    assert stuck([*pair, [_call("recv", "P", members, 1)]]) == []
