"""A pack becomes tokens, labels, loss mask, positions and a mask; several packs become one batch.

Flags keep Megatron-LM's meaning. Without `reset_attention_mask` a pack is one causal sequence and
the label of a document's last token is the first token of the next. With it, documents see
themselves only and no label crosses from one to another:

    tokens     a0 a1 a2 a3 | b0 b1 b2 | -  -        documents a (cut here, a4 follows) and b (ends)
    labels     a1 a2 a3 a4 | b1 b2  . | .  .        shifted before anything is dispatched to ranks
    loss        1  1  1  1 |  1  1  0 | 0  0        a0, a1 a prefix: loss 0 1 1 1; bidirectional: 0

Boundaries are the true document boundaries of the corpus, not a search for end tokens. Labels that
belong to a prefix carry no loss, nor does any in a bidirectional document: those positions see
their label, and next-token loss would reward copying it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.data.document_set import BIDIRECTIONAL, Documents, Texts, read_with_next
from megatron_cp.data.fill_in_the_middle import FillInTheMiddle, rearrange
from megatron_cp.data.packing import Pack, Piece
from megatron_cp.mask import AttentionMask, concat, from_slices, sliding_window
from megatron_cp.plan import AttentionPlan, make_plans

_Slice = tuple[int, int, int, int, int | None, int | None]
_NO_LABEL = -1
# Weight of the full mask where every layer slides a window: its plan is made, because it
# describes the batch, but it has no say in the placement.
_NO_LAYERS = 1e-6


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How a pack becomes arrays; the three flags are Megatron-LM's.

    `labels_cross_documents`: under `reset_attention_mask` too, the label of a document's last token
    is the first token of the next, with loss. Megatron's GPTDataset does so. With `fim` the pieces of
    a pack are rearranged, and padding is its padding token.
    """

    seq_length: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    labels_cross_documents: bool = False
    eod_token: int | None = None
    vocab_size: int | None = None
    fim: FillInTheMiddle | None = None

    def __post_init__(self) -> None:
        if self.eod_mask_loss and self.eod_token is None:
            raise ValueError("eod_token=None: --eod-mask-loss needs the tokenizer's eod; pass it")


@dataclass(frozen=True)
class PackedBatch:
    """S tokens with everything that training needs to know about them. Arrays are `[S]`.

    The tail behind the last document is padding: token 0 (or that of fill-in-the-middle), loss 0,
    and no row or key in the mask.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    mask: AttentionMask
    document_lengths: tuple[int, ...]
    document_kinds: tuple[str, ...]
    document_starts: tuple[int, ...]
    """Where each begins among the S tokens."""
    document_names: tuple[str, ...]
    """Corpus, number and tokens of each, for messages."""
    places_in_sample: NDArray[np.int64] | None = None
    """Where each token stands in its sample, for RoPE, where documents see those before them: `position_ids` may
    restart, what lies between two tokens stays. None: documents see themselves alone."""

    @property
    def rope_positions(self) -> NDArray[np.int64]:
        """Returns the position of each token for RoPE."""
        return self.position_ids if self.places_in_sample is None else self.places_in_sample

    def only(self, chosen: Collection[int]) -> PackedBatch:
        """Returns the batch with these documents alone, each seeing itself only; the rest is padding.

        What pads is a token of theirs, so that no token of the others is left.
        """
        kept = [
            (self.document_starts[i], self.document_starts[i] + self.document_lengths[i])
            for i in sorted(chosen)
        ]
        is_kept = np.zeros(len(self.tokens), dtype=np.bool_)
        for start, stop in kept:
            is_kept[start:stop] = True
        size = len(self.tokens)
        boxes = from_slices(size, size, [(a, b, a, b, None, None) for a, b in kept])

        def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[i] for i in sorted(chosen))

        return replace(
            self,
            tokens=np.where(is_kept, self.tokens, self.tokens[kept[0][0]]),
            labels=np.where(is_kept, self.labels, 0),
            loss_mask=self.loss_mask * is_kept,
            mask=self.mask & boxes,
            document_lengths=of(self.document_lengths),
            document_kinds=of(self.document_kinds),
            document_starts=of(self.document_starts),
            document_names=of(self.document_names),
        )


@dataclass(frozen=True)
class PlannedBatch:
    """A micro-batch and its plans by layer kind, which took `plan_ms` to make.

    `spans_replicas`: it is that of all replicas, planned over their context ranks together (`hybrid.py`).
    """

    batch: PackedBatch
    plans: Mapping[str, AttentionPlan]
    plan_ms: float = 0.0
    spans_replicas: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Which plans a batch needs: "full" always, "window" if some layers slide a window.

    `window` is `(left, right)` as in Megatron's --window-size: keys before and after the query.
    """

    cp_size: int = 1
    config: CPConfig = field(default_factory=CPConfig)
    num_full_layers: int = 1
    num_window_layers: int = 0
    window: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if (self.window is None) != (self.num_window_layers == 0):
            raise ValueError(
                f"window={self.window} and num_window_layers={self.num_window_layers} must be "
                "given together; leave both out for a model without sliding-window layers"
            )

    def masks(self, mask: AttentionMask) -> dict[str, AttentionMask]:
        """Returns the mask of every kind of layer, from that of the batch."""
        if self.window is None:
            return {"full": mask}
        left, right = self.window
        return {"full": mask, "window": mask & sliding_window(mask.num_queries, left, right)}


# Without document masks every pack has the same mask, so the same plans.
@functools.lru_cache(maxsize=8)
def make_batch_plans(mask: AttentionMask, request: PlanRequest) -> Mapping[str, AttentionPlan]:
    """Returns the plans of a mask, all on one placement; the last eight are remembered."""
    layers = {"full": request.num_full_layers or _NO_LAYERS, "window": request.num_window_layers}
    wanted = {name: (one, float(layers[name])) for name, one in request.masks(mask).items()}
    plans = make_plans(wanted, request.cp_size, request.config)
    for plan in plans.values():
        plan.digest()  # made here, in a worker: it travels with the plan and is only read in training
    return plans


def build_batch(documents: Documents, packs: Sequence[Pack], config: BatchConfig) -> PackedBatch:
    """Returns one batch of `len(packs) * seq_length` tokens; packs do not see each other.

    Raises:
        ValueError: a token id is outside the vocabulary (names the document), or a document with a
            prefix meets a configuration that would ignore it.
    """
    if config.fim is None:
        return join_batches([_build_pack(documents, pack, config) for pack in packs])
    return join_batches(
        [
            _build_pack(*rearrange(documents, pack, config.fim, config.seq_length), config)
            for pack in packs
        ]
    )


def join_batches(batches: Sequence[PackedBatch]) -> PackedBatch:
    """Returns one batch of the batches one after the other; none sees another."""
    if len(batches) == 1:
        return batches[0]
    firsts = [0, *itertools.accumulate(len(b.tokens) for b in batches[:-1])]
    return PackedBatch(
        tokens=np.concatenate([b.tokens for b in batches]),
        labels=np.concatenate([b.labels for b in batches]),
        loss_mask=np.concatenate([b.loss_mask for b in batches]),
        position_ids=np.concatenate([b.position_ids for b in batches]),
        mask=concat([b.mask for b in batches]),
        document_lengths=tuple(n for b in batches for n in b.document_lengths),
        document_kinds=tuple(kind for b in batches for kind in b.document_kinds),
        document_starts=tuple(
            first + start
            for first, b in zip(firsts, batches, strict=True)
            for start in b.document_starts
        ),
        document_names=tuple(name for b in batches for name in b.document_names),
        places_in_sample=np.concatenate([b.rope_positions for b in batches]),
    )


def plan_batch(batch: PackedBatch, request: PlanRequest) -> PlannedBatch:
    """Returns the batch with its plans."""
    started = time.perf_counter()
    plans = make_batch_plans(batch.mask, request)
    return PlannedBatch(batch, plans, plan_ms=(time.perf_counter() - started) * 1e3)


def visible_prefix(documents: Texts, piece: Piece) -> int:
    """Returns how many leading tokens of a piece all its tokens see; all of a bidirectional one."""
    prefix = int(documents.prefix_lengths[piece.document])
    if prefix == BIDIRECTIONAL:
        return piece.length
    return min(max(prefix - piece.start, 0), piece.length)


def _build_pack(documents: Texts, pack: Pack, config: BatchConfig) -> PackedBatch:
    size, used = config.seq_length, pack.num_tokens
    padding = 0 if config.fim is None else config.fim.tokens.pad
    tokens = np.full(size, padding, dtype=np.int64)
    labels = np.full(size, _NO_LABEL, dtype=np.int64)
    # Padding positions restart where documents do, so they stay below seq_length either way.
    position_ids = np.arange(size, dtype=np.int64)
    no_loss = np.zeros(size, dtype=np.bool_)
    slices: list[_Slice] = []
    kinds: list[str] = []
    start = 0
    for piece in pack.pieces:
        stop = start + piece.length
        words = read_with_next(documents, piece, config.vocab_size)
        tokens[start:stop] = words[: piece.length]
        labels[start : start + len(words) - 1] = words[1:]
        if config.reset_position_ids:
            position_ids[start:stop] = np.arange(piece.length)
        prefix = visible_prefix(documents, piece)
        kinds.append(_kind(documents, piece, prefix))
        no_loss[start : start + _without_loss(documents, piece)] = True
        learned = documents.supervised(piece.document, piece.start + 1, piece.stop + 1)
        if learned is not None:
            no_loss[start:stop] |= ~learned
        slices += _document_slices(start, stop, prefix)
        start = stop
    if config.reset_position_ids:
        position_ids[used:] = np.arange(size - used)
    if not config.reset_attention_mask:
        if set(kinds) != {"causal"}:
            raise ValueError(
                f"reset_attention_mask=False: {documents.name(pack.pieces[0].document)} and its "
                f"neighbours have kinds {sorted(set(kinds))}, one causal sequence would ignore "
                "that; set --reset-attention-mask"
            )
        slices = [(0, used, 0, used, None, 0)]
    if config.labels_cross_documents or not config.reset_attention_mask:
        labels[: used - 1] = tokens[1:used]
        if pack.following is not None:
            document, offset = pack.following
            following = Piece(document, offset, offset + 1)
            labels[used - 1] = read_with_next(documents, following, config.vocab_size)[0]
    if config.eod_mask_loss:
        no_loss |= tokens == config.eod_token
    no_loss |= (labels == _NO_LABEL) | (not pack.counts)
    return PackedBatch(
        tokens=tokens,
        labels=np.where(labels == _NO_LABEL, 0, labels),
        loss_mask=(~no_loss).astype(np.float32),
        position_ids=position_ids,
        mask=from_slices(size, size, slices),
        document_lengths=tuple(piece.length for piece in pack.pieces),
        document_kinds=tuple(kinds),
        document_starts=(0, *itertools.accumulate(piece.length for piece in pack.pieces[:-1])),
        document_names=tuple(
            f"{documents.name(piece.document)}, tokens {piece.start} to {piece.stop}"
            for piece in pack.pieces
        ),
        places_in_sample=None if config.reset_attention_mask else np.arange(size, dtype=np.int64),
    )


def _kind(documents: Texts, piece: Piece, prefix: int) -> str:
    if documents.prefix_lengths[piece.document] == BIDIRECTIONAL:
        return "bidirectional"
    return "prefix" if prefix else "causal"


def _without_loss(documents: Texts, piece: Piece) -> int:
    """Returns how many leading labels of a piece belong to the prefix; all of a bidirectional one."""
    prefix = int(documents.prefix_lengths[piece.document])
    if prefix == BIDIRECTIONAL:
        return piece.length
    return min(max(prefix - 1 - piece.start, 0), piece.length)


def _document_slices(start: int, stop: int, prefix: int) -> list[_Slice]:
    bend = start + prefix
    both_ways: list[_Slice] = [(start, bend, start, bend, None, None)] if prefix else []
    return [*both_ways, (bend, stop, start, stop, None, 0)] if bend < stop else both_ways
