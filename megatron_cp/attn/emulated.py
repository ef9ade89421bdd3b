"""The `emulated` backend: the Hopper kernels' own source on the CPU, instructions emulated; g++ only.

For tests and for looking into a kernel, not for speed: a 512-token forward takes seconds. The emulator keeps to
the documented semantics and raises EmulatorError where a kernel does what hardware leaves undefined
(docs/emulator.md). Values say nothing about any GPU beyond those semantics.

    mask -> work list (as for the device) -+
    q, k, v -> emulated tensor maps -------+-> kernels/attn/fwd.cu compiled with g++, CTAs on host threads
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp.attn.device_lists import DeviceList, forward_list
from megatron_cp.attn.emulated_checks import NO_BACKWARD, find_variant
from megatron_cp.attn.hopper_checks import check_layout
from megatron_cp.attn.hopper_launch import PANEL, heads_per_section, score_scales
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels import build
from megatron_cp.kernels.driver import BFLOAT16, FLOAT16
from megatron_cp.kernels.emulator import library
from megatron_cp.kernels.params import FwdParams, TensorMap
from megatron_cp.mask import AttentionMask

# Registers that hold nothing, as the emulator marks them; arithmetic keeps all but the sign and the quiet bit.
POISON = (0x7FA1BEEF, 0x7FA57FA5)
POISON_MASK = 0x7FBFFFFF


@dataclass(frozen=True)
class Settings:
    """How to run: `seed` orders what is asynchronous (0 kind, others adversarial), `num_blocks` is the grid.

    One host thread gives the same run for the same seed; several share the work as they happen to come.
    """

    seed: int = 1
    num_blocks: int = 2
    host_threads: int = 1
    record_history: bool = False


def attend(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    sink_N: Tensor | None,
    options: AttendOptions,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N] float32)`, sink included."""
    if sink_N is not None and sink_N.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(NO_BACKWARD)
    out = torch.empty(*q_QNH.shape[:2], v_KGH.shape[2], dtype=q_QNH.dtype)
    lse = torch.empty(q_QNH.shape[:2])
    run_forward(q_QNH, k_KGH, v_KGH, mask, options, into=(out, lse), sink_N=sink_N)
    return out, lse


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in float32, (0, -inf) without keys."""
    out = torch.empty(*q_QNH.shape[:2], v_KGH.shape[2])
    lse = torch.empty(q_QNH.shape[:2])
    run_forward(q_QNH, k_KGH, v_KGH, mask, options, into=(out, lse))
    return out, lse


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Raises NotImplementedError: the backward kernels are not built."""
    raise NotImplementedError(NO_BACKWARD)


def run_forward(  # noqa: PLR0913  inputs, results, and how to run
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    *,
    into: tuple[Tensor, Tensor],
    sink_N: Tensor | None = None,
    accumulate: bool = False,
    settings: Settings | None = None,
) -> library.Run:
    """Fills `into = (out [Q, N, Hv] float32 or the dtype of q, lse [Q, N] float32)`; returns what happened.

    `accumulate`: `into` holds a partial result over other keys and receives the merged one.

    Raises: EmulatorBuildError without g++; EmulatorError for a defect of the kernel; ValueError for strides or
    addresses that the copy engine cannot read.
    """
    settings = settings or Settings(host_threads=len(os.sched_getaffinity(0)))
    out, lse = into
    if not accumulate:
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
    variant = find_variant(q_QNH, v_KGH, options.softcap)
    lists = forward_list(mask, *_tile(variant), torch.device("cpu"), 0)
    if not lists.num_tiles or not k_KGH.shape[0]:
        if not accumulate:
            out.zero_()
            lse.copy_(torch.full_like(lse, -torch.inf) if sink_N is None else sink_N.expand_as(lse))
        return library.Run({}, "")
    sink = None if sink_N is None else sink_N.detach().float().contiguous()
    counters = torch.zeros(2, dtype=torch.int32)
    kernel = library.load(_source(variant))
    maps = [
        _tensor_map(kernel, name, x, rows)
        for name, x, rows in zip(
            "qkv", (q_QNH, k_KGH, v_KGH), (_tile(variant)[0], *_tile(variant)[1:] * 2), strict=True
        )
    ]
    params = _params(maps, lists, counters, (out, lse, sink), (q_QNH, k_KGH, v_KGH), options)
    params.accumulate = accumulate
    named = {"q": q_QNH, "k": k_KGH, "v": v_KGH, "work list": lists.data, "sink": sink}
    machine = library.Machine(
        num_blocks=min(settings.num_blocks, lists.num_tiles * q_QNH.shape[1]),
        num_threads=int(variant.value("MCP_THREADS")),
        shared_bytes=int(variant.value("MCP_SHARED_BYTES")),
        seed=settings.seed,
        host_threads=settings.host_threads,
        record_history=settings.record_history,
        ranges=tuple(_range(name, x) for name, x in named.items() if x is not None),
    )
    run = kernel.run(params, machine)
    _check_results(out, lse, counters)
    return run


def _params(
    maps: list[TensorMap],
    lists: DeviceList,
    counters: Tensor,
    results: tuple[Tensor, Tensor, Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    options: AttendOptions,
) -> FwdParams:
    out, lse, sink = results
    q_QNH, k_KGH, v_KGH = inputs
    num_heads, num_kv_heads = q_QNH.shape[1], k_KGH.shape[1]
    tiles = lists.data.data_ptr()
    segments = tiles + 16 * lists.num_tiles
    key_columns = k_KGH.shape[2] + v_KGH.shape[2]
    scale, cap, cap_scale = score_scales(options.softmax_scale, options.softcap)
    return FwdParams(
        q_map=maps[0],
        k_map=maps[1],
        v_map=maps[2],
        tiles=tiles,
        segments=segments,
        order=segments + 32 * lists.num_segs,
        counters=counters.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        sink=None if sink is None else sink.data_ptr(),
        out_row_stride=out.stride(0),
        out_head_stride=out.stride(1),
        lse_row_stride=lse.stride(0),
        lse_head_stride=lse.stride(1),
        num_tiles=lists.num_tiles,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads_per_section=heads_per_section(num_heads, num_kv_heads, k_KGH.shape[0], key_columns),
        num_keys=k_KGH.shape[0],
        score_scale=scale,
        cap=cap,
        cap_scale=cap_scale,
        out_is_float=out.dtype == torch.float32,
    )


def _source(variant: build.Variant) -> library.Source:
    return library.Source(
        variant.name, variant.source, variant.entry, "mcp::attn::FwdParams", variant.defines
    )


def _tile(variant: build.Variant) -> tuple[int, int]:
    return int(variant.value("MCP_BLOCK_M")), int(variant.value("MCP_BLOCK_N"))


def _tensor_map(kernel: library.Kernel, name: str, x: Tensor, box_rows: int) -> TensorMap:
    check_layout(name, x)
    rows, heads, head_dim = x.shape
    # A dimension of size 1 may have any stride in torch, not in a tensor map.
    head_stride = x.stride(1) if heads > 1 else head_dim
    row_stride = x.stride(0) if rows > 1 else heads * head_stride
    encoded = kernel.encode_tiled(
        BFLOAT16 if x.dtype == torch.bfloat16 else FLOAT16,
        x.data_ptr(),
        (head_dim, heads, rows),
        (2 * head_stride, 2 * row_stride),
        (PANEL, 1, box_rows),
    )
    return TensorMap.from_buffer_copy(encoded)


def _range(name: str, x: Tensor) -> tuple[str, int, int]:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return name, x.data_ptr(), extent * x.element_size()


def _check_results(out: Tensor, lse: Tensor, counters: Tensor) -> None:
    """Raises EmulatorError if a register without a value was stored, or the work counters were left set."""
    for name, x in (("out", out), ("lse", lse)):
        if x.dtype == torch.float32:
            bits = x.contiguous().view(torch.int32) & POISON_MASK
            if any((bits == value).any() for value in POISON):
                raise library.EmulatorError(
                    f"{name} holds values of registers that were never written, or read in flight"
                )
    if counters.any():
        raise library.EmulatorError(f"the kernel left its work counters at {counters.tolist()}")
