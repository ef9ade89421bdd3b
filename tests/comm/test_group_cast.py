"""group_cast and its adjoint over gloo ranks, against 0/1 matrices in one process."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.attn.merge import merge_rows_
from megatron_cp.comm import RankTransfer, add_rows_, all_to_all, group_cast, group_reduce
from megatron_cp.comm.packed import PackedRows, packed
from megatron_cp.plan import Hop, Transfer
from tests.closeness import assert_within_budget
from tests.comm.transfers import matrix_of, random_transfer
from tests.oracles.attention import dense_attention
from tests.ranks import run_on_ranks

OWN_ROWS, WIDTH = 6, 3

# (ranks, hops, share of pairs that talk, hops in which nobody does)
SHAPES = [
    (2, 1, 1.0, ()),
    (3, 1, 0.4, ()),
    (4, 2, 0.5, ()),
    (8, 2, 0.15, ()),
    (4, 3, 0.4, (1,)),
    (3, 2, 0.5, (0,)),
    (2, 1, 0.0, ()),
    (1, 1, 1.0, ()),
]


def values(num_ranks, transfer, seed=0):
    """Returns whole numbers, so that sums are exact: own rows x and contributions y of all ranks."""
    rng = np.random.default_rng(seed)
    received = [len(m) for m in matrix_of(transfer, num_ranks, OWN_ROWS)]
    x = rng.integers(-99, 99, (num_ranks, OWN_ROWS, WIDTH)).astype(np.float64)
    return x, [rng.integers(-99, 99, (rows, WIDTH)).astype(np.float64) for rows in received]


def cast_and_reduce(rank, world_size, transfer, x, y, dtype):
    """Returns (rows received, own rows + returned contributions, number of collectives of each)."""
    compiled = RankTransfer.compile(transfer, rank, world_size, OWN_ROWS)
    original = all_to_all.start_all_to_all
    with mock.patch("megatron_cp.comm.group_cast.start_all_to_all", side_effect=original) as calls:
        rows = (torch.from_numpy(x[rank]).to(dtype),)
        (received,) = group_cast(rows, compiled, dist.group.WORLD).wait().tensors
        num_cast = calls.call_count
        own = torch.zeros(OWN_ROWS, WIDTH, dtype=dtype)
        parts = (torch.from_numpy(y[rank]).to(dtype),)
        group_reduce((own,), parts, compiled, dist.group.WORLD, add_rows_).wait()
        num_reduce = calls.call_count - num_cast
    assert compiled.num_received == len(received)
    return received.double().numpy(), own.double().numpy(), num_cast, num_reduce


@pytest.mark.parametrize(("num_ranks", "num_hops", "density", "silent"), SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_group_reduce_is_the_adjoint_of_group_cast(num_ranks, num_hops, density, silent, seed):
    transfer = random_transfer(num_ranks, OWN_ROWS, num_hops, seed, density, silent)
    x, y = values(num_ranks, transfer, seed)
    results = run_on_ranks(num_ranks, cast_and_reduce, transfer, x, y, torch.float64)
    matrices = matrix_of(transfer, num_ranks, OWN_ROWS)
    all_own = x.reshape(-1, WIDTH)
    for rank, (received, _, num_cast, num_reduce) in enumerate(results):
        assert np.array_equal(received, matrices[rank] @ all_own)
        loud = sum(len(hop.messages) > 0 for hop in transfer.hops)
        assert (num_cast, num_reduce) == (loud, loud)  # a silent hop costs no collective
    expected = sum(matrix.T @ part for matrix, part in zip(matrices, y, strict=True))
    returned = np.concatenate([own for _, own, _, _ in results])
    assert np.array_equal(returned, expected)
    cast = sum((received * part).sum() for (received, *_), part in zip(results, y, strict=True))
    assert cast == (all_own * returned).sum()  # <cast(x), y> = <x, reduce(y)>


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_arrive_bit_for_bit_in_every_dtype(dtype):
    transfer = random_transfer(4, OWN_ROWS, 2, seed=5)
    x, y = values(4, transfer)
    results = run_on_ranks(4, cast_and_reduce, transfer, x / 7, y, dtype)
    rounded = torch.from_numpy(x.reshape(-1, WIDTH) / 7).to(dtype).double().numpy()
    for matrix, (received, *_) in zip(matrix_of(transfer, 4, OWN_ROWS), results, strict=True):
        assert np.array_equal(received, matrix @ rounded)


def cast_mixed(rank, world_size, transfer, num_calls):
    """Returns what arrived of tensors of five dtypes and shapes, and the number of collectives."""
    compiled = RankTransfer.compile(transfer, rank, world_size, OWN_ROWS)
    generator = torch.Generator().manual_seed(rank)
    rows = mixed_rows(generator)
    original = all_to_all.start_all_to_all
    with mock.patch("megatron_cp.comm.group_cast.start_all_to_all", side_effect=original) as calls:
        received = group_cast(rows, compiled, dist.group.WORLD).wait().tensors
        assert calls.call_count == num_calls
    return [tensor.double() for tensor in received], [tensor.dtype for tensor in received]


def mixed_rows(generator):
    shapes = {
        torch.bfloat16: (2, 3),
        torch.float32: (),
        torch.float16: (1,),
        torch.float64: (2,),
        torch.int64: (),
    }
    return tuple(
        (torch.rand(OWN_ROWS, *shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for dtype, shape in shapes.items()
    )


def test_tensors_of_different_dtypes_travel_in_one_message():
    transfer = random_transfer(3, OWN_ROWS, 2, seed=2, density=0.9)
    results = run_on_ranks(3, cast_mixed, transfer, 2)
    own = [mixed_rows(torch.Generator().manual_seed(rank)) for rank in range(3)]
    for matrix, (received, dtypes) in zip(matrix_of(transfer, 3, OWN_ROWS), results, strict=True):
        source = torch.from_numpy(matrix.argmax(axis=1))
        for index, tensor in enumerate(received):
            whole = torch.cat([rows[index] for rows in own])
            assert dtypes[index] == whole.dtype
            assert torch.equal(tensor, whole[source].double())


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_rows_of_one_element_are_packed_whatever_their_last_stride(num_rows):
    wide = torch.arange(30.0).view(5, 6)[:num_rows]
    column = torch.arange(50.0, 60.0).as_strided((num_rows, 1), (1, 7), 3)
    message = packed((column, wide))
    assert torch.equal(message.tensors[0], torch.arange(53.0, 53 + num_rows)[:, None])
    assert torch.equal(message.tensors[1], wide)
    assert message.data.shape == (num_rows, 4 + 24 + 4)  # rows are whole words of 8 bytes, as 24 is


@settings(max_examples=60)
@given(st.data())
def test_gathered_rows_are_those_rows_bit_for_bit_and_aligned_for_any_dtype(data):
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8]
    num_rows = data.draw(st.integers(1, 5))
    rows = []
    for dtype in data.draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=4)):
        shape = data.draw(st.sampled_from([(), (1,), (3,), (2, 4), (8, 2), (5, 3)]))
        first = data.draw(st.integers(0, 2))  # a tensor may begin anywhere in its memory
        whole = torch.arange((num_rows + first) * math.prod(shape)).view(-1, *shape)
        rows.append(whole[first:].to(dtype))
    index = torch.tensor(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=6)), dtype=int)
    message = PackedRows.empty(0, tuple(rows)).gathered(tuple(rows), index)
    for part, tensor in zip(message.tensors, rows, strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor[index])
        size = math.prod(tensor.shape[1:]) * tensor.element_size()
        alignment = math.gcd(size, 16)
        assert part.storage_offset() * part.element_size() % alignment == 0
        assert len(part) < 2 or part.stride(0) * part.element_size() % alignment == 0


@settings(max_examples=60)
@given(st.data())
def test_rows_that_lie_side_by_side_already_are_not_moved(data):
    dtypes = [torch.bfloat16, torch.float32, torch.float64]
    like = tuple(
        torch.empty((0, *data.draw(st.sampled_from([(), (3,), (2, 4)]))), dtype=dtype)
        for dtype in data.draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=3))
    )
    whole = PackedRows.empty(6, like)
    whole.data.copy_(torch.arange(whole.data.numel()).view_as(whole.data) % 120)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
    part = whole.rows(begin, end)
    again = packed(part.tensors)
    assert again.data.shape == part.data.shape
    assert all(map(torch.equal, again.tensors, part.tensors))
    if len(part):
        assert again.data.data_ptr() == part.data.data_ptr()
        assert torch.equal(again.data, part.data)


def test_rows_that_lie_otherwise_are_moved():
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    both = PackedRows.empty(4, (k, v))
    both.fill_((k, v))
    for source in ((k, v), both.tensors[::-1], both.tensors[:1], (both.tensors[0][::2],) * 2):
        made = packed(source)
        assert made.data.data_ptr() not in (x.data_ptr() for x in (k, v, both.data))
        assert all(map(torch.equal, made.tensors, source))
        assert all(x.is_contiguous() for x in (made.data,))
    alone = packed((k,))
    assert alone.data.data_ptr() == k.data_ptr()
    assert torch.equal(alone.data.view(torch.float32), k.flatten(1))


def reduce_floats(rank, world_size, transfer, interleave):
    """Returns the fp32 sums of random contributions; with `interleave` two reduces are under way at once."""
    compiled = RankTransfer.compile(transfer, rank, world_size, OWN_ROWS)
    torch.manual_seed(rank)
    own = [torch.randn(OWN_ROWS, WIDTH) for _ in range(2)]
    rows = [torch.randn(compiled.num_received, WIDTH) for _ in range(2)]
    start = [
        lambda i=i: group_reduce((own[i],), (rows[i],), compiled, dist.group.WORLD, add_rows_)
        for i in range(2)
    ]
    if interleave:
        for pending in [begin() for begin in start]:
            pending.wait()
    else:
        for begin in start:
            begin().wait()
    return [tensor.numpy() for tensor in own]


@pytest.mark.parametrize("num_hops", [1, 2])
def test_sums_repeat_bit_for_bit_and_do_not_depend_on_what_else_is_under_way(num_hops):
    transfer = random_transfer(4, OWN_ROWS, num_hops, seed=8, density=0.9)
    first, again, interleaved = (
        run_on_ranks(4, reduce_floats, transfer, mode) for mode in (False, False, True)
    )
    for a, b, c in zip(first, again, interleaved, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            assert np.array_equal(x, y)
            assert np.array_equal(x, z)


def reduce_in_order(rank, world_size, transfer, contributions):
    """Returns rank 0's own row after the others' contributions came home."""
    compiled = RankTransfer.compile(transfer, rank, world_size, 1)
    own = torch.tensor([[2.0**30]]) if rank == 0 else torch.zeros(1, 1)
    part = torch.full((compiled.num_received, 1), contributions[rank])
    group_reduce((own,), (part,), compiled, dist.group.WORLD, add_rows_).wait()
    return own.item()


ONE_HOP = Transfer((Hop([(0, 1, 0, 1), (0, 2, 0, 1)]),))
TWO_HOPS = Transfer((Hop([(0, 1, 0, 1)]), Hop([(0, 2, 0, 1)])))


@pytest.mark.parametrize(
    ("transfer", "first", "second"), [(ONE_HOP, 1, 2), (TWO_HOPS, 2, 1)], ids=["ranks", "hops"]
)
def test_contributions_are_added_by_hops_backwards_and_ranks_ascending(transfer, first, second):
    """A float32 shows the order: (2^30 - 2^30) + 1 is 1, and (2^30 + 1) - 2^30 is 0."""
    contributions = {0: 0.0, first: -(2.0**30), second: 1.0}
    assert run_on_ranks(3, reduce_in_order, transfer, contributions)[0] == 1.0
    contributions = {0: 0.0, first: 1.0, second: -(2.0**30)}
    assert run_on_ranks(3, reduce_in_order, transfer, contributions)[0] == 0.0


def cast_interleaved(rank, world_size, transfers):
    """Returns what casts bring, waited for in the order started and one after the other."""
    compiled = [RankTransfer.compile(t, rank, world_size, OWN_ROWS) for t in transfers]
    rows = (torch.arange(OWN_ROWS * 2.0).reshape(OWN_ROWS, 2) + 100 * rank,)
    pending = [group_cast(rows, transfer, dist.group.WORLD) for transfer in compiled]
    early = [cast.wait().tensors[0].numpy() for cast in pending]
    late = [group_cast(rows, t, dist.group.WORLD).wait() for t in compiled]
    return early, [rows.tensors[0].numpy() for rows in late]


def test_casts_under_way_together_bring_what_they_bring_one_by_one():
    transfers = [random_transfer(3, OWN_ROWS, 1, seed, density=0.7) for seed in range(4)]
    for early, late in run_on_ranks(3, cast_interleaved, transfers):
        for a, b in zip(early, late, strict=True):
            assert np.array_equal(a, b)


# ------------------------------------------------------------------ merging partial attention

HEADS, HEAD_DIM, KEYS = 2, 4, 5


def attention_inputs(num_ranks):
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(num_ranks * OWN_ROWS, HEADS, HEAD_DIM, generator=generator)
    k = torch.randn(num_ranks * KEYS, HEADS, HEAD_DIM, generator=generator)
    v = torch.randn(num_ranks * KEYS, HEADS, HEAD_DIM, generator=generator)
    return q, k, v


def merge_attention(rank, world_size, transfer):
    """Every rank attends with own and received queries to its own keys; results merge on the way home."""
    compiled = RankTransfer.compile(transfer, rank, world_size, OWN_ROWS)
    q, k, v = attention_inputs(world_size)
    k, v = k[rank * KEYS : (rank + 1) * KEYS], v[rank * KEYS : (rank + 1) * KEYS]
    own = (q[rank * OWN_ROWS : (rank + 1) * OWN_ROWS].contiguous(),)
    (received,) = group_cast(own, compiled, dist.group.WORLD).wait().tensors

    def attend(queries):
        return dense_attention(queries, k, v, torch.ones(len(queries), KEYS, dtype=torch.bool))

    def combine(target, joins, parts):
        for index, part in joins.by_run(parts):
            merge_rows_(*target, index, *part)

    result = attend(own[0])
    group_reduce(result, attend(received), compiled, dist.group.WORLD, combine).wait()
    return result


def times_seen(transfer, num_ranks):
    """Returns how often each query meets the keys of each rank: int `[queries, ranks]`."""
    seen = np.kron(np.eye(num_ranks), np.ones((OWN_ROWS, 1)))
    for rank, matrix in enumerate(matrix_of(transfer, num_ranks, OWN_ROWS)):
        seen[:, rank] += matrix.sum(axis=0)
    return torch.from_numpy(seen)


@pytest.mark.parametrize(("num_ranks", "num_hops"), [(2, 1), (4, 1), (4, 2), (3, 3)])
def test_partial_results_merged_on_the_way_home_equal_attention_over_all_keys_met(
    num_ranks, num_hops
):
    transfer = random_transfer(num_ranks, OWN_ROWS, num_hops, seed=4, density=0.6)
    results = run_on_ranks(num_ranks, merge_attention, transfer)
    q, k, v = attention_inputs(num_ranks)
    times = times_seen(transfer, num_ranks).repeat_interleave(KEYS, dim=1)

    def repeated(dtype):  # a key met twice counts twice: its score grows by log(times)
        scores = torch.einsum("qnh,knh->qnk", q.to(dtype), k.to(dtype)) * HEAD_DIM**-0.5
        scores = scores + torch.log(times.to(dtype))[:, None, :]
        lse = torch.logsumexp(scores, dim=-1)
        return torch.einsum("qnk,knh->qnh", torch.exp(scores - lse[..., None]), v.to(dtype)), lse

    out, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    for name, actual, plain, exact in zip(
        ("out", "lse"), (out, lse), repeated(torch.float32), repeated(torch.float64), strict=True
    ):
        assert_within_budget(actual, plain, exact, name)
