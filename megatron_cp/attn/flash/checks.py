"""What the `flash` backend can serve: refused at the call, with what is allowed and what to do."""

# N query heads, G kv heads, H head dim, Hv value head dim

import logging
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.apart import run_apart
from megatron_cp.attn.choice import torch_wants_determinism
from megatron_cp.attn.flash.libraries import find_operator
from megatron_cp.attn.flash.operators import Operator, Wish
from megatron_cp.attn.flash.trial import find_fault
from megatron_cp.attn.options import AttendOptions

DTYPES = (torch.bfloat16, torch.float16)
ON_DEVICES = ("cuda",)
_log = logging.getLogger("megatron_cp")
STEP, WIDEST = 8, 256  # of head dims that flash-attn has


class Served(NamedTuple):
    """Who computes a call, and at which head dim and value head dim: zeros are put behind narrower rows."""

    operator: Operator
    dims: tuple[int, int]


def check_supported(
    q: Tensor,
    v: Tensor,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    needs_grad: bool,
) -> Served:
    """Returns what serves a call. Raises NotImplementedError where no installed operator does, naming what does."""
    if q.device.type not in ON_DEVICES or torch.version.hip is not None:
        raise NotImplementedError(
            f"backend='flash' cannot compute on device={q.device}, only on CUDA devices of compute capability 8.0 "
            "and newer; use backend='cpu' or 'reference'"
        )
    if q.dtype not in DTYPES:
        raise NotImplementedError(
            f"backend='flash' cannot compute dtype={q.dtype}, only torch.bfloat16 and torch.float16; cast q, k and "
            "v, or use backend='flex' or 'reference'"
        )
    if softmax_scale <= 0:
        raise NotImplementedError(
            f"backend='flash' cannot use softmax_scale={softmax_scale}, only numbers > 0; negate q and the scale, or "
            "use backend='flex' or 'reference'"
        )
    wish = _wish(q, v, softcap, deterministic, needs_grad)
    refusals: list[tuple[str, ...]] = []
    for dims in _dims_that_may_serve(wish.head_dim, wish.value_dim):
        operator, reasons = _find(wish._replace(head_dim=dims[0], value_dim=dims[1]), q)
        if operator is not None:
            return Served(operator, dims)
        refusals.append(reasons)
    softcap_text = f", softcap={softcap}" if softcap else ""
    raise NotImplementedError(
        f"backend='flash' finds no operator for head_dim={wish.head_dim}, value head_dim={wish.value_dim}"
        f"{softcap_text}, deterministic={deterministic}, gradients={needs_grad}: {'; '.join(refusals[-1])}; "
        f"{_advice(wish)}"
    )


def _dims_that_may_serve(head_dim: int, value_dim: int) -> list[tuple[int, int]]:
    """Returns head dim and value head dim as they are, and wider ones that more operators have."""
    one = -(-max(head_dim, value_dim) // STEP) * STEP
    wider = [(dim, dim) for dim in (one, WIDEST) if dim <= WIDEST]
    return list(dict.fromkeys([(head_dim, value_dim), *wider]))


def check_no_dropout(has_dropout: bool) -> None:
    """Raises NotImplementedError for dropout: which pairs an operator drops depends on how its rows were cut."""
    if has_dropout:
        raise NotImplementedError(
            "backend='flash' has no dropout of attention that is the same forward and backward; use backend='hopper', "
            "'flex' or 'reference'"
        )


def _advice(wish: Wish) -> str:
    """Returns what serves such a call nevertheless."""
    if wish.deterministic and wish.needs_grad:
        return (
            "call torch.use_deterministic_algorithms(True), which makes torch's operator deterministic, or install "
            "flash-attn 2, or use backend='reference'"
        )
    return "install flash-attn, or use backend='flex' or 'reference'"


def operator_for(q: Tensor, v: Tensor, options: AttendOptions, *, needs_grad: bool) -> Operator:
    """Returns the operator of a pass. Raises NotImplementedError as `check_supported`."""
    asked = (options.softcap, options.deterministic, needs_grad)
    operator, _ = _find(_wish(q, v, *asked), q)
    return operator or check_supported(q, v, options.softmax_scale, *asked).operator


def _wish(q: Tensor, v: Tensor, softcap: float, deterministic: bool, needs_grad: bool) -> Wish:
    dims = (q.shape[-1], v.shape[-1])
    wants = (softcap > 0, deterministic, needs_grad, deterministic and torch_wants_determinism())
    return Wish(_capability(q.device), *dims, *wants)


def _find(wish: Wish, q: Tensor) -> tuple[Operator | None, tuple[str, ...]]:
    """Returns `find_operator` with a trial of each, asked once per wish; but a refusal is asked again.

    What a trial found is not: an operator is tried once per wish.
    """
    key = (wish, q.dtype, q.device)

    def tried(operator: Operator) -> str | None:
        if (operator.name, key) not in _faults:
            fault = run_apart(lambda: find_fault(operator, *key))
            _faults[operator.name, key] = fault
            if fault is not None:
                _log.warning("backend 'flash' passes over an operator: %s", fault)
        return _faults[operator.name, key]

    found = _found.get(key)
    if found is None:
        found = find_operator(wish, tried)
        if found[0] is not None:
            _found[key] = found
    return found


_Key = tuple[Wish, torch.dtype, torch.device]
_found: dict[_Key, tuple[Operator | None, tuple[str, ...]]] = {}
_faults: dict[tuple[str, _Key], str | None] = {}


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
