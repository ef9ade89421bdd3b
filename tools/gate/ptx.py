"""What PTX says of matrix descriptors, of operands in registers, and of the kernel's parameter.

wgmma reads a tile of shared memory through a 64-bit descriptor (PTX ISA, "Matrix Descriptor"): bits 0-13 the address,
16-29 the leading offset and 32-45 the stride offset, all / 16, bits 62-63 the swizzle, 1 for 128 bytes. Tiles here are
panels of 128-byte rows with that swizzle, so eight rows are 1024 bytes; along the reduction the leading offset is not
used and 16 bytes, across it is a panel's bytes, a multiple of 1024.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

UPPER_HALF = 1 << 62 | (1024 // 16) << 32
ALONG_REDUCTION = (16 // 16) << 16
PANEL_UNIT = (1024 // 16) << 16

_PRODUCT = re.compile(
    r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*(?P<a>\{[^}]*\}|%\w+),\s*(?P<b>%\w+),\s*\w+,(?P<flags>[^;]*);"
)
_DEFINITION = re.compile(
    r"^\s*(?:@!?%?\w+\s+)?(?P<op>[\w.]+(?:::[\w.]+)*)\s+(?P<to>\{[^}]*\}|%[\w|%]+)\s*,\s*(?P<from>[^;]*);"
)
_PARAMETER = re.compile(r"\.param \.align (\d+) \.b8 \w+\[(\d+)\]")


@dataclass(frozen=True)
class Definition:
    """One instruction that writes a register: its name and its operands."""

    op: str
    operands: tuple[str, ...]


def parameter(ptx: str) -> tuple[int, int]:
    """Returns (alignment, bytes) of the kernel's one parameter. Raises ValueError if there is not exactly one."""
    found = _PARAMETER.findall(ptx)
    if len(found) != 1:
        raise ValueError(f"{len(found)} struct parameters in the PTX, must be 1: see the entry")
    return int(found[0][0]), int(found[0][1])


def faults(ptx: str) -> Iterator[str]:
    """Yields what is wrong with the products of a kernel, once each."""
    said, read = ptx.count("wgmma.mma_async"), len(_PRODUCT.findall(ptx))
    if said != read:
        yield f"{read} of {said} products can be read: their form in the PTX is a new one"
    seen = set()
    for fault in _faults(ptx):
        if fault not in seen:
            seen.add(fault)
            yield fault


def _faults(ptx: str) -> Iterator[str]:
    defined: dict[str, Definition] = {}
    since_fence: set[str] = set()
    for line in ptx.splitlines():
        if "wgmma.fence" in line:
            since_fence.clear()
        elif product := _PRODUCT.search(line):
            yield from _product_faults(product, defined, since_fence)
        elif definition := _DEFINITION.match(line):
            to = re.findall(r"%\w+", definition["to"])
            operands = tuple(re.findall(r"%\w+|-?\b\d+\b", definition["from"]))
            defined |= dict.fromkeys(to, Definition(definition["op"], operands))
            since_fence.update(to)


def _product_faults(
    product: re.Match[str], defined: dict[str, Definition], since_fence: set[str]
) -> Iterator[str]:
    flags = [flag.strip() for flag in product["flags"].split(",")]
    in_registers = product["a"].startswith("{")
    touched = since_fence & set(re.findall(r"%\w+", product["a"])) if in_registers else set()
    if touched:
        yield f"operand A is defined between fence and product: {', '.join(sorted(touched))}"
    # The last flags: scale of A and B, then transposition of A (if it lies in shared memory) and of B.
    sides = [(product["b"], flags[-1])]
    if not in_registers:
        sides.append((product["a"], flags[-2]))
    for register, across in sides:
        upper, leading = descriptor(register, defined)
        if upper != UPPER_HALF:
            yield f"descriptor's upper half {upper:#x}, must be {UPPER_HALF:#x}"
        good = leading % PANEL_UNIT == 0 < leading if across == "1" else leading == ALONG_REDUCTION
        if not good:
            which = "a panel, a multiple of 1024" if across == "1" else "16"
            yield f"leading offset {leading >> 12} bytes, must be {which}"


def descriptor(register: str, defined: dict[str, Definition]) -> tuple[int, int]:
    """Returns (upper half, leading offset's bits) of a descriptor, 0 for what is not set by a constant.

    Follows the register back through the constants that are or-ed in, and through additions, which only move the
    address.
    """
    upper = leading = 0
    for _ in range(64):  # a chain of definitions; longer ones are loops
        definition = defined.get(register)
        if definition is None:
            break
        constants = [int(x) for x in definition.operands if not x.startswith("%")]
        if definition.op == "or.b64" and constants:
            upper |= constants[0] >> 32 << 32
            leading |= constants[0] & 0x3FFF0000
        elif definition.op == "or.b32" and constants:
            leading |= constants[0] & 0x3FFF0000
        sources = [x for x in definition.operands if x.startswith("%")]
        if not sources or definition.op.startswith(("ld.", "shfl.")):
            break
        register = sources[0]
    return upper, leading
