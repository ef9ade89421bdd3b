"""A device's streams, played on a CPU: every operation runs at once, and what could race on a GPU is noted.

Each stream has a vector clock. An operation reads and writes bytes of storages at its stream's time; another stream
may touch them only after it has waited for that time. Memory that is freed goes back to the stream that
allocated it, which may use it again at once: by then it must know of every use, unless the storage was recorded
on a stream that does. Collectives run on a stream of their own, as NCCL's do.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_cp.comm import streams


class Stream:
    def __init__(self, name, clock=()):
        self.name, self.clock = name, dict(clock)

    def wait(self, clock):
        for name, time in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def wait_stream(self, other):
        self.wait(other.clock)

    def wait_event(self, event):
        self.wait(event)

    def tick(self):
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.name, self.clock[self.name]

    def knows(self, moment):
        name, time = moment
        return self.clock.get(name, 0) >= time


class _Storage:
    """What is known of one storage: its allocating stream, (bytes, moment) of writes and uses, streams recorded on."""

    def __init__(self, tensor, owner):
        self.alive = StorageWeakRef(tensor.untyped_storage())
        self.owner, self.writes, self.uses, self.recorded = owner, [], [], []


class RecordedStreams(TorchDispatchMode):
    """Stands for `torch.cuda` in `comm.streams`; `faults` lists what could go wrong on a GPU."""

    def __init__(self):
        super().__init__()
        self.compute, self.nccl = Stream("compute"), Stream("nccl")
        self.current, self.side = self.compute, Stream("side")
        self.faults, self.collectives = (
            [],
            [],
        )  # collectives: the streams that they were issued from
        self._storages, self._is_paused = {}, False
        self._awaited = 0  # the last collective for which compute was told to wait
        self._all_to_all = dist.all_to_all_single

    # --- what comm.streams calls

    def Stream(self, device, priority):
        self.side = Stream("side")
        return self.side

    def held_up(self):
        """Returns whether a kernel launched now would wait for a collective that nobody has waited for.

        A transfer that starts must not stop the computation until hops of another one are there.
        """
        return self.compute.clock.get("nccl", 0) > self._awaited

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def record(self, tensor, stream):
        self._find(tensor).recorded.append(stream)

    # --- what runs

    def all_to_all_single(self, received, sent, *splits, group, async_op):
        self._sweep()
        self.collectives.append(self.current.name)
        self._is_paused = True
        self._all_to_all(received, sent, *splits, group=group)
        self._is_paused = False
        self.nccl.wait(self.current.clock)
        self._touch(self.nccl, [sent], [received], "all_to_all_single")
        done = dict(self.nccl.clock)

        def wait():
            self.current.wait_event(done)
            if self.current is self.compute:
                self._awaited = max(self._awaited, done["nccl"])

        return mock.Mock(wait=wait)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._is_paused or func.is_view:
            return result
        self._sweep()
        reads = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        writes = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self._touch(self.current, reads, writes, str(func))
        return result

    def _find(self, tensor):
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            self._storages[key] = _Storage(tensor, self.current)
        return self._storages[key]

    def _touch(self, stream, reads, writes, what):
        moment = stream.tick()
        written = [(self._find(tensor), _bytes_of(tensor)) for tensor in writes]
        for storage, span in [(self._find(tensor), _bytes_of(tensor)) for tensor in reads]:
            unknown = [
                w for where, w in storage.writes if _meet(where, span) and not stream.knows(w)
            ]
            if unknown:
                self.faults.append(f"{what} on {stream.name} reads what {unknown} write")
            storage.uses.append((span, moment))
        for storage, span in written:
            unknown = [u for where, u in storage.uses if _meet(where, span) and not stream.knows(u)]
            if unknown:
                self.faults.append(f"{what} on {stream.name} writes what {unknown} use")
            storage.writes.append((span, moment))
            storage.uses.append((span, moment))

    def _sweep(self):
        """Checks the storages that were freed since the last operation."""
        for key, storage in list(self._storages.items()):
            if not storage.alive.expired():
                continue
            del self._storages[key]
            for _, use in storage.uses:
                if not any(stream.knows(use) for stream in [storage.owner, *storage.recorded]):
                    self.faults.append(f"memory of {storage.owner.name} goes back before {use}")


def _bytes_of(tensor):
    """Returns the range of its storage in which a tensor lies, gaps included."""
    extent = sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.storage_offset()
    end = begin + 1 + extent if tensor.numel() else begin
    return begin * tensor.element_size(), end * tensor.element_size()


def _meet(a, b):
    return a[0] < b[1] and b[0] < a[1]


@contextlib.contextmanager
def recorded_streams():
    """Runs the transfers inside on recorded streams instead of the CPU's order."""
    recorder = RecordedStreams()
    with (
        mock.patch.object(streams, "_streams_of", lambda device: recorder),
        mock.patch.dict(streams._side_streams, clear=True),
        mock.patch.object(
            torch.Tensor, "record_stream", lambda x, stream: recorder.record(x, stream)
        ),
        mock.patch.object(dist, "all_to_all_single", recorder.all_to_all_single),
        recorder,
    ):
        yield recorder
