r"""Masks given by blocks: block sparse, strided, global + local, star, streaming, diffusion.

`num_blocks` blocks cut the tokens as evenly as integers allow: block i is `[i * num_tokens //
num_blocks, (i + 1) * num_tokens // num_blocks)`. In the formulas `i` is the block of the query and
`j` the block of the key; in the pictures `#` is a full block and `\` a causal one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import builders
from megatron_cp.mask.checks import (
    as_array,
    as_count,
    as_lengths,
    as_tokens,
    check_number_of_slices,
)
from megatron_cp.mask.interval import IntArray, runs_of_rows
from megatron_cp.mask.mask import AttentionMask
from megatron_cp.mask.slice import make_rows


def block_sparse(
    table: NDArray[np.bool_],
    q_blocks: int | Sequence[int] | IntArray,
    k_blocks: int | Sequence[int] | IntArray | None = None,
    *,
    num_queries: int | None = None,
    num_keys: int | None = None,
    causal: bool = False,
) -> AttentionMask:
    """Returns the mask whose block `(i, j)` is full where `table[i, j]` is true.

        table = # . #      allowed(q, k) = table[block(q), block(k)]
                . # #                      and, with causal=True, k <= q

    `q_blocks` and `k_blocks` are one block size for all (then `num_queries`, `num_keys` may end the
    last block early) or one size per block; keys are cut like queries unless `k_blocks` is given.
    Equal neighbours become one slice. One table serves all heads. Source: uniform and variable
    block-sparse masks of LongCA-bench; NSA, MoBA, VSA.
    """
    cells = as_array("table", table)
    if cells.ndim != 2 or cells.dtype != np.bool_:
        raise ValueError(
            f"table has dtype {cells.dtype} and shape {cells.shape}; it must be bool of shape "
            "[query blocks, key blocks]: convert it with table > 0"
        )
    if k_blocks is None:
        k_blocks, num_keys = q_blocks, num_queries if num_keys is None else num_keys
    q_bounds = _table_bounds("q_blocks", q_blocks, cells.shape[0], "num_queries", num_queries)
    k_bounds = _table_bounds("k_blocks", k_blocks, cells.shape[1], "num_keys", num_keys)
    i_start, i_end, j_start, j_end = _boxes_of(cells)
    rows = make_rows(q_bounds[i_start], q_bounds[i_end], k_bounds[j_start], k_bounds[j_end])
    mask = AttentionMask(int(q_bounds[-1]), int(k_bounds[-1]), rows)
    if not causal:
        return mask
    diagonal = make_rows(0, mask.num_queries, 0, mask.num_keys, hi=0)
    return (mask & AttentionMask(mask.num_queries, mask.num_keys, diagonal)).merged()


def _boxes_of(cells: NDArray[np.bool_]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Returns disjoint boxes `(i_start, i_end, j_start, j_end)` of the true cells of a matrix.

    Equal runs of consecutive rows become one box.
    """
    i, start, end = runs_of_rows(cells)
    order = np.lexsort((i, end, start))
    i, start, end = i[order], start[order], end[order]
    joined = (np.diff(start) == 0) & (np.diff(end) == 0) & (np.diff(i) == 1)
    opens = np.flatnonzero(np.r_[True, ~joined][: len(i)])
    closes = np.r_[opens[1:], len(i)][: len(opens)] - 1
    return i[opens], i[closes] + 1, start[opens], end[opens]


def strided(
    num_tokens: int, num_blocks: int = 16, stride: int = 4, reach: int = 3, remapped: bool = False
) -> AttentionMask:
    """Returns blocks that see those of their residue class, up to `reach - 1` members away.

        # . # . . .        num_blocks=6, stride=2, reach=2      remapped:   # # . . . .
        . # . # . .                                                         # # # . . .
        # . # . # .        allowed = i % stride == j % stride               . # # . . .
        . # . # . #                  and |i - j| < reach * stride           . . . # # .
        . . # . # .                                                         . . . # # #
        . . . # . #                                                         . . . . # #

    With `remapped` the tokens are reordered so that the blocks of one class lie together (the order
    in which UltraAttn computes it). Source: UltraAttn strided(1/16, 4, 3) is the default remapped:
    density 56/256; Sparse Transformer.
    """
    bounds = _bounds(num_tokens, num_blocks)
    stride, reach = as_count("stride", stride, minimum=1), as_count("reach", reach, minimum=1)
    block = np.arange(num_blocks)
    steps = min(reach - 1, num_blocks // stride)
    check_number_of_slices(num_blocks * (2 * steps + 1), f"num_blocks={num_blocks}, reach={reach}")
    i, j = np.meshgrid(block, np.arange(-steps, steps + 1) * stride, indexing="ij")
    j = i + j
    inside = (j >= 0) & (j < num_blocks)
    i, j = i[inside], j[inside]
    rows = make_rows(bounds[i], bounds[i + 1], bounds[j], bounds[j + 1])
    mask = AttentionMask(num_tokens, num_tokens, rows)
    if remapped:
        order = np.lexsort((block, block % stride))
        ranges = np.stack([bounds[order], bounds[order + 1]], axis=1)
        mask = mask.gather(ranges, ranges)
    return mask.merged()


def global_local(
    num_tokens: int, num_blocks: int = 16, num_global: int = 1, num_local: int = 1
) -> AttentionMask:
    """Returns blocks near the diagonal, and first blocks that see and are seen by everyone.

        # # # #        num_global=1, num_local=1
        # # . .        allowed = i < num_global or j < num_global or |i - j| < num_local
        # . # .
        # . . #

    Source: UltraAttn global+local(1/16, 1, 1) is the default: density 46/256.
    """
    bounds = _bounds(num_tokens, num_blocks)
    num_local = as_count("num_local", num_local)
    num_global = min(as_count("num_global", num_global), num_blocks)
    i = np.arange(num_global, num_blocks if num_local else num_global)
    low = np.maximum(num_global, i - num_local + 1)
    high = np.minimum(num_blocks, i + num_local)
    edge = bounds[num_global]
    rows = [
        make_rows(0, edge, 0, num_tokens),
        make_rows(edge, num_tokens, 0, edge),
        make_rows(bounds[i], bounds[i + 1], bounds[low], bounds[high]),
    ]
    return AttentionMask(num_tokens, num_tokens, np.concatenate(rows)).merged()


def star(num_tokens: int, num_blocks: int = 4) -> AttentionMask:
    r"""Returns causal blocks that all see the first block.

        \ . . .
        # \ . .        allowed = (i == j and k <= q) or (j == 0 and i > 0)
        # . \ .
        # . . \

    Source: Star Attention (arXiv 2411.17116); UltraAttn star(1/4) is the default: density 5/16.
    """
    return streaming(num_tokens, num_blocks, num_local=1, num_sink=1)


def streaming(
    num_tokens: int, num_blocks: int = 8, num_local: int = 3, num_sink: int = 1
) -> AttentionMask:
    r"""Returns causal blocks that see the `num_local - 1` blocks before them and the first ones.

        \ . . . .
        # \ . . .        num_local=2, num_sink=1
        # # \ . .        allowed = k <= q and (i - j < num_local or j < num_sink)
        # . # \ .
        # . . # \

    Source: StreamingLLM by blocks; UltraAttn streaming(1/8, 3) is the default: density 22/64.
    """
    bounds = _bounds(num_tokens, num_blocks)
    num_local = as_count("num_local", num_local, minimum=1)
    num_sink = as_count("num_sink", num_sink)
    i = np.arange(num_blocks)
    first = np.maximum(0, i - num_local + 1)
    rows = [
        make_rows(bounds[i], bounds[i + 1], bounds[first], bounds[i + 1], hi=0),
        make_rows(bounds[i], bounds[i + 1], 0, bounds[np.minimum(num_sink, first)]),
    ]
    return AttentionMask(num_tokens, num_tokens, np.concatenate(rows)).merged()


def block_diffusion(num_tokens: int, block: int) -> AttentionMask:
    """Returns the mask of block diffusion: `num_tokens` noisy, then as many clean tokens.

        noisy  clean
        # . .  . . .       (noisy, noisy): i == j
        . # .  # . .       (noisy, clean): j < i
        . . #  # # .       (clean, clean): j <= i
        . . .  # . .       (clean, noisy): never
        . . .  # # .
        . . .  # # #       blocks of `block` tokens; the last may be short

    The grid is `2 num_tokens` square. Source: BD3-LM (arXiv 2503.09573).
    """
    num_tokens, block = as_tokens("num_tokens", num_tokens), as_count("block", block, minimum=1)
    check_number_of_slices(num_tokens // block, f"block={block} of num_tokens={num_tokens}")
    start = np.arange(0, num_tokens, block, dtype=np.int64)
    end = np.minimum(start + block, num_tokens)
    clean = num_tokens
    rows = [
        make_rows(start, end, start, end),
        make_rows(start, end, clean, clean + start),
        make_rows(clean + start, clean + end, clean, clean + end),
    ]
    return AttentionMask(2 * num_tokens, 2 * num_tokens, np.concatenate(rows))


def block_causal(num_tokens: int, block: int) -> AttentionMask:
    """Returns one sequence of blocks, each of which sees itself fully and all earlier blocks.

        # # . .
        # # . .        block=2: allowed(q, k) = k // block <= q // block
        # # # #
        # # # #

    Source: MAGI-1 and other block-autoregressive models; `block_causal_documents` has it per
    document.
    """
    num_tokens, block = as_tokens("num_tokens", num_tokens), as_count("block", block, minimum=1)
    if block == 1:
        return builders.causal(num_tokens)
    check_number_of_slices(num_tokens // block, f"block={block} of num_tokens={num_tokens}")
    start = np.arange(0, num_tokens, block, dtype=np.int64)
    end = np.minimum(start + block, num_tokens)
    return AttentionMask(num_tokens, num_tokens, make_rows(start, end, 0, end))


def _bounds(num_tokens: int, num_blocks: int) -> IntArray:
    num_tokens = as_tokens("num_tokens", num_tokens)
    num_blocks = as_count("num_blocks", num_blocks, minimum=1)
    check_number_of_slices(num_blocks, f"num_blocks={num_blocks}")
    return np.arange(num_blocks + 1, dtype=np.int64) * num_tokens // num_blocks


def _table_bounds(
    name: str,
    sizes: int | Sequence[int] | IntArray,
    num_blocks: int,
    total_name: str,
    total: int | None,
) -> IntArray:
    """Returns where the blocks of one axis begin and end: int64 `[num_blocks + 1]`."""
    if as_array(name, sizes).ndim == 0:
        size = as_count(name, sizes, minimum=1)
        bounds = np.arange(num_blocks + 1, dtype=np.int64) * size
        if total is None:
            return bounds
        if not bounds[-1] - size < as_count(total_name, total) <= bounds[-1] and num_blocks:
            raise ValueError(
                f"{total_name}={total} must end inside the last of {num_blocks} blocks of "
                f"{name}={size}, "
                f"in ({bounds[-1] - size}, {bounds[-1]}]; give a table of another shape"
            )
        return np.minimum(bounds, total)
    lengths = as_lengths(name, sizes)  # type: ignore[arg-type]
    if len(lengths) != num_blocks:
        raise ValueError(
            f"{name} has {len(lengths)} sizes and the table {num_blocks} blocks; give one per block"
        )
    bounds = np.r_[0, np.cumsum(lengths)]
    if total is not None and total != bounds[-1]:
        raise ValueError(
            f"{total_name}={total} must be the sum of {name}, {bounds[-1]}; leave it out"
        )
    return bounds
