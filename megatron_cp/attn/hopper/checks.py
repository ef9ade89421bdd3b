"""What the Hopper kernels can serve: refused at the call, with what is allowed, never by a failing launch."""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.features import Feature, feature_of
from megatron_cp.kernels import build
from megatron_cp.kernels.build import Variant

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ON_DEVICES = ("cuda",)
CAPABILITY = (9, 0)
ALIGNMENT = 16  # bytes; what the copy engine wants of addresses and strides


def _feature(defines: dict[str, str]) -> Feature | None:
    """Returns the feature of a variant; None where one kernel serves all."""
    if "MCP_SOFTCAP" not in defines:
        return None
    return feature_of(defines["MCP_SOFTCAP"] == "true", defines.get("MCP_DROPOUT") == "true")


def feature_of_variant(variant: Variant) -> Feature:
    """Returns the feature of a kernel that has scores."""
    feature = _feature(dict(define.split("=", 1) for define in variant.defines))
    assert feature is not None, f"{variant.name} has no scores"
    return feature


@lru_cache(maxsize=1)
def forward_variants() -> dict[tuple[str, int, int, Feature], Variant]:
    """Returns the forward kernels by (dtype, head dim, value head dim, feature)."""
    return {
        (
            variant.value("MCP_TYPE"),
            int(variant.value("MCP_HEAD_DIM")),
            int(variant.value("MCP_VALUE_DIM")),
            feature_of_variant(variant),
        ): variant
        for variant in build.variants().values()
        if variant.kernel_pass == "forward"
    }


class Refuser(NamedTuple):
    """Who refuses a call, and which backends can serve it; the emulated backend has the same kernels."""

    backend: str
    others: str


HOPPER = Refuser("hopper", "backend='flash', 'flex' or 'reference'")

_Kind = tuple[str, str, int | None, int | None, Feature | None]


@lru_cache(maxsize=1)
def _variants() -> dict[_Kind, Variant]:
    """Returns all kernels by (pass, dtype, head dim, value head dim, feature), None where one serves all."""
    table: dict[_Kind, Variant] = {}
    for variant in build.variants().values():
        defines = dict(define.split("=", 1) for define in variant.defines)
        dims = [
            int(defines[name]) if name in defines else None
            for name in ("MCP_HEAD_DIM", "MCP_VALUE_DIM")
        ]
        dtype = defines.get("MCP_TYPE", "")  # none where the kernel is in float32
        table[variant.kernel_pass, dtype, dims[0], dims[1], _feature(defines)] = variant
    return table


@lru_cache(maxsize=256)
def find_variant(
    kernel_pass: str,
    dtype: torch.dtype,
    head_dim: int | None,
    value_dim: int | None,
    feature: Feature | None,
    refuser: Refuser = HOPPER,
) -> Variant:
    """Returns the kernel of such calls. Raises NotImplementedError as `check_supported`."""
    kind = (kernel_pass, DTYPES.get(dtype, ""), head_dim, value_dim, feature)
    variant = _variants().get(kind)
    if variant is not None:
        return variant
    if dtype not in DTYPES:
        allowed = " and ".join(str(dtype) for dtype in DTYPES)
        raise NotImplementedError(
            f"backend={refuser.backend!r} cannot compute dtype={dtype}, only {allowed}; cast q, k and v, or use "
            f"{refuser.others}"
        )
    kinds = [kind for kind in _variants() if kind[0] == kernel_pass and kind[4] == feature]
    pairs = sorted({(kind[2] or 0, kind[3] or 0) for kind in kinds})
    also = f" and {feature}" if feature else ""
    raise NotImplementedError(
        f"backend={refuser.backend!r} has no {kernel_pass.split('_')[0]} kernel for head_dim={head_dim}, value "
        f"head_dim={value_dim}{also}, only for {', '.join(str(pair) for pair in pairs) or 'calls without one'}; "
        f"use {refuser.others}"
    )


class GradientKernels(NamedTuple):
    """Who makes the gradients: `main` dk and dv, and dq where there is no kernel for it alone."""

    main: Variant
    dq: Variant | None


@lru_cache(maxsize=256)
def find_gradient_kernels(
    dtype: torch.dtype, head_dim: int, value_dim: int, feature: Feature, deterministic: bool
) -> GradientKernels:
    """Returns the kernels of such calls; raises NotImplementedError as `check_supported`.

    One that adds up dq from key tiles takes five products, two that share nothing take seven. Where one does not fit
    (64, 192 and 256 with softcap, 64 with dropout), there are only the two, and they alone give the same bits in every
    run.
    """
    kind = (dtype, head_dim, value_dim, feature)
    one = _variants().get(("backward", DTYPES.get(dtype, ""), *kind[1:]))
    if one is not None and not deterministic:
        return GradientKernels(one, None)
    return GradientKernels(find_variant("backward_dkdv", *kind), find_variant("backward_dq", *kind))


@lru_cache(maxsize=256)
def built_dims(
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    feature: Feature,
    needs_grad: bool,
    refuser: Refuser = HOPPER,
) -> tuple[int, int]:
    """Returns the (head dim, value head dim) of the kernels that serve such calls, with zeros behind shorter rows.

    The narrowest pair that is wide enough and has all passes asked for. Raises NotImplementedError as
    `check_supported`.
    """
    passes = ("forward", "backward_dkdv") if needs_grad else ("forward",)
    asked = (DTYPES.get(dtype), feature)
    built = [
        {
            (kind[2] or 0, kind[3] or 0)
            for kind in _variants()
            if kind[0] == name and (kind[1], kind[4]) == asked
        }
        for name in passes
    ]
    fitting = [d for d in set.intersection(*built) if d[0] >= head_dim and d[1] >= value_dim]
    if fitting:
        return min(fitting, key=lambda dims: (sum(dims), dims))
    for name in passes:
        find_variant(name, dtype, head_dim, value_dim, feature, refuser)
    raise AssertionError("a pair of dims that is built is wide enough for itself")


def check_supported(
    q: Tensor, v: Tensor, softmax_scale: float, feature: Feature, needs_grad: bool
) -> tuple[int, int]:
    """Returns the dims of the kernels that serve a call, as `built_dims`.

    Raises NotImplementedError for a valid call that the kernels do not serve, naming what does.
    """
    if softmax_scale < 0:
        raise NotImplementedError(
            f"backend='hopper' cannot use softmax_scale={softmax_scale} < 0; negate q and the scale"
        )
    return _check_kind(q.device, q.dtype, q.shape[-1], v.shape[-1], feature, needs_grad)


@lru_cache(maxsize=256)  # what is refused raises, and is asked again
def _check_kind(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    feature: Feature,
    needs_grad: bool,
) -> tuple[int, int]:
    if device.type not in ON_DEVICES:
        raise NotImplementedError(
            f"backend='hopper' cannot compute on device={device}, only on CUDA devices of compute capability 9.0 "
            "(H100, H200, GH200); use backend='cpu' or 'reference', or 'emulated' for the kernels' source on a CPU"
        )
    dims = built_dims(dtype, head_dim, value_dim, feature, needs_grad)
    check_capability(device)
    return dims


def check_capability(device: torch.device) -> None:
    """Raises NotImplementedError unless the device has compute capability 9.0: sm_90a runs nowhere else."""
    capability = _capability(device)
    if capability != CAPABILITY:
        raise NotImplementedError(
            f"backend='hopper' cannot compute on {device} of compute capability {capability[0]}.{capability[1]}, only "
            "on 9.0 (H100, H200, GH200); use backend='flash', 'flex' or 'reference'"
        )


def is_readable(x: Tensor) -> bool:
    """Returns whether the copy engine can read `x` `[rows, heads, columns]` where it lies."""
    row_stride, head_stride, stride = x.stride()
    itemsize, address = x.element_size(), x.data_ptr()
    return (
        stride == 1
        and (head_stride * itemsize % ALIGNMENT == 0 or x.shape[1] == 1)
        and (row_stride * itemsize % ALIGNMENT == 0 or x.shape[0] == 1)
        and address % ALIGNMENT == 0
        and (address != 0 or has_memory(x))
        and ((row_stride != 0 and head_stride != 0) or not _repeats(x))
    )


def readable(x: Tensor) -> Tensor:
    """Returns `x`, copied if the copy engine cannot read it where it lies."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def readable_sink(sink: Tensor | None) -> Tensor | None:
    """Returns the sink as the kernels read it, if there is one."""
    if sink is None:
        return None
    sink = sink.to(torch.float32).contiguous()
    return sink if has_memory(sink) else sink.clone()


def has_memory(x: Tensor) -> bool:
    """Returns whether the numbers of `x` lie at its address; those of a collective that is under way do not."""
    return x.data_ptr() != 0 or not x.numel()


def all_readable(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the tensors, each as `readable`."""
    return readable(q), readable(k), readable(v)


def _repeats(x: Tensor) -> bool:
    """Returns whether a dimension of more than one element has stride 0, which no tensor map may have."""
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))


def check_layout(name: str, x: Tensor) -> None:
    """Raises ValueError unless `is_readable(x)`."""
    if not is_readable(x):
        raise ValueError(
            f"{name} of strides {x.stride()} at address {x.data_ptr():#x} must have last stride 1, other strides of a "
            f"multiple of {ALIGNMENT // x.element_size()} elements, and begin at a multiple of {ALIGNMENT} bytes, "
            f"not at 0; call {name}.contiguous()"
        )


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
