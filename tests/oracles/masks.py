"""Dense masks by their definition, pair by pair; shares no code with the package.

Every function has the name and the arguments of a builder of `megatron_cp.mask` and returns its dense
bool matrix `[queries, keys]`.
"""

from collections.abc import Callable

import numpy as np


def render(num_queries: int, num_keys: int, allowed: Callable[[int, int], bool]) -> np.ndarray:
    """Returns the matrix of `allowed(q, k)`."""
    pairs = [[bool(allowed(q, k)) for k in range(num_keys)] for q in range(num_queries)]
    return np.array(pairs, dtype=bool).reshape(num_queries, num_keys)


def places(lengths) -> list[tuple[int, int, int]]:
    """Returns (document, position in it, its length) of every token."""
    return [(d, p, n) for d, n in enumerate(lengths) for p in range(n)]


def full(num_queries, num_keys=None):
    return render(num_queries, num_queries if num_keys is None else num_keys, lambda q, k: True)


def causal(num_queries, num_keys=None):
    num_keys = num_queries if num_keys is None else num_keys
    return render(num_queries, num_keys, lambda q, k: num_keys - 1 - k >= num_queries - 1 - q)


def sliding_window(num_tokens, left, right=0, num_sink=0):
    def allowed(q, k):
        behind = left == -1 or q - k <= left or k < num_sink
        return behind and (right == -1 or k - q <= right)

    return render(num_tokens, num_tokens, allowed)


def chunked_causal(num_tokens, chunk):
    return render(num_tokens, num_tokens, lambda q, k: k <= q and q // chunk == k // chunk)


def prefix_lm(num_tokens, prefix):
    return render(num_tokens, num_tokens, lambda q, k: k <= q or (q < prefix and k < prefix))


def global_sliding_window(num_tokens, window, num_global, causal=False):
    def allowed(q, k):
        near = abs(q - k) <= window
        return (near or q < num_global or k < num_global) and (k <= q or not causal)

    return render(num_tokens, num_tokens, allowed)


def image_spans(num_tokens, spans, left=-1):
    def allowed(q, k):
        if any(a <= q < b and a <= k < b for a, b in spans):
            return True
        return k <= q and (left == -1 or q - k <= left)

    return render(num_tokens, num_tokens, allowed)


def dilated(num_tokens, left, right=0, dilation=2):
    def allowed(q, k):
        inside = (left == -1 or q - k <= left) and (right == -1 or k - q <= right)
        return inside and abs(k - q) % dilation == 0

    return render(num_tokens, num_tokens, allowed)


def documents(lengths, within="causal"):
    """`within`: a word, ("prefix", p) or ("window", left[, right]), or a list of these."""
    place = places(lengths)

    def allowed(q, k):
        (document, row, _), (other, column, _) = place[q], place[k]
        kind = within[document] if isinstance(within, list) else within
        if document != other:
            return False
        if kind == "full":
            return True
        if kind == "causal":
            return column <= row
        if kind[0] == "prefix":
            return column <= row or column < kind[1]
        left, right = kind[1], kind[2] if len(kind) == 3 else 0
        return (left == -1 or row - column <= left) and (right == -1 or column - row <= right)

    return render(len(place), len(place), allowed)


def from_cu_seqlens(cu_seqlens, within="causal", cu_seqlens_k=None):
    keys = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k

    def allowed(q, k):
        for i in range(len(keys) - 1):
            if cu_seqlens[i] <= q < cu_seqlens[i + 1] and keys[i] <= k < keys[i + 1]:
                from_end = keys[i + 1] - k - (cu_seqlens[i + 1] - q)
                return within == "full" or from_end >= 0
        return False

    return render(int(cu_seqlens[-1]), int(keys[-1]), allowed)


def prefix_lm_documents(lengths, prefix):
    place = places(lengths)

    def allowed(q, k):
        (document, row, _), (other, column, _) = place[q], place[k]
        size = prefix if isinstance(prefix, int) else prefix[document]
        return document == other and (column <= row or (row < size and column < size))

    return render(len(place), len(place), allowed)


def prefix_tree(lengths, parents):
    place = places(lengths)

    def sees(document, other):
        while document not in (other, -1):
            document = parents[document]
        return document == other

    return render(len(place), len(place), lambda q, k: k <= q and sees(place[q][0], place[k][0]))


def shared_question(lengths):
    place = places(lengths)
    return render(
        len(place),
        len(place),
        lambda q, k: k <= q and (place[k][0] == 0 or place[k][0] == place[q][0]),
    )


def causal_blockwise(lengths):
    place = places(lengths)
    last = len(lengths) - 1
    return render(
        len(place),
        len(place),
        lambda q, k: k <= q and (place[q][0] == last or place[q][0] == place[k][0]),
    )


def block_causal_documents(lengths, block):
    place = places(lengths)

    def allowed(q, k):
        (document, row, _), (other, column, _) = place[q], place[k]
        return document == other and column // block <= row // block

    return render(len(place), len(place), allowed)


def block_causal(num_tokens, block):
    return render(num_tokens, num_tokens, lambda q, k: k // block <= q // block)


def block_diffusion(num_tokens, block):
    def allowed(q, k):
        q_block, k_block = q % num_tokens // block, k % num_tokens // block
        if q < num_tokens:
            return q_block == k_block if k < num_tokens else k_block < q_block
        return k >= num_tokens and k_block <= q_block

    return render(2 * num_tokens, 2 * num_tokens, allowed)


def _block_of(num_tokens, num_blocks) -> list[int]:
    """Returns the block of every token; block i ends before (i + 1) * num_tokens // num_blocks."""
    result = []
    for token in range(num_tokens):
        block = 0
        while token >= (block + 1) * num_tokens // num_blocks:
            block += 1
        result.append(block)
    return result


def strided(num_tokens, num_blocks=16, stride=4, reach=3, remapped=False):
    block = _block_of(num_tokens, num_blocks)
    if remapped:
        block = sorted(block, key=lambda i: (i % stride, i // stride))

    def allowed(q, k):
        i, j = block[q], block[k]
        return i % stride == j % stride and abs(i // stride - j // stride) < reach

    return render(num_tokens, num_tokens, allowed)


def global_local(num_tokens, num_blocks=16, num_global=1, num_local=1):
    block = _block_of(num_tokens, num_blocks)

    def allowed(q, k):
        i, j = block[q], block[k]
        return i < num_global or j < num_global or abs(i - j) < num_local

    return render(num_tokens, num_tokens, allowed)


def star(num_tokens, num_blocks=4):
    block = _block_of(num_tokens, num_blocks)
    return render(
        num_tokens,
        num_tokens,
        lambda q, k: k <= q and (block[q] == block[k] or block[k] == 0),
    )


def streaming(num_tokens, num_blocks=8, num_local=3, num_sink=1):
    block = _block_of(num_tokens, num_blocks)

    def allowed(q, k):
        return k <= q and (block[q] - block[k] < num_local or block[k] < num_sink)

    return render(num_tokens, num_tokens, allowed)


def block_sparse(table, q_sizes, k_sizes, causal=False):
    """Sizes of every block, one by one."""
    q_place, k_place = places(q_sizes), places(k_sizes)
    return render(
        len(q_place),
        len(k_place),
        lambda q, k: table[q_place[q][0], k_place[k][0]] and (k <= q or not causal),
    )


def flashmask(indices, causal, num_queries):
    """Paddle's definition: column j hides the rows [start, end) that its two or four numbers name."""
    num_keys, columns = indices.shape
    hidden = np.zeros((num_queries, num_keys), dtype=bool)
    for j in range(num_keys):
        if causal:
            end = indices[j, 1] if columns == 2 else num_queries
            hidden[indices[j, 0] : end, j] = True
            hidden[:j, j] = True
        elif columns == 2:
            hidden[indices[j, 0] :, j] = True
            hidden[: indices[j, 1], j] = True
        else:
            hidden[indices[j, 0] : indices[j, 1], j] = True
            hidden[indices[j, 2] : indices[j, 3], j] = True
    return ~hidden


def ranges(num_queries, num_keys, q_ranges, k_ranges, types):
    """MagiAttention's definition: each box a full, lower (bottom-right) or upper (top-left) triangle."""
    dense = np.zeros((num_queries, num_keys), dtype=bool)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, types, strict=True):
        box = np.ones((q1 - q0, k1 - k0), dtype=bool)
        if kind in (1, 3, "causal", "bi_causal"):
            box &= np.tril(box, (k1 - k0) - (q1 - q0))
        if kind in (2, 3, "inv_causal", "bi_causal"):
            box &= np.triu(np.ones_like(box))
        dense[q0:q1, k0:k1] |= box
    return dense


def huggingface(attention_mask, position_ids, within):
    """Token by token: same sequence, real, same number, no break of the positions in between."""
    shape = np.shape(attention_mask if attention_mask is not None else position_ids)
    batch, seqlen = shape

    def allowed(q, k):
        (b, row), (c, column) = divmod(q, seqlen), divmod(k, seqlen)
        if b != c or (within == "causal" and column > row):
            return False
        if attention_mask is not None:
            value = attention_mask[b][row]
            if value == 0 or value != attention_mask[b][column]:
                return False
        if position_ids is not None:
            low, high = sorted((row, column))
            for t in range(low + 1, high + 1):
                if position_ids[b][t] != position_ids[b][t - 1] + 1:
                    return False
        return True

    return render(batch * seqlen, batch * seqlen, allowed)
