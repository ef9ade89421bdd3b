"""What the attention of a pack costs, from the lengths of its documents: the packs of a batch are dealt by it.

    every layer, forward and backward     the larger of   the pairs that its mask allows, spread evenly
                                                          the rows that no plan can leave where they are

It is the lower bound of the pack's plan on the context ranks (`plan/bounds/bounds.py`), for which the lengths are
enough: nothing is planned, and no mask is built. A layer that slides a window counts what it computes, which is
little of a long document, so packs are not dealt by the area of the full mask where few layers see it. How well it
orders packs: `benchmarks/bench_replicas.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_cp.data.batch import BatchConfig, PlanRequest, visible_prefix
from megatron_cp.data.document_set import Documents
from megatron_cp.data.packing import Pack
from megatron_cp.plan.bounds.bounds import MaskExtent, time_bound_of
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import PASSES, OwnRows

Window = tuple[int, int] | None


def comparable(seconds: float) -> float:
    """Returns seconds as all processors have them: two may differ in the last bits of a sum."""
    return round(seconds, 15)


def pack_seconds(
    documents: Documents, pack: Pack, config: BatchConfig, request: PlanRequest
) -> float:
    """Returns the least seconds of attention in all layers, both passes; no plan of the pack is predicted below.

    With `config.fim` those of the pack before its pieces are rearranged. O(documents).
    """
    return least_seconds(_lengths(documents, pack, config), config.seq_length, request)


def pack_area(documents: Documents, pack: Pack, config: BatchConfig, request: PlanRequest) -> int:
    """Returns the pairs that the masks of all layers allow, the same on any ranks. O(documents)."""
    lengths = _lengths(documents, pack, config)
    return sum(
        layers * extent_of_lengths(lengths, window).area for layers, window in _layers(request)
    )


def _lengths(documents: Documents, pack: Pack, config: BatchConfig) -> list[tuple[int, int]]:
    """Returns the documents that a pack's mask keeps apart, (tokens, leading tokens that all of them see)."""
    if config.reset_attention_mask:
        return [(piece.length, visible_prefix(documents, piece)) for piece in pack.pieces]
    return [(pack.num_tokens, 0)]


def least_seconds(
    lengths: Sequence[tuple[int, int]], num_tokens: int, request: PlanRequest
) -> float:
    """Returns the least seconds of documents, (tokens, leading tokens that all of them see), in `num_tokens` rows."""
    cp_size, config = request.cp_size, request.config
    own = OwnRows.of_tokens(tokens_per_rank(num_tokens, cp_size, config))
    seconds = 0.0
    for layers, window in _layers(request):
        extent = extent_of_lengths(lengths, window)
        seconds += layers * sum(
            time_bound_of(extent, cp_size, own, config, name) for name in PASSES
        )
    return comparable(seconds)


def _layers(request: PlanRequest) -> Iterator[tuple[int, Window]]:
    """Yields how many layers there are of each kind, and their window."""
    if request.num_full_layers:
        yield request.num_full_layers, None
    if request.window is not None:
        yield request.num_window_layers, request.window


def extent_of_lengths(lengths: Sequence[tuple[int, int]], window: Window = None) -> MaskExtent:
    """Returns what bounds know of the mask of documents, (tokens, leading tokens that all of them see) each.

    `window` is (left, right) as in Megatron's --window-size; -1 sees everything.
    """
    left, right = window or (-1, -1)
    width = math.inf if left < 0 else left + 1
    sees_ahead = right < 0
    area = degree = 0
    for tokens, prefix in lengths:
        rising = int(min(tokens, width))  # the n-th of them sees n keys, each later one as many
        area += rising * (rising + 1) // 2 + (tokens - rising) * rising
        ahead = prefix * (prefix - 1) // 2 if sees_ahead else 0
        area += ahead
        degree = max(degree, tokens if ahead else rising)
    is_one_sided = not sees_ahead or all(prefix <= 1 for _, prefix in lengths)
    return MaskExtent(area, degree, degree, is_one_sided)
