"""Row orders against loops that say in words where each row goes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.models.hugging_face.orders import by_group, evens_then_odds
from megatron_cp.models.hugging_face.rows import Piece, Row, Source


@given(groups=st.integers(1, 5), per_group=st.integers(1, 4), width=st.integers(1, 6))
def test_query_key_and_value_rows_stand_group_by_group(groups: int, per_group: int, width: int):
    heads = groups * per_group
    labels = [("q", head, i) for head in range(heads) for i in range(width)]
    labels += [(kind, group, i) for kind in "kv" for group in range(groups) for i in range(width)]
    expected = []
    for group in range(groups):
        mine = range(group * per_group, (group + 1) * per_group)
        expected += [("q", head, i) for head in mine for i in range(width)]
        expected += [("k", group, i) for i in range(width)]
        expected += [("v", group, i) for i in range(width)]
    order = by_group({"Q": heads * width, "K": groups * width, "D": width})
    assert [labels[row] for row in order] == expected


@given(width=st.integers(1, 9))
def test_alternating_gates_and_ups_are_parted(width: int):
    labels = [(kind, i) for i in range(width) for kind in ("gate", "up")]
    order = evens_then_odds({"G": 2 * width})
    assert [labels[row] for row in order] == [("gate", i) for i in range(width)] + [
        ("up", i) for i in range(width)
    ]


def test_padding_is_zero_and_cut_off_again():
    piece = Piece(
        row=Row(megatron="", hf=(("", "VH"),), padded=True),
        keys=("key",),
        index=(),
        leading=(),
        sources=(Source("name", (5, 3), (5, 3)),),
        sizes={"padded": 8},
    )
    tensor = torch.randn(5, 3)
    joined = piece.joined([tensor])
    assert torch.equal(joined, torch.cat([tensor, torch.zeros(3, 3)]))
    assert torch.equal(piece.cut(joined)[0], tensor)
    assert torch.equal(piece.cut(joined[:6])[0], tensor)  # a run may pad otherwise


@pytest.mark.parametrize("is_transposed", [False, True])
def test_cut_is_the_inverse_of_joined_for_any_order(is_transposed: bool):
    order = np.random.default_rng(0).permutation(7)
    shapes = [(4, 3), (3, 3)] if not is_transposed else [(3, 4), (3, 3)]
    piece = Piece(
        row=Row(megatron="", hf=(), order=lambda _: order, transposed=is_transposed),
        keys=("key",),
        index=(),
        leading=(),
        sources=tuple(Source(str(shape), shape, shape) for shape in shapes),
        sizes={},
    )
    parts = [torch.randn(shape) for shape in shapes]
    joined = piece.joined(parts)
    rows = torch.cat([part.t() if is_transposed else part for part in parts])
    assert all(torch.equal(joined[i], rows[order[i]]) for i in range(7))
    assert all(torch.equal(a, b) for a, b in zip(piece.cut(joined), parts, strict=True))
