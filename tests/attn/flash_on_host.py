"""torch's flash-attn operators as float64 formulas on CPU tensors, and the backend made to believe in a GPU.

The formulas share no code with the package. They take the operators' own arguments by the operators' own
schemas (torch checks the binding), and misread what flash-attn 2 misreads: a window that is longer than the
longest key sequence (flash_api.cpp: mha_varlen_fwd, set_params_fprop). They refuse what it does not define:
rows in no sequence, sequences without rows, queries without keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron_cp.attn import device_arrays
from megatron_cp.attn.flash import checks

ALL_DTYPES = (torch.bfloat16, torch.float16, torch.float64)


class Calls(list):
    """Keywords of each call of the stand-in, in order."""


@contextmanager
def on_host(capability=(8, 0), find_fault=lambda *_: None) -> Iterator[Calls]:
    """CPU tensors, also of float64, pass for those of a GPU; yields the calls that are made.

    `find_fault` stands for the trial of each operator.
    """
    calls = Calls()
    library = torch.library.Library("aten", "IMPL")

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, **options):
        assert dropout == 0.0 and not debug
        window = _window(options, causal, max_q, max_k)
        calls.append(("forward", len(cu_q) - 1, *window))
        out, lse = varlen_forward(q, k, v, cu_q, cu_k, window, options["scale"])
        nothing = torch.zeros(2, dtype=torch.uint64)
        return out, lse, nothing, nothing, q.new_zeros(0)

    def backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, **options
    ):
        assert dropout == 0.0
        window = _window(options, causal, max_q, max_k)
        calls.append(("backward", len(cu_q) - 1, *window))
        return varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, window, options["scale"])

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "ON_DEVICES", ("cpu", "cuda"))
        patch.setattr(checks, "DTYPES", ALL_DTYPES)
        patch.setattr(checks, "_capability", lambda _: capability)
        patch.setattr(checks, "find_fault", find_fault)
        _forget()
        try:
            yield calls
        finally:
            _forget()
            library._destroy()


def _forget():
    checks._found.clear()
    checks._faults.clear()
    device_arrays._entries.clear()


def _window(options, causal, max_q, max_k):
    """Returns (left, right) as flash-attn 2 understands them; None = open."""
    left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
    assert max_q > 1, "one row per sequence takes a path with heads and rows exchanged"
    right = 0 if causal else right
    left, right = (-1 if side >= max_k else side for side in (left, right))
    if left >= 0 > right:
        right = max_k
    return (None if left < 0 else left), (None if right < 0 else right)


def varlen_forward(q, k, v, cu_q, cu_k, window, scale, softcap=0.0):
    """Returns (out [rows, N, Hv] in the dtype of q, lse [N, rows] in fp32 or fp64)."""
    _check(q, k, cu_q, cu_k)
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float64)
    for rows, keys in _spans(cu_q, cu_k):
        x, p = _scores(q[rows], k[keys], window, scale, softcap)
        lse[:, rows] = torch.logsumexp(x, dim=-1)
        p = torch.exp(x - lse[:, rows].unsqueeze(-1))
        assert torch.isfinite(lse[:, rows]).all(), "a row without keys"
        out[rows] = torch.einsum("nqk,knh->qnh", p, _expand(v[keys], q.shape[1]))
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, window, scale, softcap=0.0):
    """Returns (dq, dk, dv) in the dtype of q; delta is made of dout and out, as the operators do."""
    _check(q, k, cu_q, cu_k)
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    assert dout.shape == out.shape and dout.dtype == out.dtype == q.dtype
    dq, dk, dv = (torch.full(x.shape, torch.nan, dtype=torch.float64) for x in (q, k, v))
    delta = (dout.double() * out.double()).sum(dim=-1).t()
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    for rows, keys in _spans(cu_q, cu_k):
        x, slope = _scores(q[rows], k[keys], window, scale, softcap)
        p = torch.exp(x - lse[:, rows].double().unsqueeze(-1))
        d = dout[rows].double()
        dp = torch.einsum("qnh,knh->nqk", d, _expand(v[keys], num_heads))
        ds = p * (dp - delta[:, rows].unsqueeze(-1)) * slope * scale
        dq[rows] = torch.einsum("nqk,knh->qnh", ds, _expand(k[keys], num_heads))
        dk_all = torch.einsum("nqk,qnh->knh", ds, q[rows].double())
        dv_all = torch.einsum("nqk,qnh->knh", p, d)
        dk[keys], dv[keys] = (y.unflatten(1, (num_kv_heads, -1)).sum(2) for y in (dk_all, dv_all))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _scores(q, k, window, scale, softcap):
    """Returns scores [N, queries, keys] in float64, -inf outside the window, and d(capped) / d(score)."""
    num_q, num_k = q.shape[0], k.shape[0]
    x = torch.einsum("qnh,knh->nqk", q.double(), _expand(k, q.shape[1])) * scale
    slope = torch.ones_like(x)
    if softcap:
        x = softcap * torch.tanh(x / softcap)
        slope = 1 - (x / softcap) ** 2
    corner = torch.arange(num_k) - torch.arange(num_q)[:, None] - (num_k - num_q)
    seen = torch.ones(num_q, num_k, dtype=torch.bool)
    if window[0] is not None:
        seen &= corner >= -window[0]
    if window[1] is not None:
        seen &= corner <= window[1]
    return x.masked_fill(~seen, -torch.inf), slope


def _expand(x, num_heads):
    return x.double().repeat_interleave(num_heads // x.shape[1], dim=1)


def _spans(cu_q, cu_k):
    for i in range(len(cu_q) - 1):
        yield slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))


def _check(q, k, cu_q, cu_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k) > 1
    for cu, x in ((cu_q, q), (cu_k, k)):
        assert cu.is_contiguous() and int(cu[0]) == 0 and int(cu[-1]) == x.shape[0]
        assert (cu[1:] > cu[:-1]).all() and x.stride(-1) == 1
