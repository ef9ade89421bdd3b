"""Which backend computes on a GPU where the caller names none: hopper, then flash, then flex; one log line says so.

`hopper` is taken where it serves the call and its self-test passed on that GPU. A failed self-test is a loud warning
with the numbers, and an error for a caller who asked for hopper by name. On an H100 hopper was chosen;
no other GPU has been tried.
"""

import logging
import warnings
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.features import Feature, feature_of
from megatron_cp.kernels.compilers import CompileError, NoCompilerError
from megatron_cp.kernels.driver import CudaError

_log = logging.getLogger("megatron_cp")


class Asked(NamedTuple):
    """What a call wants of its backend besides shapes."""

    softmax_scale: float
    softcap: float
    deterministic: bool
    needs_grad: bool
    has_dropout: bool = False

    def feature(self) -> Feature:
        """Returns the feature of kernels that serve the call. Raises NotImplementedError where none has all of it."""
        return feature_of(self.softcap > 0, self.has_dropout)


class Served(NamedTuple):
    """What serves a call: head dim and value head dim of the kernels, and whose operator where there are several."""

    dims: tuple[int, int]
    operator: str = ""


_Kind = tuple[Hashable, ...]
_chosen: dict[_Kind, str] = {}
_served: dict[_Kind, Served] = {}  # by hopper, tested


def _kind(q: Tensor, v: Tensor, asked: Asked) -> _Kind:
    """Returns what the answer depends on."""
    return (
        q.device, q.dtype, q.shape[-1], v.shape[-1],
        asked.softcap > 0, asked.softmax_scale > 0, asked.softmax_scale < 0, asked.deterministic,
        asked.needs_grad, asked.has_dropout, torch_wants_determinism(),
    )  # fmt: skip


def torch_wants_determinism() -> bool:
    """Returns whether torch is to raise an error where results may differ from run to run."""
    is_wanted = torch.are_deterministic_algorithms_enabled()
    return is_wanted and not torch.is_deterministic_algorithms_warn_only_enabled()


def choose_backend(q: Tensor, v: Tensor, asked: Asked) -> str:
    """Returns the backend for calls like this one: `cpu` on a CPU, else the first GPU backend that serves it.

    Raises NotImplementedError where none does.
    """
    return "cpu" if q.device.type == "cpu" else _choose_gpu_backend(q, v, asked)


def _choose_gpu_backend(q: Tensor, v: Tensor, asked: Asked) -> str:
    kind = _kind(q, v, asked)
    chosen = _chosen.get(kind)
    if chosen is None:
        found = _first_that_serves(q, v, asked)
        chosen = _chosen[kind] = found.backend
        _log.log(
            logging.WARNING if found.reasons else logging.INFO,
            "attention on %s, %s, head_dim %d: backend %s",
            q.device, str(q.dtype).removeprefix("torch."), q.shape[-1], found,
        )  # fmt: skip
    return chosen


def tell_choice(device: torch.device) -> str:
    """Returns which backend computes bf16 attention of head dim 128 with gradients on a GPU, and why none before it."""
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=device)
    asked = Asked(128**-0.5, softcap=0.0, deterministic=False, needs_grad=True)
    return f"{device}: {_first_that_serves(q, q, asked)}"


class _Found(NamedTuple):
    """A backend, and why those before it were passed over."""

    backend: str
    reasons: list[str]
    operator: str = ""
    """Of flash: whose."""

    def __str__(self) -> str:
        """Returns it in words."""
        by = f" by {self.operator}" if self.operator else ""
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.backend}{by}{why}"


def _first_that_serves(q: Tensor, v: Tensor, asked: Asked) -> _Found:
    """Returns a backend, and why those before it were passed over. Raises NotImplementedError where none serves."""
    checks: dict[str, Callable[[Tensor, Tensor, Asked], Served]] = {
        "hopper": check_hopper,
        "flash": check_flash,
    }
    reasons: list[str] = []
    for backend, check in checks.items():
        try:
            return _Found(backend, reasons, check(q, v, asked).operator)
        except NotImplementedError as refusal:
            reasons.append(str(refusal).rsplit("; ", 1)[0])  # without the advice
        except (CudaError, CompileError, NoCompilerError, OSError) as failure:  # a cache, a library
            reasons.append(str(failure).splitlines()[0])
        except FailedSelfTestError as failure:
            reasons.append(f"{backend} failed its self-test")
            warnings.warn(str(failure), stacklevel=4)
    if asked.deterministic and asked.needs_grad:
        raise NotImplementedError(
            f"no backend computes these gradients deterministically on {q.device}: {'; '.join(reasons)}; give bf16 or "
            "fp16 tensors under torch.use_deterministic_algorithms(True), which makes torch's operator deterministic, "
            "install flash-attn 2, or use backend='reference', which holds all scores in memory"
        )
    return _Found("flex", reasons)


class FailedSelfTestError(RuntimeError):
    """The Hopper kernels compute something else than float64 does on this GPU."""


def check_hopper(q: Tensor, v: Tensor, asked: Asked) -> Served:
    """Returns the kernels that serve a call.

    Raises NotImplementedError for calls that the kernels do not serve, FailedSelfTestError where they are wrong.
    """
    kind = _kind(q, v, asked)
    if kind in _served:
        return _served[kind]
    from megatron_cp.attn.hopper import checks, judge, self_test

    feature = asked.feature()
    dims = checks.check_supported(q, v, asked.softmax_scale, feature, asked.needs_grad)
    tested = judge.Kind(q.dtype, *dims, feature, asked.needs_grad)
    verdict = self_test.find_verdict(tested, q.device)
    if verdict is None:
        return Served(dims)
    if not verdict.passed:
        others = "'flex'" if asked.has_dropout else "'flash' or 'flex'"
        raise FailedSelfTestError(
            f"backend='hopper' fails its self-test on {q.device} for {tested.dtype}, head_dim={tested.head_dim}: "
            f"{verdict}; use backend={others}, and report it with the output of python -m megatron_cp doctor"
        )
    served = _served[kind] = Served(dims)
    return served


def check_flash(q: Tensor, v: Tensor, asked: Asked) -> Served:
    """Returns what serves a call. Raises NotImplementedError where no variable-length operator does."""
    from megatron_cp.attn.flash import checks

    checks.check_no_dropout(asked.has_dropout)
    wishes = (asked.softmax_scale, asked.softcap, asked.deterministic, asked.needs_grad)
    operator, dims = checks.check_supported(q, v, *wishes)
    return Served(dims, operator.name)
