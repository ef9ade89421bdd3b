"""Which rows get which contributions, of many that came back together: in runs, and row by row.

Both say the same, and in the same order for each row. torch adds run after run, since no row may be named twice in one
call. A kernel takes row after row, so that each is read and written once, however many contributions it gets.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_cp.comm.packed import Rows
from megatron_cp.mask.interval import IntArray


@dataclass(frozen=True)
class Joins:
    """Contributions and the rows that get them."""

    runs: tuple[tuple[int, Tensor], ...]
    """`(begin, index)`: contributions from `begin` on go to rows `index` int64, of which none comes twice."""
    rows: Tensor
    """int64 `[n]`: each row that gets any, once, ascending."""
    begins: Tensor
    """int64 `[n + 1]`."""
    parts: Tensor
    """int64: `rows[i]` gets contributions `parts[begins[i] : begins[i + 1]]`, one after the other."""

    @classmethod
    def of(cls, runs: Sequence[tuple[int, IntArray]]) -> "Joins":
        """Returns the joins of runs: contributions from `begin` on, and the int64 rows that get them."""
        empty = np.empty(0, dtype=np.int64)
        targets = np.concatenate([empty, *(rows for _, rows in runs)])
        parts = np.concatenate([empty, *(begin + np.arange(len(rows)) for begin, rows in runs)])
        order = np.argsort(targets, kind="stable")
        targets = targets[order]
        begins = np.flatnonzero(np.diff(targets, prepend=-1))
        arrays = (targets[begins], np.append(begins, len(targets)), parts[order])
        return cls(
            tuple((begin, torch.from_numpy(rows)) for begin, rows in runs),
            *map(torch.from_numpy, arrays),
        )

    def by_run(self, contributions: Rows) -> Iterator[tuple[Tensor, Rows]]:
        """Yields `(index, part)` of each run: what goes to rows `index`, in their order."""
        for begin, index in self.runs:
            yield index, tuple(x[begin : begin + len(index)] for x in contributions)

    @property
    def by_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what a kernel reads: `(rows, begins, parts)`."""
        return self.rows, self.begins, self.parts


def add_rows_(target: Rows, joins: Joins, parts: Rows) -> None:
    """Adds contributions to rows of `target`, in place, in the target's dtype."""
    for index, part in joins.by_run(parts):
        for tensor, rows in zip(target, part, strict=True):
            tensor.index_add_(0, index, rows.to(tensor.dtype))
