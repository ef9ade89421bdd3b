"""Compiles every kernel variant and reads the machine code: what must hold without a GPU.

    python tools/compile_gate.py                      all variants, one line each
    python tools/compile_gate.py fwd_bf16_128         some of them

Fails when a variant does not compile, a consumer branch spills a register, the producer branch spills more
than its budget, ptxas serialises matrix products (C75xx) or ignores setmaxnreg, no HGMMA or TMA instruction is
there, or a CTA asks for more shared memory than it can have. Which branch an instruction belongs to is found
by walking the control flow from the two USETMAXREG instructions. Needs nvcc, and nvdisasm (PATH, or the
package nvidia-cuda-nvdisasm of the dev extra). Nothing is run on a GPU.
"""

import argparse
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_cp.kernels import build, compilers

MAX_SHARED_BYTES = 227 * 1024
# Local-memory instructions allowed in the producer's branch. The backward's are in the warp that adds dq to
# global memory, in its copy for the deterministic mode: it has 24 registers and waits most of the time.
PRODUCER_SPILL_BUDGET = {"forward": 0, "backward": 40}

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
LABEL = re.compile(r"^\s*(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: its name with suffixes, and where it may go besides the next one."""

    name: str
    predicated: bool
    target: str | None


@dataclass
class Listing:
    """The instructions of one kernel, with the index that each label stands for."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What was found in one variant; `faults` is empty when the gate is open."""

    name: str
    registers: int
    shared_bytes: int
    products: int
    consumer_spills: int
    producer_spills: int
    seconds: float
    faults: tuple[str, ...]

    def __str__(self) -> str:
        """Returns the variant's line of the report."""
        line = (
            f"{self.name:28s} {self.registers:4d} registers  {self.shared_bytes:6d} B shared  {self.products:4d} HGMMA"
            f"  spills: consumers {self.consumer_spills}, producer {self.producer_spills}  {self.seconds:.1f} s"
        )
        return "\n".join([line, *(f"    FAULT {fault}" for fault in self.faults)])


def find_nvdisasm() -> str | None:
    """Returns nvdisasm of PATH or of the environment's packages."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvdisasm"))
    return shutil.which("nvdisasm") or (str(packaged[-1]) if packaged else None)


def read_listing(sass: str) -> Listing:
    """Returns the instructions and labels of the output of `nvdisasm -c`."""
    listing = Listing()
    for line in sass.splitlines():
        if label := LABEL.match(line):
            listing.labels[label[1]] = len(listing.instructions)
        elif match := INSTRUCTION.match(line):
            target = TARGET.search(match[2])
            predicated = "@" in line.split("*/", 1)[1].split(match[1])[0]
            listing.instructions.append(
                Instruction(match[1], predicated, target[1] if target else None)
            )
    return listing


def reachable(listing: Listing, start: int) -> set[int]:
    """Returns the indices of all instructions that control flow can reach from `start`."""
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        at = waiting.pop()
        while at < len(listing.instructions) and at not in seen:
            seen.add(at)
            instruction = listing.instructions[at]
            if instruction.target in listing.labels:
                waiting.append(listing.labels[instruction.target])
            ends = instruction.name.split(".")[0] in ("BRA", "EXIT", "RET", "JMP")
            if ends and not instruction.predicated and ".DIV" not in instruction.name:
                break
            at += 1
    return seen


def branch(listing: Listing, marker: str) -> set[int]:
    """Returns the instructions that follow a USETMAXREG of this kind: those of one role."""
    names = [instruction.name for instruction in listing.instructions]
    starts = [i for i, name in enumerate(names) if name.startswith(f"USETMAXREG.{marker}")]
    return set().union(*(reachable(listing, i + 1) for i in starts))


def spills(listing: Listing, indices: set[int]) -> int:
    """Returns how many of these instructions touch local memory."""
    return sum(listing.instructions[i].name.split(".")[0] in ("LDL", "STL") for i in indices)


def compile_with_log(
    variant: build.Variant, compiler: compilers.Compiler, folder: Path
) -> tuple[Path, str]:
    """Returns the cubin's path and what ptxas said. Raises CompileError."""
    output = folder / f"{variant.name}.cubin"
    command = [compiler.path, *compilers.NVCC_FLAGS, *compilers.FLAGS, "-Xptxas", "-v"]
    command += [f"-D{define}" for define in variant.defines]
    command += [f"-I{include}" for include in build.INCLUDE_FOLDERS]
    command += ["-o", str(output), str(variant.path)]
    done = compilers.run_program(command)
    log = done.stdout + done.stderr
    if done.returncode != 0:
        raise compilers.CompileError(f"{variant.name} does not compile:\n{log}")
    return output, log


def check_variant(
    variant: build.Variant, compiler: compilers.Compiler, nvdisasm: str, folder: Path
) -> Verdict:
    """Returns the verdict on one variant. Raises CompileError."""
    started = time.perf_counter()
    cubin, log = compile_with_log(variant, compiler, folder)
    read = compilers.run_program([nvdisasm, "-c", str(cubin)])
    read.check_returncode()
    listing = read_listing(read.stdout)
    values = dict(define.split("=", 1) for define in variant.defines)
    return judge(variant.name, values, log, listing, time.perf_counter() - started)


def judge(name: str, values: dict[str, str], log: str, listing: Listing, seconds: float) -> Verdict:
    """Returns the verdict from the compiler's log and the machine code."""
    consumers, producer = branch(listing, "TRY_ALLOC"), branch(listing, "DEALLOC")
    names = [instruction.name for instruction in listing.instructions]
    registers = re.search(r"Used (\d+) registers", log)
    shared = int(values.get("MCP_SHARED_BYTES", "0"))
    kind = "backward" if name.startswith("bwd") else "forward"
    verdict = Verdict(
        name=name,
        registers=int(registers[1]) if registers else 0,
        shared_bytes=shared,
        products=sum(n.startswith("HGMMA") for n in names),
        consumer_spills=spills(listing, consumers),
        producer_spills=spills(listing, producer - consumers),
        seconds=seconds,
        faults=(),
    )
    faults = tuple(_faults(verdict, log, names, kind, bool(consumers)))
    return Verdict(**{**verdict.__dict__, "faults": faults})


def _faults(
    verdict: Verdict, log: str, names: list[str], kind: str, has_roles: bool
) -> Iterator[str]:
    for line in log.splitlines():
        if re.search(r"\(C75\d\d\)|setmaxnreg", line):
            yield line.strip()
    if verdict.shared_bytes > MAX_SHARED_BYTES:
        yield f"shared memory {verdict.shared_bytes} B, allowed {MAX_SHARED_BYTES}"
    if not has_roles:  # a small kernel without warpgroup roles: preprocess, postprocess
        if any(name.split(".")[0] in ("LDL", "STL") for name in names):
            yield "spills"
        return
    if verdict.products == 0:
        yield "no HGMMA instruction"
    if not any(name.startswith("UTMALDG") for name in names):
        yield "no UTMALDG instruction: nothing is loaded by TMA"
    if verdict.consumer_spills:
        yield f"consumers have {verdict.consumer_spills} LDL/STL, allowed 0"
    if verdict.producer_spills > PRODUCER_SPILL_BUDGET[kind]:
        yield f"producer has {verdict.producer_spills} LDL/STL, allowed {PRODUCER_SPILL_BUDGET[kind]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="VARIANT", help="default: all")
    names = parser.parse_args(arguments).names or list(build.variants())
    unknown = [name for name in names if name not in build.variants()]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; one of {', '.join(build.variants())}")
    compiler, nvdisasm = compilers.find_nvcc(), find_nvdisasm()
    if compiler is None:
        parser.error("nvcc is missing: put it on PATH or set CUDA_HOME")
    if nvdisasm is None:
        parser.error("nvdisasm is missing: pip install nvidia-cuda-nvdisasm, or put it on PATH")
    print(f"nvcc {compiler.version}, {len(names)} variants; compiled, nothing is run on a GPU")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="mcp-gate-") as folder:
        for name in names:
            verdict = check_variant(build.variants()[name], compiler, nvdisasm, Path(folder))
            print(verdict, flush=True)
            failed += bool(verdict.faults)
    print(f"{failed} of {len(names)} variants failed" if failed else "all variants pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
