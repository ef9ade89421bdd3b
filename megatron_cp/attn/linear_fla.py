"""The gated delta rule by the Triton kernels of flash-linear-attention, where that is installed on a GPU.

    S_t = (1 - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T         over runs of tokens side by side
    o_t = scale S_t^T q_t

Its operator takes a state before each run and gives the one behind it, with gradients of both; that is all that
context parallelism needs. It is taken where it agrees with the recurrence on a small case, tried once for each device,
dtype and head dims; else `linear.py` computes. On an H100 its 0.6 refused the backward pass under Triton 3.4 to 3.7.0,
and was not taken. **It has never computed on a GPU**: tests put another operator of the same signature in its place.

Source: `fla.ops.gated_delta_rule.chunk_gated_delta_rule`, flash-linear-attention 0.6.
"""

# N runs, T tokens in them, H heads, K key dim, V value dim

import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attn.apart import run_apart

_log = logging.getLogger("megatron_cp")

_MAX_KEY_DIM = 256
_LARGEST_ERROR = 0.03  # of the largest number: some roundings of 16 bits
_verdicts: dict[tuple[object, ...], str | None] = {}  # what stands against it; None: nothing


def why_not(k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None) -> str | None:
    """Returns why these tensors `[T, H, K]`, `[T, H, V]`, g and beta cannot go to the kernels; None if they can."""
    if k.device.type != "cuda":
        return f"tensors are on {k.device}; its kernels need a GPU"
    if beta is None or g is None or g.dim() != 2:
        return "its kernels here are those of the delta rule with one decay for each head: give g [T, H] and beta"
    if k.dtype not in (torch.bfloat16, torch.float16):
        return f"tensors are {k.dtype}; its kernels take 16 bits"
    if k.shape[-1] > _MAX_KEY_DIM:
        return f"the key dim is {k.shape[-1]}; its kernels take {_MAX_KEY_DIM} at most"
    kind = (k.device, k.dtype, k.shape[-1], v.shape[-1])
    if kind not in _verdicts:
        # The maps of runs are computed with keys in the place of values.
        _verdicts[kind] = run_apart(
            lambda: _try(k, v) or (None if v.shape[-1] == k.shape[-1] else _try(k, k))
        )
        _log.info(
            "linear attention on %s: %s", k.device, _verdicts[kind] or "flash-linear-attention"
        )
    return _verdicts[kind]


def chunk_rule() -> Callable[..., Any]:
    """Returns the operator of flash-linear-attention. Raises ImportError where it is not installed."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def rule_of_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    bounds: Tensor,
    initial: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns outputs `[T, H, V]` and the states behind the runs `[N, H, K, V]` in fp32.

    q, k `[T, H, K]`, v `[T, H, V]` of one 16-bit dtype, g, beta `[T, H]`; run i is `bounds[i]` to `bounds[i + 1]`,
    int64 `[N + 1]`, one token at least. `initial` `[N, H, K, V]` are the states before them.
    """
    out, states = chunk_rule()(
        q[None].contiguous(),
        k[None].contiguous(),
        v[None].contiguous(),
        g[None].float().contiguous(),
        beta[None].contiguous(),
        scale=scale,
        initial_state=initial.float().contiguous(),
        output_final_state=True,
        cu_seqlens=bounds,
    )
    return out[0], states


def map_of_runs(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what each run makes of a state S: P `[N, H, K, K]` and B `[N, H, K, V]` of P S + B, fp32."""
    runs, heads, key_dim = len(bounds) - 1, k.shape[1], k.shape[2]
    nothing = v.new_zeros((runs, heads, key_dim, v.shape[2]), dtype=torch.float32)
    _, added = rule_of_runs(k, k, v, g, beta, bounds, nothing)
    one = torch.eye(key_dim, device=k.device).expand(runs, heads, key_dim, key_dim)
    _, transition = rule_of_runs(k, k, torch.zeros_like(k), g, beta, bounds, one)
    return transition, added


def delta_rule_of_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    bounds: Tensor,
    initial: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns outputs and last states of the gated delta rule, token by token: what the kernels are compared with.

    Arguments and results are those of `rule_of_runs`, in the dtype of the inputs.
    """
    outputs, last = [], []
    for run, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        state = initial[run]
        for token in range(start, stop):
            state = g[token].exp()[:, None, None] * state
            held = torch.einsum("hkv,hk->hv", state, k[token])
            state = state + torch.einsum("h,hk,hv->hkv", beta[token], k[token], v[token] - held)
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[token]))
        last.append(state)
    return torch.stack(outputs), torch.stack(last)


def _try(k: Tensor, v: Tensor) -> str | None:
    """Returns what stands against the kernels for tensors like these: not installed, or wrong on a small case."""
    try:
        chunk_rule()
    except ImportError:
        return "flash-linear-attention is not installed"
    lengths, heads = (70, 30, 1), 2
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(k.device)

    tokens = sum(lengths)
    keys = torch.nn.functional.normalize(drawn(tokens, heads, k.shape[-1]), dim=-1)
    beta = torch.sigmoid(drawn(tokens, heads))
    rows = (drawn(*keys.shape), keys, drawn(tokens, heads, v.shape[-1]), beta)
    query, key, value, beta = (x.to(k.dtype) for x in rows)
    tensors = [query, key, value, -drawn(tokens, heads).abs() / 8, beta]
    initial = drawn(len(lengths), heads, k.shape[-1], v.shape[-1])
    bounds = torch.tensor([0, *lengths], device=k.device).cumsum(0)
    with torch.enable_grad(), torch.inference_mode(False):
        try:
            found = _results(rule_of_runs, [*tensors, initial], bounds)
        except (
            Exception
        ) as error:  # whatever a compiler or the library raises: there is another way to compute
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(
                f"flash-linear-attention does not run on {k.device}, the plain computation is taken: {reason}",
                stacklevel=2,
            )
            return f"it does not run here: {reason}"
        exact = [x.double() for x in (*tensors, initial)]
        wanted = _results(delta_rule_of_runs, exact, bounds)
    errors = [
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, wanted, strict=True)
    ]
    worst = float(torch.tensor(errors).max())  # NaN if one is
    if worst <= _LARGEST_ERROR:
        return None
    warnings.warn(
        f"flash-linear-attention is off by {worst:.2g} of the largest number on {k.device} ({k.dtype}, head dims "
        f"{k.shape[-1]}, {v.shape[-1]}); the plain computation is taken",
        stacklevel=2,
    )
    return "it failed its test on this device"


def _results(
    rule: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], bounds: Tensor
) -> list[Tensor]:
    """Returns outputs, states and all gradients of a rule."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    *inputs, before = leaves
    out, states = rule(*inputs, bounds, before, inputs[0].shape[-1] ** -0.5)
    gradients = torch.autograd.grad(
        [out, states], leaves, [torch.ones_like(out), torch.ones_like(states)]
    )
    return [out.detach(), states.detach(), *gradients]
