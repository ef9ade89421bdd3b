"""What a call of `attend` asks for, checked once at the public boundary.

Every check is made here, on every rank alike, so that a backend may assume good input.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import math
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from megatron_cp.attn import choice
from megatron_cp.attn.dropout import Dropout, check_rate
from megatron_cp.mask import AttentionMask, checks

BACKENDS = ("reference", "cpu", "flex", "flash", "hopper", "emulated")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class AttendOptions:
    """Checked settings of one attention call; `softcap` and `dropout_p` 0 mean none.

    `deterministic` asks for the same bits in every run; `reference` and `cpu` always give them.
    """

    softmax_scale: float
    softcap: float = 0.0
    backend: str = "cpu"
    deterministic: bool = False
    sm_share: float = 0.0
    """Share of a GPU's multiprocessors that the kernel leaves to transfers under way; `hopper` heeds it."""
    wide_dims: tuple[int, int] | None = None
    """Head dim and value head dim of the kernel, where it is wider than the rows: zeros are put behind them."""
    dropout_p: float = 0.0
    dropout_seeds: Tensor | None = field(default=None, repr=False, compare=False)
    """Int64 `[N]`, of each head, where there is dropout."""
    dropout: Dropout | None = field(default=None, repr=False, compare=False)
    """For the rows at hand."""


def resolve_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    backend: str | None = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
) -> AttendOptions:
    """Returns checked options for `q` `[Q, N, H]`, `k` `[K, G, H]`, `v` `[K, G, Hv]`.

    `softmax_scale=None` means `1/sqrt(H)`; `backend=None` means `cpu` for CPU tensors, and for CUDA tensors the first
    of `hopper`, `flash` and `flex` that serves the call (choice.py). `deterministic` is also what
    `torch.use_deterministic_algorithms(True)` asks for.

    Raises: ValueError for shapes, dtypes or values that no backend could serve; NotImplementedError for a backend
    that cannot serve this call, naming those that can; RuntimeError for `hopper` by name where it failed its self-test.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    _check_kinds(
        (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    )
    scale = 1.0 / math.sqrt(q.shape[-1])
    if softmax_scale is not None:
        scale = as_number("softmax_scale", softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(
            f"softmax_scale={softmax_scale} must be finite; pass None for 1/sqrt(head_dim)"
        )
    softcap, dropout_p = as_number("softcap", softcap), as_number("dropout_p", dropout_p)
    if not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap={softcap} must be finite and >= 0; pass 0.0 for no softcap")
    check_rate(dropout_p)
    is_differentiated = needs_grad(q, k, v)
    deterministic = deterministic or choice.torch_wants_determinism()
    asked = choice.Asked(scale, softcap, deterministic, is_differentiated, dropout_p > 0)
    if backend is None:
        backend = choice.choose_backend(q, v, asked)
    _check_backend(backend, q, asked)
    dims = built = (q.shape[-1], v.shape[-1])
    if backend == "flash":
        built = choice.check_flash(q, v, asked).dims
    if backend == "hopper":
        built = choice.check_hopper(q, v, asked).dims
    if backend == "emulated":
        from megatron_cp.attn.emulated import checks as emulated_checks

        built = emulated_checks.check_supported(q, v, scale, asked.feature(), is_differentiated)
    wide = None if built == dims else built
    return _options(scale, softcap, backend, deterministic, wide, dropout_p)


@lru_cache(maxsize=256)
def _options(
    softmax_scale: float,
    softcap: float,
    backend: str,
    deterministic: bool,
    wide_dims: tuple[int, int] | None,
    dropout_p: float,
) -> AttendOptions:
    """Returns the settings of all calls alike."""
    return AttendOptions(
        softmax_scale, softcap, backend, deterministic, wide_dims=wide_dims, dropout_p=dropout_p
    )


def check_grid(q: Tensor, k: Tensor, mask: AttentionMask) -> None:
    """Raises ValueError unless the mask's grid is that of the tensors' rows, TypeError for what is no mask."""
    if not isinstance(mask, AttentionMask):
        checks.check_mask(mask)
    if (mask.num_queries, mask.num_keys) != (q.shape[0], k.shape[0]):
        raise ValueError(
            f"mask grid {mask.num_queries} x {mask.num_keys} must equal the rows of q and k, "
            f"{q.shape[0]} x {k.shape[0]}; crop or shift the mask, or pad the tensors"
        )


def check_sink(q: Tensor, sink: Tensor | None) -> None:
    """Raises ValueError unless `sink` is None or floating `[N]` on the device of `q`, TypeError for no tensor."""
    if sink is None:
        return
    check_tensor("sink", sink)
    if (
        tuple(sink.shape) != (q.shape[1],)
        or not sink.is_floating_point()
        or sink.device != q.device
    ):
        raise ValueError(
            f"sink {sink.dtype} {tuple(sink.shape)} on {sink.device} must be a floating tensor "
            f"({q.shape[1]},) on {q.device}; pass one logit per query head"
        )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of `out`, `lse` and gradients inside: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def needs_grad(*tensors: Tensor | None) -> bool:
    """Returns whether a result of these tensors has a backward pass."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def as_number(name: str, value: object) -> float:
    """Returns a setting as a float. Raises TypeError for what is no number, a tensor too: it would get no gradient."""
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} is {type(value).__name__}; it must be a number, as a tensor would get no gradient: give a float; "
            "of a scale that is learned give 1.0, and multiply q by it"
        )
    if not isinstance(value, Real):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; it must be a number")
    return float(value)


def check_tensor(name: str, x: object) -> None:
    """Raises TypeError for what is no tensor, not a dense one, or one of all ranks."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; it must be a torch.Tensor")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{name} has layout {x.layout}; it must be a dense tensor: {name}.to_dense()"
        )
    if type(x) is not Tensor and hasattr(x, "to_local"):
        raise TypeError(
            f"{name} is {type(x).__name__}, a tensor of all ranks; it must be a plain torch.Tensor of what belongs to "
            f"this rank: {name}.to_local(), where it is placed so"
        )


@lru_cache(maxsize=256)  # what is refused raises, and is asked again
def _check_kinds(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
) -> None:
    """Raises ValueError for q, k and v that do not belong together, or that no backend serves."""
    _check_shapes(*shapes)
    _check_dtypes(*dtypes)
    if len(set(devices)) > 1:
        raise ValueError(
            f"devices of q, k, v = {', '.join(map(str, devices))} must be equal; move them to one device"
        )


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 3:
            raise ValueError(
                f"{name} of shape {tuple(shape)} must be [rows, heads, head_dim]; "
                "fold the batch into the rows and block-diagonally into the mask"
            )
    (_, num_heads, head_dim), (num_keys, num_kv_heads, k_dim) = q, k
    if (num_keys, num_kv_heads) != v[:2]:
        raise ValueError(
            f"k {tuple(k)} and v {tuple(v)} must agree in rows and heads; "
            "pass keys and values of the same tokens"
        )
    if head_dim != k_dim or head_dim < 1 or v[2] < 1:
        raise ValueError(
            f"head_dim of q={head_dim} must equal that of k={k_dim} and be positive, as that of v={v[2]}; "
            "only v may differ"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads or num_heads < 1:
        raise ValueError(
            f"num_heads={num_heads} must be a positive multiple of num_kv_heads={num_kv_heads}; repeat or drop heads "
            "so that query head n uses kv head n // (N // G)"
        )


def _check_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> None:
    if not q == k == v:
        raise ValueError(
            f"dtypes of q, k, v = {q}, {k}, {v} must be equal; cast them to one of them"
        )
    if q not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"dtype={q} must be one of {allowed}; cast q, k and v")


def _check_backend(backend: str, q: Tensor, asked: choice.Asked) -> None:
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} must be one of {', '.join(BACKENDS)}; "
            "pass None to let the device choose"
        )
    on_cpu = q.device.type == "cpu"
    able = "backend='cpu' or 'reference'" if on_cpu else "backend='flash', 'flex' or 'reference'"
    if backend == "cpu" and not on_cpu:
        raise NotImplementedError(
            f"backend='cpu' cannot compute on device={q.device}, only on cpu; use {able}"
        )
    if backend == "flex" and asked.deterministic and asked.needs_grad:
        others = "'cpu'" if on_cpu else "'hopper', 'flash'"
        raise NotImplementedError(
            "backend='flex' cannot promise the same gradients in every run, as deterministic=True or "
            f"torch.use_deterministic_algorithms(True) asks for; use backend={others} or 'reference'"
        )
    if backend == "flex" and on_cpu and asked.needs_grad:
        raise NotImplementedError(
            f"backend='flex' has no backward pass on device=cpu, only on GPUs; use {able}"
        )
