"""The emulator's headers match the device's, its library is built safely, and it finds defects put into the kernel."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.attn.emulated import machine as emulated_machine
from megatron_cp.attn.emulated.backend import Settings, running
from megatron_cp.kernels import build
from megatron_cp.kernels.emulator import library
from tests.attn.formula import random_case
from tests.kernels.careless_changes import BACKWARD, FORWARD, LATE_LANES

DEVICE = library.KERNELS / "include" / "mcp" / "ptx"
EMULATED = library.EMULATOR / "include" / "mcp" / "ptx"
# Names that one side has for itself: how a wrapper is written, not what a kernel sees.
OWN_NAMES = {"flush_subnormal"}


def _declarations(folder: Path) -> set[str]:
    """Returns `template return-type name(parameter types)` of every wrapper, without parameter names."""
    found = set()
    pattern = re.compile(
        r"((?:template\s*<[^>]*>\s*)*)MCP_DEVICE\s+([\w\s*&]+?)\s(\w+(?:<\w+>)?)\(([^{;]*?)\)\s*[{;]"
    )
    for path in sorted(folder.glob("*.cuh")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        for template, result, name, parameters in pattern.findall(text):
            types = [_type(p) for p in re.split(r",(?![^(]*\))", parameters) if p.strip()]
            found.add(
                f"{path.name}: {' '.join(template.split())} {result} {name}({', '.join(types)})"
            )
    return found


def _type(parameter: str) -> str:
    """Returns a parameter without its name."""
    reference = re.search(r"^(.*)\(&\s*\w*\)(.*)$", parameter.strip())
    if reference:
        return f"{reference[1].strip()} (&){reference[2]}"
    words = parameter.split()
    known = {
        "u32",
        "u64",
        "i32",
        "i64",
        "u16",
        "float",
        "int",
        "bool",
        "const",
        "void",
        "f32x2",
        "i32x4",
    }
    if len(words) > 1 and words[-1].strip("*&") not in known and not words[-1].endswith(("*", "&")):
        words = words[:-1]
    return " ".join(words)


def test_every_wrapper_has_the_same_signature_on_both_sides():
    device, emulated_side = _declarations(DEVICE), _declarations(EMULATED)
    assert len(device) > 50
    emulated_side = {line for line in emulated_side if not any(name in line for name in OWN_NAMES)}
    assert device == emulated_side


def test_both_sides_have_the_same_files():
    assert {p.name for p in DEVICE.iterdir()} == {p.name for p in EMULATED.iterdir()}


def test_what_is_read_with_every_kernel_holds_none_of_the_large_headers_of_the_standard_library():
    """With them each of the kernels takes more than twice as long to compile."""
    folders = emulated_machine.source_of(build.variants()["fwd_bf16_64"]).include_folders
    roots = [library.EMULATOR / "entry.cpp"]
    roots += sorted({variant.path for variant in build.variants().values()})
    files = {file for root in roots for file in build.included_files(root, folders)}
    assert library.EMULATOR / "include" / "mcp" / "ptx" / "wgmma.cuh" in files
    text = "".join(file.read_text() for file in files)
    assert set(re.findall(r"#include <(\w+)>", text)) <= {"cstdint", "cstring"}


def _break(mutation, tmp_path, monkeypatch):
    """Lets the emulated backend run a copy of the kernels with one change."""
    name, text, replacement, _ = mutation
    kernels = tmp_path / "kernels"
    for folder in ("attn", "include"):
        shutil.copytree(library.KERNELS / folder, kernels / folder)
    source = (kernels / name).read_text()
    assert text in source, f"{name} has changed: say this mutation in its new words"
    (kernels / name).write_text(source.replace(text, replacement))
    whole = emulated_machine.source_of
    monkeypatch.setattr(
        emulated_machine, "source_of", lambda variant: replace(whole(variant), root=kernels)
    )


@pytest.mark.parametrize("mutation", FORWARD.values(), ids=FORWARD)
def test_a_careless_change_of_the_forward_kernel_is_found(mutation, tmp_path, monkeypatch):
    _break(mutation, tmp_path, monkeypatch)
    slices = [(0, 150, 0, 290, None, None), (150, 260, 0, 140, None, -20)]
    inputs, _ = random_case(260, 300, (2, 1), (64, 64), torch.bfloat16)
    with pytest.raises(library.EmulatorError, match=mutation[-1]):
        attend(*inputs, masks.from_slices(260, 300, slices), backend="emulated")


@pytest.mark.parametrize("mutation", BACKWARD.values(), ids=BACKWARD)
def test_a_careless_change_of_the_backward_kernel_is_found(mutation, tmp_path, monkeypatch):
    _break(mutation, tmp_path, monkeypatch)
    alone = "bwd_wide" in mutation[0] or "bwd_dq" in mutation[0]
    head_dims = {"bwd_roles": (64, 64), "bwd_64": (64, 64), "bwd_192": (192, 192)}
    named = (dims for file, dims in head_dims.items() if file in mutation[0])
    dims = next(named, (192, 128) if alone else (128, 128))
    inputs, _ = random_case(300, 200, (2, 1), dims, torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]
    out, _ = attend(*leaves, masks.full(300, 200), backend="emulated", deterministic=alone)
    with pytest.raises(library.EmulatorError, match=mutation[-1]):
        out.sum().backward()


@pytest.mark.parametrize("mutation", LATE_LANES.values(), ids=LATE_LANES)
def test_a_lane_that_its_warp_does_not_wait_for_is_found_under_some_seed(
    mutation, tmp_path, monkeypatch
):
    _break(mutation, tmp_path, monkeypatch)
    # Many tiles between two meetings of a warp: of queries for the backward kernel, of keys else.
    shape = (1500, 200) if "bwd" in mutation[0] else (200, 1500)
    inputs, _ = random_case(*shape, (1, 1), (64, 64), torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]
    with pytest.raises(library.EmulatorError, match=mutation[-1]):
        for seed in range(1, 25):
            with running(Settings(seed=seed, host_threads=1)):
                out, _ = attend(*leaves, masks.full(*shape), backend="emulated")
                out.sum().backward()


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    library._compiler.cache_clear()
    try:
        with pytest.raises(
            library.EmulatorBuildError, match=r"g\+\+ is on PATH .*install .* or use backend='cpu'"
        ):
            library._compiler()
    finally:
        monkeypatch.undo()
        library._compiler.cache_clear()


def test_source_that_does_not_compile_is_shown_with_the_compilers_words(tmp_path):
    broken = tmp_path / "broken.cu"
    broken.write_text("int kernel(int x) { return y; }\n")
    with pytest.raises(library.EmulatorBuildError, match="was not declared"):
        library.load(library.Source("broken", "broken.cu", "kernel", "int", root=tmp_path))


def test_a_cache_that_others_can_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = library.cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o722)
    with pytest.raises(PermissionError, match="mode 722; it must belong to user"):
        library.cache_folder()


def test_changed_source_gets_another_library(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "kernel.cu"
    found = []
    for body in ("*params.out = 1;", "*params.out = 2;"):
        source.write_text(
            "struct Params { int* out; };\n#include <mcp/platform.cuh>\n"
            f"MCP_KERNEL(32) kernel(MCP_PARAMS(Params, params)) {{ {body} }}\n"
        )
        library.load.cache_clear()
        kernel = library.load(
            library.Source("changing", "kernel.cu", "kernel", "Params", root=tmp_path)
        )
        out = torch.zeros(1, dtype=torch.int32)
        kernel.run(_Pointer(out.data_ptr()), library.Machine(1, 32, 0))
        found.append(out.item())
    assert found == [1, 2]
    names = sorted(p.name for p in library.cache_folder().iterdir() if not p.name.endswith(".lock"))
    assert [n.split(".")[0] for n in names] == ["changing", "changing", "engine"]


class _Pointer(library.ctypes.Structure):
    _fields_ = (("out", library.ctypes.c_void_p),)


def test_portable_context_switches_give_the_same_bits(monkeypatch):
    inputs, _ = random_case(140, 140, (1, 1), (64, 64), torch.bfloat16)
    mask = masks.causal(140)
    expected = attend(*inputs, mask, backend="emulated")
    load = library.load

    def load_portable(source):
        return load(source, ("-DMCP_EMULATOR_UCONTEXT", "-Werror"))

    monkeypatch.setattr(emulated_machine.library, "load", load_portable)
    for got, wanted in zip(attend(*inputs, mask, backend="emulated"), expected, strict=True):
        assert torch.equal(got, wanted)
