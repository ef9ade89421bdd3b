"""Every variant of the kernels passes tools/compile_gate.py, and the gate closes when it should.

Each kernel in bf16 by one compiler of CI (`make toolkits` fetches them) and in fp16 by one of two others, in turn; all
variants by one that is here alone. `tools/compile_gate.py --toolkits all` checks every pair. Without a compiler and
nvdisasm nothing can be said, and the tests say that. What a compiler and nvdisasm made stays in the user's cache, as
cubins in use do; it is judged anew each time.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cp.kernels import build, compilers, elf
from tests.kernels import kept_code
from tools import compile_gate as gate
from tools.gate import ordering, ptx, sass

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = build.variants()
IN_CI = ((12, 4), (12, 8), (13, 0))
HERE = {c.numbers: c for c in (*compilers.nvrtcs(), *compilers.nvccs()) if c.numbers in IN_CI}
COMPILER = HERE[max(HERE)] if HERE else None
NVDISASM = sass.find_nvdisasm()
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no NVRTC, no nvcc: make toolkits")
needs_disassembler = pytest.mark.skipif(NVDISASM is None, reason="nvdisasm is not installed")
CASES = [
    pytest.param(numbers, name, id=f"{'.'.join(map(str, numbers))}-{name}")
    for index, name in enumerate(VARIANTS)
    for numbers in IN_CI
    if numbers == ((12, 8) if "fp16" not in name else IN_CI[index % 2 * 2])
    or list(HERE) == [numbers]
]

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


def judge(text: str, log: str = LOG, shared_bytes: int = 1024) -> tuple[str, ...]:
    defines = (f"MCP_SHARED_BYTES={shared_bytes}", "MCP_THREADS=384")
    variant = replace(VARIANTS["fwd_bf16_64"], name="fwd_test", defines=defines)
    return gate.judge(variant, "nobody", log, sass.read_listing(text)).faults


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[tuple, Future]]:
    """Checks the variants of all selected tests, two at a time."""
    params = [
        item.callspec.params
        for item in request.session.items
        if "verdicts" in getattr(item, "fixturenames", ())
    ]
    wanted = [(one["numbers"], one["name"]) for one in params if one["numbers"] in HERE]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(max_workers=2) as pool:
        patch.setattr(gate, "disassembled", kept_code.disassembled)

        def check(numbers: tuple[int, int], name: str) -> gate.Verdict:
            kept = kept_code.Kept.of(HERE[numbers], VARIANTS[name], NVDISASM)
            return gate.check_variant(VARIANTS[name], kept, NVDISASM)

        yield {one: pool.submit(check, *one) for one in wanted}


@needs_disassembler
@pytest.mark.parametrize(("numbers", "name"), CASES)
def test_variant_passes_the_gate(
    numbers: tuple[int, int], name: str, verdicts: dict[tuple, Future]
) -> None:
    if numbers not in HERE:
        pytest.skip(f"no compiler of CUDA {numbers[0]}.{numbers[1]}: make toolkits")
    verdict = verdicts[numbers, name].result()
    assert verdict.faults == (), str(verdict)


@needs_compiler
@needs_disassembler
def test_variant_whose_consumers_spill_is_refused() -> None:
    # Three consumer warpgroups have 160 registers a thread; a head dim of 128 needs more.
    plain = VARIANTS["fwd_bf16_128"]
    defines = dict(define.split("=") for define in plain.defines)
    defines |= {"MCP_BLOCK_M": "192", "MCP_CONSUMERS": "3", "MCP_THREADS": "512"}
    defines["MCP_SHARED_BYTES"] = str(int(defines["MCP_SHARED_BYTES"]) + 64 * 128 * 2 + 4 * 2048)
    greedy = replace(plain, defines=tuple(f"{name}={value}" for name, value in defines.items()))
    verdict = gate.check_variant(greedy, COMPILER, NVDISASM)
    assert verdict.consumer_spills > 0
    assert any("consumers have" in fault for fault in verdict.faults)


@needs_compiler
def test_declared_shared_memory_that_differs_from_the_source_does_not_compile() -> None:
    variant = VARIANTS["fwd_bf16_128"]
    wrong = tuple(d.replace("MCP_SHARED_BYTES=", "MCP_SHARED_BYTES=1") for d in variant.defines)
    with pytest.raises(compilers.CompileError, match=r"variants\.json and traits\.h disagree"):
        build.compile_variant(replace(variant, defines=wrong), COMPILER)


def test_good_code_has_no_fault() -> None:
    assert judge(SASS) == ()


@pytest.mark.parametrize(
    ("before", "line", "fault"),
    [
        ("@!P1 BRA", "/*0028*/  LDL R1, [R2] ;", "the innermost loops of products have 1 LDL"),
        (".L_x_0:", "/*0018*/  LDL R1, [R2] ;", None),
        ("UTMALDG", "/*0058*/  @P2 STL [R2], R1 ;", None),
    ],
)
def test_a_spill_in_a_loop_of_products_is_a_fault_and_one_beside_it_is_none(
    before: str, line: str, fault: str | None
) -> None:
    found = judge("\n".join(_with(before, [line])))
    assert [one[: len(fault or "")] for one in found] == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("before", "count", "fault"),
    [
        (".L_x_0:", 33, "consumers have 33 LDL/STL, allowed 32"),
        ("UTMALDG", 17, "the producer has 17 LDL/STL, allowed 16"),
    ],
)
def test_spills_beyond_the_budget_are_told_apart_by_the_role_that_reaches_them(
    before: str, count: int, fault: str
) -> None:
    assert judge("\n".join(_with(before, ["/*0018*/  LDL R1, [R2] ;"] * count))) == (fault,)
    assert judge("\n".join(_with(before, ["/*0018*/  LDL R1, [R2] ;"] * (count - 1)))) == ()


def _with(before: str, lines: list[str]) -> list[str]:
    """Returns SASS with lines before the first that contains `before`."""
    text = SASS.splitlines()
    at = next(i for i, one in enumerate(text) if before in one)
    return text[:at] + [f"        {line}" for line in lines] + text[at:]


@pytest.mark.parametrize(
    ("sass", "log", "shared_bytes", "fault"),
    [
        (SASS.replace("HGMMA", "HMMA"), LOG, 0, "no HGMMA"),
        (SASS.replace("UTMALDG", "LDG"), LOG, 0, "no UTMALDG"),
        (SASS, LOG, 227 * 1024 + 1, "shared memory 232449 B"),
        (SASS, f"info : (C7520) wgmma serialized\n{LOG}", 0, "info : (C7520)"),
        (SASS, f"setmaxnreg ignored; unable to determine\n{LOG}", 0, "setmaxnreg ignored"),
        (SASS, LOG.replace("168", "160"), 0, "160 registers a thread, and the roles share 168"),
        (SASS, "", 0, "the compiler's log does not say how many registers"),
    ],
)
def test_each_defect_of_the_machine_code_is_named(
    sass: str, log: str, shared_bytes: int, fault: str
) -> None:
    (found,) = judge(sass, log, shared_bytes)
    assert found.startswith(fault)


# ---------------------------------------------------------------------- PTX


@pytest.fixture(scope="module")
def code() -> str:
    """PTX of the forward kernel: products with A in shared memory and in registers, B along and across."""
    if COMPILER is None:
        pytest.skip("no NVRTC, no nvcc: make toolkits")
    variant = VARIANTS["fwd_bf16_128"]
    defines = variant.defines
    return COMPILER.compile_with_log(variant.path, defines, build.INCLUDE_FOLDERS).ptx


# The ISA's fields by hand: swizzle of 128 bytes in bits 62-63, eight rows of 128 bytes / 16 in bits 32-45.
_UPPER = "4611686293305294848"


def test_descriptor_constant_is_the_one_of_the_instruction_set(code: str) -> None:
    assert int(_UPPER) == ptx.UPPER_HALF == (1 << 62) + (8 * 128 // 16 << 32)
    assert code.count(_UPPER) >= code.count("wgmma.mma_async")
    assert list(ptx.faults(code)) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (_UPPER, str(int(_UPPER) + (1 << 32)), "descriptor's upper half 0x4000004100000000"),
        (_UPPER, str(int(_UPPER) + (1 << 62)), "descriptor's upper half 0x8000004000000000"),
        (", 65536;", ", 131072;", "leading offset 32 bytes, must be 16"),
        (", 67108864;", ", 65536;", "leading offset 16 bytes, must be a panel"),
    ],
)
def test_wrong_descriptor_is_found(code: str, before: str, after: str, fault: str) -> None:
    assert before in code
    assert any(found.startswith(fault) for found in ptx.faults(code.replace(before, after)))


def test_operand_in_registers_that_changes_after_the_fence_is_found(code: str) -> None:
    lines = code.splitlines()
    product = next(
        i for i, line in enumerate(lines) if "wgmma.mma_async" in line and line.count("{") == 2
    )
    register = re.search(r"\}, *\{(%r\d+)", lines[product])[1]
    lines.insert(product, f"\tmov.u32 {register}, %r1;")
    (fault,) = ptx.faults("\n".join(lines))
    assert fault == f"operand A is defined between fence and product: {register}"


def test_product_in_a_form_that_cannot_be_read_is_a_fault(code: str) -> None:
    count = code.count("wgmma.mma_async")
    (first, *_) = ptx.faults(
        code.replace("wgmma.mma_async.sync.aligned", "wgmma.mma_async (new)", 1)
    )
    assert (
        first == f"{count - 1} of {count} products can be read: their form in the PTX is a new one"
    )


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("fwd_bf16_64", ".param .align 64 .b8 k_param_0[576]", None),
        ("fwd_bf16_64", ".param .align 64 .b8 k_param_0[640]", "the parameter has 640 bytes"),
        ("bwd_bf16_64", ".param .align 16 .b8 k_param_0[1088]", "the parameter is aligned to 16"),
        ("bwd_preprocess_bf16_64", ".param .align 8 .b8 k_param_0[112]", None),
    ],
)
def test_parameter_is_compared_with_its_mirror(name: str, text: str, fault: str | None) -> None:
    found = list(gate.parameter_faults(VARIANTS[name], text))
    assert [one[: len(fault or "")] for one in found] == ([fault] if fault else [])


# ---------------------------------------------------------------------- ordering, ABI, command


ORDERED = """
        /*0000*/                   FENCE.VIEW.ASYNC.S ;
        /*0010*/                   UTMAREDG.3D.ADD [UR8], [UR4] ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   DEPBAR.LE SB0, 0x0 ;
        /*0040*/                   MEMBAR.ALL.GPU ;
        /*0050*/                   MEMBAR.ALL.CTA ;
        /*0060*/                   LDGDEPBAR ;
"""
_OLD = compilers.Compiler("nvrtc", "a", "12.4")
_NEW = compilers.Compiler("nvcc", "b", "13.0.88")


@pytest.fixture
def counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ordering.json of one row: one DEPBAR by 12.4, two by 13.0."""
    monkeypatch.setattr(ordering, "PATH", tmp_path / "ordering.json")
    old = sass.read_listing(ORDERED)
    new = sass.read_listing(ORDERED.replace("LDGDEPBAR", "DEPBAR.LE"))
    ordering.write([("bwd_bf16_64", _OLD, old), ("bwd_bf16_64", _NEW, new)])
    yield tmp_path / "ordering.json"
    ordering.kept.cache_clear()


def test_counts_are_one_number_where_compilers_agree_and_a_table_where_not(counts: Path) -> None:
    assert json.loads(counts.read_text()) == {
        "bwd_64": {
            "FENCE.VIEW.ASYNC": 1,
            "UTMAREDG": 1,
            "WARPGROUP.DEPBAR": 1,
            "DEPBAR": {"12.4": 1, "13.0": 2},
            "MEMBAR.GPU": 1,
        }
    }


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (ORDERED, []),
        (ORDERED.replace("FENCE", "NOP"), ["0 FENCE.VIEW.ASYNC instructions"]),
        (ORDERED + ORDERED.replace("UTMAREDG", "NOP"), 4),
        (ORDERED.replace("ALL.GPU", "ALL.CTA"), ["0 MEMBAR.GPU instructions"]),
        (ORDERED.replace("LDGDEPBAR", "DEPBAR"), ["2 DEPBAR instructions"]),
    ],
)
def test_instruction_that_orders_memory_is_missed(counts: Path, text: str, faults) -> None:
    listing = sass.read_listing(text)
    found = list(ordering.faults("bwd_fp16_64", _OLD, listing))
    if isinstance(faults, int):
        assert len(found) == faults
    else:
        assert [one.split(",")[0] for one in found] == faults
    (unknown,) = ordering.faults("bwd_fp16_96", _OLD, listing)
    assert unknown.endswith("python tools/compile_gate.py --write-counts")


def test_compiler_without_a_column_is_held_to_what_all_agree_on(counts: Path) -> None:
    other = compilers.Compiler("nvrtc", "c", "12.9")
    assert list(ordering.faults("bwd_bf16_64", other, sass.read_listing(ORDERED))) == []
    lost = sass.read_listing(ORDERED.replace("UTMAREDG", "NOP"))
    assert len(list(ordering.faults("bwd_bf16_64", other, lost))) == 1


def test_dtypes_that_differ_are_not_written_down(counts: Path) -> None:
    more = sass.read_listing(ORDERED + ORDERED)
    found = [("bwd_bf16_64", _OLD, sass.read_listing(ORDERED)), ("bwd_fp16_64", _OLD, more)]
    with pytest.raises(ValueError, match="one number must hold for both"):
        ordering.write(found)


def test_backward_variants_have_their_fences_written_down() -> None:
    for name, variant in VARIANTS.items():
        row = ordering.kept()[ordering.row_name(name)]
        if variant.kernel_pass == "backward":
            assert min(row[what] for what in ("FENCE.VIEW.ASYNC", "UTMAREDG")) > 0


def test_code_of_another_abi_than_its_compilers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilers.Compiled(b"\x7fELF\2\1\1\x41\x08" + bytes(7), ".param .align 8 .b8 k[112]", "")
    listing = sass.read_listing("")
    code = gate.Code(VARIANTS["bwd_preprocess_bf16_64"], _OLD, made, listing)
    monkeypatch.setattr(ordering, "kept", lambda: {"bwd_preprocess_64": {}})
    assert list(gate._more_faults(code)) == [
        "ELF ABI 0x41/8 stands for CUDA 13 in kernels/elf.py, the compiler is of 12"
    ]


def test_packaged_cubins_suit_the_oldest_driver_where_a_compiler_of_its_version_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest = compilers.MIN_VERSION[0]
    if all(major != oldest for major, _ in HERE):
        pytest.skip(f"no compiler of CUDA {oldest}: make toolkits")
    small = {n: v for n, v in VARIANTS.items() if n.startswith("bwd_preprocess_bf16")}
    monkeypatch.setattr(build, "variants", lambda: small)
    assert build.build_packaged(tmp_path / "cubins")[0] == len(small)
    for path in (tmp_path / "cubins").iterdir():
        assert elf.runs_on(path.read_bytes(), oldest), build.cuda_of(path.read_bytes())


def test_compilers_are_chosen_by_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "nvrtcs", lambda: (_OLD,))
    monkeypatch.setattr(compilers, "nvccs", lambda: (_NEW,))
    assert gate.chosen_compilers("") == (_OLD,)
    assert gate.chosen_compilers("all") == (_OLD, _NEW)
    assert gate.chosen_compilers("13.0") == (_NEW,)
    with pytest.raises(
        compilers.NoCompilerError, match=r": 12\.9 is not here; .*fetch_toolkits\.py 12\.9"
    ):
        gate.chosen_compilers("12.4,12.9")


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
