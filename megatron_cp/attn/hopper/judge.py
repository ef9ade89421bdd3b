"""What is asked of kernels on a GPU before they train a model: small masks, all passes, against float64 on that GPU.

parts       what every stage of context parallelism calls: a forward pass, one onto an earlier result, merged rows,
            the backward pass of given row statistics, one that adds to an earlier dq
the whole   `attend` with a sink and gradients through `out` and `lse`, in 16 bits

Of the parts, whole passes and merged rows were judged on an H100 (until 2026-11-24); the others on a CPU alone, in the
emulator.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_cp.attn import reference
from megatron_cp.attn.closeness import largest_difference, row_error
from megatron_cp.attn.dropout import Dropout, head_seeds, key_words, row_words
from megatron_cp.attn.features import Feature
from megatron_cp.attn.hopper.launch import head_by_head
from megatron_cp.attn.hopper.verdicts import Verdict
from megatron_cp.attn.merge import apply_sink, sink_gradient
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask, documents, sliding_window

NUM_HEADS, NUM_KV_HEADS = 4, 2
DROPOUT = 0.3
# Of a row's result, in eps of its type: about twice what the emulated kernels reach over all variants (.26 to .70). One
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

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        sink_N: Tensor | None,
        options: AttendOptions,
    ) -> tuple[Tensor, Tensor]:
        """Returns `(out, lse)`, sink included, differentiable."""

    def forward_onto_(
        self,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
    ) -> None:
        """Merges attention over other keys into a result, in place."""

    def backward_onto_(  # noqa: PLR0913  as backward, and what to add to
        self,
        dq: Tensor | None,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: AttentionMask,
        options: AttendOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `(dq, dk, dv)`, dq without softmax_scale and added to a dq that is given."""

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


def judge(passes: Passes, kind: Kind, device: torch.device) -> Verdict:
    """Returns what a test of a backend's passes on a device finds: its worst result against its limit."""
    found: list[Verdict] = []
    with torch.inference_mode(False), torch.no_grad():
        cases = [_Case.of(kind, name, mask, device) for name, mask in small_masks().items()]
        for case in cases:
            found += _judged_passes(passes, case)
        found += _judged_stages(passes, cases[0])
        if kind.feature != "dropout":  # has no `attend` of its own
            found += _judged_whole(passes, cases[0])
        with head_by_head():
            name, mask = "tiles without keys, on one multiprocessor", tiles_without_keys()
            found += _judged_passes(passes, _Case.of(kind, name, mask, device, sm_share=1.0))
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


@dataclass(frozen=True)
class _Case:
    """Inputs, and what float64 makes of them."""

    kind: Kind
    name: str
    mask: AttentionMask
    options: AttendOptions
    tensors: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    out: Tensor
    lse: Tensor
    logits: Tensor

    @classmethod
    def of(
        cls,
        kind: Kind,
        name: str,
        mask: AttentionMask,
        device: torch.device,
        sm_share: float = 0.0,
    ) -> "_Case":
        """Returns a case, the same each time."""
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
        logits = torch.full((NUM_HEADS,), -math.inf, dtype=torch.float64, device=device)
        out, lse = reference.forward(q.double(), k.double(), v.double(), mask, options, logits)
        dout = draw(mask.num_queries, NUM_HEADS, kind.value_dim)
        return cls(kind, name, mask, options, (q, k, v), dout, out, lse, logits)

    @functools.cached_property
    def delta(self) -> Tensor:
        """Of the row statistics of the exact result."""
        return (self.dout.double() * self.out).sum(dim=-1)

    @functools.cached_property
    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """`(dq, dk, dv)` of the exact result."""
        return self.gradients(self.lse, self.delta)

    def gradients(self, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `(dq, dk, dv)` in float64."""
        dout, q, k, v = (x.double() for x in (self.dout, *self.tensors))
        return reference.backward(dout, q, k, v, lse, delta, self.mask, self.options)

    def judged(self, result: str, actual: Tensor, exact: Tensor) -> Verdict:
        """Returns the verdict on rows of a result."""
        limit = MAX_ROW_ERROR_IN_EPS * torch.finfo(self.kind.dtype).eps
        return self._judged(result, row_error(actual, exact), limit)

    def judged_numbers(self, result: str, actual: Tensor, exact: Tensor) -> Verdict:
        """Returns the verdict on logarithms."""
        return self._judged(result, largest_difference(actual, exact), MAX_LSE_ERROR)

    def _judged(self, result: str, error: float, limit: float) -> Verdict:
        return Verdict(error <= limit, f"{result} under {self.name}", error, limit)  # NaN is not <=


def _judged_passes(passes: Passes, case: _Case) -> Iterator[Verdict]:
    """Yields verdicts on both passes, and on parts merged row by row."""
    tensors, mask, options = case.tensors, case.mask, case.options
    logits = torch.full_like(case.logits, -math.inf, dtype=torch.float32)
    out, lse = passes.forward(*tensors, mask, options, logits)
    yield case.judged_numbers("max_logits", logits, case.logits)
    yield case.judged_numbers("lse", lse, case.lse)
    yield case.judged("out", out, case.out)
    out, lse = _in_two_parts(passes, tensors, mask, options)
    yield case.judged_numbers("merged lse", lse, case.lse)
    yield case.judged("merged out", out, case.out)
    if not case.kind.needs_grad:
        return
    stats = case.lse.float(), case.delta.float()
    for deterministic in (False, True):  # other kernels
        asked = replace(options, deterministic=deterministic)
        found = passes.backward(case.dout, *tensors, *stats, mask, asked)
        for name, *pair in zip(("dq", "dk", "dv"), found, case.exact, strict=True):
            yield case.judged(f"{'deterministic ' if deterministic else ''}{name}", *pair)


def _judged_stages(passes: Passes, case: _Case) -> Iterator[Verdict]:
    """Yields verdicts on what stages of context parallelism call: each adds to what the one before left."""
    (q, k, v), mask, options = case.tensors, case.mask, case.options
    half = len(k) // 2
    halves = [(slice(*span), mask.crop(k=span)) for span in ((0, half), (half, len(k)))]
    (first, part), (second, rest) = halves
    out, lse = passes.forward(q, k[first], v[first], part, _of_keys(options, first))
    passes.forward_onto_(out, lse, q, k[second], v[second], rest, _of_keys(options, second))
    yield case.judged_numbers("lse of two stages", lse, case.lse)
    yield case.judged("out of two stages", out, case.out)
    if not case.kind.needs_grad:
        return
    stats = case.lse.float(), case.delta.float()
    for deterministic in (False, True):
        dq, parts = None, []
        for keys, part in halves:
            asked = replace(_of_keys(options, keys), deterministic=deterministic)
            dq, *of_keys = passes.backward_onto_(
                dq, case.dout, q, k[keys], v[keys], *stats, part, asked
            )
            parts.append(of_keys)
        assert dq is not None
        found = (dq * options.softmax_scale, *map(torch.cat, zip(*parts, strict=True)))
        for name, *pair in zip(("dq", "dk", "dv"), found, case.exact, strict=True):
            yield case.judged(
                f"{'deterministic ' if deterministic else ''}{name} of two stages", *pair
            )


def _judged_whole(passes: Passes, case: _Case) -> Iterator[Verdict]:
    """Yields verdicts on `attend` with a sink, and on its gradients through both results."""
    sink = torch.linspace(-1.0, 1.0, NUM_HEADS, device=case.dout.device)
    exact_out, exact_lse = apply_sink(case.out, case.lse, sink.double())
    leaves = [x.detach().requires_grad_(case.kind.needs_grad) for x in (*case.tensors, sink)]
    q, k, v, of_sink = leaves
    with torch.set_grad_enabled(case.kind.needs_grad):
        out, lse = passes.attend(q, k, v, case.mask, of_sink, case.options)
    yield case.judged_numbers("lse with a sink", lse.detach(), exact_lse)
    yield case.judged("out with a sink", out.detach(), exact_out)
    if not case.kind.needs_grad:
        return
    dlse = torch.linspace(-1.0, 1.0, exact_lse.numel(), device=sink.device).view_as(exact_lse)
    found = torch.autograd.grad((out, lse), leaves, (case.dout, dlse))
    # Of the result as it was rounded, which is judged above.
    delta = (case.dout.double() * out.detach().double()).sum(dim=-1) - dlse
    exact = case.gradients(exact_lse, delta)
    for name, *pair in zip(("dq", "dk", "dv"), found[:3], exact, strict=True):
        yield case.judged(f"{name} with a sink", *pair)
    dsink = sink_gradient(exact_lse, sink.double(), delta)
    yield case.judged("dsink", found[3][None], dsink[None])


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
