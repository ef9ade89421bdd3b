"""A cache folder of another user is refused, also where only that user can write to it."""

import os

import pytest

from megatron_cp.kernels import cache


@pytest.mark.parametrize("find", [cache.user_folder, cache.existing_folder])
def test_a_folder_of_another_owner_is_refused(find, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache.user_folder("cubins", "cubin")
    assert find("cubins", "cubin") == folder
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match=rf"has owner {owner} .*belong to user {owner + 1}"):
        find("cubins", "cubin")
