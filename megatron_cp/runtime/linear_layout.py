"""Which rows of a rank form which chunks, and which states it folds, gives and gets: index tensors of one placement.

Own rows form the chunks of own segments. The maps of segments that others want go to them in one all-to-all. The state
before an own segment is what the maps of its document's earlier segments make of nothing, in the order of tokens.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn.linear import Chains
from megatron_cp.comm.row_exchange import RowExchange
from megatron_cp.comm.upload import Uploaded, upload
from megatron_cp.mask.interval import IntArray, expand_ranges
from megatron_cp.plan.schema import BoolArray, PlanData
from megatron_cp.plan.segments import Segments, WantedRows, find_segments, wanted_states

# Smallest and largest chunk taken for its speed. At K = V = 128 chunks of 16 and 64 take about 2.2 and .85 times as
# long as chunks of 32 (delta rule, 4,096 tokens, both passes, one busy core of an EPYC, 2026-11-22); longer ones have
# larger errors of dk and dv.
CHUNK_SIZES = 16, 32
MAX_LAYOUTS = 16  # kept per process: micro-batches in flight, not history


@dataclass(frozen=True)
class Chunking:
    """Own segments, longest first, cut into chunks: the links of one chain per segment."""

    chains: Chains
    size: int
    """Tokens per chunk; the last chunk of a segment is filled up with zeros."""
    rows: Tensor
    """The rows of tokens; padding rows of the pack are in no chunk."""
    places: Tensor
    """Where each of these stands among the `num_chunks * size` places."""

    def into_chunks(self, x: Tensor) -> Tensor:
        """Returns `[chunks, H, size, D]` of `[T, H, D]`."""
        places = x.new_zeros((sum(self.chains.widths) * self.size, *x.shape[1:]))
        filled = places.index_copy(0, self.places, x.index_select(0, self.rows))
        return filled.unflatten(0, (-1, self.size)).transpose(1, 2).contiguous()

    def from_chunks(self, chunks: Tensor, num_rows: int) -> Tensor:
        """Returns `[T, H, D]`; padding rows are zero."""
        flat = chunks.transpose(1, 2).flatten(0, 1).index_select(0, self.places)
        return flat.new_zeros((num_rows, *flat.shape[1:])).index_copy(0, self.rows, flat)


@dataclass(frozen=True)
class Telling:
    """The own segments whose maps somebody wants, this rank included: one chain of chunks each."""

    chains: Chains
    chunks: Tensor
    last_links: Tensor


@dataclass(frozen=True)
class Folding:
    """Documents with segments before own ones: one chain of segments each."""

    chains: Chains
    sources: Tensor
    """Rows of [own maps told | maps received]."""
    begun: Tensor
    """Own segments that do not start from nothing."""
    links: Tensor
    """The link after which each of these starts."""


@dataclass(frozen=True)
class LinearLayout:
    """All that a rank must know for linear attention under a plan and document lengths."""

    chunking: Chunking
    num_segments: int
    telling: Telling
    exchange: RowExchange
    folding: Folding


@dataclass(frozen=True)
class Runs:
    """Some own segments, in the order of a layout, as runs of tokens side by side."""

    tokens: Tensor
    """Their tokens, as places in `Chunking.rows`."""
    bounds: Tensor
    """Where each begins among them, and the end."""

    def __len__(self) -> int:
        """Returns the number of segments."""
        return len(self.bounds) - 1


@dataclass(frozen=True)
class SegmentRuns:
    """Own segments as runs, for kernels that take any lengths."""

    told: Runs
    """Those whose maps somebody wants."""
    first: Runs
    """Those that start from nothing: each begins its document."""
    later: Runs
    """Those that start from a state, as `Folding.begun`."""


@lru_cache(maxsize=MAX_LAYOUTS)
@torch.inference_mode(False)
def segment_runs(
    plan: PlanData, document_lengths: tuple[int, ...], rank: int, device: torch.device
) -> Uploaded[SegmentRuns]:
    """Returns the runs of `rank`, compiled once; lengths are checked."""
    segments = find_segments(plan, document_lengths)
    own, is_told = _own_segments(segments, wanted_states(segments), rank)
    length = segments.length[own]
    bounds = np.cumsum([0, *length])

    def runs(chosen: BoolArray) -> Runs:
        _, tokens = expand_ranges(bounds[:-1][chosen], bounds[1:][chosen])
        return Runs(_tensor(tokens), _tensor(np.cumsum([0, *length[chosen]])))

    is_later = segments.order[own] > 0
    return upload(SegmentRuns(runs(is_told), runs(~is_later), runs(is_later)), device)


def _own_segments(segments: Segments, wanted: WantedRows, rank: int) -> tuple[IntArray, BoolArray]:
    """Returns a rank's segments, longest first, and which of them somebody wants the map of."""
    own = segments.of(rank)
    own = own[np.argsort(-segments.length[own], kind="stable")]
    return own, np.isin(own, wanted.item)


@lru_cache(maxsize=MAX_LAYOUTS)
@torch.inference_mode(False)  # kept: a later call may want gradients
def linear_layout(
    plan: PlanData,
    document_lengths: tuple[int, ...],
    key_dim: int,
    rank: int,
    device: torch.device,
) -> Uploaded[LinearLayout]:
    """Returns the layout of `rank`, compiled once; lengths are checked."""
    segments = find_segments(plan, document_lengths)
    wanted = wanted_states(segments)
    own, is_told = _own_segments(segments, wanted, rank)
    size = _chunk_size(segments.length[own], key_dim)
    chunking = _cut_into_chunks(segments.length[own], segments.row[own], size)
    telling = _tell(-(-segments.length[own] // size), is_told, chunking.chains)
    map_row = np.zeros(len(segments.rank), np.int64)  # of the maps told and received here
    map_row[own[is_told]] = np.arange(is_told.sum())
    exchange, arriving = RowExchange.compile(
        wanted.reader, segments.rank[wanted.item], map_row[wanted.item], rank, plan.cp_size
    )
    map_row[wanted.item[arriving]] = is_told.sum() + np.arange(len(arriving))
    folding = _fold(segments, wanted, own, rank, map_row)
    return upload(LinearLayout(chunking, len(own), telling, exchange, folding), device)


def _chunk_size(lengths: IntArray, key_dim: int) -> int:
    """Returns a power of two near `key_dim`, smaller where filling chunks up would more than double the rows.

    In a longer chunk keys are no longer independent: the delta rule's triangular systems then lose accuracy (at key
    dim 8, 2.4 times the recurrence's error in chunks of 64, 1.2 times in chunks of 16: fp32, 300 tokens, 2026-11-22).
    """
    smallest, largest = CHUNK_SIZES
    size = min(largest, max(smallest, 1 << (key_dim - 1).bit_length()))
    while (-(-lengths // size) * size).sum() > 2 * lengths.sum():
        size //= 2
    return size


def _cut_into_chunks(lengths: IntArray, first_row: IntArray, size: int) -> Chunking:
    chains = Chains.of(-(-lengths // size))
    segment, token = expand_ranges(np.zeros_like(lengths), lengths)
    places = (chains.first_link[token // size] + segment) * size + token % size
    return Chunking(chains, size, _tensor(first_row[segment] + token), _tensor(places))


def _tell(num_chunks: IntArray, is_told: BoolArray, chunk_chains: Chains) -> Telling:
    told = np.flatnonzero(is_told)
    chains = Chains.of(num_chunks[told])
    step, chain = chains.links()
    last = chains.first_link[num_chunks[told] - 1] + np.arange(len(told))
    return Telling(chains, _tensor(chunk_chains.first_link[step] + told[chain]), _tensor(last))


def _fold(
    segments: Segments, wanted: WantedRows, own: IntArray, rank: int, map_row: IntArray
) -> Folding:
    """`own`: this rank's segments as chunked; `map_row`: where the maps of own and received segments lie."""
    earlier = wanted.item[wanted.reader == rank]
    documents, first, count = np.unique(
        segments.document[earlier], return_index=True, return_counts=True
    )
    order = np.argsort(-count, kind="stable")
    chains = Chains.of(count[order])
    step, chain = chains.links()
    begun = np.flatnonzero(segments.order[own])
    chain_of_document = np.argsort(order)
    at = chain_of_document[documents.searchsorted(segments.document[own[begun]])]
    links = chains.first_link[segments.order[own[begun]] - 1] + at
    sources = map_row[earlier[first[order]][chain] + step]
    return Folding(chains, _tensor(sources), _tensor(begun), _tensor(links))


def _tensor(index: IntArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64))
