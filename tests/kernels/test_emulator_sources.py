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
from megatron_cp.kernels import build
from megatron_cp.kernels.emulator import library
from tests.attn.formula import random_case

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


# What a careless change of the kernel could look like: (file, text, replacement, what the emulator says).
MUTATIONS = {
    "no fence before the scores": (
        "include/mcp/gemm.cuh",
        "ptx::wgmma_fence();",
        "",
        "no wgmma.fence|changed after the last wgmma.fence",
    ),
    "a cleared tail without proxy fence": (
        "attn/key_producer.cuh",
        "ptx::fence_proxy_async();\n            ptx::sync_warp();",
        "ptx::sync_warp();",
        "through the generic proxy",
    ),
    "a tail released before all lanes have cleared it": (
        "attn/key_producer.cuh",
        "ptx::fence_proxy_async();\n            ptx::sync_warp();",
        "ptx::fence_proxy_async();",
        r"was written by thread \d+, and nothing orders that write before",
    ),
    "waits for the other parity": (
        "include/mcp/ring.cuh",
        "wait(empty(at), at.parity ^ 1)",
        "wait(empty(at), at.parity)",
        "deadlock",
    ),
    "no wait for the keys": (
        "attn/fwd_sm90.cuh",
        "shared.key_ring.wait_full(keys_at);\n        turns.take();",
        "turns.take();",
        "TMA copy that this thread has not waited for|nobody has written",
    ),
    "reads the scores too early": (
        "attn/fwd_sm90.cuh",
        "ptx::wgmma_wait<1>();",
        "ptx::wgmma_wait<2>();",
        "was written between|accumulator read before|in flight",
    ),
    "packs probabilities before the wait": (
        "attn/fwd_sm90.cuh",
        "keys_at.advance();\n        ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(out);",
        "keys_at.advance();\n        pack<T>(probs, scores);\n        ptx::wgmma_wait<0>();\n"
        "        ptx::wgmma_pin(out);",
        "operand A registers of lane 0 changed",
    ),
    "releases the values before the wait": (
        "attn/fwd_sm90.cuh",
        "ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(out);\n"
        "        if (speaker) shared.value_ring.release(values_at);",
        "if (speaker) shared.value_ring.release(values_at);\n        ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "expects the bytes of the keys for the queries": (
        "attn/fwd_sm90.cuh",
        "expect_tx(full, Traits::kQueryBytes)",
        "expect_tx(full, Traits::kQueryBytes / 2)",
        "fewer bytes were expected than copied|bytes more than expected",
    ),
    "an unaligned base": (
        "attn/fwd_sm90.cuh",
        "(ptx::dynamic_shared() + kSwizzleBytes - 1) / kSwizzleBytes * kSwizzleBytes",
        "(ptx::dynamic_shared() + 127) / 128 * 128 + 128",
        "misaligned swizzled panel",
    ),
    "one register too many": (
        "attn/traits.h",
        "kConsumers == 2 ? 24 : 32",
        "kConsumers == 2 ? 24 : 40",
        "deadlock.*setmaxnreg.inc 160",
    ),
}
BACKWARD_MUTATIONS = {
    "consumers that do not meet before dq": (
        "attn/bwd_sm90.cuh",
        "ptx::named_barrier_sync<Shared::kConsumerThreads>(1);",
        "",
        r"was written by thread \d+, and nothing orders|nobody has written|through the generic proxy",
    ),
    "ds without proxy fence": (
        "attn/bwd_sm90.cuh",
        "ptx::fence_proxy_async();\n            ptx::named_barrier_sync",
        "ptx::named_barrier_sync",
        "through the generic proxy",
    ),
    "queries released before dk is done": (
        "attn/bwd_sm90.cuh",
        "ptx::wgmma_wait<0>();\n            ptx::wgmma_pin(dk);\n            release(shared.query_ring);",
        "release(shared.query_ring);\n            ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "a single buffer for ds": (
        "attn/bwd_sm90.cuh",
        "shared.ds(rows_at.stage)",
        "shared.ds(0)",
        "which a wgmma of warpgroup . may still read",
    ),
    "dq handed over without proxy fence": (
        "attn/bwd_sm90.cuh",
        "ptx::fence_proxy_async();\n        ptx::mbarrier_arrive(shared.dq_ring",
        "ptx::mbarrier_arrive(shared.dq_ring",
        "through the generic proxy",
    ),
    "dq given back while it is read": (
        "attn/bwd_load_store.cuh",
        "ptx::tma_wait_group_read<0>();\n            shared.dq_ring.release(dq_at);",
        "shared.dq_ring.release(dq_at);",
        "which a bulk store of thread .* may still read",
    ),
    "queries of dk alone released before dk is done": (
        "attn/bwd_wide_sm90.cuh",
        "ptx::wgmma_wait<0>();\n        ptx::wgmma_pin(dk);\n        this->release(shared.query_ring, at);",
        "this->release(shared.query_ring, at);\n        ptx::wgmma_wait<0>();",
        "which a wgmma of warpgroup . may still read",
    ),
    "weights read before they are written": (
        "attn/bwd_wide_sm90.cuh",
        "shared.weights_ring.wait_full(at);",
        "",
        "was written by thread|nobody has written|phase",
    ),
    "probabilities of 192 read before they are written": (
        "attn/bwd_192_sm90.cuh",
        "shared.weight_ring.wait_full(weights_at);",
        "",
        "was written by thread|nobody has written",
    ),
    "probabilities of 192 written over what dk still reads": (
        "attn/bwd_192_sm90.cuh",
        "shared.weight_ring.wait_empty(weights_at);",
        "",
        "nothing orders that write before this access",
    ),
    "gradients of scores of 192 read before all have written them": (
        "attn/bwd_192_sm90.cuh",
        "ptx::named_barrier_sync<kWarpgroupSize>(1);",
        "",
        "generic proxy|was written by thread|nobody has written",
    ),
    "dout of 192 released before dv is done": (
        "attn/bwd_192_sm90.cuh",
        "c, shared.probs());\n        }\n        ptx::wgmma_wait<0>();",
        "c, shared.probs());\n        }",
        "which a wgmma of warpgroup . may still read",
    ),
    "gradients of scores of 192 without proxy fence": (
        "attn/bwd_192_sm90.cuh",
        "ptx::fence_proxy_async();\n        ptx::named_barrier_sync<kWarpgroupSize>(1);",
        "ptx::named_barrier_sync<kWarpgroupSize>(1);",
        "through the generic proxy",
    ),
    "dq of 192 written before it is given back": (
        "attn/bwd_192_sm90.cuh",
        "shared.dq_ring.wait_empty(dq_at);",
        "",
        "which a bulk store of thread .* may still read",
    ),
    "keys of dq alone released while they are multiplied": (
        "attn/bwd_dq_sm90.cuh",
        "issue_p_b<T>(dq, ds_16, shared.keys(keys_at.stage));\n        keys_at.advance();",
        "issue_p_b<T>(dq, ds_16, shared.keys(keys_at.stage));\n        release(shared.key_ring, keys_at);",
        "which a wgmma of warpgroup . may still read|more than",
    ),
    "dout of dq alone is not waited for": (
        "attn/bwd_dq_sm90.cuh",
        "expect_tx(full, Traits::kQueryBytes + Traits::kDoutBytes)",
        "expect_tx(full, Traits::kQueryBytes)",
        "fewer bytes were expected than copied|bytes more than expected",
    ),
}


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


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_careless_change_of_the_forward_kernel_is_found(mutation, tmp_path, monkeypatch):
    _break(mutation, tmp_path, monkeypatch)
    slices = [(0, 150, 0, 290, None, None), (150, 260, 0, 140, None, -20)]
    inputs, _ = random_case(260, 300, (2, 1), (64, 64), torch.bfloat16)
    with pytest.raises(library.EmulatorError, match=mutation[-1]):
        attend(*inputs, masks.from_slices(260, 300, slices), backend="emulated")


@pytest.mark.parametrize("mutation", BACKWARD_MUTATIONS.values(), ids=BACKWARD_MUTATIONS)
def test_a_careless_change_of_the_backward_kernel_is_found(mutation, tmp_path, monkeypatch):
    _break(mutation, tmp_path, monkeypatch)
    alone = "bwd_wide" in mutation[0] or "bwd_dq" in mutation[0]
    dims = (192, 192) if "bwd_192" in mutation[0] else (192, 128) if alone else (128, 128)
    inputs, _ = random_case(300, 200, (2, 1), dims, torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]
    out, _ = attend(*leaves, masks.full(300, 200), backend="emulated", deterministic=alone)
    with pytest.raises(library.EmulatorError, match=mutation[-1]):
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
