"""A save that a disk or a folder refuses: told on every rank, nothing left, and training goes on or stops."""

import contextlib
import errno
import io
import os
import shutil
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder
from megatron_cp.training.whole_files import write_atomically
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made


def full_disk(*arguments, **keywords):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk_says_torch(*arguments, **keywords):
    raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 704 vs 598")


BUSY = "Device or resource busy"


def busy(*arguments, **keywords):
    raise OSError(errno.EBUSY, BUSY, str(arguments[0]))


class FullFile:
    """Stands for HashedFile on a full disk."""

    def __init__(self, path, mode="wb"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))


def places() -> dict:
    """What writes, by the name of what it writes: owner, name and what it does instead."""
    from megatron.core.dist_checkpointing import serialization
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from megatron_cp.mcore.versions import compat
    from megatron_cp.training.checkpoint import files, legacy_format, writer

    of_common = [(*one, full_disk_says_torch) for one in compat.writers_of_common_state()]
    return {
        "folder": (Path, "mkdir", full_disk),
        # From core 0.19 on a file of tensors holds it.
        "common.pt": of_common[0] if of_common else (writer, "HashedFile", FullFile),
        "tensors": (writer, "HashedFile", FullFile),
        ".metadata": (FileSystemWriter, "finish", full_disk),
        "metadata.json": (serialization, "save_config", full_disk),
        "model_optim_rng.pt": (legacy_format, "HashedFile", FullFile),
        "distrib_optim.pt": (torch, "save", full_disk_says_torch),
        "manifest": (files, "write_manifest", full_disk),
        "name": (files, "publish", full_disk),
        "a bug": (files, "write_manifest", lambda *given: {}["no such entry"]),
        "an older checkpoint": (files.shutil, "rmtree", busy),
    }


DIST = ("folder", "common.pt", "tensors", ".metadata", "metadata.json", "manifest", "name")
CASES = [
    *[(place, odd, kind) for place in DIST for odd in (0, 1) for kind in ("dist", "async")],
    *[(place, 0, "torch") for place in ("folder", "model_optim_rng.pt", "distrib_optim.pt", "name")],
]  # fmt: skip
# Rank 1 writes tensors alone.
CASES = [(place, odd, kind) for place, odd, kind in CASES if odd == 0 or place == "tensors"]
KINDS = {
    "dist": (),
    "async": ("--async-save",),
    "torch": ("--ckpt-format", "torch", "--use-distributed-optimizer"),
}


def save_three_times(rank, world_size, folder, place, odd, flags):
    """Saves well, then with a fault on one rank, then well again; what was said, and who refused."""
    said, refusal = io.StringIO(), None
    flags = ("--save", folder, *flags)
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import SaveError, Saver

        saver = Saver(state)
        owner, name, instead = places()[place]
        with contextlib.redirect_stderr(said):
            for number in (1, 2, 3):
                made.step(state, number)
                before = getattr(owner, name)
                if number == 2 and rank == odd:
                    setattr(owner, name, instead)
                try:
                    saver.save()
                    saver.finish()
                except SaveError as failure:
                    refusal = str(failure)
                    break
                finally:
                    setattr(owner, name, before)
                if number == 2:
                    left = sorted(path.name for path in Path(folder).iterdir())
                torch.distributed.barrier()
        newest = saver.newest
    return refusal, said.getvalue(), newest, left if refusal is None else None


@pytest.mark.parametrize(("place", "odd", "kind"), CASES)
def test_training_goes_on_without_the_checkpoint_and_saves_the_next_one(
    tmp_path, place: str, odd: int, kind: str
):
    root = tmp_path / "run"
    flags = (*KINDS[kind], "--on-save-error", "continue")
    for refusal, said, newest, left in run_on_ranks(
        2, save_three_times, str(root), place, odd, flags
    ):
        assert refusal is None
        assert said.count("WARNING: ") == 1
        assert str(iteration_folder(root, 2)) in said
        # Megatron-Core's writers of 0.17 and later tell the kind of an error alone.
        reasons = ("No space left", "written in part, as on a full disk", "<class 'OSError'>")
        assert any(reason in said for reason in reasons)
        assert "unexpected pos" not in said
        assert f"are free in {root}" in said and f"(rank {odd})" in said
        assert newest == 3
        assert left == [iteration_folder(root, 1).name, TRACKER]
    assert (root / TRACKER).read_text() == "3"
    assert sorted(p.name for p in root.iterdir()) == [
        iteration_folder(root, 1).name, iteration_folder(root, 3).name, TRACKER,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_or_stops_with_the_same_line_on_every_rank(tmp_path, kind: str):
    root = tmp_path / "run"
    answers = run_on_ranks(2, save_three_times, str(root), "name", 0, KINDS[kind])
    refusals = [refusal for refusal, *_ in answers]
    assert refusals[0] == refusals[1]
    assert "could not be written: [Errno 28] No space left on device" in refusals[0]
    assert "--on-save-error continue" in refusals[0]
    assert [said for _, said, *_ in answers] == ["", ""]
    assert (root / TRACKER).read_text() == "1"
    assert not list(root.glob("*.unfinished"))


def test_what_no_disk_says_is_told_to_every_rank_too(tmp_path):
    answers = run_on_ranks(2, save_three_times, str(tmp_path / "run"), "a bug", 0, ())
    refusals = [refusal for refusal, *_ in answers]
    assert refusals[0] == refusals[1]
    assert "could not be written: KeyError: 'no such entry'" in refusals[0]
    assert (tmp_path / "run" / TRACKER).read_text() == "1"


def test_an_older_checkpoint_that_stays_is_a_warning_and_no_failed_save(tmp_path):
    root = tmp_path / "run"
    flags = ("--save-retain-interval", "100")
    answers = run_on_ranks(2, save_three_times, str(root), "an older checkpoint", 0, flags)
    first, second, third = (iteration_folder(root, n).name for n in (1, 2, 3))
    for refusal, _, newest, left in answers:
        assert (refusal, newest) == (None, 3)
        assert left == [first, second, TRACKER]
    assert answers[0][1].count("WARNING: ") == 1
    assert f"an older checkpoint could not be removed: [Errno 16] {BUSY}" in answers[0][1]
    assert str(root / first) in answers[0][1] and "could not be written" not in answers[0][1]
    assert answers[1][1] == ""
    assert sorted(path.name for path in root.iterdir()) == [first, third, TRACKER]


def lose_the_folder(rank, world_size, folder):
    """Saves where the folder became a file; then with the folder back."""
    refusals = []
    flags = ("--save", folder, "--on-save-error", "continue")
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import SaveError, Saver

        saver = Saver(state)
        made.step(state, 1)
        if rank == 0:
            Path(folder).write_text("")
        torch.distributed.barrier()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            saver.save()
            for is_last in (True,):
                try:
                    saver.save(is_last=is_last)
                except SaveError as failure:
                    refusals.append(str(failure))
        if rank == 0:
            Path(folder).unlink()
        torch.distributed.barrier()
        saver.save(is_last=True)
        return said.getvalue(), refusals, saver.newest


def test_a_lost_folder_is_told_and_the_last_save_always_stops(tmp_path):
    root = tmp_path / "run"
    for said, refusals, newest in run_on_ranks(2, lose_the_folder, str(root)):
        assert said.count("WARNING: ") == 1
        assert "Not a directory" in said
        assert len(refusals) == 1 and "go on from there with --load" in refusals[0]
        assert newest == 1
    assert (root / TRACKER).read_text() == "1"


def test_a_tracker_that_cannot_be_written_leaves_the_checkpoints_as_they_were(
    tmp_path, monkeypatch
):
    from megatron_cp.training.checkpoint import files

    for iteration, where in ((2, tmp_path), (4, tmp_path / "new")):
        folder = files.iteration_folder(where, iteration)
        folder.mkdir(parents=True)
        files.write_manifest(folder, {"shape": {}, "data": {}, "restarts": 0})
    shutil.move(files.iteration_folder(tmp_path / "new", 4), files.unfinished_folder(tmp_path, 4))
    (tmp_path / "new").rmdir()
    write_atomically(tmp_path / TRACKER, "2")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        files.publish(tmp_path, 4)
    assert files.latest_iteration(tmp_path) == 2
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iter_0000002", "iter_0000004.unfinished", TRACKER]
