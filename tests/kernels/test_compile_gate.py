"""Every variant of the kernels passes tools/compile_gate.py, and the gate closes when it should.

Without nvcc and nvdisasm nothing can be said, and the tests say that.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cp.kernels import build, compilers

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("compile_gate", ROOT / "tools" / "compile_gate.py")
gate = importlib.util.module_from_spec(spec)
sys.modules["compile_gate"] = gate  # its dataclasses look their module up
spec.loader.exec_module(gate)

VARIANTS = build.variants()
NVCC, NVDISASM = compilers.find_nvcc(), gate.find_nvdisasm()
needs_compiler = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
needs_disassembler = pytest.mark.skipif(NVDISASM is None, reason="nvdisasm is not installed")

SASS = """
	.headerflags	@"EF_CUDA_SM90"
.text.k:
        /*0000*/                   @P0 BRA `(.L_x_1) ;
        /*0010*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0 ;
.L_x_0:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0030*/                   @!P1 BRA `(.L_x_0) ;
        /*0040*/                   EXIT ;
.L_x_1:
        /*0050*/                   USETMAXREG.DEALLOC.CTAPOOL 0x18 ;
        /*0060*/                   UTMALDG.3D [UR8], [UR4], desc[UR6] ;
        /*0070*/                   EXIT ;
"""
LOG = "ptxas info    : Used 168 registers, used 16 barriers"


def judge(sass: str, log: str = LOG, shared_bytes: int = 1024) -> tuple[str, ...]:
    values = {"MCP_SHARED_BYTES": str(shared_bytes)}
    return gate.judge("fwd_test", values, log, gate.read_listing(sass), 0.0).faults


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future]]:
    """Checks the variants of all selected tests, two at a time."""
    folder = tmp_path_factory.mktemp("gate")
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if "verdicts" in getattr(item, "fixturenames", ())
    ]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            name: pool.submit(gate.check_variant, VARIANTS[name], NVCC, NVDISASM, folder)
            for name in wanted
        }


@needs_compiler
@needs_disassembler
@pytest.mark.parametrize("name", list(VARIANTS))
def test_variant_compiles_without_spills_and_with_parallel_matrix_products(
    name: str, verdicts: dict[str, Future]
) -> None:
    verdict = verdicts[name].result()
    assert verdict.faults == (), str(verdict)


@needs_compiler
@needs_disassembler
def test_variant_whose_consumers_spill_is_refused(tmp_path: Path) -> None:
    # Three consumer warpgroups have 160 registers a thread; 128 keys a tile need more.
    defines = dict(define.split("=") for define in VARIANTS["fwd_bf16_64"].defines)
    defines |= {"MCP_CONSUMERS": "3", "MCP_STAGES": "2", "MCP_BLOCK_M": "192", "MCP_THREADS": "512"}
    defines["MCP_SHARED_BYTES"] = "91392"
    greedy = replace(VARIANTS["fwd_bf16_64"], defines=tuple(f"{k}={v}" for k, v in defines.items()))
    verdict = gate.check_variant(greedy, NVCC, NVDISASM, tmp_path)
    assert verdict.consumer_spills > 0
    assert any("consumers have" in fault for fault in verdict.faults)


@needs_compiler
def test_declared_shared_memory_that_differs_from_the_source_does_not_compile(
    tmp_path: Path,
) -> None:
    variant = VARIANTS["fwd_bf16_128"]
    wrong = tuple(d.replace("MCP_SHARED_BYTES=", "MCP_SHARED_BYTES=1") for d in variant.defines)
    with pytest.raises(compilers.CompileError, match=r"variants\.json and traits\.h disagree"):
        gate.compile_with_log(replace(variant, defines=wrong), NVCC, tmp_path)


def test_good_code_has_no_fault() -> None:
    assert judge(SASS) == ()


@pytest.mark.parametrize(
    ("before", "line", "fault"),
    [
        ("@!P1 BRA", "/*0028*/  LDL R1, [R2] ;", "consumers have 1 LDL/STL"),
        ("UTMALDG", "/*0058*/  @P2 STL [R2], R1 ;", "producer has 1 LDL/STL"),
    ],
)
def test_spill_is_told_apart_by_the_role_that_reaches_it(
    before: str, line: str, fault: str
) -> None:
    lines = SASS.splitlines()
    at = next(i for i, text in enumerate(lines) if before in text)
    lines.insert(at, f"        {line}")
    (found,) = judge("\n".join(lines))
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("sass", "log", "shared_bytes", "fault"),
    [
        (SASS.replace("HGMMA", "HMMA"), LOG, 0, "no HGMMA"),
        (SASS.replace("UTMALDG", "LDG"), LOG, 0, "no UTMALDG"),
        (SASS, LOG, 227 * 1024 + 1, "shared memory 232449 B"),
        (SASS, f"info : (C7520) wgmma serialized\n{LOG}", 0, "info : (C7520)"),
        (SASS, f"setmaxnreg ignored; unable to determine\n{LOG}", 0, "setmaxnreg ignored"),
    ],
)
def test_each_defect_of_the_machine_code_is_named(
    sass: str, log: str, shared_bytes: int, fault: str
) -> None:
    (found,) = judge(sass, log, shared_bytes)
    assert found.startswith(fault)


def test_kernel_sources_name_no_instruction_outside_the_wrappers() -> None:
    words = re.compile(
        r"\basm\b|__shfl|__sync|threadIdx|blockIdx|gridDim|__shared__|__device__|__global__"
    )
    files = [
        path
        for path in (ROOT / "kernels").rglob("*.*")
        if path.suffix in (".h", ".cu", ".cuh") and not {"ptx", "emulator"} & set(path.parts)
    ]
    assert len(files) > 8
    assert [path.name for path in files if words.search(path.read_text())] == []
