"""What is asked of kernels on a GPU before they train a model: small masks, all passes, against float64 on that GPU.

parts       what every stage of context parallelism calls: a forward pass, one onto an earlier result, one that is the
            last for its rows, merged rows, the backward pass of given row statistics, one that adds to an earlier dq,
            added rows
the whole   `attend` with a sink and gradients through `out` and `lse`, in 16 bits

All kinds of calls passed on an H200 (2026-11-27; the kernel that merges rows and the launches of row statistics were
changed since), and on a CPU, in the emulator.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_cp.attn import reference
from megatron_cp.attn.closeness import largest_difference, row_error
from megatron_cp.attn.dropout import Dropout, head_seeds, key_words, row_words
from megatron_cp.attn.features import Feature
from megatron_cp.attn.hopper.launch import head_by_head
from megatron_cp.attn.hopper.passes import Passes
from megatron_cp.attn.hopper.verdicts import Verdict
from megatron_cp.attn.merge import ByRow, apply_sink, merge_partials, sink_gradient
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask, documents, sliding_window

NUM_HEADS, NUM_KV_HEADS = 4, 2
DROPOUT = 0.3
# Of a row's result, in eps of its type: about twice what the emulated kernels reach over all variants (.26 to .70). One
# key too many in a row of 400 moves it by 5 %, six times the limit in bf16.
MAX_ROW_ERROR_IN_EPS = 1.0
MAX_LSE_ERROR = 1e-5  # float32 sums of exact products; the emulated kernels reach 1.2e-6


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
        found += _judged_joins(passes, cases[0])
        if kind.feature != "dropout":  # has no `attend` of its own
            found += _judged_whole(passes, cases[0])
        with head_by_head():
            name, mask = "tiles without keys, on one multiprocessor", tiles_without_keys()
            alone = _Case.of(kind, name, mask, device, sm_share=1.0)
            found += _judged_passes(passes, alone)
            found += _judged_stages(passes, alone)  # there a group's heads are visited in one item
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
            drawn = torch.randn(rows, heads, dim, generator=generator, dtype=torch.float32)
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
    """Yields verdicts on both passes."""
    tensors, mask, options = case.tensors, case.mask, case.options
    logits = torch.full_like(case.logits, -math.inf, dtype=torch.float32)
    out, lse = passes.forward(*tensors, mask, options, logits)
    yield case.judged_numbers("max_logits", logits, case.logits)
    yield case.judged_numbers("lse", lse, case.lse)
    yield case.judged("out", out, case.out)
    if not case.kind.needs_grad:
        return
    stats = case.lse.float(), case.delta.float()
    types = (
        (False, True) if case.kind.feature == "dropout" else (False,)
    )  # the whole rounds for the others
    for deterministic, rounded in itertools.product(
        (False, True), types
    ):  # other kernels, other stores
        asked = replace(options, deterministic=deterministic)
        found = passes.backward(case.dout, *tensors, *stats, mask, asked, rounded)
        words = f"{'deterministic ' if deterministic else ''}{'rounded ' if rounded else ''}"
        for name, *pair in zip(("dq", "dk", "dv"), found, case.exact, strict=True):
            yield case.judged(f"{words}{name}", *pair)


def _judged_stages(passes: Passes, case: _Case) -> Iterator[Verdict]:
    """Yields verdicts on what stages of context parallelism call: each adds to what the one before left."""
    (q, k, v), options = case.tensors, case.options
    half = len(k) // 2
    spans = (0, half), (half, len(k))
    keys = [slice(*span) for span in spans]
    (first, part), (second, rest) = zip(
        keys, (case.mask.crop(k=span) for span in spans), strict=True
    )
    out, lse = passes.forward(q, k[first], v[first], part, _of_keys(options, first))
    passes.forward_onto_(out, lse, q, k[second], v[second], rest, _of_keys(options, second))
    yield case.judged_numbers("lse of two stages", lse, case.lse)
    yield case.judged("out of two stages", out, case.out)
    sink = _sink(case.dout.device)
    held = passes.forward(q, k[first], v[first], part, _of_keys(options, first))
    last = q, k[second], v[second], rest, _of_keys(options, second), sink
    out, lse = passes.forward_last(held, *last)
    exact_out, exact_lse = apply_sink(case.out, case.lse, sink.double())
    yield case.judged_numbers("lse of the last stage", lse, exact_lse)
    yield case.judged("out of the last stage", out, exact_out)
    if not case.kind.needs_grad:
        return
    for deterministic in (False, True):
        found = _gradients_of_stages(passes, case, deterministic)
        for name, *pair in zip(("dq", "dk", "dv"), found, case.exact, strict=True):
            yield case.judged(f"{'deterministic ' if deterministic else ''}{name} of stages", *pair)


def _gradients_of_stages(
    passes: Passes, case: _Case, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` of halves of the queries and of the keys, each added to what is held for its rows."""
    (q, k, v), lse, delta = case.tensors, case.lse.float(), case.delta.float()
    middle, half = len(q) // 2, len(k) // 2
    dq: list[Tensor | None] = [None, None]
    dkeys: list[tuple[Tensor, Tensor] | None] = [None, None]
    for i, rows in enumerate(((0, middle), (middle, len(q)))):
        for j, columns in enumerate(((0, half), (half, len(k)))):
            queries, keys = slice(*rows), slice(*columns)
            asked = _of_queries(_of_keys(case.options, keys), queries)
            dq[i], *of_keys = passes.backward_onto_(
                dq[i], dkeys[j], case.dout[queries], q[queries], k[keys], v[keys],
                lse[queries], delta[queries], case.mask.crop(q=rows, k=columns),
                replace(asked, deterministic=deterministic),
            )  # fmt: skip
            dkeys[j] = (of_keys[0], of_keys[1])
    whole = torch.cat([x for x in dq if x is not None])
    dk, dv = map(torch.cat, zip(*(pair for pair in dkeys if pair), strict=True))
    return whole * case.options.softmax_scale, dk, dv


def _judged_whole(passes: Passes, case: _Case) -> Iterator[Verdict]:
    """Yields verdicts on `attend` with a sink, and on its gradients through both results."""
    sink = _sink(case.dout.device)
    exact_out, exact_lse = apply_sink(case.out, case.lse, sink.double())
    leaves = [x.detach().requires_grad_(case.kind.needs_grad) for x in (*case.tensors, sink)]
    q, k, v, of_sink = leaves
    with torch.set_grad_enabled(case.kind.needs_grad):
        out, lse = passes.attend(q, k, v, case.mask, of_sink, case.options)
    yield case.judged_numbers("lse with a sink", lse.detach(), exact_lse)
    yield case.judged("out with a sink", out.detach(), exact_out)
    if not case.kind.needs_grad:
        return
    dlse = torch.linspace(-1.0, 1.0, exact_lse.numel(), dtype=torch.float32, device=sink.device)
    dlse = dlse.view_as(exact_lse)
    found = torch.autograd.grad((out, lse), leaves, (case.dout, dlse))
    # Of the result as it was rounded, which is judged above.
    delta = (case.dout.double() * out.detach().double()).sum(dim=-1) - dlse
    exact = case.gradients(exact_lse, delta)
    for name, *pair in zip(("dq", "dk", "dv"), found[:3], exact, strict=True):
        yield case.judged(f"{name} with a sink", *pair)
    dsink = sink_gradient(exact_lse, sink.double(), delta, dlse)
    yield case.judged("dsink", found[3][None], dsink[None])


def _sink(device: torch.device) -> Tensor:
    return torch.linspace(-1.0, 1.0, NUM_HEADS, dtype=torch.float32, device=device)


def _dropout(q: Tensor, k: Tensor) -> Dropout:
    rows, keys = (torch.arange(len(x), device=q.device) for x in (q, k))
    words = row_words(head_seeds(torch.tensor([1], device=q.device), q), rows)
    return Dropout(DROPOUT, words, key_words(keys))


def _judged_joins(passes: Passes, case: _Case) -> Iterator[Verdict]:
    """Yields verdicts on results that come home: some rows get none, some one and some two, in no order."""
    generator, device = torch.Generator().manual_seed(1), case.dout.device
    num_rows, num_parts, width = 300, 400, case.kind.value_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32).to(device)

    held = draw(num_rows, NUM_HEADS, width), 3 * draw(num_rows, NUM_HEADS)
    part = draw(num_parts, NUM_HEADS, width), 3 * draw(num_parts, NUM_HEADS)
    held[1][::7], part[1][::5] = -math.inf, -math.inf  # rows without keys
    held[0][::7], part[0][::5] = 0.0, 0.0
    rows = torch.randperm(num_rows, generator=generator)[: num_rows - 20].to(device)
    counts = torch.arange(len(rows), device=device) % 3
    begins = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    parts = torch.randperm(num_parts, generator=generator).to(device)[: int(begins[-1])]
    by_row = (rows, begins, parts)
    out, lse, total = held[0].double(), held[1].double(), held[0].double()
    for i in range(2):
        some = counts > i
        to, one = rows[some], parts[begins[:-1][some] + i]
        more = part[0][one].double(), part[1][one].double()
        out[to], lse[to] = merge_partials(out[to], lse[to], *more)
        total[to] += more[0]
    yield from _joined(passes, case, held, part, (out, lse), by_row)
    first = tuple(x[:num_rows] for x in part)
    exact = merge_partials(*(x.double() for x in (*held, *first)))
    yield from _joined(passes, case, held, (first[0], first[1]), exact, None)
    if not case.kind.needs_grad:
        return
    for name, columns in (("added rows", width), ("added rows with gaps", width + 4)):
        found = held[0].new_zeros(num_rows, NUM_HEADS, columns)[..., :width].copy_(held[0])
        passes.add_parts_(found, part[0], by_row)
        yield case.judged_numbers(name, found, total)


def _joined(
    passes: Passes,
    case: _Case,
    held: tuple[Tensor, Tensor],
    part: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    by_row: ByRow | None,
) -> Iterator[Verdict]:
    out, lse = held[0].clone(), held[1].clone()
    passes.merge_parts_(out, lse, *part, by_row)
    which = "merged spans" if by_row is None else "merged rows"
    yield case.judged_numbers(f"lse of {which}", lse, exact[1])
    yield case.judged_numbers(f"out of {which}", out, exact[0])


def _of_keys(options: AttendOptions, keys: slice) -> AttendOptions:
    dropout = options.dropout
    if dropout is None:
        return options
    return replace(options, dropout=replace(dropout, key_words=dropout.key_words[keys]))


def _of_queries(options: AttendOptions, queries: slice) -> AttendOptions:
    dropout = options.dropout
    if dropout is None:
        return options
    return replace(options, dropout=replace(dropout, row_words=dropout.row_words[queries]))
