"""What one stream fills, and others read, waits on the device alone: recorded on streams that are not there."""

from types import SimpleNamespace

import pytest
import torch

from megatron_cp import device_memory
from megatron_cp.device_memory import SharedTensor
from megatron_cp.mask import causal
from megatron_cp.plan import make_plan
from megatron_cp.runtime.session import open_session

GPU = torch.device("cuda", 0)


class Cuda:
    """Stands for `torch.cuda`: one current stream; `calls` says what streams and memory were asked for."""

    def __init__(self):
        self.calls, self.number, self.is_capturing = [], 1, False

    def Event(self):
        return SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream.cuda_stream))
        )

    def current_stream(self, device):
        number = self.number
        return SimpleNamespace(
            cuda_stream=number, wait_event=lambda _: self.calls.append(("wait", number))
        )

    def is_current_stream_capturing(self):
        return self.is_capturing


@pytest.fixture
def cuda(monkeypatch):
    stand_in = Cuda()
    for name in ("Event", "current_stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    raw_stream = lambda index: stand_in.number  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw_stream, raising=False)
    return stand_in


def on_gpu(cuda):
    """A tensor that says that it is on a GPU, and tells who keeps its memory."""
    keep = lambda stream: cuda.calls.append(("keep", stream.cuda_stream))  # noqa: E731
    return SimpleNamespace(device=GPU, record_stream=keep)


def test_another_stream_waits_once_and_keeps_the_memory(cuda):
    shared = device_memory.share(on_gpu(cuda))
    shared.wait()
    assert cuda.calls == [("record", 1)]
    for cuda.number in (2, 2, 1, 3, 2):
        shared.wait()
    assert cuda.calls == [("record", 1), ("wait", 2), ("keep", 2), ("wait", 3), ("keep", 3)]


def test_a_stream_that_records_a_graph_waits_for_nothing_and_is_not_taken_for_one_that_did(cuda):
    shared = device_memory.share(on_gpu(cuda))
    cuda.number, cuda.is_capturing = 2, True
    shared.wait()
    assert cuda.calls == [("record", 1)]
    cuda.is_capturing = False
    shared.wait()
    assert cuda.calls[1:] == [("wait", 2), ("keep", 2)]


def test_a_device_without_streams_has_nothing_to_wait_for():
    x = torch.arange(3)
    shared = device_memory.share(x)
    shared.wait()
    assert shared == SharedTensor(x, None, {0})


def test_a_call_with_a_plan_is_refused_while_a_graph_is_recorded(cuda):
    cuda.is_capturing = True
    with pytest.raises(RuntimeError, match=r"a CUDA graph must not record calls with a plan"):
        open_session(make_plan(causal(8), 1), None, GPU)
