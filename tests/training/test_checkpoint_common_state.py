"""What all ranks share, inside a file of tensors: so Megatron-Core saves from 0.19 on, and every version loads it."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_cp.training.checkpoint.files import MANIFEST, iteration_folder
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

KEY, FILE = "common_state/shard_0_1", "__9_0.distcp"


def save(rank, world_size, folder):
    """A checkpoint after two updates; its weights and Adam's count."""
    flags = ("--save", folder, "--context-parallel-size", str(world_size))
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import Saver

        for number in (1, 2):
            made.step(state, number)
        Saver(state).save()
        return made.weights_of(state), [g["step"] for g in state.optimizer.param_groups]


def load(rank, world_size, folder):
    """(refusal, iteration, weights, Adam's count) of a load."""
    flags = ("--load", folder, "--context-parallel-size", str(world_size))
    refusal = None
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        try:
            load_checkpoint(state)
        except ValueError as problem:
            refusal = str(problem)
        counts = [g["step"] for g in state.optimizer.param_groups]
        return refusal, state.iteration, made.weights_of(state), counts


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder in the newer form, what rank 0 saved)."""
    root = tmp_path_factory.mktemp("common")
    kept = run_on_ranks(2, save, str(root))[0]
    folder = iteration_folder(root, 2)
    if (folder / "common.pt").exists():  # as 0.18 and before save it
        with_object(folder, torch.load(folder / "common.pt", weights_only=False))
        (folder / "common.pt").unlink()
    (folder / MANIFEST).unlink()
    return root, kept


def with_object(folder: Path, content: object) -> None:
    """Puts the object where 0.19 has it: a list of one, as `torch.save` writes it, in a file of tensors."""
    torch.save([content], folder / FILE)
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.state_dict_metadata[KEY] = BytesStorageMetadata()
    length = (folder / FILE).stat().st_size
    index.storage_data[MetadataIndex(KEY)] = _StorageInfo(FILE, 0, length)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_loaded_with_the_optimizer_on_any_number_of_ranks(saved, world_size):
    root, (weights, counts) = saved
    for refusal, iteration, found, steps in run_on_ranks(world_size, load, str(root)):
        assert (refusal, iteration, steps) == (None, 2, counts)
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)


class Command:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch executed_by_a_checkpoint",)


def test_nothing_in_it_executes_and_a_cut_one_is_named(saved, tmp_path):
    root = Path(shutil.copytree(saved[0], tmp_path / "copy"))
    folder = iteration_folder(root, 2)
    with_object(folder, {"args": Command()})
    for refusal, iteration, *_ in run_on_ranks(2, load, str(root)):
        assert "common_state holds posix.system; to read it would execute code" in refusal
        assert iteration == 0
    with_object(folder, {"iteration": 2})
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-1])
    for refusal, iteration, *_ in run_on_ranks(2, load, str(root)):
        assert f"{folder / FILE} is" in refusal and "bytes of it" in refusal
        assert iteration == 0
    with_object(folder, ["no", "entries"])
    assert "of type list" in run_on_ranks(1, load, str(root))[0][0]
