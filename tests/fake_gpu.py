"""A GPU that is not there: fake CUDA tensors, a fake process group, and a meter of what torch does between kernels.

Fake tensors have shapes, strides and a device, and no values: whole passes of real size run in milliseconds, operators
refuse tensors of two devices, and what would make the host wait for the GPU (reading a value, a size that depends on
values) raises. Nothing is computed.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cp import device_memory
from megatron_cp.comm import streams, upload
from megatron_cp.device_memory import SharedTensor
from megatron_cp.runtime import session

CUDA = torch.device("cuda", 0)
# What waits for the device; a copy from pinned memory is not among them.
WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_pinned",
    "unique",
    "equal.default",
)
FREE = ("empty", "new_empty", "empty_like", "record_stream", "lift_fresh", "detach")


class Meter(TorchDispatchMode):
    """Counts the bytes that operators read and write; views and allocations cost nothing."""

    def __init__(self):
        super().__init__()
        self.bytes, self.by_operator, self.waits = 0, {}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if any(word in name for word in WAITING) or _leaves_the_device(name, args, result):
            self.waits.append(name)
        if func.is_view or func.namespace in ("c10d", "prim") or name.split(".")[1] in FREE:
            return result
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        reads = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
        writes = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if name.startswith(("aten.index_select", "aten.index.")):  # reads the chosen rows only
            reads = writes
        if name.startswith(("aten.index_add_", "aten.index_copy_")):  # touches the named rows only
            reads, writes = [reads[-1]], [reads[-1]] * (2 if "add" in name else 1)
        count = sum(x.numel() * x.element_size() for x in reads + writes)
        self.bytes += count
        self.by_operator[name] = self.by_operator.get(name, 0) + count
        return result


def contiguous_copy(x):
    """Does what `contiguous` does, without the guard of a device that this build of torch does not know."""
    return x.clone(memory_format=torch.contiguous_format)


def _leaves_the_device(name, args, result):
    source = next((x for x in tree_leaves(args) if isinstance(x, torch.Tensor)), None)
    return (
        source is not None
        and isinstance(result, torch.Tensor)
        and source.device.type == "cuda"
        and result.device.type == "cpu"
    )


@contextlib.contextmanager
def fake_gpus(rank, num_ranks):
    """Makes this process `rank` of `num_ranks` with one GPU each; yields the group. To be used in a fresh process."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def copied(x, device):
        return torch.empty(x.shape, dtype=x.dtype, device=device)

    with (
        fake,
        mock.patch.object(upload, "copy_to", copied),
        mock.patch.object(upload, "share", lambda buffer: SharedTensor(buffer, None, {0})),
        mock.patch.object(device_memory, "current_stream", lambda _: 0),
        mock.patch.object(session, "is_capturing", lambda _: False),
        mock.patch.object(session, "_agree", lambda *_: None),
        mock.patch.object(session, "tell_of_other_hardware", lambda *_: None),
        mock.patch.object(streams, "_streams_of", lambda _: _Streams()),
        mock.patch.dict(streams._side_streams, clear=True),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
        mock.patch.object(torch.Tensor, "__getitem__", _get),
        mock.patch.object(torch.Tensor, "copy_", _copy),
    ):
        yield dist.group.WORLD
    dist.destroy_process_group()


class _Streams:
    """Streams on which everything runs in the caller's order."""

    def Stream(self, device, priority):
        return mock.MagicMock()

    def current_stream(self, device):
        return mock.MagicMock()

    def stream(self, stream):
        return contextlib.nullcontext()


def _copy(x, source):
    """Copies nothing, and is metered as what reads the source and writes `x`."""
    assert x.device == source.device, (x.device, source.device)
    torch.ops.aten._to_copy.default(source.expand(x.shape), dtype=x.dtype)
    return x


def _get(x, index):
    """Does what indexing does, without the guard of a device that this build of torch does not know."""
    dim = 0
    items = index if isinstance(index, tuple) else (index,)
    named = sum(item is not None and item is not Ellipsis for item in items)
    for item in items:
        if item is Ellipsis:
            dim += x.dim() - named
        elif item is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(item, slice):
            start, stop, step = item.indices(x.shape[dim])
            x, dim = torch.ops.aten.slice.Tensor(x, dim, start, max(start, stop), step), dim + 1
        elif isinstance(item, torch.Tensor):
            assert item.dtype != torch.bool, "a boolean index waits for the device"
            x, dim = torch.ops.aten.index.Tensor(x, [None] * dim + [item]), dim + item.dim()
        else:
            x = x.select(dim, item)
            named -= 1
    return x
