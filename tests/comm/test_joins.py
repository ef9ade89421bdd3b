"""Which rows get which contributions: the two ways of saying it, and how often results are joined."""

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.comm import Joins, RankTransfer, add_rows_, group_reduce
from megatron_cp.plan import Hop, Transfer
from tests.ranks import run_on_ranks

ROWS = 7
RUNS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, ROWS - 1), unique=True)), max_size=5
)


@settings(max_examples=100)
@given(RUNS)
def test_rows_get_the_parts_of_their_runs_in_order(drawn):
    runs, begin, expected = [], 0, {}
    for gap, rows in drawn:
        begin += gap
        runs.append((begin, np.array(rows, dtype=np.int64)))
        for row in rows:
            expected.setdefault(row, []).append(begin)
            begin += 1
    joins = Joins.of(runs)
    rows, begins, parts = (x.tolist() for x in joins.by_row)
    assert all(x.dtype == torch.int64 for x in joins.by_row)
    assert {row: parts[begins[i] : begins[i + 1]] for i, row in enumerate(rows)} == expected
    assert rows == sorted(expected)
    assert len(begins) == len(rows) + 1
    assert [(begin, index.tolist()) for begin, index in joins.runs] == [
        (begin, rows.tolist()) for begin, rows in runs
    ]


def count_joins(rank, world_size, transfer):
    """Returns how many rows a rank has in each call that joins them, and its own rows after."""
    compiled = RankTransfer.compile(transfer, rank, world_size, own_rows=2)
    called = []

    def combine(target, joins, parts):
        called.append(len(joins.rows))
        add_rows_(target, joins, parts)

    own = torch.zeros(2, 1)
    received = torch.full((compiled.num_received, 1), float(rank))
    group_reduce((own,), (received,), compiled, dist.group.WORLD, combine).wait()
    return called, own[:, 0].tolist()


def test_what_comes_home_from_all_ranks_and_hops_is_joined_at_once():
    """Row 0 of rank 0 goes to three ranks in one hop, then row 1 to two; rank 3 passes row 0 on to rank 2."""
    first = Hop([(0, 1, 0, 1), (0, 2, 0, 1), (0, 3, 0, 1)])
    second = Hop([(0, 1, 1, 2), (0, 3, 1, 2), (3, 2, 2, 3)])
    joined = run_on_ranks(4, count_joins, Transfer((first, second)))
    assert joined[0] == ([2], [1 + 2 + 3 + 2, 1 + 3])
    assert joined[3][0] == [1, 0]  # the row that it passed on, then none of its own
    assert joined[1][0] == joined[2][0] == [0]
