"""Values of every kernel variant on small shapes against float64, with poisoned results.

The budget is that of the test suite: at most about twice the error of the plain formula in the same dtype.
"""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megatron_cp import mask as masks
from megatron_cp.attn import AttendOptions, attend
from megatron_cp.attn.hopper import backend as hopper
from megatron_cp.attn.hopper import judge
from megatron_cp.attn.hopper.checks import feature_of_variant, find_variant
from megatron_cp.attn.hopper.gpu import GpuKernel
from megatron_cp.attn.hopper.machine import Memory
from megatron_cp.kernels import build
from megatron_cp.mask import AttentionMask
from tests.attn.formula import stored_lse_attention
from tests.closeness import assert_within_budget
from tests.kernels.features import of_oracle, wishes, with_feature
from tests.oracles.attention import dense_attention, exact_attention, plain_attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALL_LENGTHS = (1, 127, 128, 129, 300)
ROUNDED_ROWS = 16  # per timed case, compared with float64
ROW_TOLERANCE = (
    2e-2  # relative norm of rows of large cases: rounding is below 1e-2, a wrong key is not
)
Share = tuple[int, int]  # which one, of how many
WHOLE: Share = (0, 1)
LSE_TOLERANCE = 1e-5  # of max(1, lse): float32 sums of exact products


@dataclass(frozen=True)
class Small:
    """One small check: a variant of the kernel, a mask, heads, and what is asked for."""

    variant: build.Variant
    mask_name: str
    mask: AttentionMask
    num_heads: int
    num_kv_heads: int
    has_sink: bool

    @property
    def name(self) -> str:
        """Returns what the report calls it."""
        sink = ", sink" if self.has_sink else ""
        return f"{self.variant.name}, {self.mask_name}, {self.num_heads}:{self.num_kv_heads}{sink}"


def small_masks() -> Iterator[tuple[str, AttentionMask]]:
    """Yields masks of all slice kinds and awkward sizes."""
    for n in SMALL_LENGTHS:
        yield f"causal {n}", masks.causal(n)
    yield "full 129 x 300", masks.full(129, 300)
    yield "causal 300 x 129, rows without keys", masks.causal(300, 129)
    yield "documents with one-token ones", masks.documents([1, 127, 1, 1, 70, 129, 2])
    kinds = ["full", "causal", ("window", 40), ("prefix", 17), ("window", 9, 9)]
    yield "documents of five kinds", masks.documents([70, 130, 200, 90, 33], kinds)
    yield "window both ways with sinks", masks.sliding_window(389, 65, 3, 5)
    yield "shared question", masks.shared_question([150, 20, 20, 30, 5, 64])
    yield "block causal documents", masks.block_causal_documents([300, 77], 64)
    inverse = [(0, 200, 0, 250, 0, None), (0, 200, 250, 300, None, 180)]
    yield "inverse causal beside a band", masks.from_slices(256, 300, inverse)
    table = np.random.default_rng(0).random((6, 6)) < 0.4
    yield "block sparse, empty rows", masks.block_sparse(table, 64, num_queries=384, num_keys=384)


def read_share(text: str) -> Share:
    """Returns the share that a command line names, as `2/6`."""
    index, of = text.split("/")
    return int(index), int(of)


def forward_variants(share: Share = WHOLE) -> list[build.Variant]:
    """Returns the forward variants of a share: every `share[1]`-th, from `share[0]` on."""
    first, step = share
    return [v for v in build.variants().values() if v.kernel_pass == "forward"][first::step]


def small_checks(quick: bool, share: Share = WHOLE) -> Iterator[Small]:
    """Yields forward variants with every small mask, heads and sink alternating."""
    heads = ((4, 1), (3, 3), (8, 2))
    for variant in forward_variants(share):
        for index, (name, mask) in enumerate(small_masks()):
            if not quick or index % 4 == 0:
                yield Small(variant, name, mask, *heads[index % 3], has_sink=index % 2 == 1)


def checks(quick: bool, share: Share = WHOLE) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields all checks of a share of the variants: what the report calls it, and a call that judges it."""
    for small in small_checks(quick, share):
        yield small.name, partial(check_small, small)
    for variant in forward_variants(share):
        yield f"{variant.name}, merged parts", partial(check_merge, variant)
        yield f"{variant.name}, long rows", partial(check_long, variant)
        yield f"{variant.name}, as stages call it", partial(check_stages, variant)
    for small in small_checks(quick, share):
        if has_gradients(small.variant) and not small.has_sink:
            yield f"gradients, {small.name}", partial(check_gradients, small)


def has_gradients(variant: build.Variant) -> bool:
    """Returns whether there is a backward kernel for what this forward kernel computes."""
    dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    dtype = DTYPES[variant.value("MCP_TYPE")]
    try:
        find_variant("backward_dkdv", dtype, *dims, feature_of_variant(variant))
    except NotImplementedError:
        return False
    return True


def check_small(small: Small, device: str = "cuda") -> str:
    """Returns the relative error beside the plain formula's; raises AssertionError beyond the budget.

    Keys and queries that no slice holds are NaN; results are poisoned; a second run must give the same bits.
    """
    variant, mask = small.variant, small.mask
    dtype = DTYPES[variant.value("MCP_TYPE")]
    dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    feature = feature_of_variant(variant)
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (mask.num_queries, small.num_heads, dims[0]),
        (mask.num_keys, small.num_kv_heads, dims[0]),
    )
    shapes += ((mask.num_keys, small.num_kv_heads, dims[1]),)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    sink = torch.linspace(-1, 1, small.num_heads) if small.has_sink else None
    dense = torch.from_numpy(mask.to_dense())
    options = of_oracle(feature, q, k)
    exact = dense_attention(
        *(x.double() for x in (q, k, v)), dense, **options, **_sink(sink, torch.float64)
    )
    plain = dense_attention(q, k, v, dense, **options, **_sink(sink, dtype))
    q[~dense.any(1)], k[~dense.any(0)], v[~dense.any(0)] = (float("nan"),) * 3
    on = [x.to(device) for x in (q, k, v)]
    device_sink = None if sink is None else sink.to(device)
    asked = {"backend": "hopper", "sink": device_sink, **wishes(feature, device)}
    with torch.no_grad(), poisoned_results():
        first = attend(*on, mask, **asked)
        again = attend(*on, mask, **asked)
    for name, one, other in zip(("out", "lse"), first, again, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), f"{name} differs between two runs"
    assert not first[0].isnan().any() and not first[1].isnan().any(), (
        "a row was not written, or holds NaN"
    )
    assert_within_budget(first[0].cpu(), plain[0], exact[0], "out")
    _assert_lse(first[1].cpu(), exact[1])
    return (
        f"out {_relative(first[0].cpu(), exact[0]):.1e} (plain {_relative(plain[0], exact[0]):.1e})"
    )


def check_merge(variant: build.Variant, device: str = "cuda") -> str:
    """Returns the error of two parts of the keys merged in place; raises AssertionError beyond the budget."""
    dtype = DTYPES[variant.value("MCP_TYPE")]
    dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    feature = feature_of_variant(variant)
    mask, generator = masks.sliding_window(300, 90), torch.Generator().manual_seed(2)
    shapes = ((300, 4, dims[0]), (300, 2, dims[0]), (300, 2, dims[1]))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    dense = torch.from_numpy(mask.to_dense())
    known = of_oracle(feature, q, k)
    exact = dense_attention(q.double(), k.double(), v.double(), dense, **known)
    plain = dense_attention(q, k, v, dense, **known)
    on_q, on_k, on_v = (x.to(device) for x in (q, k, v))
    plain_options = AttendOptions(dims[0] ** -0.5, 0.0, "hopper")
    of_head, of_tail = (
        with_feature(plain_options, feature, on_q, on_k, keys)
        for keys in (slice(0, 140), slice(140, 300))
    )
    head, tail = mask.crop(k=(0, 140)), mask.crop(k=(140, 300))
    with torch.no_grad():
        out, lse = hopper.forward(on_q, on_k[:140], on_v[:140], head, of_head)
        hopper.forward_onto_(out, lse, on_q, on_k[140:], on_v[140:], tail, of_tail)
    assert_within_budget(out.cpu(), plain[0], exact[0], "out")
    _assert_lse(lse.cpu(), exact[1])
    return f"out {_relative(out.cpu(), exact[0]):.1e}"


def check_stages(variant: build.Variant, device: str = "cuda") -> str:
    """Returns the self-test's worst result: passes that add to others, are the last, join; AssertionError if wrong."""
    dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    dtype, feature = DTYPES[variant.value("MCP_TYPE")], feature_of_variant(variant)
    kind = judge.Kind(dtype, *dims, feature, has_gradients(variant))
    verdict = judge.judge(hopper, kind, torch.device(device))
    assert verdict.passed, verdict
    return str(verdict)


def check_long(variant: build.Variant, device: str = "cuda", num_keys: int = 5200) -> str:
    """Returns the errors where one multiprocessor meets rows without keys and the next head in turn.

    More keys than the heads of one section may have (4,096 at head dim 256 with 8 kv heads), rows without keys between
    documents. Each kv head is compared by itself, on the device. Raises AssertionError beyond the budget.
    """
    dtype = DTYPES[variant.value("MCP_TYPE")]
    dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    feature = feature_of_variant(variant)
    num_queries, num_keys = num_keys // 2, num_keys
    some, others = (0, num_queries // 3), (num_queries // 2 - 5, num_queries - 50)
    slices = [
        (*some, 0, num_keys, None, None),
        (*others, num_keys // 16, num_keys, None, num_queries),
    ]
    mask = masks.from_slices(num_queries, num_keys, slices)
    dense = torch.from_numpy(mask.to_dense()).to(device)
    generator = torch.Generator().manual_seed(3)
    of_q, of_k = (num_queries, 16), (num_keys, 8)
    shapes = (*of_q, dims[0]), (*of_k, dims[0]), (*of_k, dims[1]), (*of_q, dims[1])
    q, k, v, dout = (
        torch.randn(s, generator=generator).to(dtype).to(device).requires_grad_() for s in shapes
    )
    with poisoned_results():
        out, lse = attend(q, k, v, mask, backend="hopper", **wishes(feature, device))
        found = [out]
        if has_gradients(variant):
            found += torch.autograd.grad(out, (q, k, v), dout)
    known = of_oracle(feature, q, k)
    factors = known.pop("factors", None)
    names, errors = ("out", "dq", "dk", "dv"), []
    for head in range(8):
        of_q, of_k = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        if factors is not None:
            known["factors"] = factors[:, of_q].to(device)
        one = q[:, of_q], k[:, of_k], v[:, of_k], dense
        exact = exact_attention(*one, dout=dout[:, of_q], **known)
        plain = plain_attention(*one, dout=dout[:, of_q], **known)
        _assert_lse(lse[:, of_q].detach(), exact.lse)
        for name, result in zip(names, found, strict=False):
            part = result[:, of_q if name in ("out", "dq") else of_k].detach()
            wanted = getattr(exact, name)
            size = max(1.0, wanted.abs().max().item())
            assert_within_budget(part, getattr(plain, name), wanted, name, size=size)
            errors.append(_relative(part, wanted))
    return f"largest relative error {torch.tensor(errors).max().item():.1e}"


def _assert_lse(lse: Tensor, exact: Tensor) -> None:
    infinite = torch.isinf(exact)
    assert torch.equal(lse[infinite].double(), exact[infinite]), (
        "lse of rows without keys is not -inf"
    )
    error = ((lse.double() - exact).abs() / exact.abs().clamp_min(1))[~infinite]
    assert not (error > LSE_TOLERANCE).any(), f"lse is off by {error.max():.1e}"


def check_gradients(small: Small, device: str = "cuda") -> str:
    """Returns the relative errors of dq, dk, dv; raises AssertionError beyond the budget."""
    variant, mask = small.variant, small.mask
    dtype = DTYPES[variant.value("MCP_TYPE")]
    dims = int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM"))
    feature = feature_of_variant(variant)
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (mask.num_queries, small.num_heads, dims[0]),
        (mask.num_keys, small.num_kv_heads, dims[0]),
    )
    shapes += ((mask.num_keys, small.num_kv_heads, dims[1]),)
    shapes += ((mask.num_queries, small.num_heads, dims[1]),)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    dense = torch.from_numpy(mask.to_dense())
    known = of_oracle(feature, q, k)
    exact = exact_attention(q, k, v, dense, dout=dout, **known)
    plain = plain_attention(q, k, v, dense, dout=dout, **known)
    sizes = dict.fromkeys(("dq", "dk", "dv"), 1.0)  # of the terms, where they cancel
    if (
        feature == "dropout"
    ):  # `out`, rounded, enters delta; without dropout a row of one key has out = v
        wide = (x.double() for x in (q, k, v))
        no_dlse = torch.zeros(q.shape[:2], dtype=torch.float64)
        _, sizes = stored_lse_attention(*wide, dense, dout=dout.double(), dlse=no_dlse, **known)
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    options = {"backend": "hopper", **wishes(feature, device)}

    def differentiate(deterministic: bool) -> tuple[Tensor, ...]:
        out, _ = attend(*leaves, mask, deterministic=deterministic, **options)
        return torch.autograd.grad(out, leaves, dout.to(device))

    with poisoned_results():
        gradients, first, again = (differentiate(fixed) for fixed in (False, True, True))
    errors, names = [], ("dq", "dk", "dv")
    for name, one, other in zip(names, first, again, strict=True):
        assert torch.equal(one, other), f"deterministic {name} differs between two runs"
    for name, *found in zip(names, gradients, first, strict=True):
        wanted = getattr(exact, name)
        size = max(sizes[name], wanted.abs().max().item())
        for gradient in found:
            assert_within_budget(gradient.cpu(), getattr(plain, name), wanted, name, size=size)
        errors.append(f"{name} {_relative(found[0].cpu(), wanted):.1e}")
    return ", ".join(errors)


def check_rows(out_TNH: Tensor, x: "tuple[Tensor, Tensor, Tensor]", mask: AttentionMask) -> None:
    """Compares some rows and heads of a large result with float64; raises AssertionError."""
    q, k, v = x
    generator = np.random.default_rng(0)
    rows = generator.choice(q.shape[0], min(ROUNDED_ROWS, q.shape[0]), replace=False)
    for row in (*rows.tolist(), 0, q.shape[0] - 1):
        head = int(generator.integers(q.shape[1]))
        kv_head = head // (q.shape[1] // k.shape[1])
        keys = mask.crop(q=(row, row + 1)).array[:, 2:4]
        which = torch.cat(
            [torch.arange(a, b, device=q.device) for a, b in keys.tolist()] or [_NO_KEYS]
        )
        scores = (k[which, kv_head].double() @ q[row, head].double()) * q.shape[2] ** -0.5
        expected = torch.softmax(scores, 0) @ v[which, kv_head].double()
        error = (out_TNH[row, head].double() - expected).norm() / expected.norm().clamp_min(1e-6)
        assert error < ROW_TOLERANCE, f"row {row}, head {head}: relative error {error:.1e}"


_NO_KEYS = torch.zeros(0, dtype=torch.int64)


class poisoned_results:  # noqa: N801  reads as a statement
    """Fills what a kernel is to write whole with NaN before its launch."""

    def __enter__(self) -> None:
        self._launch = launch = GpuKernel.launch

        def poisoned(
            kernel: GpuKernel,
            num_blocks: int,
            params: ctypes.Structure,
            memory: Callable[[], Memory] | None = None,
        ) -> None:
            for x in memory().filled.values() if memory else ():
                x.fill_(float("nan"))
            launch(kernel, num_blocks, params)

        GpuKernel.launch = poisoned

    def __exit__(self, *_: object) -> None:
        GpuKernel.launch = self._launch


def _sink(sink: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    return {} if sink is None else {"sink": sink.to(dtype)}


def _relative(actual: Tensor, exact: Tensor) -> float:
    finite = torch.isfinite(exact)
    return ((actual.double() - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-30)).item()
