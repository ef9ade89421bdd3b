"""Transfers on a side stream, played on recorded streams: no race, one order on all ranks, the CPU's bits."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_cp.comm import RankTransfer, add_rows_, group_cast, group_reduce
from tests.comm.recorded_streams import Stream, recorded_streams
from tests.comm.transfers import random_transfer
from tests.ranks import run_on_ranks

OWN_ROWS, WIDTH = 6, 3
SHAPES = [(2, 1, ()), (3, 2, ()), (4, 3, ()), (4, 3, (0,)), (3, 3, (2,)), (8, 2, ())]


def move(rank, world_size, transfer, log):
    """Returns (rows received, own rows + what came home) of two casts and reduces that travel together.

    `log(place)` is called where collectives may have been issued.
    """
    compiled = RankTransfer.compile(transfer, rank, world_size, OWN_ROWS)
    generator = torch.Generator().manual_seed(rank)

    def randn(rows, dtype):
        return torch.randn(rows, WIDTH, generator=generator).to(dtype)

    results = []
    casts = []
    for dtype in (torch.float32, torch.bfloat16):
        rows = (randn(OWN_ROWS, dtype) * 2, randn(OWN_ROWS, torch.float32) * 3)
        casts.append(group_cast(rows, compiled, dist.group.WORLD))
        log("cast started")
        del rows  # the caller may forget them: the side stream still reads
    results += [tensor.float() * 2 for cast in casts for tensor in cast.wait().tensors]
    log("casts ended")
    own = torch.zeros(OWN_ROWS, WIDTH)
    reduces = []
    for _ in range(2):
        part = (randn(compiled.num_received, torch.float32) * 2,)
        reduces.append(group_reduce((own,), part, compiled, dist.group.WORLD, add_rows_))
        log("reduce started")
        del part
        own.add_(1)  # the caller goes on with its own rows
    for reduce in reduces:
        reduce.wait()
    log("reduces ended")
    return [*results, own * 1]


def move_on_streams(rank, world_size, transfer):
    """Returns (results, results on a CPU, faults, issuing streams, collectives issued by each place)."""
    expected = move(rank, world_size, transfer, lambda place: None)
    with recorded_streams() as recorder:
        places = []
        results = move(
            rank, world_size, transfer, lambda p: places.append((p, len(recorder.collectives)))
        )
        torch.zeros(1).add_(1)  # frees what is left
    return results, expected, recorder.faults, recorder.collectives, places


@pytest.mark.parametrize(("num_ranks", "num_hops", "silent"), SHAPES)
def test_transfers_on_a_side_stream_race_with_nothing_and_bring_the_bits_of_the_cpu(
    num_ranks, num_hops, silent
):
    transfer = random_transfer(num_ranks, OWN_ROWS, num_hops, 3, 0.8, silent)
    answers = run_on_ranks(num_ranks, move_on_streams, transfer)
    for results, expected, faults, *_ in answers:
        assert not faults
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(("num_ranks", "num_hops", "silent"), SHAPES)
def test_all_hops_are_issued_at_the_start_later_ones_aside_and_alike_on_all_ranks(
    num_ranks, num_hops, silent
):
    transfer = random_transfer(num_ranks, OWN_ROWS, num_hops, 3, 0.8, silent)
    answers = run_on_ranks(num_ranks, move_on_streams, transfer)
    loud = num_hops - len(silent)
    for *_, collectives, places in answers:
        assert collectives == ["compute", *["side"] * (loud - 1)] * 4
        assert places == [
            ("cast started", loud), ("cast started", 2 * loud), ("casts ended", 2 * loud),
            ("reduce started", 3 * loud), ("reduce started", 4 * loud), ("reduces ended", 4 * loud),
        ]  # fmt: skip


def ways_to_break_the_order():
    """Returns the stream operations without which something races."""
    return {
        "nobody waits for a collective": ("wait_event", Stream),
        "memory is not recorded": ("record_stream", torch.Tensor),
    }


def move_on_broken_streams(rank, world_size, transfer, way):
    name, owner = ways_to_break_the_order()[way]
    with (
        recorded_streams() as recorder,
        mock.patch.object(owner, name, lambda self, other: None),
    ):
        move(rank, world_size, transfer, lambda place: None)
        torch.zeros(1).add_(1)
    return recorder.faults


@pytest.mark.parametrize("way", ways_to_break_the_order())
def test_the_recorded_streams_notice_every_missing_order(way):
    transfer = random_transfer(3, OWN_ROWS, 2, 3, 0.8)
    for faults in run_on_ranks(3, move_on_broken_streams, transfer, way):
        assert faults
