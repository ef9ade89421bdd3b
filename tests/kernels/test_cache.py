"""Nobody but the user decides what lies in the cache of compiled files."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_cp.kernels import cache


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A cache below folders of the test's own, outside of the home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "above" / "cache"))
    monkeypatch.setattr(cache, "_up_to_home", lambda folder: list(folder.parents)[:3])
    (tmp_path / "above").mkdir(mode=0o755)
    return tmp_path / "above"


def test_a_folder_above_that_others_can_write_to_is_refused(base: Path):
    assert cache.user_folder("kernels", "kernel").is_dir()
    base.chmod(0o777)
    with pytest.raises(PermissionError, match=r"lies below .*/above, which has owner .* mode 777"):
        cache.user_folder("kernels", "kernel")
    base.chmod(0o1777)  # sticky: others cannot rename what is ours
    assert cache.user_folder("kernels", "kernel").is_dir()


def test_a_folder_above_of_another_user_is_refused(base: Path, monkeypatch):
    cache.user_folder("kernels", "kernel")
    real = Path.stat

    def of_another(path: Path, **options):
        state = real(path, **options)
        return os.stat_result((*state[:4], 4242, *state[5:])) if path == base else state

    monkeypatch.setattr(Path, "stat", of_another)
    with pytest.raises(PermissionError, match="which has owner 4242"):
        cache.user_folder("kernels", "kernel")


@pytest.mark.parametrize("find", [cache.user_folder, cache.existing_folder])
def test_a_folder_of_another_owner_is_refused(find, base, monkeypatch):
    folder = cache.user_folder("cubins", "cubin")
    assert find("cubins", "cubin") == folder
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=rf"has owner {owner} .*belong to user {owner + 1}"):
        find("cubins", "cubin")


@pytest.mark.parametrize("mode", range(0, 0o1000, 0o11))
def test_who_can_replace_is_read_from_the_mode(mode: int):
    state = os.stat_result((stat.S_IFDIR | mode, 0, 0, 1, os.getuid(), 999_999, 0, 0, 0, 0))
    assert cache._others_can_replace(state) == bool(mode & 0o022)


@pytest.mark.parametrize(
    ("name", "members", "is_own"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "other"], False), ("staff", [], False)],
)
def test_a_group_is_the_user_s_own_by_its_name_and_without_other_members(
    monkeypatch, name, members, is_own
):
    group = SimpleNamespace(gr_name=name, gr_mem=members)
    monkeypatch.setattr(cache.grp, "getgrgid", lambda number: group)
    monkeypatch.setattr(cache.pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="me"))
    assert cache._is_own_group(999_999) == is_own


def test_the_folders_above_end_with_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    inside = tmp_path / "a" / "b"
    assert cache._up_to_home(inside) == [tmp_path / "a", tmp_path]
    assert cache._up_to_home(Path("/x/y")) == [Path("/x"), Path("/")]


def test_a_lock_that_is_a_link_is_not_followed(base: Path, tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    path = cache.user_folder("kernels", "kernel") / "a.bin"
    path.with_suffix(".lock").symlink_to(target)
    with pytest.raises(PermissionError, match="is a link"):
        cache.make_once(path, lambda: path.write_text("made"))
    assert target.read_text() == "content"
    path.with_suffix(".lock").unlink()
    assert cache.make_once(path, lambda: path.write_text("made")).read_text() == "made"
    assert stat.S_IMODE(path.with_suffix(".lock").stat().st_mode) == 0o600
