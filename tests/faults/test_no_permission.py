"""Folders that may not be written, or read: one line on every rank. As another user, since root may do anything."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.training.checkpoint.files import TRACKER
from tests.faults.plants import NOBODY
from tests.faults.program import Launch, Outcome, run_program
from tests.training.commands import DATA, MODEL, STEPS

pytestmark = pytest.mark.timeout(900)

CP2 = ("--context-parallel-size", "2")
MOCK = (*MODEL, *DATA, *STEPS, *CP2, "--eval-iters", "0", "--no-wandb")
CORPUS = ("--seq-length", "128", "--vocab-size", "512", "--num-workers", "0")
FILES = (*MODEL, *STEPS, *CORPUS, *CP2, "--eval-iters", "0", "--no-wandb")
PLANT = "tests.faults.plants.nobody"
# what is asked for -> flags (folders below the test's own), and what the line says
REFUSED = {
    "checkpoints": ((*MOCK, "--save", "{locked}/save"), "--save {locked}/save cannot be written"),
    "a run's folder": ((*MOCK, "--run-dir", "{locked}/run"), "--run-dir {locked}/run cannot be written"),
    "a closed folder": ((*MOCK, "--save", "{closed}/save"), "--save {closed}/save cannot be written"),
    "a checkpoint to load": ((*MOCK, "--load", "{closed}"), "{closed}"),
    "token files": ((*FILES, "--data-path", "{closed}/corpus"), "{closed}/corpus"),
    "the index of samples": (
        (*FILES, "--packing", "megatron", "--data-path", "{open}/corpus", "--data-cache-path", "{locked}/index"),
        "{locked}/index",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders() -> Iterator[dict[str, Path]]:
    """Of the other user, where he can come: one to write, one to read and one that is closed."""
    base = Path(tempfile.mkdtemp(dir="/tmp", prefix="no_permission_"))
    found = {name: base / name for name in ("open", "locked", "closed", "temporary", "saves")}
    for folder in found.values():
        folder.mkdir()
    for place in (found["open"], found["closed"]):
        with IndexedWriter(place / "corpus", dtype="uint16") as writer:
            for number in range(60):
                writer.add_document([(number + i) % 512 for i in range(50)])
            writer.finish()
    (found["closed"] / TRACKER).write_text("2")
    for path in [base, *base.rglob("*")] if os.getuid() == 0 else ():
        try:
            os.chown(path, NOBODY, NOBODY)
        except OSError as problem:
            shutil.rmtree(base)
            pytest.skip(f"root may not be another user here: {problem}")
    base.chmod(0o755)
    found["locked"].chmod(0o555)
    found["closed"].chmod(0o000)
    yield found
    for folder in found.values():
        folder.chmod(0o755)
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> dict[str, list[Outcome]]:
    names = {name: str(path) for name, path in folders.items()}
    own = {"TMPDIR": names["temporary"], "HOME": names["open"], "LOCKED": names["saves"]}
    launches = {
        name: Launch(tuple(f.format(**names) for f in flags), 2, environment=own, plant=PLANT)
        for name, (flags, _) in REFUSED.items()
    }
    save = (*MOCK, "--save", names["saves"], "--save-interval", "2")
    late = f"{PLANT}_whose_folder_is_locked_at_the_second_save"
    launches["a save"] = Launch(save, 2, environment=own, plant=late)
    cache = {**own, "XDG_CACHE_HOME": names["locked"]}
    asks = f"{PLANT}_asks_for_the_kernel_cache"
    launches["the cache of kernels"] = Launch((), environment=cache, plant=asks)
    return dict(zip(launches, run_program(list(launches.values())), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_not_be_read_or_written_is_one_line_before_ranks_meet(
    name: str, folders: dict[str, Path], outcomes: dict[str, list[Outcome]]
):
    says = REFUSED[name][1].format(**folders)
    for rank in outcomes[name]:
        assert rank.code == 2, rank.stderr[-3000:]
        (line,) = rank.stderr.splitlines()
        assert line.startswith("pretrain_gpt.py: error: ") and says in line
        assert "ermission denied" in line
        assert rank.stdout == ""


def test_a_folder_that_is_locked_while_a_run_goes_on_is_one_line_and_the_checkpoint_before_stays(
    folders: dict[str, Path], outcomes: dict[str, list[Outcome]]
):
    for rank in outcomes["a save"]:
        assert rank.code == 1, rank.stderr[-3000:]
        (line,) = [text for text in rank.stderr.splitlines() if "error: " in text]
        assert "Permission denied" in line and "iter_0000004" in line
    assert (folders["saves"] / TRACKER).read_text() == "2"


def test_a_cache_of_kernels_that_may_not_be_made_is_named(
    outcomes: dict[str, list[Outcome]], folders
):
    (rank,) = outcomes["the cache of kernels"]
    assert rank.code == 2
    assert "Permission denied" in rank.stderr and f"{folders['locked']}/megatron_cp" in rank.stderr
