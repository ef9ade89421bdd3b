"""Which backend computes on a GPU where the caller names none: hopper, then flash, then flex; one log line says so.

`hopper` is taken where it serves the call and its self-test passed on that GPU. A failed self-test is a loud warning
with the numbers, and an error for a caller who asked for hopper by name. On an H100 hopper was chosen;
no other GPU has been tried.
"""

import logging
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.features import Feature, feature_of
from megatron_cp.attn.graphs import outside_compiled_graphs
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


_Kind = tuple[torch.device, torch.dtype, int, int, bool, bool, bool, bool, bool]
_chosen: dict[_Kind, str] = {}
_served: dict[_Kind, tuple[int, int]] = {}  # by hopper, tested


def _kind(q: Tensor, v: Tensor, asked: Asked) -> _Kind:
    """Returns what the answer depends on."""
    return (
        q.device, q.dtype, q.shape[-1], v.shape[-1],
        asked.softcap > 0, asked.softmax_scale >= 0, asked.deterministic, asked.needs_grad,
        asked.has_dropout,
    )  # fmt: skip


def choose_backend(q: Tensor, v: Tensor, asked: Asked) -> str:
    """Returns the backend for calls like this one: `cpu` on a CPU, else the first GPU backend that serves it."""
    return "cpu" if q.device.type == "cpu" else _choose_gpu_backend(q, v, asked)


@outside_compiled_graphs
def _choose_gpu_backend(q: Tensor, v: Tensor, asked: Asked) -> str:
    kind = _kind(q, v, asked)
    chosen = _chosen.get(kind)
    if chosen is None:
        chosen, reasons = _first_that_serves(q, v, asked)
        _chosen[kind] = chosen
        why = f" ({'; '.join(reasons)})" if reasons else ""
        _log.log(
            logging.WARNING if reasons else logging.INFO,
            "attention on %s, %s, head_dim %d: backend %s%s",
            q.device, str(q.dtype).removeprefix("torch."), q.shape[-1], chosen, why,
        )  # fmt: skip
    return chosen


def tell_choice(device: torch.device) -> str:
    """Returns which backend computes bf16 attention of head dim 128 with gradients on a GPU, and why none before it."""
    q = torch.zeros(1, 8, 128, dtype=torch.bfloat16, device=device)
    asked = Asked(128**-0.5, softcap=0.0, deterministic=False, needs_grad=True)
    chosen, reasons = _first_that_serves(q, q, asked)
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{device}: {chosen}{why}"


def _first_that_serves(q: Tensor, v: Tensor, asked: Asked) -> tuple[str, list[str]]:
    """Returns a backend, and why those before it were passed over."""
    checks: dict[str, Callable[[], object]] = {
        "hopper": lambda: check_hopper(q, v, asked),
        "flash": lambda: check_flash(q, v, asked),
    }
    reasons = []
    for backend, check in checks.items():
        try:
            check()
        except NotImplementedError as refusal:
            reasons.append(str(refusal).split("; ")[0])
        except (CudaError, CompileError, NoCompilerError, OSError) as failure:  # a cache, a library
            reasons.append(str(failure).splitlines()[0])
        except FailedSelfTestError as failure:
            reasons.append(f"{backend} failed its self-test")
            warnings.warn(str(failure), stacklevel=4)
        else:
            return backend, reasons
    return "flex", reasons


class FailedSelfTestError(RuntimeError):
    """The Hopper kernels compute something else than float64 does on this GPU."""


@outside_compiled_graphs
def check_hopper(q: Tensor, v: Tensor, asked: Asked) -> tuple[int, int]:
    """Returns the (head dim, value head dim) of the kernels that serve a call.

    Raises NotImplementedError for calls that the kernels do not serve, FailedSelfTestError where they are wrong.
    """
    kind = _kind(q, v, asked)
    if kind in _served:
        return _served[kind]
    from megatron_cp.attn.hopper import checks, self_test

    feature = asked.feature()
    dims = checks.check_supported(q, v, asked.softmax_scale, feature, asked.needs_grad)
    tested = self_test.Kind(q.dtype, *dims, feature, asked.needs_grad)
    verdict = self_test.find_verdict(tested, q.device)
    if verdict is None:
        return dims
    if not verdict.passed:
        others = "'flex'" if asked.has_dropout else "'flash' or 'flex'"
        raise FailedSelfTestError(
            f"backend='hopper' fails its self-test on {q.device} for {tested.dtype}, head_dim={tested.head_dim}: "
            f"{verdict}; use backend={others}, and report it with the output of python -m megatron_cp doctor"
        )
    _served[kind] = dims
    return dims


def check_flash(q: Tensor, v: Tensor, asked: Asked) -> None:
    """Raises NotImplementedError for calls that no variable-length operator serves."""
    from megatron_cp.attn.flash import checks

    checks.check_no_dropout(asked.has_dropout)
    wishes = (asked.softmax_scale, asked.softcap, asked.deterministic, asked.needs_grad)
    checks.check_supported(q, v, *wishes)
