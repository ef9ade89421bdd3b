"""The kernels that join rows, their own source in the emulator, against the formulas in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.attn import merge_rows_
from megatron_cp.attn.attend import part_joiner
from megatron_cp.attn.emulated.backend import Settings, running
from megatron_cp.attn.hopper.rows import add_params, merge_params
from megatron_cp.attn.options import AttendOptions
from megatron_cp.comm import Joins, add_rows_
from megatron_cp.comm.packed import PackedRows
from tests.closeness import assert_within_budget


def merged_row(out, lse, part_out, part_lse):
    """Returns a row `[N, width]` and what it gets, `[m, N, width]`, as one in float64, by softmax denominators."""
    weights = torch.cat([lse[None], part_lse]).double().exp()
    values = torch.cat([out[None], part_out]).double()
    whole = weights.sum(dim=0)
    share = torch.where(whole > 0, weights / whole, 0.0).unsqueeze(-1)
    return (values * share).sum(dim=0), whole.log()


def drawn(num_rows, heads, width, generator):
    """Returns a partial result in which some rows have no keys."""
    out = torch.randn(num_rows, heads, width, generator=generator)
    lse = 3 * torch.randn(num_rows, heads, generator=generator)
    empty = torch.rand(num_rows, heads, generator=generator) < 0.2
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)


def drawn_runs(num_rows, num_runs, seed):
    """Returns runs of rows, none twice in a run, and the number of parts; some parts belong to no run."""
    rng, runs, begin = np.random.default_rng(seed), [], 0
    for _ in range(num_runs):
        begin += int(rng.integers(0, 3))
        rows = rng.permutation(num_rows)[: int(rng.integers(0, num_rows + 1))]
        runs.append((begin, rows))
        begin += len(rows)
    return runs, begin + 1


def parts_of(runs, row):
    """Returns which parts a row gets, in order."""
    return [begin + int(at) for begin, rows in runs for at in np.flatnonzero(rows == row)]


def as_they_come_home(*parts):
    """Returns the parts as views of one message."""
    message = PackedRows.empty(len(parts[0]), parts)
    message.fill_(parts)
    return message.tensors


SIZES = {
    "num_rows": st.integers(1, 20),
    "heads": st.integers(1, 5),
    "num_runs": st.integers(0, 4),
    "seed": st.integers(0, 5),
}


@settings(max_examples=30)
@given(**SIZES, width=st.sampled_from([2, 64, 66, 128, 256, 322]))
def test_merged_rows_are_those_of_the_formula(num_rows, heads, width, num_runs, seed):
    generator = torch.Generator().manual_seed(seed)
    out, lse = drawn(num_rows, heads, width, generator)
    runs, num_parts = drawn_runs(num_rows, num_runs, seed)
    parts = as_they_come_home(*drawn(num_parts, heads, width, generator))
    exact = out.double(), lse.double()
    for row in range(num_rows):
        mine = [part[parts_of(runs, row)] for part in parts]
        exact[0][row], exact[1][row] = merged_row(out[row], lse[row], *mine)
    plain, held = (out.clone(), lse.clone()), (out.clone(), lse.clone())
    joins = Joins.of(runs)
    for begin, index in joins.runs:
        merge_rows_(*plain, index, *(part[begin : begin + len(index)] for part in parts))
    with running(Settings(seed=seed, num_blocks=2)):
        joiner().merge_parts_(*held, *parts, joins.by_row)
    for found, by_torch, wanted, name in zip(held, plain, exact, ("out", "lse"), strict=True):
        assert_within_budget(found, by_torch, wanted, name, size=4.0 if name == "lse" else None)
    untouched = torch.tensor([not parts_of(runs, row) for row in range(num_rows)])
    assert torch.equal(held[0][untouched], out[untouched])
    assert torch.equal(held[1][untouched], lse[untouched])


@settings(max_examples=10)
@given(num_rows=st.integers(1, 20), count=st.integers(0, 20), seed=st.integers(0, 5))
def test_without_a_list_the_first_rows_get_a_part_each(num_rows, count, seed):
    generator = torch.Generator().manual_seed(seed)
    count = min(count, num_rows)
    out, lse = drawn(num_rows, 2, 64, generator)
    part = drawn(count, 2, 64, generator)
    listed = out.clone(), lse.clone()
    with running(Settings(seed=seed, num_blocks=2)):
        joiner().merge_parts_(*listed, *part, Joins.of([(0, np.arange(count))]).by_row)
        joiner().merge_parts_(out, lse, *part)
    assert torch.equal(out, listed[0])
    assert torch.equal(lse, listed[1])


@settings(max_examples=30)
@given(**SIZES, width=st.sampled_from([1, 33, 64, 128, 130, 257]), is_padded=st.booleans())
def test_added_rows_are_sums_in_the_order_of_the_runs(
    num_rows, heads, width, num_runs, seed, is_padded
):
    """Bit by bit those of torch, which adds run after run."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randn(num_rows, heads, width + 2 * is_padded, generator=generator)[..., :width]
    runs, num_parts = drawn_runs(num_rows, num_runs, seed)
    parts = as_they_come_home(torch.randn(num_parts, heads, width, generator=generator))
    exact, joins = total.double().clone(), Joins.of(runs)
    for row in range(num_rows):
        exact[row] += parts[0][parts_of(runs, row)].double().sum(dim=0)
    plain = total.clone()
    add_rows_((plain,), joins, parts)
    with running(Settings(seed=seed, num_blocks=2)):
        joiner().add_parts_(total, parts[0], joins.by_row)
    assert torch.equal(total, plain)
    assert (total - exact).abs().max() < 1e-5


def joiner():
    return part_joiner(AttendOptions(1.0, backend="emulated"), 64)


def test_rows_that_the_kernels_cannot_read_are_refused():
    odd = torch.zeros(3, 2, 7), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"out \(3, 2, 7\) .* even width.* call out.contiguous"):
        merge_params(*odd, *odd)
    by_row = Joins.of([(0, np.arange(3))]).by_row
    with pytest.raises(ValueError, match=r"total of torch.bfloat16 must be .* call total.float"):
        add_params(odd[0].bfloat16(), odd[0], by_row)
    turned = torch.zeros(3, 7, 2).mT
    with pytest.raises(ValueError, match=r"part \(3, 2, 7\) .* call part.contiguous"):
        add_params(odd[0], turned, by_row)
