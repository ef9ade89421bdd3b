"""A cluster measured: which rows cross which level, what times say of a link, and a profile that plans read."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_cp import CPConfig, make_plan
from megatron_cp import mask as masks
from megatron_cp.__main__ import main
from megatron_cp.config import Level
from megatron_cp.measure import links, profile, rates
from megatron_cp.measure.links import Crossing, Link, crossings, fitted, ports
from megatron_cp.plan.hardware.topology import get_topology, load_profile
from tests.processes import HANG_SECONDS
from tests.ranks import run_on_ranks


@pytest.mark.parametrize(
    ("num_ranks", "node_size", "wider"), [(2, 2, ()), (8, 2, ()), (24, 2, (4, 12)), (4, 1, ())]
)
def test_every_pair_of_ranks_crosses_one_level_alone(num_ranks, node_size, wider):
    levels = crossings(num_ranks, node_size, wider)
    sent = [
        np.array([level.splits(rank, num_ranks, 1 << 20) for rank in range(num_ranks)])
        for level in levels
    ]
    assert (sum(table > 0 for table in sent) == 1 - np.eye(num_ranks)).all()
    for level, table in zip(levels, sent, strict=True):
        assert (table == table.T).all()  # what a rank sends is what it receives
        assert (table.sum(axis=1) > 0.99 * (1 << 20)).all()
        for a, b in itertools.product(range(num_ranks), repeat=2):
            assert (table[a, b] > 0) == (
                a // level.inside != b // level.inside and a // level.whole == b // level.whole
            )


def test_one_rank_of_each_node_sends_alone():
    table = np.array([Crossing(3, 9, alone=True).splits(rank, 9, 600) for rank in range(9)])
    assert {tuple(x) for x in np.argwhere(table).tolist()} == {
        (0, 3), (0, 6), (3, 0), (3, 6), (6, 0), (6, 3)
    }  # fmt: skip
    assert set(table[table > 0].tolist()) == {300}


def test_a_link_is_the_line_through_the_times():
    found = fitted({size: 30e-6 + size / 40e9 for size in (1 << 16, 1 << 22, 1 << 27)})
    assert found.gbytes_per_s == pytest.approx(40)
    assert found.latency_us == pytest.approx(30)
    without = fitted({size: size / 40e9 * (1 if size > 1e6 else 0.5) for size in (1000, 1 << 27)})
    assert without.latency_us == 0
    assert without.gbytes_per_s >= 40


def test_ports_are_shared_where_all_together_reach_less_than_one_alone():
    assert ports(8, Link(44, 1), Link(45, 1)) is None
    assert ports(8, Link(22, 1), Link(44, 1)) == 4
    assert ports(8, Link(2, 1), Link(44, 1)) == 1


def measured(rank, world_size, node_size, wider):
    rates.SHAPES["cpu"], profile.SHAPES["cpu"] = (16, 32), (16, 32)
    links.SIZES["cpu"] = profile.SIZES["cpu"] = (1 << 10, 1 << 14)
    heads = rates.Heads(2, 1, 8, torch.float32, torch.device("cpu"))
    said = []
    cluster = profile.Cluster("four", node_size, wider)
    found = profile.measure(cluster, heads, 1, get_topology("h100"), said.append)
    return found.profile, found.notes, said


@pytest.mark.parametrize(("node_size", "wider"), [(4, ()), (2, ()), (1, (2,))])
def test_all_ranks_find_a_profile_that_plans_read(tmp_path, node_size, wider):
    found, notes, said = run_on_ranks(4, measured, node_size, wider)[0]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(found))
    topology = load_profile(path)
    assert topology.node_size == node_size
    assert len(topology.kernels.rows) == len(topology.kernels.keys) == 2
    assert 0 <= topology.contention <= 0.95
    assert [level.size for level in topology.outer_levels] == list(wider)
    assert all(isinstance(level, Level) for level in topology.outer_levels)
    is_one_node = node_size == 4
    assert (topology.outer_gbytes_per_s == 45.0) == is_one_node  # h100's, and it is said
    assert any("one node" in note for note in notes) == is_one_node == ("as h100" in topology.name)
    assert said[0] == "attention, warming up"
    plan = make_plan(masks.causal(256), 4, CPConfig(num_heads=2, num_kv_heads=1, topology=topology))
    assert plan.stats()["makespan_ms"] > 0


def test_sizes_that_do_not_fit_are_said():
    for wider in ((6,), (2,), (16,), (4, 4)):
        with pytest.raises(ValueError, match="do not fit 8 ranks"):
            profile.Cluster("x", 2, wider).check(8)
    profile.Cluster("x", 2, (4,)).check(8)
    profile.Cluster("x", 1, ()).check(3)


def test_torchrun_writes_the_file(tmp_path):
    words = ["--num-attention-heads", "1", "--kv-channels", "8", "--rounds", "1"]
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "megatron_cp", "measure", "out/two.json", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert load_profile(tmp_path / "out" / "two.json").node_size == 2
    assert "2 ranks, 2 on each node" in run.stdout
    assert "next: --cp-topology out/two.json" in run.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.json"], "at least two: torchrun"),
        (["cluster.json", "--wider-groups", "a"], "--wider-groups"),
        (["cluster.json", "--num-query-groups", "5"], "--num-query-groups 5 must divide"),
        (["cluster.txt"], "must end in .json"),
        (["cluster.json", "--wider-groups", "3"], "do not fit 8 ranks"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words, message, capsys, monkeypatch):
    if len(words) > 1 or words == ["cluster.txt"]:
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main(["measure", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
