"""Hypothesis strategies: masks as plain numbers, lengths of documents, loss masks.

A mask is drawn as `(num_queries, num_keys, slices)` with slices as tuples `(q_start, q_end,
k_start, k_end, lo, hi)`: an oracle can read it without the package. `attention_masks` draws the
package's AttentionMask with its dense rendering. Sizes are small: an oracle looks at every pair.
"""

import itertools

import numpy as np
from hypothesis import strategies as st

# (q_start, q_end, k_start, k_end, lo, hi); None = open side
SliceTuple = tuple[int, int, int, int, int | None, int | None]
MaskTuple = tuple[int, int, list[SliceTuple]]

# Nothing, one token, primes, powers of two and their neighbours.
_AWKWARD_LENGTHS = (0, 1, 2, 3, 5, 7, 8, 11, 13, 15, 16, 17, 19, 23, 29, 31)


def bounds(size: int, *, allow_empty: bool = False) -> st.SearchStrategy[tuple[int, int]]:
    """Returns half-open ranges within [0, size); size 0 needs `allow_empty`."""
    if allow_empty:
        points = st.tuples(st.integers(0, size), st.integers(0, size))
        return points.map(lambda ends: (min(ends), max(ends)))
    starts = st.integers(0, size - 1)
    return starts.flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, size)))


@st.composite
def bands(draw, q: tuple[int, int], k: tuple[int, int]) -> tuple[int | None, int | None]:
    """Returns (lo, hi) for a box: open, one-sided or two-sided, sometimes clear of the box."""
    lowest, highest = k[0] - q[1], k[1] - q[0]
    side = st.none() | st.integers(lowest - 2, highest + 2)
    lo, hi = draw(side), draw(side)
    if lo is not None and hi is not None and lo > hi:
        return hi, lo
    return lo, hi


@st.composite
def slices(draw, num_queries: int, num_keys: int) -> SliceTuple:
    """Returns one slice inside the grid; its band may leave it without a pair."""
    q, k = draw(bounds(num_queries)), draw(bounds(num_keys))
    return (*q, *k, *draw(bands(q, k)))


def _intervals(cuts: list[int], size: int) -> list[tuple[int, int]]:
    ends = sorted({0, size, *cuts})
    return [(a, b) for a, b in itertools.pairwise(ends) if a < b]


@st.composite
def disjoint_slices(draw, num_queries: int, num_keys: int) -> list[SliceTuple]:
    """Returns disjoint slices, in any order: a few boxes, each with no, one or two bands."""
    result: list[SliceTuple] = []
    q_cuts = draw(st.lists(st.integers(0, num_queries), max_size=3))
    for q in _intervals(q_cuts, num_queries):
        k_cuts = draw(st.lists(st.integers(0, num_keys), max_size=2))
        for k in _intervals(k_cuts, num_keys):
            kind = draw(st.sampled_from(("absent", "band", "band", "two bands")))
            if kind == "absent":
                continue
            lo, hi = draw(bands(q, k))
            if kind == "band":
                result.append((*q, *k, lo, hi))
                continue
            low_end = k[0] - q[1] if lo is None else lo
            high_end = k[1] - q[0] if hi is None else hi
            split = draw(st.integers(min(low_end, high_end), max(low_end, high_end)))
            for low, high in ((lo, split), (split + 1, hi)):
                if low is None or high is None or low <= high:
                    result.append((*q, *k, low, high))
    return draw(st.permutations(result))


@st.composite
def masks(draw, max_queries: int = 24, max_keys: int = 24, *, square: bool = False) -> MaskTuple:
    """Returns (num_queries, num_keys, disjoint slices); a square grid has one size for both."""
    num_queries = draw(st.integers(1, max_queries))
    num_keys = num_queries if square else draw(st.integers(1, max_keys))
    return num_queries, num_keys, draw(disjoint_slices(num_queries, num_keys))


@st.composite
def attention_masks(draw, max_queries: int = 24, max_keys: int = 24, *, square: bool = False):
    """Returns (AttentionMask, dense bool matrix [Q, K] rendered without the package)."""
    from megatron_cp.mask import from_slices  # only tests that use the package need it

    num_queries, num_keys, parts = draw(masks(max_queries, max_keys, square=square))
    return from_slices(num_queries, num_keys, parts), render(num_queries, num_keys, parts)


def render(num_queries: int, num_keys: int, parts: list[SliceTuple]) -> np.ndarray:
    """Returns the dense bool matrix, pair by pair by definition; refuses a pair given twice."""
    times = np.zeros((num_queries, num_keys), dtype=np.int64)
    for q_start, q_end, k_start, k_end, lo, hi in parts:
        for q in range(q_start, q_end):
            for k in range(k_start, k_end):
                if (lo is None or lo <= k - q) and (hi is None or k - q <= hi):
                    times[q, k] += 1
    assert times.max(initial=0) <= 1, f"slices overlap: {parts}"
    return times.astype(bool)


def document_lengths(
    max_documents: int = 6, max_length: int = 32, *, min_total: int = 1
) -> st.SearchStrategy[list[int]]:
    """Returns lengths of documents; empty ones, single tokens and primes are drawn often."""
    awkward = st.sampled_from([n for n in _AWKWARD_LENGTHS if n <= max_length])
    lengths = st.lists(awkward | st.integers(0, max_length), min_size=1, max_size=max_documents)
    return lengths.filter(lambda drawn: sum(drawn) >= min_total)


def loss_masks(num_tokens: int) -> st.SearchStrategy[np.ndarray]:
    """Returns float32 [num_tokens] of zeros and ones: all, none, one valid token, any."""
    everywhere = st.just(np.ones(num_tokens, np.float32))
    nowhere = st.just(np.zeros(num_tokens, np.float32))
    single = st.integers(0, max(num_tokens - 1, 0)).map(
        lambda i: (np.arange(num_tokens) == i).astype(np.float32)
    )
    anywhere = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens).map(
        lambda flags: np.array(flags, dtype=np.float32).reshape(num_tokens)
    )
    return everywhere | nowhere | single | anywhere
