"""Cubins: what is compiled, when, and who may write where. The compiler is a fake that counts."""

import json
import os
import runpy
import shutil
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
from megatron_cp.kernels import driver as driver_module
from tests.processes import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


# What identifies the ELF file of a cubin, as compilers of these major versions wrote it (read with xxd).
HEADER = {
    12: bytes.fromhex("7f454c46 020101 33 07 00000000000000"),
    13: bytes.fromhex("7f454c46 020101 41 08 00000000000000"),
}
REAL_COMPILERS = (*compilers.nvrtcs(), *compilers.nvccs())


class CountingCompiler:
    """Stands in for a compiler; its 'cubin' says what it was given, after the header of its version."""

    kind, path = "nvcc", "nvcc"

    def __init__(self, version="13.0.1", kind="nvcc", log="", error=None):
        self.calls, self.version, self.kind, self.log, self.error = 0, version, kind, log, error
        self.numbers = tuple(int(part) for part in version.split(".")[:2])
        self.name = f"{kind} {version}"

    def compile_with_log(self, source, defines, include_folders):
        self.calls += 1
        if self.error:
            raise compilers.CompileError(self.error)
        assert all(folder.is_dir() for folder in include_folders)
        text = f"{source.name} {' '.join(defines)} {self.calls}".encode()
        return compilers.Compiled(HEADER[self.numbers[0]] + text, "", self.log)


@pytest.fixture
def machine(monkeypatch):
    """Sets what compilers there are, and the driver's version."""

    def install(*found, driver=None):
        by_kind = {kind: tuple(c for c in found if c.kind == kind) for kind in ("nvcc", "nvrtc")}
        monkeypatch.setattr(compilers, "nvccs", lambda: by_kind["nvcc"])
        monkeypatch.setattr(compilers, "nvrtcs", lambda: by_kind["nvrtc"])
        monkeypatch.setattr(driver_module, "installed_version", lambda: driver)
        build.cubin.cache_clear()

    return install


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder of kernels with two variants of one source, and an empty cache."""
    sources = tmp_path / "kernels"
    (sources / "include" / "mcp" / "ptx").mkdir(parents=True)
    (sources / "attn").mkdir()
    (sources / "attn" / "fwd.cu").write_text('#include <mcp/a.cuh>\n#include "params.h"\n')
    (sources / "attn" / "params.h").write_text("// parameters\n")
    (sources / "include" / "mcp" / "a.cuh").write_text("#pragma once\n#include <mcp/ptx/b.cuh>\n")
    (sources / "include" / "mcp" / "ptx" / "b.cuh").write_text("#include <mcp/a.cuh>\n")
    (sources / "include" / "mcp" / "other.cuh").write_text("// of another kernel\n")
    shared = {"pass": "forward", "source": "attn/fwd.cu", "entry": "tiny"}
    listed = [{"name": f"fwd_{d}", "defines": {"D": d}, **shared} for d in (64, 128)]
    (sources / "attn" / "variants.json").write_text(json.dumps({"variants": listed}))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "PACKAGED", sources / "cubins")
    monkeypatch.setattr(build, "VARIANTS", sources / "attn" / "variants.json")
    monkeypatch.setattr(build, "INCLUDE_FOLDERS", (sources / "include", sources))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.variants.cache_clear()
    build.cubin.cache_clear()
    yield sources
    build.variants.cache_clear()
    build.cubin.cache_clear()


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
    assert build.build_packaged(tree / "cubins") == (2, "nvcc 13.0.1")
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
    assert build.build_packaged(tree / "cubins") == (2, "nvrtc 12.8 or nvcc 13.0.88")
    made = [path.read_bytes() for path in (tree / "cubins").iterdir()]
    assert {elf.toolkit_major(cubin) for cubin in made} == {12}


# ---------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("packaged", "driver", "taken"),
    [
        ("12.8", (12, 0), True),  # a minor version back: the same binary format
        ("12.8", (13, 0), True),
        ("13.0.88", (13, 1), True),
        ("13.0.88", None, True),  # nothing to ask
        ("13.0.88", (12, 9), False),
        ("12.8", (11, 8), False),
    ],
)
def test_packaged_cubin_is_used_by_drivers_of_its_major_version_and_later(
    tree, machine, packaged, driver, taken
):
    machine(CountingCompiler(packaged))
    build.build_packaged(tree / "cubins")
    machine(driver=driver)
    if taken:
        assert build.cubin("fwd_64")[:9] == HEADER[int(packaged[:2])][:9]
        return
    with pytest.raises(compilers.NoCompilerError) as refusal:
        build.cubin("fwd_64")
    words = str(refusal.value)
    assert f"is of CUDA {packaged[:2]} (ELF ABI 0x" in words
    assert f"the driver of CUDA {driver[0]}" in words
    cure = 'pip install "nvidia-cuda-nvrtc-cu12"' if driver[0] == 12 else "update the NVIDIA driver"
    assert cure in words


def test_driver_of_cuda_12_gets_a_cubin_of_cuda_12_although_one_of_13_is_packaged(tree, machine):
    machine(CountingCompiler("13.0.88"))
    build.build_packaged(tree / "cubins")
    new, old = CountingCompiler("13.0.88"), CountingCompiler("12.8", "nvrtc")
    machine(new, CountingCompiler("13.0", "nvrtc"), old, driver=(12, 4))
    assert build.cubin("fwd_64") == HEADER[12] + b"fwd.cu D=64 1"
    assert (new.calls, old.calls) == (0, 1)
    machine(new, old, driver=(13, 0))
    assert build.cubin("fwd_64")[:9] == HEADER[13][:9]  # the packaged one again


def test_cached_cubin_of_a_newer_compiler_is_not_given_to_an_older_driver(tree, machine):
    new, old = CountingCompiler("13.0.88"), CountingCompiler("12.6", "nvrtc")
    machine(new, driver=(13, 0))
    assert elf.toolkit_major(build.cubin("fwd_64")) == 13
    machine(new, old, driver=(12, 2))
    assert elf.toolkit_major(build.cubin("fwd_64")) == 12


def test_oldest_major_version_is_taken_in_its_newest_minor_and_nvrtc_before_nvcc(machine):
    machine(
        *(CountingCompiler(v, "nvrtc") for v in ("13.0", "12.4", "12.8", "12.6")),
        *(CountingCompiler(v) for v in ("13.1.2", "13.0.88")),
    )
    assert [c.name for c in compilers.find_compilers()] == ["nvrtc 12.8", "nvcc 13.1.2"]
    assert [c.name for c in compilers.find_compilers("nvcc")] == ["nvcc 13.1.2"]
    assert [c.name for c in compilers.find_compilers(at_most=12)] == ["nvrtc 12.8"]
    with pytest.raises(compilers.NoCompilerError, match=r"nvcc found: nvcc 13\.1\.2 .*up to 12"):
        compilers.find_compilers("nvcc", at_most=12)


# ---------------------------------------------------------------------- compilers that fail


@pytest.mark.parametrize("broken", ["nvrtc", "nvcc"])
def test_compiler_that_fails_is_replaced_by_the_other_and_named(tree, machine, capsys, broken):
    kinds = {"nvrtc": "12.8", "nvcc": "12.8.1"}
    found = {
        kind: CountingCompiler(version, kind, error="no gcc" if kind == broken else None)
        for kind, version in kinds.items()
    }
    machine(*found.values())
    assert build.cubin("fwd_64") == HEADER[12] + b"fwd.cu D=64 1"
    said = capsys.readouterr().err
    if broken == "nvrtc":  # it is tried first
        assert "nvrtc 12.8 (nvcc): no gcc" in said
        assert "nvcc 12.8.1 is used instead" in said
    else:
        assert said == "" and found["nvcc"].calls == 0


def test_compilers_that_all_fail_give_the_reasons_of_each(tree, machine):
    machine(
        CountingCompiler("12.8", "nvrtc", error="builtins missing"),
        CountingCompiler("13.0.88", error="gcc is too new"),
    )
    with pytest.raises(compilers.CompileError) as failure:
        build.cubin("fwd_64")
    assert "nvrtc 12.8" in str(failure.value) and "builtins missing" in str(failure.value)
    assert "nvcc 13.0.88" in str(failure.value) and "gcc is too new" in str(failure.value)


def test_code_that_the_compiler_calls_serialised_is_not_used(tree, machine):
    log = "ptxas info : (C7516) Potential Performance Loss: wgmma.mma_async are serialized"
    machine(CountingCompiler("12.4", "nvrtc", log=log))
    with pytest.raises(compilers.CompileError, match=r"serialises the matrix products of fwd_64"):
        build.cubin("fwd_64")
    machine(CountingCompiler("12.4", "nvrtc", log=log), CountingCompiler("12.8.1"))
    assert build.cubin("fwd_64").endswith(b"fwd.cu D=64 1")


_BROKEN_NVCC = """#!/bin/sh
test "$1" = --version && echo 'Cuda compilation tools, release 12.8, V12.8.93' && exit
echo 'nvcc fatal : no host compiler' >&2; exit 1
"""


def test_nvcc_without_a_host_compiler_does_not_stop_nvrtc(tree, tmp_path, monkeypatch):
    real = [one for one in REAL_COMPILERS if one.kind == "nvrtc"]
    if not real:
        pytest.skip("no NVRTC on this machine: make toolkits")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(_BROKEN_NVCC)
    nvcc.chmod(0o755)
    (tree / "attn" / "fwd.cu").write_text(_TINY)
    broken = compilers.Compiler("nvcc", str(nvcc), "12.8.93")
    monkeypatch.setattr(compilers, "nvccs", lambda: (broken,))
    monkeypatch.setattr(compilers, "nvrtcs", lambda: (real[0],))
    assert elf.toolkit_major(build.compiled_cubin("fwd_64")) == real[0].numbers[0]
    monkeypatch.setattr(compilers, "nvrtcs", tuple)
    with pytest.raises(compilers.CompileError, match="no host compiler"):
        build.compiled_cubin("fwd_64")


@pytest.mark.parametrize("major", [12, 13])
def test_real_compiler_writes_the_abi_that_the_table_knows(tree, major):
    real = [one for one in REAL_COMPILERS if one.numbers[0] == major]
    if not real:
        pytest.skip(f"no compiler of CUDA {major} on this machine: make toolkits")
    (tree / "attn" / "fwd.cu").write_text(_TINY)
    for one in real:
        made = build.compile_variant(build.variants()["fwd_64"], one)
        assert made[:9] == HEADER[major][:9], one.name


def test_abi_of_what_is_no_cubin_is_refused_and_an_unknown_one_runs_nowhere():
    with pytest.raises(ValueError, match=r"begins with b'text'; it must be an ELF file"):
        elf.abi(b"text that is no cubin")
    unknown = HEADER[13][:8] + b"\x09" + HEADER[13][9:]
    assert elf.toolkit_major(unknown) is None
    assert not elf.runs_on(unknown, 99)
    assert elf.runs_on(unknown, None)
    assert build.cuda_of(unknown) == "CUDA unknown (ELF ABI 0x41/9)"


def test_missing_compiler_is_named_with_what_to_do(tree, machine):
    machine()
    message = (
        r"nvcc and NVRTC found: none; allowed: CUDA 12\.4 or later .*CUDA_HOME.*libnvrtc\.so\.12.*; "
        r'pip install "nvidia-cuda-nvrtc-cu12"'
    )
    with pytest.raises(compilers.NoCompilerError, match=message):
        build.cubin("fwd_64")


def test_compiler_older_than_the_instructions_is_not_taken(tmp_path, monkeypatch):
    old = tmp_path / "bin" / "nvcc"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    old.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    compilers.nvccs.cache_clear()
    found = compilers.nvccs()
    compilers.nvccs.cache_clear()
    assert str(old) not in [one.path for one in found]


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


_TINY = """#include <mcp/a.cuh>
extern "C" __global__ void __launch_bounds__(128, 1) tiny(float* x) { x[threadIdx.x] = D; }
"""


@pytest.mark.parametrize("kind", ["nvcc", "nvrtc"])
def test_real_compiler_makes_a_cubin_and_reports_errors(tree, kind):
    compiler = next((one for one in REAL_COMPILERS if one.kind == kind), None)
    if compiler is None:
        pytest.skip(f"no {kind} on this machine")
    (tree / "attn" / "fwd.cu").write_text(_TINY)
    made = build.compile_variant(build.variants()["fwd_64"], compiler)
    assert made[:4] == b"\x7fELF"
    assert b"tiny" in made
    (tree / "attn" / "fwd.cu").write_text(_TINY.replace("x[", "y["))
    with pytest.raises(compilers.CompileError, match='identifier "y" is undefined'):
        build.compile_variant(build.variants()["fwd_64"], compiler)


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
