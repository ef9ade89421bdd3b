"""What the Hopper kernels can serve: refused at the call, with what is allowed, never by a failing launch."""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megatron_cp.kernels import build
from megatron_cp.kernels.build import Variant

F = TypeVar("F", bound=Callable[..., Any])

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ON_DEVICES = ("cuda",)
CAPABILITY = (9, 0)
ALIGNMENT = 16  # bytes; what the copy engine wants of addresses and strides
NO_BACKWARD = (
    "backend='hopper' has no backward pass yet, only the forward pass is built; train with backend='flex' "
    "('cpu' on CPU tensors), or call under torch.no_grad()"
)


def outside_compiled_graphs(function: F) -> F:
    """Returns the function, at which compiled code is left and entered again behind it.

    `torch.compiler.disable` alone does this too, and costs every uncompiled call half a microsecond.
    """
    disabled = torch.compiler.disable(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return disabled(*arguments)
        return function(*arguments)

    return cast(F, call)


@lru_cache(maxsize=1)
def forward_variants() -> dict[tuple[str, int, int, bool], Variant]:
    """Returns the forward kernels by (dtype, head dim, value head dim, has softcap)."""
    return {
        (
            variant.value("MCP_TYPE"),
            int(variant.value("MCP_HEAD_DIM")),
            int(variant.value("MCP_VALUE_DIM")),
            variant.value("MCP_SOFTCAP") == "true",
        ): variant
        for variant in build.variants().values()
        if variant.kernel_pass == "forward"
    }


@lru_cache(maxsize=256)
def find_variant(dtype: torch.dtype, head_dim: int, value_dim: int, has_softcap: bool) -> Variant:
    """Returns the forward kernel of such calls. Raises NotImplementedError as `check_wish`."""
    variant = forward_variants().get((DTYPES.get(dtype, ""), head_dim, value_dim, has_softcap))
    if variant is not None:
        return variant
    if dtype not in DTYPES:
        allowed = " and ".join(str(dtype) for dtype in DTYPES)
        raise NotImplementedError(
            f"backend='hopper' cannot compute dtype={dtype}, only {allowed}; cast q, k and v, or use "
            "backend='flex' or 'reference'"
        )
    pairs = sorted({(h, hv) for _, h, hv, _ in forward_variants()})
    raise NotImplementedError(
        f"backend='hopper' has no kernel for head_dim={head_dim} with a value head_dim={value_dim}, only for "
        f"{', '.join(str(pair) for pair in pairs)}; use backend='flex' or 'reference'"
    )


@outside_compiled_graphs
def check_wish(
    q: Tensor, v: Tensor, softmax_scale: float, softcap: float, needs_grad: bool
) -> None:
    """Raises NotImplementedError for a valid call that the kernels do not serve, naming what does."""
    if q.device.type not in ON_DEVICES:
        raise NotImplementedError(
            f"backend='hopper' cannot compute on device={q.device}, only on CUDA devices of compute capability 9.0 "
            "(H100, H200, GH200); use backend='cpu' or 'reference', or 'emulated' for the kernels' source on a CPU"
        )
    find_variant(q.dtype, q.shape[-1], v.shape[-1], softcap > 0)
    if softmax_scale < 0:
        raise NotImplementedError(
            f"backend='hopper' cannot use softmax_scale={softmax_scale} < 0; negate q and the scale"
        )
    if needs_grad:
        raise NotImplementedError(NO_BACKWARD)
    check_capability(q.device)


def check_capability(device: torch.device) -> None:
    """Raises NotImplementedError unless the device has compute capability 9.0: sm_90a runs nowhere else."""
    capability = _capability(device)
    if capability != CAPABILITY:
        raise NotImplementedError(
            f"backend='hopper' cannot compute on {device} of compute capability {capability[0]}.{capability[1]}, only "
            "on 9.0 (H100, H200, GH200); use backend='flex' or 'reference'"
        )


def check_layout(name: str, x: Tensor) -> None:
    """Raises ValueError unless the copy engine can read `x` `[rows, heads, head_dim]` where it lies."""
    row_stride, head_stride, stride = x.stride()
    itemsize = x.element_size()
    aligned = (
        stride == 1
        and (head_stride * itemsize % ALIGNMENT == 0 or x.shape[1] == 1)
        and (row_stride * itemsize % ALIGNMENT == 0 or x.shape[0] == 1)
        and x.data_ptr() % ALIGNMENT == 0
    )
    if not aligned:
        raise ValueError(
            f"{name} of strides {x.stride()} at address {x.data_ptr():#x} must have last stride 1, other strides of a "
            f"multiple of {ALIGNMENT // itemsize} elements, and begin at a multiple of {ALIGNMENT} bytes; "
            f"call {name}.contiguous()"
        )


def check_sink_gradient(sink: Tensor | None) -> None:
    """Raises NotImplementedError where a sink asks for a gradient that nothing would give it."""
    if sink is not None and sink.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(NO_BACKWARD)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
