"""The kernels' first call on a GPU: a few small masks against float64 on that very GPU, remembered in the cache.

A kernel that is wrong there (a driver, a compiler, a board that nobody tried) must not train a model. The test
runs once per GPU, driver and build of a variant, in a fraction of a second; its verdict is kept (verdicts.py). All
kinds passed it on an H100; on a CPU the emulated kernels pass it, and kernels with a planted defect fail it.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import contextlib
import hashlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_cp.attn import reference
from megatron_cp.attn.dropout import Dropout, head_seeds, key_words, row_words
from megatron_cp.attn.features import Feature
from megatron_cp.attn.hopper.checks import (
    DTYPES,
    find_gradient_kernels,
    find_variant,
    forward_variants,
)
from megatron_cp.attn.hopper.launch import head_by_head
from megatron_cp.attn.hopper.verdicts import Verdict, kept_verdict
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels import build
from megatron_cp.kernels.driver import driver
from megatron_cp.mask import AttentionMask, documents, sliding_window

TEST_VERSION = 2  # of the cases below: verdicts of others are not asked
NUM_HEADS, NUM_KV_HEADS = 4, 2
DROPOUT = 0.3
# Of a row's result, in eps of its type: about twice what the emulated kernels reach over all variants (.26 to .55). One
# key too many in a row of 400 moves it by 5 %, six times the limit in bf16.
MAX_ROW_ERROR_IN_EPS = 1.0
MAX_LSE_ERROR = 1e-5  # float32 sums of exact products; the emulated kernels reach 1.2e-6


class Passes(Protocol):
    """The raw passes of a backend."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
        max_logits_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns `(out, lse)`; raises `max_logits` to the largest logit of each head."""

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `(dq, dk, dv)`."""

    def merge_rows_(
        self, out: Tensor, lse: Tensor, rows: Tensor | None, part_out: Tensor, part_lse: Tensor
    ) -> None:
        """Merges rows of a partial result into another, in place."""


@dataclass(frozen=True)
class Kind:
    """What a call asks of the kernels."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    feature: Feature
    needs_grad: bool


_is_skipped: ContextVar[bool] = ContextVar("megatron_cp_self_test_is_skipped", default=False)
_verdicts: dict[tuple[Kind, torch.device], Verdict] = {}


@contextlib.contextmanager
def skipped() -> Iterator[None]:
    """Lets kernels run untested inside: for tools that judge them themselves."""
    token = _is_skipped.set(True)
    try:
        yield
    finally:
        _is_skipped.reset(token)


def find_verdict(kind: Kind, device: torch.device) -> Verdict | None:
    """Returns the verdict on this GPU: of this process, of an earlier one, or of a test now; None if skipped.

    Raises RuntimeError where the test now ends in a fault of the GPU.
    """
    if _is_skipped.get():
        return None
    verdict = _verdicts.get((kind, device))
    if verdict is None:
        from megatron_cp.attn.hopper import backend

        if torch.cuda.is_available():
            # A fault of what the caller has done before is the caller's.
            torch.cuda.synchronize(device)
        verdict = kept_verdict(_key(kind, device), lambda: judge(backend, kind, device))
        _verdicts[kind, device] = verdict
    return verdict


def tell_all(device: torch.device) -> str:
    """Returns one line on the verdicts of all kinds of calls. Raises SystemExit with such a line if any failed."""
    verdicts = {kind: find_verdict(kind, device) for kind in all_kinds()}
    wrong = [
        f"{kind.dtype}, head_dim {kind.head_dim}: {v}"
        for kind, v in verdicts.items()
        if v and not v.passed
    ]
    if wrong:
        raise SystemExit(
            f"{len(wrong)} of {len(verdicts)} kinds of kernels are wrong: {'; '.join(wrong)}"
        )
    return f"all {len(verdicts)} kinds of kernels agree with float64 on this GPU"


def all_kinds() -> list[Kind]:
    """Returns every kind of call that has kernels for both passes."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    return [
        Kind(dtypes[name], head_dim, value_dim, feature, needs_grad=True)
        for name, head_dim, value_dim, feature in forward_variants()
    ]


def judge(passes: Passes, kind: Kind, device: torch.device) -> Verdict:
    """Returns what a test of a backend's passes on a device finds: its worst result against its limit."""
    found = [
        found
        for name, mask in small_masks().items()
        for found in _compared(passes, kind, name, mask, device)
    ]
    with head_by_head():
        name, mask = "tiles without keys, on one multiprocessor", tiles_without_keys()
        found += _compared(passes, kind, name, mask, device, sm_share=1.0)
    return max(found, key=_share_of_limit)


def _share_of_limit(verdict: Verdict) -> float:
    assert verdict.error is not None
    assert verdict.limit is not None
    return math.inf if math.isnan(verdict.error) else verdict.error / verdict.limit


def small_masks() -> dict[str, AttentionMask]:
    """Returns masks with every kind of tile: full, cut by a diagonal on either side, ragged, empty."""
    kinds = ("causal", "full", ("window", 40), "causal", ("prefix", 30))
    return {
        "documents": documents([150, 1, 129, 2, 118], list(kinds)),
        "a window of 65": sliding_window(300, 65),
        "queries without keys": documents([140, 160], "causal").crop(k=(100, 300)),
    }


def tiles_without_keys() -> AttentionMask:
    """Returns a mask whose first tiles have no key at all; a section of heads ends with them, the next begins."""
    return documents([260, 160], "causal").crop(k=(220, 420))


def _compared(
    passes: Passes,
    kind: Kind,
    name: str,
    mask: AttentionMask,
    device: torch.device,
    sm_share: float = 0.0,
) -> Iterator[Verdict]:
    generator = torch.Generator().manual_seed(len(name))

    def draw(rows: int, heads: int, dim: int) -> Tensor:
        drawn = torch.randn(rows, heads, dim, generator=generator)
        return drawn.to(kind.dtype).to(device)

    q = draw(mask.num_queries, NUM_HEADS, kind.head_dim)
    k = draw(mask.num_keys, NUM_KV_HEADS, kind.head_dim)
    v = draw(mask.num_keys, NUM_KV_HEADS, kind.value_dim)
    softcap = 5.0 if kind.feature == "softcap" else 0.0
    options = AttendOptions(kind.head_dim**-0.5, softcap, "reference", sm_share=sm_share)
    if kind.feature == "dropout":
        options = replace(options, dropout_p=DROPOUT, dropout=_dropout(q, k))
    q_f64, k_f64, v_f64 = q.double(), k.double(), v.double()
    logits = torch.full((NUM_HEADS,), -math.inf, dtype=torch.float64, device=device)
    found_logits = logits.float()
    out, lse = reference.forward(q_f64, k_f64, v_f64, mask, options, logits)
    limit = MAX_ROW_ERROR_IN_EPS * torch.finfo(kind.dtype).eps
    with torch.no_grad():
        found_out, found_lse = passes.forward(q, k, v, mask, options, found_logits)
    yield _judged(f"max_logits under {name}", _largest(found_logits, logits), MAX_LSE_ERROR)
    yield _judged(f"lse under {name}", _largest(found_lse, lse), MAX_LSE_ERROR)
    yield _judged(f"out under {name}", _row_error(found_out, out), limit)
    with torch.no_grad():
        merged_out, merged_lse = _in_two_parts(passes, (q, k, v), mask, options)
    yield _judged(f"merged lse under {name}", _largest(merged_lse, lse), MAX_LSE_ERROR)
    yield _judged(f"merged out under {name}", _row_error(merged_out, out), limit)
    if not kind.needs_grad:
        return
    dout = draw(mask.num_queries, NUM_HEADS, kind.value_dim)
    delta = (dout.double() * out).sum(dim=-1)
    exact = reference.backward(dout.double(), q_f64, k_f64, v_f64, lse, delta, mask, options)
    for deterministic in (False, True):  # other kernels
        asked = replace(options, deterministic=deterministic)
        with torch.no_grad():
            found = passes.backward(dout, q, k, v, lse.float(), delta.float(), mask, asked)
        for gradient, result, expected in zip(("dq", "dk", "dv"), found, exact, strict=True):
            what = f"{'deterministic ' if deterministic else ''}{gradient} under {name}"
            yield _judged(what, _row_error(result, expected), limit)


def _dropout(q: Tensor, k: Tensor) -> Dropout:
    rows, keys = (torch.arange(len(x), device=q.device) for x in (q, k))
    words = row_words(head_seeds(torch.tensor([1], device=q.device), q), rows)
    return Dropout(DROPOUT, words, key_words(keys))


def _in_two_parts(
    passes: Passes,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)` over halves of the keys, merged row by row in another order."""
    q, k, v = tensors
    half = len(k) // 2
    out, lse = passes.forward(
        q, k[:half], v[:half], mask.crop(k=(0, half)), _of_keys(options, slice(0, half))
    )
    part = passes.forward(
        q, k[half:], v[half:], mask.crop(k=(half, len(k))), _of_keys(options, slice(half, len(k)))
    )
    order = torch.arange(len(q) - 1, -1, -1, device=q.device)
    rows_of_part = [x[order].contiguous() for x in part]
    passes.merge_rows_(out, lse, order, *rows_of_part)
    return out, lse


def _of_keys(options: AttendOptions, keys: slice) -> AttendOptions:
    dropout = options.dropout
    if dropout is None:
        return options
    return replace(options, dropout=replace(dropout, key_words=dropout.key_words[keys]))


def _judged(result: str, error: float, limit: float) -> Verdict:
    return Verdict(error <= limit, result, error, limit)  # NaN is not <=


def _largest(actual: Tensor, exact: Tensor) -> float:
    """Returns the largest difference; infinite where one of the two is infinite and the other is not."""
    difference = (actual.double() - exact).abs().masked_fill(actual.double() == exact, 0.0)
    return difference.max().item()


def _row_error(actual: Tensor, exact: Tensor) -> float:
    """Returns the largest error of a row of a head, relative to its size, or to a typical one if that is larger."""
    size = exact.norm(dim=-1)
    typical = size[size > 0].median() if (size > 0).any() else torch.ones_like(size)[0, 0]
    return ((actual.double() - exact).norm(dim=-1) / size.clamp(min=typical)).max().item()


def _key(kind: Kind, device: torch.device) -> str:
    """Returns a name for GPU, driver and the very machine code: any other gets a test of its own."""
    properties = torch.cuda.get_device_properties(device)
    asked = (kind.dtype, kind.head_dim, kind.value_dim, kind.feature)
    variants = [find_variant("forward", *asked)]
    if kind.needs_grad:
        both = [find_gradient_kernels(*asked, deterministic) for deterministic in (False, True)]
        variants += {one.name: one for pair in both for one in pair if one is not None}.values()
    names = [variant.name for variant in variants]
    code = hashlib.sha256(b"".join(build.cubin(name) for name in names)).hexdigest()
    gpu = f"{properties.name} {getattr(properties, 'uuid', '')}"
    text = f"test {TEST_VERSION} {gpu} driver {driver().version} {asked} {names} {code}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
