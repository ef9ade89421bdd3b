"""Tensors that wait on the host: as they were, and without a wait."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp.runtime import host_memory


def test_nothing_of_cpu_ranks_is_put_away():
    with host_memory.on_host():
        assert not host_memory.leaves(torch.zeros(1))
    assert not host_memory.leaves(torch.zeros(1))


def test_a_tensor_comes_back_as_it_was():
    tensor = torch.arange(6.0).view(2, 3).t()  # of any strides
    away = host_memory.put_away(tensor)
    before = tensor.clone()
    tensor += 1
    assert torch.equal(away.back(), before) and away.back().dtype == tensor.dtype


class _Calls(TorchDispatchMode):
    """Each operation with its arguments by name."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = [argument.name for argument in func._schema.arguments]
        self.made.append((str(func), dict(zip(names, args, strict=False)) | (kwargs or {})))
        return func(*args, **(kwargs or {}))


def test_copies_of_a_gpu_go_through_pinned_memory_and_nobody_waits():
    with FakeTensorMode(), _Calls() as calls:
        tensor = torch.empty(4, 3, device="cuda", dtype=torch.bfloat16).t()
        with host_memory.on_host():
            assert host_memory.leaves(tensor)
        calls.made.clear()
        away = host_memory.put_away(tensor)
        back = away.back()
    assert (back.device, back.shape, back.dtype) == (tensor.device, tensor.shape, tensor.dtype)
    made = {
        name: given for name, given in calls.made if not name.startswith(("aten.detach", "prim"))
    }
    assert list(made) == ["aten.empty.memory_format", "aten.copy_.default", "aten._to_copy.default"]
    empty, copy, to_copy = made.values()
    assert empty["pin_memory"] and copy["non_blocking"] and to_copy["non_blocking"]
