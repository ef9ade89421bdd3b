"""Lets Megatron-Core train on CPU ranks (gloo): the one place that stands in for CUDA.

Megatron-Core has no CPU mode: it asks `torch.cuda` for the current device, its random streams, its
streams and events, and creates tensors with `device="cuda"`. `install()` answers these calls on a
machine without CUDA, before Megatron is imported. With CUDA it does nothing at all, so the same
script serves both.

What this module must never do (each was a measured fault, notes in docs/megatron.md):
  * leave `torch.cuda._lazy_call` alone: Megatron sets its random streams through it, and without
    CUDA the queue never runs: dropout then differs between tensor-parallel ranks and initial
    weights depend on the tensor-parallel size;
  * bind one function object under two torch names: dynamo keys its rules by object and refuses the
    second;
  * replace `torch.cuda.manual_seed_all`: `torch.manual_seed`, which the stand-ins call, calls it
    (endless recursion);
  * make `torch.cuda.is_available()` true, or touch anything when it is;
  * run after the first import of `megatron.core`, which copies some of these names at import
    (install() raises).
The stand-ins are process-wide and stay.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from megatron_cp.mcore.versions import triton_free

_CPU = torch.device("cpu")

_FACTORIES = (
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint",
    "zeros_like", "ones_like", "empty_like", "full_like",
)  # fmt: skip

_IGNORED_CALLS = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")


def install() -> bool:
    """Returns True with the stand-ins in place, False where CUDA is there and nothing was changed.

    Call it first in the entry script and in every worker process that trains. A second call changes
    nothing.

    Raises:
        RuntimeError: if `megatron.core` was imported before the first call.
    """
    if torch.cuda.is_available():
        return False
    if is_installed():
        return True
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core is already imported, without CUDA and without the CPU stand-ins; it must come after "
            "them: call megatron_cp.mcore.cpu.install() before anything that imports megatron.core"
        )
    _disable_compilation()
    _answer_device_calls()
    _answer_random_calls()
    _send_factories_to_cpu()
    _send_tensor_methods_to_cpu()
    triton_free.install()
    torch.cuda._megatron_cp_on_cpu = True  # type: ignore[attr-defined]
    return True


def is_installed() -> bool:
    """Returns whether this process runs on the stand-ins."""
    return bool(getattr(torch.cuda, "_megatron_cp_on_cpu", False))


def _disable_compilation() -> None:
    """Keeps fused functions plain; compiling them at import takes 25 s and a C++ compiler.

    A disabled `torch.compile` still imports its compiler, a second of every start.
    """
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if os.environ["TORCH_COMPILE_DISABLE"] != "1":
        return
    torch.compile = _compile_nothing
    dynamo_config = sys.modules.get("torch._dynamo.config")
    if dynamo_config is not None:  # read its environment long ago
        dynamo_config.disable = True  # type: ignore[attr-defined]


def _compile_nothing(model: Any = None, **options: Any) -> Any:
    """Returns the function or module as it is; without one, a decorator that does."""
    return (lambda one: one) if model is None else model


class _NullStream:
    """Stands for a CUDA stream or event: work is done when its call returns, waits are over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def query(self, *args: Any) -> bool:
        """Returns True: all work is done."""
        return True

    record = synchronize = wait = wait_stream = wait_event = query

    def record_event(self, event: Any = None) -> Any:
        """Returns an event that has happened."""
        return _NullStream() if event is None else event

    def elapsed_time(self, end: object) -> float:
        """Returns 0 ms: there is no device clock."""
        return 0.0


class _DefaultGenerators:
    """Stands for `torch.cuda.default_generators`: the CPU's generator under every device."""

    def __getitem__(self, device: object) -> torch.Generator:
        return torch.default_generator


def _bind(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Puts a fresh function object under `module.name`, because dynamo refuses one under two names."""

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    stand_in.__name__ = stand_in.__qualname__ = name
    setattr(module, name, stand_in)


def _answer_device_calls() -> None:
    cuda: Any = torch.cuda
    _bind(cuda, "current_device", lambda: _CPU)
    for name in _IGNORED_CALLS:
        _bind(cuda, name, lambda *args, **kwargs: None)
    cuda.Stream = _NullStream
    cuda.Event = type("Event", (_NullStream,), {})
    for name in ("stream", "current_stream", "default_stream"):
        _bind(cuda, name, lambda *args, **kwargs: _NullStream())
    for name in ("range_push", "range_pop"):
        _bind(cuda.nvtx, name, lambda *args, **kwargs: 0)


def _answer_random_calls() -> None:
    """Lets the CPU's generator serve as the GPU's; Megatron's tracker swaps its state per stream."""
    cuda: Any = torch.cuda
    for module in (cuda, cuda.random):
        _bind(module, "get_rng_state", lambda device=None: torch.get_rng_state())
        _bind(module, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
        _bind(module, "manual_seed", lambda seed: torch.manual_seed(seed))
    cuda.default_generators = _DefaultGenerators()
    _bind(cuda, "_lazy_call", lambda callback, **kwargs: callback())
    # At every fork the tracker warns that the CPU's generator moved; here that is the generator it
    # forked.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _redirect(kwargs: dict[str, Any]) -> None:
    """Turns a CUDA device, and pinned memory, in keyword arguments into their CPU meaning."""
    if _is_cuda(kwargs.get("device")):
        kwargs["device"] = _CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False


def _send_factories_to_cpu() -> None:
    # `with torch.device(...)` tells factories by identity, from a list made at its first use: made
    # later, it would hold the stand-ins, and such a context would silently do nothing.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))


def _redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        _redirect(kwargs)
        return factory(*args, **kwargs)

    return create


def _send_tensor_methods_to_cpu() -> None:
    tensor: Any = torch.Tensor
    plain_to, plain_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        _redirect(kwargs)
        return plain_to(self, *args, **kwargs)

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers and gradient clipping compare this string with
        # 'torch.cuda.FloatTensor'.
        answer = plain_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.to, tensor.type = to, type_name
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.pin_memory = lambda self, *args, **kwargs: self
