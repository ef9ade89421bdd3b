"""Damage that no size and no error shows: other bytes in a checkpoint, a replica that drifts, and who writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint.files import MANIFEST, iteration_folder
from tests.faults.program import Launch, Outcome, run_program
from tests.mcore.tiny_gpt import Case, parallel_state
from tests.ranks import run_on_ranks
from tests.training.checkpoints import tensors_of
from tests.training.commands import DATA, MODEL

pytestmark = pytest.mark.timeout(1800)

RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "2",
    "--lr", "1e-3", "--lr-decay-iters", "4", "--log-interval", "1", "--eval-iters", "0", "--no-wandb",
    "--check-weight-hash-across-dp-replicas-interval", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Saves of several kinds, and loads, one of them with a changed byte."""
    root = tmp_path_factory.mktemp("damage")
    saves = {
        "plain": (), "one writer": ("--no-ckpt-fully-parallel-save",),
        "broken": ("--async-save", "--save-interval", "1"),
    }  # fmt: skip
    launches = [Launch((*RUN, "--save", str(root / name), *f), 2) for name, f in saves.items()]
    outcomes = dict(zip(saves, run_program(launches), strict=True))
    assert outcomes["broken"][0].code == 0, outcomes["broken"][0].stderr[-3000:]
    file = max(
        iteration_folder(root / "broken", 2).glob("*.distcp"), key=lambda f: f.stat().st_size
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    shutil.copytree(root / "broken", root / "cut")
    (iteration_folder(root / "cut", 2) / file.name).write_bytes(content[:100])
    more = ("--train-iters", "3", "--override-opt-param-scheduler")
    restarted = {"TORCHELASTIC_RESTART_COUNT": "1"}
    loads = {
        "load plain": Launch((*RUN, *more, "--load", str(root / "plain"), "--verify-integrity"), 2),
        "load broken": Launch((*RUN, *more, "--load", str(root / "broken")), 2),
        "restart": Launch((*RUN, *more, "--load", str(root / "broken")), 2, environment=restarted),
        "new node": Launch(
            (*RUN, *more, "--load", str(root / "cut")), 2, plant="tests.faults.plants.a_new_node"
        ),
    }
    outcomes |= dict(zip(loads, run_program(list(loads.values())), strict=True))
    return root, outcomes


def test_contents_that_are_as_they_were_saved_are_loaded(runs):
    ranks = runs[1]["load plain"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    assert "verified the contents of" in ranks[0].stdout
    manifest = json.loads((iteration_folder(runs[0] / "plain", 2) / MANIFEST).read_text())
    assert manifest["sha256"].keys() == manifest["files"].keys()


def test_damage_is_one_line_on_every_rank(runs):
    for rank in runs[1]["load broken"]:
        assert rank.code == 2, rank.stderr[-3000:]
        (line,) = [x for x in rank.stderr.splitlines() if x.startswith("pretrain_gpt.py: error: ")]
        assert "SHA-256" in line
        assert str(runs[0] / "broken") in line


def test_after_an_elastic_restart_the_run_goes_back_and_on(runs):
    ranks = runs[1]["restart"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    assert "WARNING: damaged checkpoint" in ranks[0].stdout
    assert "successfully loaded checkpoint" in ranks[0].stdout
    assert "at iteration 1" in ranks[0].stdout


def test_a_node_in_the_place_of_another_goes_back_with_those_that_were_restarted(runs):
    """It counts restarts from 0, and a cut file is seen before ranks have met."""
    ranks = runs[1]["new node"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[1].stderr[-3000:]
    assert "is 100 bytes" in ranks[0].stdout
    assert "at iteration 1" in ranks[0].stdout


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_replicas_share_the_writing_unless_told_otherwise(runs):
    spread, one = (iteration_folder(runs[0] / name, 2) for name in ("plain", "one writer"))
    writers = [{f.name.split("_")[2] for f in x.glob("*.distcp")} for x in (spread, one)]
    assert writers == [{"0", "1"}, {"0"}]
    expected, found = tensors_of(one), tensors_of(spread)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


def test_equal_replicas_are_said_to_be_equal(runs):
    said = runs[1]["plain"][0].stdout
    assert said.count("weights of all replicas are equal after") == 2


def said_of_weights(rank, world_size, odd_rank):
    with parallel_state(Case()):
        from megatron_cp.training.replicas import ReplicasDifferError, check_replicas

        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)).bfloat16()
        if rank == odd_rank:
            with torch.no_grad():
                model[1].weight.view(torch.int16)[1, 1] ^= 1  # the lowest bit of one number
        try:
            check_replicas([model], 7)
        except ReplicasDifferError as problem:
            return str(problem)
    return None


@pytest.mark.parametrize("odd_rank", [None, 0, 2])
def test_a_flipped_bit_is_found_and_its_rank_named_on_all_ranks(odd_rank: int | None):
    said = run_on_ranks(3, said_of_weights, odd_rank)
    assert len(set(said)) == 1
    if odd_rank is None:
        assert said[0] is None
    else:
        assert f"ranks [{odd_rank}] do not hold" in said[0]
        assert "first in 1.weight" in said[0]
        assert "after iteration 7" in said[0]
