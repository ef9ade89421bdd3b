"""The process groups beside a context-parallel group: one for rows on a GPU, one to talk on CPUs.

    rows on NCCL      a communicator of high priority: its short kernels are not to queue behind attention's
    agreements        any group that takes CPU tensors: digests are compared without waiting for the GPU

Where the group itself will do, it is used: always on gloo. Groups are made on first use, by all ranks of the
group alike, and kept. The NCCL communicator ran between ranks on one GPU; several GPUs never had one.

A program may hand out groups that stand for torch's, to free and make those anew while its own stay (slime's
`ReloadableProcessGroup`). Then the group that is meant is the one that stands behind it now.
"""

import contextlib
import datetime
import hashlib
import itertools
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

_groups: dict[tuple[str, str], dist.ProcessGroup] = {}
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def torchs_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group that stands behind one which a program has wrapped; torch's own as it is."""
    inner = getattr(group, "group", None)
    return inner if isinstance(inner, dist.ProcessGroup) else group


def name_of(group: dist.ProcessGroup) -> str:
    """Returns a name that no other group of this process has had: torch's own come back after a new start."""
    group = torchs_own(group)
    if group not in _numbers:
        _numbers[group] = next(_next_number)
    return f"{group.group_name} {_numbers[group]}"


def transfer_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group over which rows of `group` travel. Collective over its ranks on first use."""
    group = torchs_own(group)
    if not _is_nccl(group):
        return group
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    # By default NCCL starts four blocks as one cluster, which waits until four multiprocessors of one part of the GPU
    # are free together. What attention leaves lies anywhere: single blocks begin there at once.
    options.config.cga_cluster_size = 1
    return _beside(group, "rows", "nccl", options)


def agreement_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a group of the same ranks for CPU tensors. Collective over its ranks on first use."""
    group = torchs_own(group)
    if torch.device("cpu") in group._device_types or not _is_nccl(group):
        return group
    return _beside(group, "agreements", "gloo", None)


def forget_groups() -> None:
    """Drops the groups made here; NCCL's and gloo's threads must not outlive the interpreter's objects."""
    _groups.clear()


def _is_nccl(group: dist.ProcessGroup) -> bool:
    """Returns whether GPU tensors of a group go over NCCL; it may have another backend for CPU tensors."""
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def _beside(group: dist.ProcessGroup, use: str, backend: str, options: object) -> dist.ProcessGroup:
    key = (name_of(group), use)
    if key not in _groups:
        ranks = dist.get_process_group_ranks(group)
        with _nothing_to_split(), _named(f"megatron_cp {use} beside {group.group_name}: {ranks}"):
            # Not `dist.new_group`, which a program may have wrapped: it would make this group anew by another name.
            _groups[key] = dist.distributed_c10d.new_group(
                ranks,
                timeout=_timeout_of(group),
                backend=backend,
                pg_options=options,
                use_local_synchronization=True,
                group_desc=f"megatron_cp {use}",
            )
    return _groups[key]


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """Returns how long the group's own collectives wait, None where its backend does not say."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
    return timeout


@contextlib.contextmanager
def _nothing_to_split() -> Iterator[None]:
    """Makes new groups of NCCL begin anew, even where `init_process_group` was given a device.

    Then torch would split the communicator of all ranks, which waits for every rank of the job. But the next pipeline
    stage waits for the rows of this one, and makes its group later: both would wait for ever.
    """
    world = dist.distributed_c10d._get_default_group()
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Makes a group that its ranks alone make find the same name on each of them: by it they meet.

    torch's own name counts the groups that a rank is in. Ranks of a pipeline are in different numbers of them (the
    first and the last stage share embeddings), would go by different names, and wait for ever. So would the ranks of
    a group that the program makes later: since 2.14 torch counts ours too, and not every rank has one.
    """
    c10d = dist.distributed_c10d
    hashed, digest = c10d._hash_ranks_to_str, hashlib.sha1(name.encode(), usedforsecurity=False)
    count = c10d._world.group_count
    c10d._hash_ranks_to_str = lambda ranks: digest.hexdigest()
    try:
        yield
    finally:
        c10d._hash_ranks_to_str, c10d._world.group_count = hashed, count
