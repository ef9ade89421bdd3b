"""The collectives of a run as each rank starts them, and whether they can wait for one another for ever.

gloo forgives what NCCL may not: it runs what was started side by side, while kernels of two communicators may have to
wait for room on a GPU, in the order in which they came there. The strictest machine is the judge here:
a rank begins nothing before all that it started is done.

    rank 0   all-to-all {0 1}   send to 2       rank 2   receive from 0   all-to-all {2 3}
    rank 1   all-to-all {0 1}   send to 3       rank 3   receive from 1   all-to-all {2 3}

A run that ends on that machine waits for ever on no other.
"""

import contextlib
import functools
import json
import os
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

FOLDER = "MCP_TEST_COLLECTIVES"  # variable of the environment
COLLECTIVES = (
    "_allgather_base", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather",
    "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced",
    "scatter", "barrier", "monitored_barrier", "all_gather_single", "all_to_all_single",
    "reduce_scatter_single",
)  # fmt: skip
PEER = {
    "send": 1,
    "recv": 1,
}  # place of the other rank, as the group numbers it, among the arguments


def record(rank: int) -> None:
    """Notes every collective of this process in the folder, and starts chains of transfers as a GPU does."""
    file = (Path(os.environ[FOLDER]) / f"{rank}.jsonl").open("w", encoding="utf-8")
    group_class, state = (
        torch._C._distributed_c10d.ProcessGroup,
        SimpleNamespace(batch=0, open=None),
    )

    def write(*line):
        file.write(json.dumps(line) + "\n")
        file.flush()

    def note(group, name, peer=None):
        ranks = dist.get_process_group_ranks(group)
        batch = state.open if peer is not None else None
        other = None if peer is None else ranks[peer]
        thread = threading.current_thread().name
        write(name, group.group_name, ranks, other, batch, thread)

    def noting(name, original):
        @functools.wraps(original)
        def call(group, *arguments, **options):
            note(group, name, arguments[PEER[name]] if name in PEER else None)
            return original(group, *arguments, **options)

        return call

    for name in (*COLLECTIVES, *PEER):
        if hasattr(group_class, name):
            setattr(group_class, name, noting(name, getattr(group_class, name)))
    start_batch = dist.batch_isend_irecv

    def batch(operations):
        state.batch += 1
        state.open = state.batch
        try:
            return start_batch(operations)
        finally:
            state.open = None

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch
    make_group = dist.new_group

    @functools.wraps(make_group)
    def new_group(ranks=None, *arguments, **options):
        group = make_group(ranks, *arguments, **options)
        everyone = list(range(dist.get_world_size()))
        callers = ranks if options.get("use_local_synchronization") else everyone
        write("new_group", str(ranks or everyone), callers, None, None, "MainThread")
        return group

    dist.new_group = dist.distributed_c10d.new_group = new_group
    _start_chains_as_on_a_gpu()
    _have_groups_as_on_a_gpu()


def _have_groups_as_on_a_gpu() -> None:
    """Rows travel over a communicator of their own, which its ranks make when they first need it."""
    from megatron_cp.comm import groups

    beside = groups._beside
    dist.ProcessGroupNCCL = SimpleNamespace(
        Options=lambda **_: SimpleNamespace(config=SimpleNamespace())
    )
    groups._is_nccl = lambda _: True
    groups._beside = lambda group, use, *_: beside(group, use, "gloo", None)


def _start_chains_as_on_a_gpu() -> None:
    """Hops of a transfer are started one after another at once, not when their rows are waited for."""
    from megatron_cp.comm import streams

    class Stream:
        def __init__(self, *_, **__):
            pass

        def wait_stream(self, _):
            pass

    fake = SimpleNamespace(
        Stream=Stream, current_stream=Stream, stream=lambda _: contextlib.nullcontext()
    )
    streams._streams_of = lambda _: fake
    torch.Tensor.record_stream = lambda *_: None


def recorded(folder: Path, world_size: int) -> list[list[list]]:
    """Returns what every rank started, in order."""
    return [
        [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
        for rank in range(world_size)
    ]


def stuck(ranks: list[list[list]]) -> list[str]:
    """Returns what each rank of the strictest machine waits for in the end, nothing where all ended."""
    waiting, opened, moved = [deque(_steps(calls)) for calls in ranks], set(), True
    while moved:
        moved = False
        for rank, steps in enumerate(waiting):
            if not steps:
                continue
            if steps[0].name in PEER:
                moved |= _exchange(rank, waiting, opened)
            else:
                moved |= _meet(steps[0], waiting)
    return [f"rank {rank} at {steps[0]}" for rank, steps in enumerate(waiting) if steps]


def _steps(calls):
    """Returns collectives, and sends and receives of one batch together."""
    steps, batch = [], None
    for name, group, members, other, number, _ in calls:
        if other is not None and number is not None and number == batch:
            steps[-1].open.append((name, group, other))
            continue
        batch = number
        open_ends = [] if other is None else [(name, group, other)]
        steps.append(SimpleNamespace(name=name, group=group, ranks=members, open=open_ends))
    return steps


def _meet(step, waiting):
    """Ends a collective if every rank of its group is there."""
    heads = [waiting[rank][0] if waiting[rank] else None for rank in step.ranks]
    if any(head is None or (head.name, head.group) != (step.name, step.group) for head in heads):
        return False
    for rank in step.ranks:
        waiting[rank].popleft()
    return True


def _exchange(rank, waiting, opened):
    """Ends sends and receives whose other ends are there, in the order in which both have them.

    The first of a group makes its communicator, for which NCCL wants every rank of the group.
    """
    mine, has_moved = waiting[rank][0], False
    if mine.group not in opened:
        heads = [waiting[one][0] if waiting[one] else None for one in mine.ranks]
        if any(head is None or head.group != mine.group for head in heads):
            return False
        opened.add(mine.group)
    for end in list(mine.open):
        name, group, other = end
        theirs = waiting[other][0] if waiting[other] else None
        wanted = ({"send": "recv", "recv": "send"}[name], group, rank)
        if theirs is not None and wanted in theirs.open:
            mine.open.remove(end)
            theirs.open.remove(wanted)
            has_moved = True
            if not theirs.open:
                waiting[other].popleft()
    if not mine.open and waiting[rank] and waiting[rank][0] is mine:
        waiting[rank].popleft()
    return has_moved
