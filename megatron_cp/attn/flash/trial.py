"""An operator's first call on a GPU: two small masks, both passes, against float64 on that very GPU.

Libraries are installed for other GPUs than the one at hand, have no image for it, or are of another version than
their names. None computes a training step before it has computed this, once per process and kind of call. It
passed torch's operator and flash-attn 3's on an H200; on a CPU it was tried with stand-ins, right and wrong ones.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import torch
from torch import Tensor

from megatron_cp.attn import reference
from megatron_cp.attn.closeness import largest_difference, row_error
from megatron_cp.attn.flash.operators import Operator, Wish
from megatron_cp.attn.flash.passes import backward_by, forward_by
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask, documents, sliding_window

NUM_HEADS, NUM_KV_HEADS = 4, 2
SOFTCAP = 5.0
# Of a row's result, in eps of its type: operators round probabilities, results and sums of calls to 16 bits. One key
# too many in a row of 60 moves it by more than a tenth, four times the limit in bf16.
MAX_ROW_ERROR_IN_EPS = 3.0
LEAST_LIMIT = 1e-5  # float32 inside
MAX_LSE_ERROR = 1e-4


def find_fault(
    operator: Operator, wish: Wish, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns what is wrong with an operator on a GPU, None where it computes what it should. Outside of autocast."""
    try:
        with torch.no_grad():
            faults = [_compared(operator, wish, mask, dtype, device) for mask in _masks()]
    except torch.OutOfMemoryError:
        raise  # nothing was found out
    except Exception as problem:  # whatever a library raises: the next one is asked
        return f"{operator.name} fails a first call: {' '.join(str(problem).split())[:200]}"
    return next(filter(None, faults), None)


def _masks() -> tuple[AttentionMask, ...]:
    """Returns masks of each window that calls have: causal, open, to one side and to both; in several calls."""
    kinds = ("causal", "full", ("window", 9), "causal", ("window", 5, 3))
    return documents([37, 20, 48, 1, 30], list(kinds)), sliding_window(130, 64)


def _compared(
    operator: Operator, wish: Wish, mask: AttentionMask, dtype: torch.dtype, device: torch.device
) -> str | None:
    generator = torch.Generator().manual_seed(1)

    def draw(rows: int, heads: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, dim, generator=generator).to(dtype).to(device)

    q = draw(mask.num_queries, NUM_HEADS, wish.head_dim)
    k = draw(mask.num_keys, NUM_KV_HEADS, wish.head_dim)
    v = draw(mask.num_keys, NUM_KV_HEADS, wish.value_dim)
    softcap = SOFTCAP if wish.has_softcap else 0.0
    options = AttendOptions(wish.head_dim**-0.5, softcap, "flash", wish.deterministic)
    exact = q.double(), k.double(), v.double()
    out, lse = reference.forward(*exact, mask, options)
    found_out, found_lse = forward_by(operator, q, k, v, mask, options)
    errors = {"out": row_error(found_out, out)}
    if wish.needs_grad:
        dout = draw(mask.num_queries, NUM_HEADS, wish.value_dim)
        delta = (dout.double() * out).sum(dim=-1)
        expected = reference.backward(dout.double(), *exact, lse, delta, mask, options)
        stats = lse.to(found_lse.dtype), delta.to(found_lse.dtype)
        found = backward_by(operator, dout, q, k, v, *stats, mask, options)
        errors |= {
            name: row_error(*pair)
            for name, *pair in zip(("dq", "dk", "dv"), found, expected, strict=True)
        }
    limit = max(MAX_ROW_ERROR_IN_EPS * torch.finfo(dtype).eps, LEAST_LIMIT)
    limits = {**dict.fromkeys(errors, limit), "lse": MAX_LSE_ERROR}
    errors["lse"] = largest_difference(found_lse, lse)
    for name, error in errors.items():
        if not error <= limits[name]:  # NaN is not <=
            off = f"{error:.2g} off float64, at most {limits[name]:.2g}"
            return f"{operator.name} is wrong on this GPU: {name} of a row is {off}"
    return None
