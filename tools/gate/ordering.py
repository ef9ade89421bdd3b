"""How many instructions that order memory each variant has, kept as data beside the variants.

A fence that the compiler or an edit loses is a race that values need not show. A count that changes is looked at;
where the change is meant, `python tools/compile_gate.py --write-counts` writes it down, from the bf16 variants; fp16
must have the same. A number stands for all compilers, a table for those that differ: the compiler adds waits (DEPBAR)
of its own.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

from megatron_cp.kernels import build, compilers
from tools.gate.sass import Listing, ordering_counts

PATH = build.VARIANTS.with_name("ordering.json")
Counts = dict[str, int | dict[str, int]]


def toolkit(compiler: compilers.Compiler) -> str:
    """Returns the name that a compiler's column has: `12.8`; NVRTC and nvcc of one version are one compiler."""
    return ".".join(map(str, compiler.numbers))


def row_name(variant: str) -> str:
    """Returns the row of a variant: its name without the dtype."""
    return variant.replace("_bf16", "").replace("_fp16", "")


@lru_cache(maxsize=1)
def kept() -> dict[str, Counts]:
    """Returns the counts by row, as the file has them."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def faults(name: str, compiler: compilers.Compiler, listing: Listing) -> Iterator[str]:
    """Yields every count that is not the kept one; a compiler without a column is held to the common ones."""
    row = kept().get(row_name(name))
    if row is None:
        yield f"{PATH.name} has no counts of {name}: python tools/compile_gate.py --write-counts"
        return
    for what, count in ordering_counts(listing).items():
        wanted = row.get(what, 0)
        if isinstance(wanted, dict):
            wanted = wanted.get(toolkit(compiler), count)
        if count != wanted:
            yield f"{count} {what} instructions, {PATH.name} has {wanted}"


def write(found: Iterable[tuple[str, compilers.Compiler, Listing]]) -> int:
    """Writes the counts of these variants by these compilers; returns how many rows there are.

    Raises: ValueError where two dtypes, or NVRTC and nvcc of one version, differ.
    """
    counts: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for name, compiler, listing in found:
        for what, count in ordering_counts(listing).items():
            column = counts[row_name(name)][what]
            if column.setdefault(toolkit(compiler), count) != count:
                raise ValueError(
                    f"{name}: {count} {what} by {compiler.name}, {column[toolkit(compiler)]} by the other of its "
                    "row and column; one number must hold for both: tell them apart in tools/gate/ordering.py"
                )
    lines = [f"{json.dumps(name)}: {json.dumps(_common(one))}" for name, one in counts.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    kept.cache_clear()
    return len(lines)


def _common(columns: dict[str, dict[str, int]]) -> Counts:
    """Returns one number where all compilers agree, else the table; kinds that never occur are left out."""
    rows = {
        what: column if len(set(column.values())) > 1 else next(iter(column.values()))
        for what, column in columns.items()
    }
    return {what: row for what, row in rows.items() if row}
