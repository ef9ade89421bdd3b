"""Machine code as text (`nvdisasm -hex -c`, `cuobjdump -sass`) -> instructions with their control bits.

The 128 bits of an instruction follow it in two comments; bits 105..125 tell the issuing hardware what to do:
stall 4 | yield 1 | board set when the result is there 3 | board set when operands are read 3 | boards to wait for 6.
Source: Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018, section 2.1.
"""

import re
from dataclasses import dataclass, replace

NO_BOARD = 7

_LINE = re.compile(
    r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*/\* 0x([0-9a-f]{16}) \*/"
)
_SECOND_HALF = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_NAMED_TARGET = re.compile(r"`\((\.L_\w+)\)")
_PLAIN_TARGET = re.compile(r"(?:^|\s)0x([0-9a-f]+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction. `target`: where a branch goes, as an index into the listing."""

    address: int
    predicate: str  # without the @; empty: always
    name: str
    operands: str
    control: int = 0
    target: int | None = None

    @property
    def base(self) -> str:
        """Returns the name without suffixes."""
        return self.name.split(".", 1)[0]

    @property
    def stall(self) -> int:
        """Returns the cycles before the warp's next instruction may issue."""
        return self.control & 15

    @property
    def result_board(self) -> int:
        """Returns the scoreboard that is free again when the result is there, or NO_BOARD."""
        return self.control >> 5 & 7

    @property
    def read_board(self) -> int:
        """Returns the scoreboard that is free again when the operands have been read, or NO_BOARD."""
        return self.control >> 8 & 7

    @property
    def waits(self) -> tuple[int, ...]:
        """Returns the scoreboards that must be free before this issues."""
        return tuple(board for board in range(6) if self.control >> (11 + board) & 1)


Listing = tuple[Instruction, ...]


def read_listing(text: str) -> Listing:
    """Returns the instructions of one kernel, in the order of their addresses."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _LINE.match(line):
            found.append(Instruction(int(match[1], 16), match[2] or "", match[3], match[4]))
        elif found and (half := _SECOND_HALF.match(line)):
            found[-1] = replace(found[-1], control=int(half[1], 16) >> 41 & 0x1FFFFF)
    at = {instruction.address: index for index, instruction in enumerate(found)}
    return tuple(replace(i, target=_target(i, labels, at)) for i in found)


def _target(i: Instruction, labels: dict[str, int], at: dict[int, int]) -> int | None:
    if i.base != "BRA":
        return None
    if named := _NAMED_TARGET.search(i.operands):
        return labels.get(named[1])
    plain = _PLAIN_TARGET.search(i.operands)
    return at.get(int(plain[1], 16)) if plain else None
