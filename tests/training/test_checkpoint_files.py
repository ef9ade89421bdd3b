"""The tracker, the manifest and the folders of a checkpoint."""

import contextlib
import io
import json
import os
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_cp.errors import DamagedCheckpointError
from megatron_cp.training.checkpoint import files, formats
from megatron_cp.training.whole_files import check_writable, write_atomically
from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

SHAPE = dict.fromkeys(files.SHAPE_ARGUMENTS, 1)


def make_checkpoint(root, number: int, **content):
    folder = files.iteration_folder(root, number)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * 100)
    (folder / "metadata.json").write_text("{}")
    files.write_manifest(folder, {"shape": SHAPE, "data": {}, "restarts": 0, **content})
    return folder


def test_the_layout_is_megatrons(tmp_path):
    assert files.iteration_folder(tmp_path, 5).name == "iter_0000005"
    write_atomically(tmp_path / files.TRACKER, "5")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert files.latest_iteration(tmp_path) == 5


def test_without_a_tracker_there_is_no_checkpoint(tmp_path):
    assert files.latest_iteration(tmp_path) is None


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.5", "10\N{SUPERSCRIPT TWO}"])
def test_a_damaged_tracker_is_named(tmp_path, text: str):
    (tmp_path / files.TRACKER).write_text(text)
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration\.txt.*--ckpt-step"):
        files.latest_iteration(tmp_path)


def test_an_atomic_write_that_fails_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_a_whole_checkpoint_reads_back(tmp_path):
    folder = make_checkpoint(tmp_path, 3, data={"cursor": 7})
    manifest = files.read_manifest(folder)
    assert manifest["data"] == {"cursor": 7}
    assert manifest["files"] == {"__0_0.distcp": 100, "metadata.json": 2}


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_shard_is_named_with_its_sizes(tmp_path, damage: str):
    folder = make_checkpoint(tmp_path, 3)
    shard = folder / "__0_0.distcp"
    shard.write_bytes(b"x" * 40) if damage == "truncate" else shard.unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp is (40 bytes|missing).*100 bytes"):
        files.read_manifest(folder)


def test_a_damaged_manifest_is_named(tmp_path):
    folder = make_checkpoint(tmp_path, 3)
    (folder / files.MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"megatron_cp\.json is damaged"):
        files.read_manifest(folder)


SMALL = {
    "shape": {"num_layers": 2, "normalization": "RMSNorm", "kv_channels": None},
    "meaning": {"rotary_base": 10000.0},
    "layout": {"world_size": 2},
    "data": {"cursor": 20, "epoch": 1, "skipped": [1, 2]},
    "iteration": 5,
    "restarts": 0,
}


def test_every_flipped_bit_of_a_manifest_is_damage_or_changes_nothing(tmp_path):
    folder = make_checkpoint(tmp_path, 5, **SMALL)
    path = folder / files.MANIFEST
    whole, content = path.read_bytes(), files.read_manifest(folder)
    assert content["data"] == SMALL["data"]
    harmless = 0
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = files.read_manifest(folder)
        except DamagedCheckpointError as damage:
            assert str(path) in str(damage)
            continue
        assert json.dumps(found) == json.dumps(content), (place, bytes(flipped))
        harmless += 1
    assert harmless < 10  # of blanks, some


@pytest.mark.parametrize("form", [0, 3, True, "2", 2.0, None, [2]])
def test_a_manifest_of_an_unknown_format_is_damaged(tmp_path, form):
    folder = make_checkpoint(tmp_path, 5)
    made.rewrite_manifest(folder, lambda content: content.update(format=form))
    with pytest.raises(DamagedCheckpointError, match=r"it says format .*, and 1 and 2 are known"):
        files.read_manifest(folder)


def test_manifests_of_the_format_before_are_read_but_not_with_entries_that_it_never_had(tmp_path):
    folder = make_checkpoint(tmp_path, 5, **SMALL)
    made.rewrite_manifest(folder, lambda content: content.update(format=1))
    assert files.read_manifest(folder)["data"] == SMALL["data"]
    text = (folder / files.MANIFEST).read_text()
    (folder / files.MANIFEST).write_text(text.replace('"sha256"', '"sha257"'))
    with pytest.raises(DamagedCheckpointError, match="'sha257', which is no entry of format 1"):
        files.read_manifest(folder)
    made.rewrite_manifest(folder, lambda content: content.pop("sha257"))  # the first versions
    assert files.read_manifest(folder)["data"] == SMALL["data"]


def test_a_checkpoint_of_megatron_has_no_manifest(tmp_path):
    assert files.read_manifest(tmp_path) is None


@pytest.mark.parametrize("name", files.SHAPE_ARGUMENTS)
def test_another_model_is_refused_by_the_flag_that_differs(tmp_path, name: str):
    wanted = vars(Namespace(**{**SHAPE, name: 2}))
    spelled = {
        "add_bias_linear": "--disable-bias-linear False, this run has False",
        "padded_vocab_size": r"--vocab-size \(see --make-vocab-size-divisible-by\) of 1, this run has 2",
    }
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=spelled.get(name, f"{flag} 1, this run has 2")) as caught:
        files.check_shape(tmp_path, SHAPE, wanted)
    files.check_shape(tmp_path, SHAPE, SHAPE)
    if "--dist-ckpt-strictness" in str(caught.value):
        files.check_shape(tmp_path, SHAPE, wanted, may_add_tensors=True)
    else:
        with pytest.raises(ValueError, match="this run has"):
            files.check_shape(tmp_path, SHAPE, wanted, may_add_tensors=True)


def test_heads_that_latent_attention_does_not_read_may_be_said_otherwise(tmp_path):
    latent = {"multi_latent_attention": True, "hybrid_layer_pattern": None}
    arguments = dict.fromkeys(files.SHAPE_ARGUMENTS, 1) | latent
    saved, wanted = (
        files.shape_of(arguments | {"kv_channels": heads, "num_query_groups": heads})
        for heads in (1, 2)
    )
    files.check_shape(tmp_path, saved, wanted)
    files.check_shape(tmp_path, saved | {"kv_channels": 1}, wanted)  # as manifests said it
    with pytest.raises(ValueError, match="--hidden-size 1, this run has 2"):
        files.check_shape(tmp_path, saved, wanted | {"hidden_size": 2})


def test_layers_that_share_picks_are_told_from_those_that_do_not(tmp_path):
    sparse = {"multi_latent_attention": True, "hybrid_layer_pattern": None, "num_layers": 4}
    arguments = dict.fromkeys(files.SHAPE_ARGUMENTS, 1) | sparse
    arguments["experimental_attention_variant"] = "dsa"
    sharing = ("dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset")
    each, also_each, shared = (
        files.shape_of(arguments | dict(zip(sharing, said, strict=True)))
        for said in ((1, 0), (4, 4), (2, 0))
    )
    before = {name: value for name, value in each.items() if name not in sharing}  # could not share
    for saved in (each, before):
        files.check_shape(tmp_path, saved, also_each)
        with pytest.raises(ValueError, match="--dsa-indexer-topk-freq 1, this run has 2"):
            files.check_shape(tmp_path, saved, shared, may_add_tensors=True)


@pytest.mark.parametrize(
    ("previous", "interval", "removed"),
    [(10, None, False), (10, 10, False), (10, 20, True), (15, 10, True), (20, 7, False)],
)
def test_older_checkpoints_are_kept_as_megatron_keeps_them(tmp_path, previous, interval, removed):
    folder = make_checkpoint(tmp_path, previous)
    assert files.remove_replaced(tmp_path, previous, 20, interval) == (folder if removed else None)
    assert folder.is_dir() != removed


def test_a_link_is_never_followed_to_remove_a_checkpoint(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    files.iteration_folder(tmp_path, 15).symlink_to(elsewhere)
    assert files.remove_replaced(tmp_path, 15, 20, 10) is None
    assert elsewhere.is_dir()


class KilledError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("earlier", [True, False])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_tracker_on_a_complete_one(
    tmp_path, monkeypatch, place: int, earlier: bool
):
    if earlier:
        make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 4)
    write_atomically(tmp_path / files.TRACKER, "4")
    new = make_checkpoint(tmp_path / "new", 4, mark="new")
    new.rename(files.unfinished_folder(tmp_path, 4))
    left = [place]

    def stopping(function):
        def call(*args, **kwargs):
            if not left[0]:
                raise KilledError
            left[0] -= 1
            return function(*args, **kwargs)

        return call

    for owner, name in ((files.Path, "replace"), (files.Path, "unlink"), (files.shutil, "rmtree")):
        monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))
    try:
        files.publish(tmp_path, 4)
        files.remove_replaced(tmp_path, 4, 4, None)
        done = True
    except KilledError:
        done = False
    found = files.latest_iteration(tmp_path)
    if found is None:
        assert not earlier
        return
    manifest = files.read_manifest(files.iteration_folder(tmp_path, found))
    assert manifest is not None
    if done:
        assert (found, manifest["mark"]) == (4, "new")
        assert not list(tmp_path.glob("iter_*.*"))


def test_a_folder_that_cannot_hold_files_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=rf"--run-dir {path} cannot be written"):
            check_writable("--run-dir", str(path))
    check_writable("--save", None)
    check_writable("--save", str(tmp_path / "new" / "folder"))
    assert not list((tmp_path / "new" / "folder").iterdir())


def three_saves(rank, world_size, folder, goes_on):
    """Saves after each step, from the beginning or from what an earlier run left at iteration 2."""
    flags = ["--save", folder, "--save-retain-interval", "100"]
    if goes_on:
        with made.run_state(*flags) as state, contextlib.redirect_stdout(io.StringIO()):
            state.iteration = 1
            made.step(state, 1)
            _saver(state).save()
        flags += ["--load", str(Path(folder) / "." / "")]
    elif goes_on is False:
        for iteration in (2, 55):
            make_checkpoint(Path(folder), iteration)
        write_atomically(Path(folder) / files.TRACKER, "55")
    said = io.StringIO()
    with made.run_state(*flags) as state, contextlib.redirect_stdout(said):
        from megatron_cp.training.checkpoint.load import load_checkpoint

        if goes_on:
            load_checkpoint(state)
        saver = _saver(state)
        for number in (1, 2, 3):
            made.step(state, number)
            saver.save()
    return said.getvalue()


def _saver(state):
    from megatron_cp.training.checkpoint.save import Saver

    return Saver(state)


def test_a_run_from_the_beginning_keeps_the_checkpoints_of_an_earlier_one_aside(tmp_path):
    (said,) = run_on_ranks(1, three_saves, str(tmp_path), False)
    aside = tmp_path / "earlier-1"
    assert said.count(f"held checkpoints of an earlier run; they are in {aside}") == 1
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000003"]
    assert sorted(path.name for path in aside.glob("iter_*")) == ["iter_0000002", "iter_0000055"]
    assert files.latest_iteration(aside) == 55
    assert files.latest_iteration(tmp_path) == 3


@pytest.mark.parametrize("goes_on", [None, True])
def test_a_run_replaces_its_own_checkpoints_and_moves_none(tmp_path, goes_on):
    (said,) = run_on_ranks(1, three_saves, str(tmp_path), goes_on)
    assert "earlier run" not in said
    last = 5 if goes_on else 3
    assert [path.name for path in tmp_path.glob("iter_*")] == [f"iter_000000{last}"]
    assert not list(tmp_path.glob("earlier-*"))


def steps_from(rank, world_size, folder, flags, saves):
    """Where a run goes on from, and what it says; it saves after each step whose number is among `saves`."""
    said = io.StringIO()
    flags = ("--save", folder, "--load", folder, *flags)
    with made.run_state(*flags) as state, contextlib.redirect_stdout(said):
        from megatron_cp.training.checkpoint.load import load_checkpoint

        load_checkpoint(state)
        start, saver = state.iteration, _saver(state)
        for number in range(start + 1, max(saves, default=0) + 1):
            made.step(state, number)
            if number in saves:
                saver.save()
    return start, said.getvalue()


def test_checkpoints_of_steps_that_were_taken_anew_are_not_gone_back_to(tmp_path):
    """A run goes back from step 3 to 1 and saves step 4: what lies between is of the steps that it left."""
    folder = str(tmp_path)
    ((_, said),) = run_on_ranks(1, steps_from, folder, (), (1, 2, 3))
    assert "they are in" not in said
    ((start, said),) = run_on_ranks(1, steps_from, folder, ("--ckpt-step", "1"), (4, 5))
    aside = tmp_path / "earlier-1"
    note = f"held checkpoints after iteration 1, which this run took anew; they are in {aside}"
    assert start == 1 and said.count(note) == 1
    assert sorted(path.name for path in aside.glob("iter_*")) == ["iter_0000002", "iter_0000003"]
    assert (files.latest_iteration(tmp_path), files.latest_iteration(aside)) == (5, 3)
    for number in (4, 5):
        for file in files.iteration_folder(tmp_path, number).glob("*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
    ((start, _),) = run_on_ranks(1, steps_from, folder, ("--ckpt-fallback",), ())
    assert start == 1
    ((start, _),) = run_on_ranks(1, steps_from, str(aside), (), ())
    assert start == 3


def test_the_format_torch_is_not_loaded_by_ranks_that_experts_are_dealt_to(tmp_path):
    """Each would take those of the first."""
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").touch()
    flags = ("--num-experts", "2", "--moe-ffn-hidden-size", "32")
    dealt = ("--expert-model-parallel-size", "2")
    formats.check_legacy_layout(tmp_path, made.arguments(*flags, world_size=2))
    with pytest.raises(ValueError, match="that flag it holds those of the first rank alone"):
        formats.check_legacy_layout(tmp_path, made.arguments(*flags, *dealt, world_size=2))
