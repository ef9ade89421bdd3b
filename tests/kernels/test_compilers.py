"""Which compiler is taken, whose cubins a driver is given, and what happens when one fails. Fakes, and real ones."""

import contextlib
import locale
import shutil

import pytest

from megatron_cp.kernels import build, compilers, elf
from tests.kernels.fake_compiler import HEADER, REAL_COMPILERS, TINY, CountingCompiler

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
    (tree / "attn" / "fwd.cu").write_text(TINY)
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
    (tree / "attn" / "fwd.cu").write_text(TINY)
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


def test_compiling_leaves_the_encoding_of_files_as_it_was(tree):
    """NVRTC puts the thread that calls it in the C locale, in which Python reads UTF-8 as ASCII."""
    nvrtcs = [one for one in REAL_COMPILERS if one.kind == "nvrtc"]
    if not nvrtcs:
        pytest.skip("no NVRTC on this machine: make toolkits")
    before = locale.nl_langinfo(locale.CODESET)
    for text in (TINY, "no kernel"):
        (tree / "attn" / "fwd.cu").write_text(text)
        for one in nvrtcs:
            with contextlib.suppress(compilers.CompileError):
                build.compile_variant(build.variants()["fwd_64"], one)
            assert locale.nl_langinfo(locale.CODESET) == before, one.name


def test_missing_compiler_is_named_with_what_to_do(tree, machine):
    machine()
    message = (
        r"nvcc and NVRTC found: none; allowed: CUDA 12\.4 or later .*CUDA_HOME.*libnvrtc\.so\.12.*; "
        r'pip install "nvidia-cuda-nvrtc-cu12"'
    )
    with pytest.raises(compilers.NoCompilerError, match=message):
        build.cubin("fwd_64")


@pytest.mark.parametrize("version", ["11.8.89", "12.3.107"])
def test_compiler_that_is_too_old_is_not_taken(tmp_path, monkeypatch, version):
    old = tmp_path / "bin" / "nvcc"
    old.parent.mkdir()
    old.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, V{version}'\n")
    old.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    compilers.nvccs.cache_clear()
    found = compilers.nvccs()
    compilers.nvccs.cache_clear()
    assert str(old) not in [one.path for one in found]


@pytest.mark.parametrize("kind", ["nvcc", "nvrtc"])
def test_real_compiler_makes_a_cubin_and_reports_errors(tree, kind):
    compiler = next((one for one in REAL_COMPILERS if one.kind == kind), None)
    if compiler is None:
        pytest.skip(f"no {kind} on this machine")
    (tree / "attn" / "fwd.cu").write_text(TINY)
    made = build.compile_variant(build.variants()["fwd_64"], compiler)
    assert made[:4] == b"\x7fELF"
    assert b"tiny" in made
    (tree / "attn" / "fwd.cu").write_text(TINY.replace("x[", "y["))
    with pytest.raises(compilers.CompileError, match='identifier "y" is undefined'):
        build.compile_variant(build.variants()["fwd_64"], compiler)
