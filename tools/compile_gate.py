"""Compiles every kernel variant and reads PTX, log and machine code: what must hold without a GPU.

    python tools/compile_gate.py                      all variants, by the compiler that would be used here
    python tools/compile_gate.py fwd_bf16_128         some of them
    python tools/compile_gate.py --toolkits all       by every compiler that is here (`make toolkits` fetches more)
    python tools/compile_gate.py --toolkits 12.4,13.0
    python tools/compile_gate.py --write-counts       regenerates kernels/attn/ordering.json, two minutes

Fails when a variant does not compile; a loop of products spills a register, or a branch more than its budget; ptxas
serialises matrix products (C75xx) or ignores setmaxnreg; no HGMMA or TMA instruction is there; a CTA asks for more
shared memory than it can have; a matrix descriptor holds another constant than the ISA asks for; an operand in
registers is defined between fence and product; the parameter's size is not that of its mirror in Python; an
instruction that orders memory was lost or added; the cubin's ELF ABI is not that of its compiler. Which branch an
instruction belongs to is found by walking the control flow from the USETMAXREG instructions. Needs nvdisasm
(PATH, or the package nvidia-cuda-nvdisasm of the dev extra), and NVRTC or nvcc. Nothing is run on a GPU.
"""

import argparse
import ctypes
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_cp.kernels import build, compilers, elf, params  # noqa: E402
from tools.gate import ordering, ptx, sass  # noqa: E402

MAX_SHARED_BYTES = 227 * 1024
REGISTERS = 1 << 16  # of a multiprocessor
# Local-memory instructions allowed in the consumers' branches outside the innermost loops of products: what a work item
# needs before and after, kept there once per item.
CONSUMER_SPILL_BUDGET = 32
# And in the producer's: it has 24 registers and waits most of the time.
PRODUCER_SPILL_BUDGET = 16
PARAMS: dict[str, type[ctypes.Structure]] = {
    "forward": params.FwdParams,
    "backward": params.BwdParams,
    "backward_dkdv": params.BwdParams,
    "backward_dq": params.DqParams,
    "backward_preprocess": params.BwdPreprocessParams,
    "backward_postprocess": params.BwdPostprocessParams,
    "merge_rows": params.MergeRowsParams,
    "add_rows": params.AddRowsParams,
}
COUNTED = "12.4,12.8,13.0"  # whose ordering instructions are written down; others are held to what these agree on
JOBS = 2
# Without the analysis of indirect branches, whose targets nobody reads here: a quarter of the time.
NVDISASM_FLAGS = ("-c", "-ndf")


@dataclass(frozen=True)
class Verdict:
    """What was found in one variant; `faults` is empty when the gate is open."""

    name: str
    by: str
    registers: int
    shared_bytes: int
    products: int
    consumer_spills: int
    loop_spills: int
    producer_spills: int
    seconds: float
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the variant's line of the report."""
        line = (
            f"{self.by:12s} {self.name:28s} {self.registers:4d} registers  {self.shared_bytes:6d} B shared  "
            f"{self.products:4d} HGMMA  spills: consumers {self.consumer_spills}, producer {self.producer_spills}  "
            f"{self.seconds:.1f} s"
        )
        return "\n".join([line, *(f"    FAULT {fault}" for fault in self.faults)])


@dataclass(frozen=True)
class Code:
    """One variant by one compiler: everything that is read."""

    variant: build.Variant
    compiler: compilers.Compiler
    made: compilers.Compiled
    listing: sass.Listing


def read_variant(variant: build.Variant, compiler: compilers.Compiler, nvdisasm: str) -> Code:
    """Returns a variant's code. Raises CompileError."""
    made = compiler.compile_with_log(variant.path, variant.defines, build.INCLUDE_FOLDERS)
    return Code(variant, compiler, made, sass.read_listing(disassembled(made.cubin, nvdisasm)))


def disassembled(cubin: bytes, nvdisasm: str) -> str:
    """Returns the machine code as text."""
    with tempfile.NamedTemporaryFile(prefix="mcp-gate-", suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        read = compilers.run_program([nvdisasm, *NVDISASM_FLAGS, file.name])
    read.check_returncode()
    return read.stdout


def check_variant(variant: build.Variant, compiler: compilers.Compiler, nvdisasm: str) -> Verdict:
    """Returns the verdict on one variant. Raises CompileError."""
    started = time.perf_counter()
    code = read_variant(variant, compiler, nvdisasm)
    verdict = judge(variant, compiler.name, code.made.log, code.listing)
    faults = (*verdict.faults, *_more_faults(code))
    seconds = time.perf_counter() - started
    return Verdict(**{**verdict.__dict__, "faults": faults, "seconds": seconds})


def judge(variant: build.Variant, by: str, log: str, listing: sass.Listing) -> Verdict:
    """Returns the verdict from the compiler's log and the machine code."""
    consumers, producer = sass.branch(listing, "TRY_ALLOC"), sass.branch(listing, "DEALLOC")
    registers = re.search(r"Used (\d+) registers", log)
    values = dict(define.split("=", 1) for define in variant.defines)
    verdict = Verdict(
        name=variant.name,
        by=by,
        registers=int(registers[1]) if registers else 0,
        shared_bytes=int(values.get("MCP_SHARED_BYTES", "0")),
        products=sum(name.startswith("HGMMA") for name in listing.names),
        consumer_spills=sass.spills(listing, consumers),
        loop_spills=sass.spills(listing, sass.product_loops(listing)),
        producer_spills=sass.spills(listing, producer - consumers),
        seconds=0.0,
    )
    faults = tuple(_faults(verdict, log, listing.names, bool(consumers)))
    if consumers:
        faults += tuple(_pool_faults(verdict, int(values["MCP_THREADS"])))
    return Verdict(**{**verdict.__dict__, "faults": faults})


def _faults(verdict: Verdict, log: str, names: list[str], has_roles: bool) -> Iterator[str]:
    if not verdict.registers:
        yield "the compiler's log does not say how many registers are used: it cannot be read"
    for line in log.splitlines():
        if re.search(r"\(C75\d\d\)|setmaxnreg", line):
            yield line.strip()
    if verdict.shared_bytes > MAX_SHARED_BYTES:
        yield f"shared memory {verdict.shared_bytes} B, allowed {MAX_SHARED_BYTES}"
    if not has_roles:  # a small kernel without warpgroup roles: preprocess, postprocess
        if any(name.split(".")[0] in ("LDL", "STL") for name in names):
            yield "spills"
        return
    yield from _role_faults(verdict, names)


def _pool_faults(verdict: Verdict, num_threads: int) -> Iterator[str]:
    """Yields a line if a launch has fewer registers than its roles hand each other (`setmaxnreg`): it would hang."""
    pool = REGISTERS // num_threads // 8 * 8
    if verdict.registers and verdict.registers != pool:
        yield f"{verdict.registers} registers a thread, and the roles share {pool} of {num_threads} threads"


def _role_faults(verdict: Verdict, names: list[str]) -> Iterator[str]:
    """Yields what must not be in a kernel whose warpgroups load or compute."""
    if verdict.products == 0:
        yield "no HGMMA instruction"
    if not any(name.startswith("UTMALDG") for name in names):
        yield "no UTMALDG instruction: nothing is loaded by TMA"
    if verdict.loop_spills:
        yield f"the innermost loops of products have {verdict.loop_spills} LDL/STL, allowed 0"
    if verdict.consumer_spills > CONSUMER_SPILL_BUDGET:
        yield f"consumers have {verdict.consumer_spills} LDL/STL, allowed {CONSUMER_SPILL_BUDGET}"
    if verdict.producer_spills > PRODUCER_SPILL_BUDGET:
        yield f"the producer has {verdict.producer_spills} LDL/STL, allowed {PRODUCER_SPILL_BUDGET}"


def _more_faults(code: Code) -> Iterator[str]:
    """Yields what PTX, the ELF header and the counts of ordering instructions say."""
    yield from ptx.faults(code.made.ptx)
    yield from parameter_faults(code.variant, code.made.ptx)
    major, found = code.compiler.numbers[0], elf.toolkit_major(code.made.cubin)
    if found != major:
        abi = elf.abi(code.made.cubin)
        yield f"ELF ABI {abi} stands for CUDA {found} in kernels/elf.py, the compiler is of {major}"
    yield from ordering.faults(code.variant.name, code.compiler, code.listing)


def parameter_faults(variant: build.Variant, text: str) -> Iterator[str]:
    """Yields how the kernel's parameter differs from the struct that Python fills."""
    mirror = PARAMS[variant.kernel_pass]
    alignment, size = ptx.parameter(text)
    if size != ctypes.sizeof(mirror):
        yield f"the parameter has {size} bytes, {mirror.__name__} in params.py {ctypes.sizeof(mirror)}"
    # Tensor maps must be aligned to 64 bytes (cuda.h); the driver aligns the copy as the kernel declares it.
    wanted = 64 if any(kind is params.TensorMap for _, kind, *_ in mirror._fields_) else 8
    if alignment != wanted:
        yield f"the parameter is aligned to {alignment} bytes, must be {wanted}"


def chosen_compilers(versions: str) -> tuple[compilers.Compiler, ...]:
    """Returns the compilers of these `major.minor` (commas between), all that are here, or for "" the one of the build.

    Raises: NoCompilerError for one that is not here.
    """
    if not versions:
        return compilers.find_compilers()[:1]
    here = (*compilers.nvrtcs(), *compilers.nvccs())
    if versions == "all":
        return here or compilers.find_compilers()
    wanted = versions.split(",")
    missing = " ".join(sorted(set(wanted) - {ordering.toolkit(one) for one in here}))
    if missing:
        there = ", ".join(one.name for one in here) or "none"
        raise compilers.NoCompilerError(
            f"toolkits={versions!r}: {missing} is not here; allowed: {there}; fetch it with python "
            f"tools/fetch_toolkits.py {missing}"
        )
    return tuple(one for one in here if ordering.toolkit(one) in wanted)


def write_counts(chosen: Sequence[compilers.Compiler], nvdisasm: str) -> None:
    """Writes down the ordering instructions of the bf16 variants, by one compiler of each version."""
    by_version = {one.numbers: one for one in reversed(chosen)}
    names = [name for name in build.variants() if "fp16" not in name]
    work = [(build.variants()[name], one) for one in by_version.values() for name in names]
    with ThreadPoolExecutor(JOBS) as pool:
        codes = pool.map(lambda one: read_variant(*one, nvdisasm), work)
        counts = [(code.variant.name, code.compiler, code.listing) for code in codes]
    print(f"{ordering.write(counts)} rows in {ordering.PATH}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="VARIANT", help="default: all")
    parser.add_argument(
        "--toolkits", default="", metavar="VERSIONS", help="such as 12.4,13.0, or: all"
    )
    parser.add_argument("--write-counts", action="store_true", help="regenerate ordering.json")
    options = parser.parse_args(arguments)
    names = options.names or list(build.variants())
    unknown = [name for name in names if name not in build.variants()]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; one of {', '.join(build.variants())}")
    nvdisasm = sass.find_nvdisasm()
    if nvdisasm is None:
        parser.error("nvdisasm is missing: pip install nvidia-cuda-nvdisasm, or put it on PATH")
    try:
        chosen = chosen_compilers(COUNTED if options.write_counts else options.toolkits)
    except compilers.NoCompilerError as error:
        parser.error(str(error))
    print(f"{', '.join(c.name for c in chosen)}; {len(names)} variants; nothing is run on a GPU")
    if options.write_counts:
        write_counts(chosen, nvdisasm)
        return 0
    work = [(build.variants()[name], compiler) for compiler in chosen for name in names]
    failed = 0
    with ThreadPoolExecutor(JOBS) as pool:
        for verdict in pool.map(lambda one: check_variant(*one, nvdisasm), work):
            print(verdict, flush=True)
            failed += bool(verdict.faults)
    print(f"{failed} of {len(work)} failed" if failed else "all pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
