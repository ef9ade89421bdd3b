"""A damaged checkpoint is named with file and reason, never loaded, and the run goes back where it may."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint import integrity
from megatron_cp.training.checkpoint.files import MANIFEST, TRACKER, iteration_folder
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made


def save_twice(rank, world_size, folder, form):
    """Checkpoints after one and two updates; the weights at each."""
    flags = ("--save", folder, "--ckpt-format", form, "--context-parallel-size", str(world_size))
    weights = []
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import Saver

        saver = Saver(state)
        for number in (1, 2):
            made.step(state, number)
            saver.save()
            weights.append(made.weights_of(state))
    return weights


def load(rank, world_size, folder, flags, restarts=None):
    """(refusal or None, what was said, the iteration, the weights) of a load."""
    own = None if restarts is None else restarts[rank]
    if own is not None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = own
    said, refusal = io.StringIO(), None
    flags = ("--load", folder, "--context-parallel-size", str(world_size), *flags)
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        with contextlib.redirect_stdout(said):
            try:
                load_checkpoint(state)
            except ValueError as problem:
                refusal = str(problem)
            finally:
                os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
        return refusal, said.getvalue(), state.iteration, made.weights_of(state)


@pytest.fixture(scope="module", params=["torch_dist", "torch"])
def saved(request, tmp_path_factory):
    """(folder, format, weights of rank 0 after one and two updates)."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, request.param, run_on_ranks(2, save_twice, str(folder), request.param)[0]


def copied(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def flip(file: Path) -> None:
    """One other bit in the middle, the same size."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def every_file(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def every_other_file(folder: Path) -> list[str]:
    """All but the manifest."""
    return [name for name in every_file(folder) if name != MANIFEST]


def test_the_manifest_holds_the_hash_of_every_file_and_nothing_else_stays(saved):
    for iteration in (1, 2):
        folder = iteration_folder(saved[0], iteration)
        expected = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in every_other_file(folder)
        }
        assert json.loads((folder / MANIFEST).read_text())["sha256"] == expected
        assert not list(folder.rglob("*.sha256"))


def test_a_flipped_bit_in_any_file_is_named_on_every_rank_before_anything_is_loaded(
    saved, tmp_path
):
    for number, name in enumerate(every_file(iteration_folder(saved[0], 2))):
        root = copied(saved, tmp_path / str(number))
        flip(iteration_folder(root, 2) / name)
        answers = run_on_ranks(2, load, str(root), ())
        assert answers[0][0] == answers[1][0]
        assert str(iteration_folder(root, 2) / name) in answers[0][0]
        assert "--ckpt-fallback" in answers[0][0]
        assert answers[0][2] == 0


def cut(folder: Path) -> None:
    file = max(folder.rglob("*.*t*"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES = {
    "a flipped bit": lambda folder: flip(max(folder.rglob("*.*t*"), key=lambda f: f.stat().st_size)),
    "a cut file": cut,
    "a lost folder": shutil.rmtree,
    "a cut manifest": lambda folder: (folder / MANIFEST).write_text("{"),
    "a manifest without a hash": lambda folder: made.rewrite_manifest(
        folder, lambda content: content.update(sha256={})
    ),
    "a manifest of other layers": lambda folder: (folder / MANIFEST).write_text(
        (folder / MANIFEST).read_text().replace('"num_layers": 2', '"num_layers": 3')
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_the_flag_a_run_goes_back_to_the_last_good_checkpoint(saved, tmp_path, damage: str):
    root = copied(saved, tmp_path)
    DAMAGES[damage](iteration_folder(root, 2))
    answers = run_on_ranks(2, load, str(root), ("--ckpt-fallback",))
    for refusal, _, iteration, weights in answers:
        assert (refusal, iteration) == (None, 1)
        assert all(torch.equal(weights[name], x) for name, x in saved[2][0].items())
    said = answers[0][1]
    assert "WARNING: damaged checkpoint: " in said and "iter_0000002" in said
    assert "going back to" in said and "iter_0000001" in said


def test_a_damaged_tracker_is_no_end_either(saved, tmp_path):
    root = copied(saved, tmp_path)
    (root / TRACKER).write_text("2x")
    answers = run_on_ranks(2, load, str(root), ("--ckpt-fallback",))
    assert [(refusal, at) for refusal, _, at, _ in answers] == [(None, 2), (None, 2)]


def resume_and_save(rank, world_size, folder, flags):
    """(refusal or None, the iteration at which a resumed run saved) of a load, a step and a save."""
    here = ("--load", folder, "--save", folder, "--context-parallel-size", str(world_size))
    with made.run_state(*here, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint
        from megatron_cp.training.checkpoint.save import SaveError, Saver

        load_checkpoint(state)
        made.step(state, 3)
        saver = Saver(state)
        try:
            saver.save(is_last=True)
        except SaveError as failure:
            return str(failure), saver.newest
        return None, saver.newest


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("advice", "saves"),
    [(("--ckpt-fallback",), 3), (("--ckpt-step", "2"), 3), (("--ckpt-step", "1"), 2)],
)
def test_a_run_that_went_on_beside_a_damaged_tracker_saves_and_mends_it(
    saved, tmp_path, world_size: int, advice, saves: int
):
    root = copied(saved, tmp_path)
    (root / TRACKER).write_text("2x")
    answers = run_on_ranks(world_size, resume_and_save, str(root), advice)
    assert answers == [(None, saves)] * world_size
    assert (root / TRACKER).read_text() == str(saves)
    names = [iteration_folder(root, number).name for number in range(1, max(saves, 2) + 1)]
    assert sorted(path.name for path in root.iterdir()) == [*names, TRACKER]


def test_where_nothing_is_whole_the_first_damage_is_the_refusal(saved, tmp_path):
    root = copied(saved, tmp_path)
    for iteration in (1, 2):
        cut(iteration_folder(root, iteration))
    answers = run_on_ranks(2, load, str(root), ("--ckpt-fallback",))
    for refusal, *_ in answers:
        assert "iter_0000002" in refusal
        assert refusal.endswith("no earlier one is whole")


def tensors_of_one_rank(folder: Path) -> Path:
    """The largest file, which both formats have more than one of."""
    files = [*folder.rglob("*.distcp"), *folder.rglob("*.pt")]
    return max(files, key=lambda f: f.stat().st_size)


def cut_by(num_bytes: int):
    def cut_it(file: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) - num_bytes])

    return cut_it


LOSSES = {"one byte": cut_by(1), "most of it": cut_by(200), "all of it": Path.unlink}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["tensors", "common.pt", ".metadata"])
def test_without_a_manifest_a_cut_or_lost_file_is_named_and_a_run_goes_back_too(
    saved, tmp_path, name: str, loss: str
):
    root = copied(saved, tmp_path)
    for iteration in (1, 2):
        (iteration_folder(root, iteration) / MANIFEST).unlink()  # as Megatron-LM writes them
    folder = iteration_folder(root, 2)
    file = tensors_of_one_rank(folder) if name == "tensors" else folder / name
    if not file.exists():
        pytest.skip(f"no {name} in the format {saved[1]} of this Megatron-Core")
    LOSSES[loss](file)
    for refusal, _, iteration, _ in run_on_ranks(2, load, str(root), ()):
        place = folder if saved[1] == "torch" and loss == "all of it" else file
        assert str(place) in refusal
        assert iteration == 0
    for refusal, said, iteration, weights in run_on_ranks(2, load, str(root), ("--ckpt-fallback",)):
        assert (refusal, iteration) == (None, 1)
        assert all(torch.equal(weights[name], x) for name, x in saved[2][0].items())
        assert "verified" not in said


@pytest.mark.parametrize(
    ("restarts", "flags", "iteration"),
    [
        (("0", "0"), (), None),
        (("1", "1"), (), 1),
        (("0", "1"), (), 1),  # nodes count restarts each for themselves
        (("3", "3"), ("--no-ckpt-fallback",), None),
        (("3", "3"), ("--ckpt-step", "2"), None),
        (("0", "0"), ("--no-verify-checkpoint", "--ckpt-step", "1"), 1),
    ],
)
def test_the_fallback_is_the_default_after_a_restart_and_never_with_a_step(
    saved, tmp_path, restarts, flags, iteration
):
    root = copied(saved, tmp_path)
    DAMAGES["a flipped bit"](iteration_folder(root, 2))
    answers = run_on_ranks(2, load, str(root), flags, restarts)
    for refusal, _, at, _ in answers:
        assert (refusal is None) == (iteration is not None)
        assert iteration in (None, at)


def test_files_are_not_compared_where_nobody_wants_it(saved, tmp_path):
    root = copied(saved, tmp_path)
    made.rewrite_manifest(
        iteration_folder(root, 2),
        lambda content: content.update(sha256=dict.fromkeys(content["sha256"], "0" * 64)),
    )
    assert "another SHA-256" in run_on_ranks(1, load, str(root), ())[0][0]
    refusal, said, iteration, _ = run_on_ranks(1, load, str(root), ("--no-verify-checkpoint",))[0]
    assert (refusal, iteration) == (None, 2)
    assert "verified" not in said


def test_a_checkpoint_without_hashes_is_refused_only_on_demand(saved, tmp_path):
    root = copied(saved, tmp_path)
    made.rewrite_manifest(iteration_folder(root, 2), without_hashes)
    _, said, iteration, _ = run_on_ranks(1, load, str(root), ())[0]
    assert iteration == 2
    assert "verified" not in said
    assert f"{iteration_folder(root, 2)} holds no SHA-256 of its files: their contents were" in said
    assert "holds no SHA-256" in run_on_ranks(1, load, str(root), ("--verify-integrity",))[0][0]


def without_hashes(content: dict) -> None:
    """As the first versions wrote it."""
    content["format"] = 1
    del content["sha256"]


def test_a_checkpoint_of_the_format_before_is_loaded_and_compared(saved, tmp_path):
    root = copied(saved, tmp_path)
    made.rewrite_manifest(iteration_folder(root, 2), lambda content: content.update(format=1))
    refusal, said, iteration, _ = run_on_ranks(1, load, str(root), ("--verify-integrity",))[0]
    assert (refusal, iteration) == (None, 2)
    assert "verified the contents of" in said
    DAMAGES["a flipped bit"](iteration_folder(root, 2))
    assert "another SHA-256" in run_on_ranks(1, load, str(root), ())[0][0]


class Command:
    """Runs a command when it is unpickled the ordinary way."""

    def __reduce__(self):
        return os.system, (f"touch {Path.cwd()}/executed",)


def test_no_file_of_a_checkpoint_executes_anything_also_with_a_matching_manifest(
    saved, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Command())
    archived = io.BytesIO()
    torch.save(Command(), archived)
    tried = 0
    for name in every_other_file(iteration_folder(saved[0], 2)):
        for number, content in enumerate((pickled, archived.getvalue())):
            root = copied(saved, tmp_path / f"{tried} {number}")
            file = iteration_folder(root, 2) / name
            file.write_bytes(content)
            told = {"files": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            made.rewrite_manifest(
                iteration_folder(root, 2),
                lambda manifest, name=name, told=told: [
                    manifest[entry].update({name: value}) for entry, value in told.items()
                ],
            )
            for flags in ((), ("--finetune",), ("--no-verify-checkpoint", "--no-load-optim")):
                refusal, *_ = run_on_ranks(1, load, str(root), flags)[0]
                # Without the optimizer nobody reads its file.
                assert refusal is not None or name.endswith("distrib_optim.pt"), (name, flags)
                tried += 1
    assert tried >= 6
    assert not list(tmp_path.rglob("executed"))


def test_an_index_that_points_out_of_its_folder_is_refused(saved, tmp_path):
    if saved[1] == "torch":
        pytest.skip("the format torch has no index")
    root = copied(saved, tmp_path)
    folder = iteration_folder(root, 2)
    index = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(index.storage_data.values())).relative_path = "../../elsewhere"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / MANIFEST).unlink()
    assert "points at the file" in run_on_ranks(1, load, str(root), ())[0][0]


def test_a_hashed_file_is_what_was_written_in_pieces_of_any_size(tmp_path):
    pieces = [bytes([n % 251]) * size for n, size in enumerate((0, 1, 300_000, 5, 2_000_000, 7))]
    with integrity.HashedFile(tmp_path / "file") as file:
        for piece in pieces:
            file.write(piece)
            file.write(memoryview(piece))
        assert file.tell() == 2 * sum(map(len, pieces))
    whole = b"".join(piece + piece for piece in pieces)
    assert (tmp_path / "file").read_bytes() == whole
    found = integrity.take_hashes(tmp_path, ["file"])
    assert found == {"file": hashlib.sha256(whole).hexdigest()}
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_named_whatever_torch_makes_of_it():
    with (
        pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
        integrity.HashedFile("/dev/full") as file,
    ):
        torch.save(torch.zeros(1_000_000), file)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_file_is_read_by_one_rank(world_size: int):
    sizes = {f"{n}": n * 7 % 5 for n in range(11)}
    shares = [integrity.share_of(sizes, rank, world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)


def indices_parsed(rank, world_size, folder):
    """The folders whose index is parsed while a rank loads."""
    from megatron_cp.mcore.checkpoint import safe_load

    parsed, parse = [], safe_load._parse_index
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            safe_load, "_parse_index", lambda path: parsed.append(path.parent.name) or parse(path)
        )
        refusal, _, iteration, _ = load(rank, world_size, folder, ("--ckpt-fallback",))
    return refusal, iteration, parsed


def test_a_load_parses_each_index_once_on_every_rank(saved, tmp_path):
    if saved[1] == "torch":
        pytest.skip("the format torch has no index")
    folder = copied(saved, tmp_path)
    names = [iteration_folder(folder, number).name for number in (1, 2)]
    assert run_on_ranks(2, indices_parsed, str(folder)) == [(None, 2, names[1:])] * 2
    (iteration_folder(folder, 2) / MANIFEST).unlink()  # what files reach is compared with the index
    (iteration_folder(folder, 2) / "__1_0.distcp").write_bytes(b"")
    expected = [(None, 1, [names[1], names[0]])] * 2
    assert run_on_ranks(2, indices_parsed, str(folder)) == expected
