"""What local attention is measured with: the formula that keeps a rounded lse, and sizes of sums.

The package's backward pass is *defined* on a stored lse: p = exp(s - lse). A float32 lse near 8 is off by
up to 2.4e-7, and so is every p relative to itself; the dense oracle, which never stores lse, has no such
error. `stored_lse_attention` is that definition in a dozen lines of torch, computed in the dtype of its
inputs; it shares no code with the package. (`attend_with_gradients` calls what is tested.)

`sizes` are the magnitudes at which results are rounded: sums of absolute terms, from float64.
"""

import torch

from megatron_cp.attn import attend
from tests.closeness import assert_within_budget
from tests.oracles.attention import AttentionResult, exact_attention, product

NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def stored_lse_attention(
    q, k, v, allowed, *, dout, dlse, sink=None, softmax_scale=None, softcap=0.0, factors=None
):
    """Returns (AttentionResult in the dtype of `q`, dict of sizes); arguments as the oracle's."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    num_kv_heads = k.shape[1]
    allowed = torch.as_tensor(allowed)[:, None, :]
    k_KNH, v_KNV = (x.repeat_interleave(q.shape[1] // num_kv_heads, dim=1) for x in (k, v))
    scores = product("qnh,knh->qnk", q, k_KNH) * scale
    slope = torch.ones_like(scores)
    if softcap:
        slope = 1 - torch.tanh(scores / softcap) ** 2
        scores = softcap * torch.tanh(scores / softcap)
    lse = torch.logsumexp(scores.masked_fill(~allowed, -torch.inf), dim=-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    safe_lse = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    p = torch.exp(scores - safe_lse).masked_fill(~allowed, 0.0)
    factor = torch.ones_like(p) if factors is None else factors.to(p.dtype)
    kept = p * factor
    out = product("qnk,knv->qnv", kept, v_KNV)
    delta = (dout * out).sum(dim=-1) - dlse
    dp = product("qnv,knv->qnk", dout, v_KNV) * factor
    ds = p * (dp - delta.unsqueeze(-1)) * slope * scale
    # 1 - tanh^2 is rounded at 1, however little of it is left.
    size_ds = p * (dp.abs() + delta.abs().unsqueeze(-1)) * abs(scale)
    dq, size_dq = (product("qnk,knh->qnh", a, b) for a, b in ((ds, k_KNH), (size_ds, k_KNH.abs())))
    dk, size_dk = (product("qnk,qnh->knh", a, b) for a, b in ((ds, q), (size_ds, q.abs())))
    dv, size_dv = (product("qnk,qnv->knv", kept, a) for a in (dout, dout.abs()))
    dk, dv, size_dk, size_dv = (
        x.unflatten(1, (num_kv_heads, -1)).sum(dim=2) for x in (dk, dv, size_dk, size_dv)
    )
    terms = torch.zeros(0) if sink is None else torch.exp(sink.to(lse.dtype) - lse) * delta
    dsink = None if sink is None else -terms.sum(dim=0)
    has_lse = torch.isfinite(lse)
    biggest = {
        "out": product("qnk,knv->qnv", kept, v_KNV.abs()),
        "lse": torch.where(has_lse, lse.abs() + 1, 0),
        "dq": size_dq,
        "dk": size_dk,
        "dv": size_dv,
        "dsink": terms.abs().sum(dim=0),
    }
    sizes = {name: x.max().item() if x.numel() else 0.0 for name, x in biggest.items()}
    return AttentionResult(out, lse, dq, dk, dv, dsink), sizes


def assert_attention(actual, inputs, allowed, *, plain_dtype, **arguments):
    """Passes if each of `actual` (out, lse, dq, dk, dv[, dsink]) is within the measured budget.

    `plain_dtype` is the dtype whose rounding is allowed: that of the inputs, or float32 for half-precision
    inputs whose results are asked for in float32.
    """
    __tracebackhide__ = True
    exact = exact_attention(*inputs, allowed, **arguments)
    as_double = {name: _cast(value, torch.float64) for name, value in arguments.items()}
    _, sizes = stored_lse_attention(*(x.double() for x in inputs), allowed, **as_double)
    in_plain = {name: _cast(value, plain_dtype) for name, value in arguments.items()}
    plain, _ = stored_lse_attention(*(x.to(plain_dtype) for x in inputs), allowed, **in_plain)
    for name, a, p, e in zip(NAMES, actual, plain, exact, strict=False):
        assert_within_budget(a, p, e, name, size=sizes[name])


def _cast(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def random_case(num_queries, num_keys, heads, head_dims, dtype, *, seed=0, sink=False):
    """Returns ((q, k, v), arguments for the oracles); heads = (N, G), head_dims = (H, Hv)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    (num_heads, num_kv_heads), (head_dim, value_head_dim) = heads, head_dims
    inputs = (
        normal(num_queries, num_heads, head_dim),
        normal(num_keys, num_kv_heads, head_dim),
        normal(num_keys, num_kv_heads, value_head_dim),
    )
    arguments = {
        "dout": normal(num_queries, num_heads, value_head_dim),
        "dlse": normal(num_queries, num_heads),
    }
    if sink:
        arguments["sink"] = normal(num_heads)
    return inputs, arguments


def attend_with_gradients(inputs, mask, arguments, **options):
    """Returns (out, lse, dq, dk, dv[, dsink]); rows without keys have no lse to differentiate."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sink = arguments.get("sink")
    if sink is not None:
        sink = sink.detach().clone().requires_grad_()
        leaves.append(sink)
    out, lse = attend(*leaves[:3], mask, sink=sink, **options)
    dlse = arguments["dlse"].to(lse.dtype)
    finite_lse = lse.masked_fill(~torch.isfinite(lse), 0.0)
    loss = (out * arguments["dout"]).sum(dtype=lse.dtype) + (finite_lse * dlse).sum()
    return (out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves))
