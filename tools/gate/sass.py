"""Machine code as nvdisasm prints it: instructions, the branch of each role, and counts that must not change."""

import re
import shutil
import sysconfig
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
LABEL = re.compile(r"^\s*(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
# What orders memory: one too few is a race that no value check need see. (what, pattern of the name)
ORDERING: Mapping[str, re.Pattern[str]] = {
    "FENCE.VIEW.ASYNC": re.compile(r"FENCE\.VIEW\.ASYNC"),
    "UTMAREDG": re.compile(r"UTMAREDG"),
    "UTMACMDFLUSH": re.compile(r"UTMACMDFLUSH"),
    "WARPGROUP.DEPBAR": re.compile(r"WARPGROUP\.DEPBAR"),
    "DEPBAR": re.compile(r"DEPBAR"),
    "MEMBAR.GPU": re.compile(r"MEMBAR\.\w+\.GPU"),
}


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

    @property
    def names(self) -> list[str]:
        """Returns the instructions' names in order."""
        return [instruction.name for instruction in self.instructions]


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
    starts = [i for i, n in enumerate(listing.names) if n.startswith(f"USETMAXREG.{marker}")]
    return set().union(*(reachable(listing, i + 1) for i in starts))


def product_loops(listing: Listing) -> set[int]:
    """Returns the instructions of the innermost loops with HGMMA in them: where a kernel spends its time."""
    loops = [
        range(listing.labels[one.target], at + 1)
        for at, one in enumerate(listing.instructions)
        if one.name.startswith("BRA") and listing.labels.get(one.target or "", at + 1) <= at
    ]
    products = [i for i, name in enumerate(listing.names) if name.startswith("HGMMA")]
    around = [[loop for loop in loops if i in loop] for i in products]
    smallest = {min(found, key=len) for found in around if found}
    inner = [
        one
        for one in smallest
        if not any(o != one and o.start in one and o[-1] in one for o in smallest)
    ]
    return {i for loop in inner for i in loop}


def spills(listing: Listing, indices: set[int]) -> int:
    """Returns how many of these instructions touch local memory."""
    return sum(listing.instructions[i].name.split(".")[0] in ("LDL", "STL") for i in indices)


def ordering_counts(listing: Listing) -> dict[str, int]:
    """Returns how many instructions of each kind of `ORDERING` there are."""
    found: Counter[str] = Counter()
    for name in listing.names:
        found.update(what for what, pattern in ORDERING.items() if pattern.match(name))
    return {what: found[what] for what in ORDERING}
