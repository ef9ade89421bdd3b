"""Index tensors go to a device in one copy from pinned memory, whatever their tree is like."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_cp.comm.upload import upload

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass(frozen=True)
class Leaf:
    rows: Tensor
    name: str


@dataclass(frozen=True)
class Tree:
    leaves: tuple[Leaf, ...]
    table: Tensor
    count: int
    nothing: None = None


@pytest.fixture
def copies():
    """The copies to a GPU that were asked for, (pinned, keywords); they stay here."""
    made, pinned, to = [], set(), torch.Tensor.to

    def pin(x):
        pinned.add(x.data_ptr())
        return x

    def copied(x, *args, **keywords):
        if args and args[0] == GPU:
            made.append((x.data_ptr() in pinned, keywords))
            return x.clone()
        return to(x, *args, **keywords)

    with (
        mock.patch.object(torch.Tensor, "pin_memory", pin),
        mock.patch.object(torch.Tensor, "to", copied),
    ):
        yield made


def _tree():
    table = torch.arange(6).view(2, 3)
    return Tree(
        (Leaf(torch.tensor([7, 8]), "a"), Leaf(torch.tensor([]).long(), "b")), table, 3
    ), table + 10


def _values(tree):
    one, places = tree
    return [leaf.rows.tolist() for leaf in one.leaves], one.table.tolist(), places.tolist()


def test_a_tree_is_one_pinned_copy_that_nobody_waits_for(copies):
    tree = _tree()
    moved = upload(tree, GPU).here()
    assert copies == [(True, {"non_blocking": True})]
    assert _values(moved) == _values(tree)
    assert [leaf.name for leaf in moved[0].leaves] == ["a", "b"] and moved[0].count == 3
    buffers = {
        x.untyped_storage().data_ptr() for x in (moved[0].table, moved[0].leaves[0].rows, moved[1])
    }
    assert len(buffers) == 1
    assert moved[0].table.untyped_storage().data_ptr() != tree[0].table.untyped_storage().data_ptr()


def test_nothing_is_copied_on_a_cpu_nor_without_tensors(copies):
    tree = _tree()
    assert upload(tree, CPU).here() is tree
    without = (Leaf, "text", 5)
    assert upload(without, GPU).here() is without
    assert copies == []
