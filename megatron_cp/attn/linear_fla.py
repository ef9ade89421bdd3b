"""Linear attention by the Triton kernels of flash-linear-attention, where that is installed on a GPU.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T                                       over runs of tokens side by side
    S_t = (1 - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T         the gated delta rule, with beta
    o_t = scale S_t^T q_t

Its operators take a state before each run and give the one behind it, with gradients of both; that is all that
context parallelism needs. One is taken where it agrees with the recurrence on a small case, tried once for each device,
dtype and head dims; else `linear.py` computes. On an H100 0.6 refused the backward pass of the delta rule under Triton
3.4 to 3.7.0, and was not taken. **They have never computed on a GPU**: tests put operators of the same signatures in
their place.

Source: `fla.ops.gated_delta_rule.chunk_gated_delta_rule` and, without beta, `fla.ops.simple_gla.chunk_simple_gla`,
flash-linear-attention 0.6.
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
    if g is None or g.dim() != 2:
        return "its kernels here have one decay for each head: give g [T, H]"
    if k.dtype not in (torch.bfloat16, torch.float16):
        return f"tensors are {k.dtype}; its kernels take 16 bits"
    if k.shape[-1] > _MAX_KEY_DIM:
        return f"the key dim is {k.shape[-1]}; its kernels take {_MAX_KEY_DIM} at most"
    is_delta = beta is not None
    kind = (k.device, k.dtype, k.shape[-1], v.shape[-1], is_delta)
    if kind not in _verdicts:
        # The maps of runs under the delta rule are computed with keys in the place of values.
        needs_keys = is_delta and v.shape[-1] != k.shape[-1]
        _verdicts[kind] = run_apart(
            lambda: _try(k, v, is_delta) or (_try(k, k, is_delta) if needs_keys else None)
        )
        _log.info(
            "linear attention on %s: %s", k.device, _verdicts[kind] or "flash-linear-attention"
        )
    return _verdicts[kind]


def chunk_rule(is_delta: bool) -> Callable[..., Any]:
    """Returns an operator of flash-linear-attention. Raises ImportError where it is not installed."""
    if is_delta:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla


def rule_of_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    bounds: Tensor,
    initial: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns outputs `[T, H, V]` and the states behind the runs `[N, H, K, V]` in fp32.

    q, k `[T, H, K]`, v `[T, H, V]` of one 16-bit dtype, g, beta `[T, H]` (None: no delta rule); run i is
    `bounds[i]` to `bounds[i + 1]`, int64 `[N + 1]`, one token at least. `initial` `[N, H, K, V]` are the states before
    them.
    """
    rows = [x[None].contiguous() for x in (q, k, v, g.float())]
    if beta is not None:
        rows.append(beta[None].contiguous())
    out, states = chunk_rule(beta is not None)(
        *rows,
        scale=scale,
        initial_state=initial.float().contiguous(),
        output_final_state=True,
        cu_seqlens=bounds,
    )
    return out[0], states


def map_of_runs(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, bounds: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what each run makes of a state S: P `[N, H, K, K]` and B `[N, H, K, V]` of P S + B, fp32.

    Without the delta rule P is a number for each head, `[N, H, K, 1]`.
    """
    runs, heads, key_dim = len(bounds) - 1, k.shape[1], k.shape[2]
    nothing = v.new_zeros((runs, heads, key_dim, v.shape[2]), dtype=torch.float32)
    _, added = rule_of_runs(k, k, v, g, beta, bounds, nothing)
    if beta is None:
        total_NH = torch.segment_reduce(g.float(), "sum", offsets=bounds, axis=0)
        return total_NH.exp()[:, :, None, None].expand(runs, heads, key_dim, 1), added
    one = torch.eye(key_dim, device=k.device).expand(runs, heads, key_dim, key_dim)
    _, transition = rule_of_runs(k, k, torch.zeros_like(k), g, beta, bounds, one)
    return transition, added


def recurrence_of_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    bounds: Tensor,
    initial: Tensor,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns outputs and last states of the recurrence, token by token: what the kernels are compared with.

    Arguments and results are those of `rule_of_runs`, in the dtype of the inputs.
    """
    outputs, last = [], []
    for run, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        state = initial[run]
        for token in range(start, stop):
            state = g[token].exp()[:, None, None] * state
            written = v[token]
            if beta is not None:
                held = torch.einsum("hkv,hk->hv", state, k[token])
                written = beta[token][:, None] * (v[token] - held)
            state = state + torch.einsum("hk,hv->hkv", k[token], written)
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[token]))
        last.append(state)
    return torch.stack(outputs), torch.stack(last)


def _try(k: Tensor, v: Tensor, is_delta: bool) -> str | None:
    """Returns what stands against the kernels for tensors like these: not installed, or wrong on a small case."""
    try:
        chunk_rule(is_delta)
    except ImportError:
        return "flash-linear-attention is not installed"
    lengths, heads = (70, 30, 1), 2
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(k.device)

    tokens = sum(lengths)
    keys = torch.nn.functional.normalize(drawn(tokens, heads, k.shape[-1]), dim=-1)
    beta = torch.sigmoid(drawn(tokens, heads)).to(k.dtype) if is_delta else None
    rows = (drawn(*keys.shape), keys, drawn(tokens, heads, v.shape[-1]))
    query, key, value = (x.to(k.dtype) for x in rows)
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
        exact = [None if x is None else x.double() for x in (*tensors, initial)]
        wanted = _results(recurrence_of_runs, exact, bounds)
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
    rule: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor | None], bounds: Tensor
) -> list[Tensor]:
    """Returns outputs, states and all gradients of a rule."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in tensors]
    query, *inputs, before = leaves
    assert query is not None
    out, states = rule(query, *inputs, bounds, before, query.shape[-1] ** -0.5)
    given = [x for x in leaves if x is not None]
    gradients = torch.autograd.grad(
        [out, states], given, [torch.ones_like(out), torch.ones_like(states)]
    )
    return [out.detach(), states.detach(), *gradients]
