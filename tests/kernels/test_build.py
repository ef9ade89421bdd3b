"""Cubins: what is compiled, when, and who may write where. The compiler is a fake that counts."""

import os
import runpy
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import setuptools
from setuptools import Distribution
from setuptools.command.build_py import build_py

from megatron_cp.kernels import build, cache, compilers, elf
from tests.kernels.fake_compiler import HEADER, CountingCompiler
from tests.processes import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def test_include_closure_holds_every_included_file_and_no_other(tree):
    closure = build.included_files(tree / "attn" / "fwd.cu")
    names = [str(path.relative_to(tree)) for path in closure]
    assert names == ["attn/fwd.cu", "attn/params.h", "include/mcp/a.cuh", "include/mcp/ptx/b.cuh"]


@pytest.mark.parametrize(
    ("edited", "changes"),
    [
        ("attn/fwd.cu", True),
        ("attn/params.h", True),
        ("include/mcp/ptx/b.cuh", True),
        ("include/mcp/other.cuh", False),
    ],
)
def test_key_follows_exactly_the_files_that_are_included(tree, edited, changes):
    variant = build.variants()["fwd_64"]
    before = build.source_key(variant)
    with (tree / edited).open("a") as file:
        file.write("// edited\n")
    assert (build.source_key(variant) != before) is changes


def test_variants_of_one_source_have_keys_of_their_own(tree):
    first, second = build.variants().values()
    assert build.source_key(first) != build.source_key(second)
    assert (first.value("D"), second.value("D")) == ("64", "128")


def test_cubin_is_compiled_once_and_again_after_an_edit_or_by_another_compiler(tree):
    variant, compiler = build.variants()["fwd_64"], CountingCompiler()
    first = build.cached_cubin(variant, compiler)
    assert first == HEADER[13] + b"fwd.cu D=64 1"
    assert build.cached_cubin(variant, compiler) == first
    assert compiler.calls == 1
    newer = CountingCompiler("13.1.0")
    build.cached_cubin(variant, newer)
    assert newer.calls == 1
    (tree / "attn" / "params.h").write_text("// other parameters\n")
    assert build.cached_cubin(variant, compiler) == HEADER[13] + b"fwd.cu D=64 2"


def test_ranks_that_need_a_cubin_at_once_compile_it_once(tree):
    variant, compiler = build.variants()["fwd_128"], CountingCompiler()
    inside, results = threading.Barrier(4), []

    def rank():
        inside.wait(timeout=HANG_SECONDS)
        results.append(build.cached_cubin(variant, compiler))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANG_SECONDS)
    assert results == [HEADER[13] + b"fwd.cu D=128 1"] * 4
    assert compiler.calls == 1


def test_cache_is_private_to_its_owner(tree):
    build.cached_cubin(build.variants()["fwd_64"], CountingCompiler())
    folder = build.cache_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    cubins = list(folder.glob("*.cubin"))
    assert len(cubins) == 1
    assert not stat.S_IMODE(cubins[0].stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_cache_that_others_can_write_to_is_refused(tree, mode):
    build.cache_folder().chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode {mode:o}; .* chmod 700 it"):
        build.cached_cubin(build.variants()["fwd_64"], CountingCompiler())


def test_failed_compilation_leaves_nothing_that_is_later_taken_for_a_cubin(tree):
    variant = build.variants()["fwd_64"]
    with pytest.raises(compilers.CompileError, match="line 1: no"):
        build.cached_cubin(variant, CountingCompiler(error="line 1: no"))
    assert [path.suffix for path in build.cache_folder().iterdir()] == [".lock"]
    assert build.cached_cubin(variant, CountingCompiler()).endswith(b"fwd.cu D=64 1")


def test_interrupted_write_leaves_the_old_file(tree, monkeypatch):
    target = build.cache_folder() / "x.cubin"
    cache.write_whole(target, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        cache.write_whole(target, b"new and longer")
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]


def test_packaged_cubin_is_used_while_it_fits_the_sources_and_not_after(tree, machine):
    packager, user = CountingCompiler(), CountingCompiler()
    machine(packager)
    count, words = build.build_packaged(tree / "cubins")
    assert count == 2
    assert words.startswith(
        "by nvcc 13.0.1; not for drivers of CUDA 12, which compile on first use: pip install"
    )
    assert packager.calls == 2
    machine(user)
    assert build.cubin("fwd_128") == HEADER[13] + b"fwd.cu D=128 2"
    assert user.calls == 0
    (tree / "attn" / "params.h").write_text("// edited\n")
    build.cubin.cache_clear()
    assert build.cubin("fwd_128") == HEADER[13] + b"fwd.cu D=128 1"
    assert user.calls == 1
    assert build.build_packaged(tree / "cubins")[0] == 2  # the old ones go
    assert len(list((tree / "cubins").iterdir())) == 2


def test_package_without_a_compiler_has_no_cubins_and_no_folder_and_says_why(tree, machine):
    machine()
    count, reason = build.build_packaged(tree / "cubins")
    assert count == 0
    assert reason.startswith("no compiler for the Hopper kernels")
    assert not (tree / "cubins").exists()


def test_cubins_of_a_wheel_are_of_cuda_12_where_such_a_compiler_is_there(tree, machine):
    machine(
        CountingCompiler("13.0.88"),
        CountingCompiler("12.4", "nvrtc"),
        CountingCompiler("12.8", "nvrtc"),
    )
    assert build.build_packaged(tree / "cubins") == (2, "by nvrtc 12.8 or nvcc 13.0.88")
    made = [path.read_bytes() for path in (tree / "cubins").iterdir()]
    assert {elf.toolkit_major(cubin) for cubin in made} == {12}


def test_command_line_says_what_it_made(tree, machine, capsys):
    machine(CountingCompiler())
    assert build.main(["--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nvcc 13.0.1")
    assert [line.split(":")[0] for line in lines[1:]] == ["fwd_64", "fwd_128"]
    assert all("bytes, CUDA 13 (ELF ABI 0x41/8), " in line for line in lines[1:])
    with pytest.raises(SystemExit):
        build.main(["fwd_65"])
    assert "unknown variant 'fwd_65'; one of fwd_64, fwd_128" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("editable", "switch", "made"), [(False, None, True), (True, None, False), (False, "0", False)]
)
def test_installation_makes_cubins_unless_editable_or_told_not_to(
    monkeypatch, editable, switch, made
):
    given, commands = {}, []
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    setup = runpy.run_path("setup.py")
    monkeypatch.setattr(build_py, "run", lambda _: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.delenv("MEGATRON_CP_CUBINS", raising=False)
    if switch is not None:
        monkeypatch.setenv("MEGATRON_CP_CUBINS", switch)
    command = setup["BuildWithCubins"](Distribution())
    command.build_lib, command.editable_mode = "out", editable
    command.run()
    expected = [str(Path("kernels", "build.py")), "--into", "out/megatron_cp/kernels/cubins"]
    assert [words[1:] for words in commands] == ([expected] if made else [])
    assert given["cmdclass"]["build_py"] is setup["BuildWithCubins"]


def test_build_runs_as_a_file_before_anything_is_installed(tmp_path):
    program = [sys.executable, str(ROOT / "kernels" / "build.py"), "--list"]
    run = subprocess.run(
        program, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    names = [line.split()[0] for line in run.stdout.splitlines()]
    assert names == list(build.variants()), run.stderr
