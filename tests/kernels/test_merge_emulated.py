"""The kernel that merges rows, its own source in the emulator, against the formula in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.attn import merge_rows_
from megatron_cp.attn.attend import row_merger
from megatron_cp.attn.emulated.backend import Settings, running
from megatron_cp.attn.hopper.rows import merge_params
from megatron_cp.attn.options import AttendOptions
from megatron_cp.comm.packed import PackedRows
from tests.closeness import assert_within_budget


def merged(out, lse, rows, part_out, part_lse):
    """Returns (out, lse) in float64, by the weights of the two softmax denominators."""
    out, lse = out.double().clone(), lse.double().clone()
    held, more = lse[rows].exp(), part_lse.double().exp()
    whole = held + more
    share = torch.where(whole > 0, held / whole, 1.0).unsqueeze(-1)
    out[rows] = out[rows] * share + part_out.double() * (1 - share)
    lse[rows] = whole.log()
    return out, lse


def drawn(num_rows, heads, width, generator):
    """Returns a partial result in which some rows have no keys."""
    out = torch.randn(num_rows, heads, width, generator=generator)
    lse = 3 * torch.randn(num_rows, heads, generator=generator)
    empty = torch.rand(num_rows, heads, generator=generator) < 0.2
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)


@settings(max_examples=25)
@given(
    num_rows=st.integers(1, 20),
    heads=st.integers(1, 5),
    width=st.sampled_from([2, 64, 66, 128, 256]),
    is_chosen=st.booleans(),
    is_packed=st.booleans(),
    seed=st.integers(0, 5),
)
def test_merged_rows_are_those_of_the_formula(num_rows, heads, width, is_chosen, is_packed, seed):
    generator = torch.Generator().manual_seed(seed)
    out, lse = drawn(num_rows, heads, width, generator)
    count = int(torch.randint(0, num_rows + 1, (), generator=generator))
    rows = torch.randperm(num_rows, generator=generator)[:count] if is_chosen else None
    part = drawn(count, heads, width, generator)
    if is_packed:  # as rows come home: views of a message
        message = PackedRows.empty(count, part)
        message.fill_(part)
        part = message.tensors
    places = torch.arange(count) if rows is None else rows
    exact = merged(out, lse, places, *part)
    plain = out.clone(), lse.clone()
    merge_rows_(*plain, rows, *part)
    with running(Settings(seed=seed, num_blocks=2)):
        row_merger(AttendOptions(1.0, backend="emulated"))(out, lse, rows, *part)
    for found, by_torch, wanted, name in zip((out, lse), plain, exact, ("out", "lse"), strict=True):
        assert_within_budget(found, by_torch, wanted, name, size=4.0 if name == "lse" else None)
        untouched = torch.ones(num_rows, dtype=torch.bool)
        untouched[places] = False
        assert torch.equal(found[untouched], by_torch[untouched])


def test_rows_that_are_not_whole_pairs_are_refused():
    odd = torch.zeros(3, 2, 7), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"out \(3, 2, 7\) .* even width.* call out.contiguous"):
        merge_params(*odd, None, *odd)
