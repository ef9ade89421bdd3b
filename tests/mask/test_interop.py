"""Conversions: each form means what its owner says, and the way there and back loses nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    or_masks,
)

from megatron_cp import mask as masks
from tests.mask.test_algebra import assert_is
from tests.mcore.tiny_gpt import enter_megatron
from tests.oracles import masks as oracle
from tests.strategies import attention_masks, document_lengths

LENGTHS = document_lengths(max_documents=5, max_length=9, min_total=1)
SHAPES = {
    "causal": masks.causal(40),
    "full": masks.full(40),
    "window": masks.sliding_window(40, 6, 0, 3),
    "documents": masks.documents([1, 0, 13, 26], ["causal", "full", ("prefix", 5), "causal"]),
    "shared question": masks.shared_question([9, 4, 20, 7]),
    "blockwise": masks.causal_blockwise([9, 4, 20, 7]),
    "global": masks.global_sliding_window(40, 3, 5),
    "video": masks.block_causal_documents([23, 17], 4),
    "nothing": masks.from_slices(40, 40, []),
}


@given(attention_masks())
def test_row_intervals_list_the_keys_of_every_query(drawn):
    mask, dense = drawn
    intervals = masks.row_intervals(mask)
    rebuilt = np.zeros_like(dense)
    for part in intervals:
        for q, (start, end) in enumerate(part.tolist()):
            assert not rebuilt[q, start:end].any()
            rebuilt[q, start:end] = True
    np.testing.assert_array_equal(rebuilt, dense)
    runs = (np.diff(dense.astype(int), axis=1, prepend=0) == 1).sum(axis=1)
    assert len(intervals) == max(1, runs.max())


@given(attention_masks(), st.data())
def test_cell_areas_count_the_pairs_of_every_cell(drawn, data):
    mask, dense = drawn
    q_bounds, k_bounds = (
        np.array(sorted(data.draw(st.lists(st.integers(0, n), min_size=1, max_size=5))))
        for n in dense.shape
    )
    areas = masks.cell_areas(mask, q_bounds, k_bounds)
    for i, j in np.ndindex(areas.shape):
        cell = dense[q_bounds[i] : q_bounds[i + 1], k_bounds[j] : k_bounds[j + 1]]
        assert areas[i, j] == cell.sum()


@given(attention_masks(), st.integers(1, 7), st.integers(1, 7))
def test_block_table_sorts_blocks_into_empty_partial_and_full(drawn, q_block, k_block):
    mask, dense = drawn
    counts, indices, full_counts, full_indices = masks.block_table(
        mask, q_block, k_block
    ).kv_arrays()
    padded = np.pad(dense, ((0, -len(dense) % q_block), (0, -dense.shape[1] % k_block)))
    for i, rows in enumerate(padded.reshape(-1, q_block, padded.shape[1])):
        sums = rows.reshape(q_block, -1, k_block).sum(axis=(0, 2))
        partial = np.flatnonzero((sums > 0) & (sums < q_block * k_block))
        full = np.flatnonzero(sums == q_block * k_block)
        assert indices[i, : counts[i]].tolist() == partial.tolist()
        assert full_indices[i, : full_counts[i]].tolist() == full.tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_block_mask_of_flex_attention_equals_our_block_table(name):
    mask = SHAPES[name]
    mask_mod = masks.to_mask_mod(mask, torch.from_numpy)
    theirs = create_block_mask(mask_mod, None, None, 40, 40, device="cpu", BLOCK_SIZE=8)
    ours = masks.block_table(mask, 8, 8).kv_arrays()
    for counts, indices, other_counts, other_indices in (
        (*ours[:2], theirs.kv_num_blocks, theirs.kv_indices),
        (*ours[2:], theirs.full_kv_num_blocks, theirs.full_kv_indices),
    ):
        np.testing.assert_array_equal(counts, other_counts[0, 0])
        for i, count in enumerate(counts):
            expected = sorted(other_indices[0, 0, i, :count].tolist())
            assert indices[i, :count].tolist() == expected
    again = masks.from_block_mask(theirs, torch.from_numpy)
    np.testing.assert_array_equal(again.to_dense(), mask.to_dense())


def test_block_masks_that_differ_between_heads_are_refused():
    def mask_mod(batch, head, q, k):
        return k <= q + head

    theirs = create_block_mask(mask_mod, None, 2, 16, 16, device="cpu", BLOCK_SIZE=4)
    with pytest.raises(NotImplementedError, match="kv_num_blocks differs"):
        masks.from_block_mask(theirs)


@pytest.mark.parametrize("axis", ["batch", "head"])
def test_block_masks_whose_entries_differ_inside_their_blocks_are_refused(axis):
    """The tables of 128 by 128 are the same for both windows."""
    reach = torch.tensor([3, 40])

    def mask_mod(batch, head, q, k):
        return (k <= q) & (q - k <= reach[batch if axis == "batch" else head])

    sizes = (2, None) if axis == "batch" else (None, 2)
    theirs = create_block_mask(mask_mod, *sizes, 200, 200, device="cpu")
    with pytest.raises(NotImplementedError, match="mask_mod differs between batch entries"):
        masks.from_block_mask(theirs)
    reach[1] = 3
    window = masks.sliding_window(200, 3)
    np.testing.assert_array_equal(masks.from_block_mask(theirs).to_dense(), window.to_dense())


def test_masks_put_together_by_flex_attention_are_read():
    def causal(batch, head, q, k):
        return q >= k

    def window(batch, head, q, k):
        return q - k <= 3

    expected = masks.sliding_window(16, 3).to_dense()
    both = and_masks(causal, window)
    made = masks.from_mask_mod(both, 16, convert=torch.from_numpy)
    np.testing.assert_array_equal(made.to_dense(), expected)
    theirs = create_block_mask(both, None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    np.testing.assert_array_equal(masks.from_block_mask(theirs).to_dense(), expected)
    every = or_masks(causal, lambda batch, head, q, k: q < k)
    assert masks.from_mask_mod(every, 16, convert=torch.from_numpy).area() == 256
    blocks = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 4, dtype=torch.int32),
        torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1).expand(-1, -1, -1, 4).contiguous(),
        BLOCK_SIZE=4,
    )
    assert masks.from_block_mask(blocks).area() == 4 * 16
    with pytest.raises(TypeError, match=r"NumPy arrays .*convert=torch\.from_numpy"):
        masks.from_mask_mod(both, 16)


def test_a_part_of_a_block_mask_is_refused():
    """Since torch 2.14 a part has lengths of its own, and torch refuses to be asked for its mask function."""
    theirs = create_block_mask(
        lambda batch, head, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=4
    )
    said = "2 x 4 blocks, its 16 x 16 tokens have 4 x 4|a sliced BlockMask"
    with pytest.raises((ValueError, RuntimeError), match=said):
        masks.from_block_mask(theirs[:, :, 1:3])


def test_causal_documents_of_other_lengths_of_keys_have_no_word_in_packed_seq_params():
    mask = masks.from_cu_seqlens([0, 2, 5], "causal", [0, 4, 9])
    with pytest.raises(ValueError, match="document 0 has 2 queries and 4 keys"):
        masks.to_packed_seq_params(mask)
    params = SimpleNamespace(cu_seqlens_q=[0, 2, 5], cu_seqlens_kv=[0, 4, 9])
    with pytest.raises(ValueError, match="document 0 has 2 queries and 4 keys"):
        masks.from_packed_seq_params(params)
    full = masks.from_packed_seq_params(params, "full")
    assert masks.to_packed_seq_params(full)["attn_mask_type"] == "padding"


def test_keys_without_lengths_of_their_own_lie_where_their_queries_do():
    params = SimpleNamespace(cu_seqlens_q=[0, 2, 5], cu_seqlens_q_padded=[0, 4, 8])
    mask = masks.from_packed_seq_params(params)
    assert (mask.num_queries, mask.num_keys) == (8, 8)
    expected = masks.documents([2, 2, 3, 1]).to_dense()
    expected[2:4] = expected[7] = False
    np.testing.assert_array_equal(mask.to_dense(), expected)


@given(attention_masks())
def test_mask_mod_there_and_back(drawn):
    mask, dense = drawn
    again = masks.from_mask_mod(masks.to_mask_mod(mask), *dense.shape)
    assert_is(again, dense)


def test_from_mask_mod_asks_in_blocks_of_rows(monkeypatch):
    asked = []

    def mask_mod(batch, head, q, k):
        asked.append(q.size * k.size)
        return (k <= q) & (q - k < 100)

    built = masks.from_mask_mod(mask_mod, 4096)
    assert built == masks.sliding_window(4096, 99)
    assert max(asked) <= 1 << 22 and len(asked) > 1


@given(attention_masks())
def test_ranges_there_and_back(drawn):
    mask, dense = drawn
    q_ranges, k_ranges, types = masks.to_ranges(mask)
    assert len(types) <= 3 * mask.num_slices
    np.testing.assert_array_equal(oracle.ranges(*dense.shape, q_ranges, k_ranges, types), dense)
    again = masks.from_ranges(
        q_ranges, k_ranges, types, num_queries=dense.shape[0], num_keys=dense.shape[1]
    )
    assert again.merged() == mask.merged() or np.array_equal(again.to_dense(), dense)


def test_plain_shapes_become_one_range_each():
    for code, mask in enumerate((masks.full(7, 5), masks.causal(7), masks.causal(7).transpose())):
        q_ranges, k_ranges, types = masks.to_ranges(mask)
        assert types.tolist() == [code] and len(q_ranges) == len(k_ranges) == 1
    assert masks.to_ranges(masks.sliding_window(9, 3))[2].tolist() == [1, 3]


# ---------------------------------------------------------------------- FlashMask


@given(
    st.integers(0, 12),
    st.sampled_from([(True, 1), (True, 2), (False, 2), (False, 4)]),
    st.data(),
)
def test_flashmask_indices_mean_what_paddle_says(size, form, data):
    causal, columns = form
    num_queries = size if causal else data.draw(st.integers(0, 12))
    flat = data.draw(
        st.lists(st.integers(0, num_queries), min_size=size * columns, max_size=size * columns)
    )
    indices = np.array(flat, dtype=np.int32).reshape(size, columns)
    dense = oracle.flashmask(indices, causal, num_queries)
    built = masks.from_flashmask(indices, causal, num_queries)
    assert_is(built, dense)
    again, again_causal = masks.to_flashmask(built)
    np.testing.assert_array_equal(oracle.flashmask(again, again_causal, num_queries), dense)


@given(attention_masks(square=True))
def test_flashmask_holds_a_mask_exactly_or_refuses_it(drawn):
    mask, dense = drawn
    hidden = np.pad(~dense, ((1, 0), (0, 0)), constant_values=False).astype(int)
    runs = (np.diff(hidden, axis=0) == 1).sum(axis=0)
    below = np.tril(~dense)
    below_runs = (np.diff(np.pad(below, ((1, 0), (0, 0))).astype(int), axis=0) == 1).sum(axis=0)
    is_causal = not np.triu(dense, 1).any()
    try:
        indices, causal = masks.to_flashmask(mask)
    except NotImplementedError as refusal:
        assert runs.max() > 2 and not (is_causal and below_runs.max() <= 1)
        assert f"key {int(np.argmax(runs > 2))} " in str(refusal)
        return
    np.testing.assert_array_equal(oracle.flashmask(indices, causal, len(dense)), dense)
    assert_is(masks.from_flashmask(indices, causal, len(dense)), dense)


@pytest.mark.parametrize(
    ("name", "columns", "causal"),
    [
        ("causal", 1, True),
        ("shared question", 1, True),
        ("window", 1, True),
        ("blockwise", 2, True),
        ("full", 2, False),
        ("video", 2, False),
        ("global", 4, False),
    ],
)
def test_flashmask_uses_the_shortest_form(name, columns, causal):
    indices, is_causal = masks.to_flashmask(SHAPES[name])
    assert (indices.shape[1], is_causal) == (columns, causal)
    dense = SHAPES[name].to_dense()
    np.testing.assert_array_equal(oracle.flashmask(indices, is_causal, 40), dense)
    four = np.broadcast_to(indices, (2, 3, *indices.shape))
    assert_is(masks.from_flashmask(four, is_causal), dense)


# ---------------------------------------------------------------------- Hugging Face, Megatron


@given(st.integers(1, 3), st.integers(1, 9), st.sampled_from(["causal", "full"]), st.data())
def test_huggingface_padding_and_positions_mean_what_they_say(batch, seqlen, within, data):
    def drawn(numbers):
        rows = st.lists(numbers, min_size=seqlen, max_size=seqlen)
        return np.array(data.draw(st.lists(rows, min_size=batch, max_size=batch)))

    padding = data.draw(st.sampled_from([None, drawn(st.integers(0, 2))]))
    positions = drawn(st.integers(0, 1)) if padding is None or data.draw(st.booleans()) else None
    if positions is not None:  # steps of one, and restarts
        positions = np.array([[t if s else 0 for t, s in enumerate(row)] for row in positions])
    expected = oracle.huggingface(padding, positions, within)
    assert_is(masks.from_huggingface(padding, positions, within), expected)
    if batch == 1:
        flat = [None if array is None else array[0] for array in (padding, positions)]
        assert_is(masks.from_huggingface(*flat, within), expected)


def test_huggingface_packed_position_ids_become_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2, 3]])
    assert masks.from_huggingface(position_ids=positions) == masks.documents([3, 2, 1, 4])


@given(attention_masks(max_queries=9, max_keys=9))
def test_huggingface_4d_masks_bool_and_additive(drawn):
    dense = drawn[1]
    two = np.stack([dense, ~dense])[:, None]
    expected = np.block([[dense, np.zeros_like(dense)], [np.zeros_like(dense), ~dense]])
    assert_is(masks.from_huggingface_4d(two), expected)
    additive = torch.zeros(two.shape).masked_fill(~torch.from_numpy(two), -torch.inf)
    assert_is(masks.from_huggingface_4d(additive), expected)
    lowest = np.where(two, 0, np.finfo(np.float16).min).astype(np.float16)
    assert_is(masks.from_huggingface_4d(lowest), expected)
    # of older versions, -1e4 and not below; heads may hide pairs by other numbers
    hidden = np.array([-1e4, -np.inf, np.finfo(np.float32).min])[:, None, None]
    older = np.where(two, 0, hidden)
    assert_is(masks.from_huggingface_4d(older), expected)


@given(LENGTHS, st.sampled_from(["causal", "full"]))
def test_packed_seq_params_there_and_back(lengths, within):
    enter_megatron()
    from megatron.core.packed_seq_params import PackedSeqParams

    mask = masks.documents(lengths, within)
    fields = masks.to_packed_seq_params(mask)
    kind = fields.pop("attn_mask_type")
    params = PackedSeqParams(
        **{k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in fields.items()}
    )
    solid = [n for n in lengths if n]
    assert params.max_seqlen_q == max(solid)
    assert params.cu_seqlens_kv.tolist() == np.cumsum([0, *solid]).tolist()
    if max(solid) > 1:  # single tokens are causal and full at once
        assert kind == {"causal": "padding_causal", "full": "padding"}[within]
    again = masks.from_packed_seq_params(params, within)
    np.testing.assert_array_equal(again.to_dense(), mask.to_dense())


@given(LENGTHS, st.sampled_from(["causal", "full"]), st.data())
def test_padded_packed_seq_params_leave_the_padding_blind(lengths, within, data):
    padding = [data.draw(st.integers(0, 3)) for _ in lengths]
    real, padded = np.cumsum([0, *lengths]), np.cumsum([0, *np.add(lengths, padding)])
    params = SimpleNamespace(
        cu_seqlens_q=real,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )
    labels = [(d, p < n) for d, n in enumerate(lengths) for p in range(n + padding[d])]

    def allowed(q, k):
        both_real = labels[q][1] and labels[k][1] and labels[q][0] == labels[k][0]
        return both_real and (within == "full" or k <= q)

    expected = oracle.render(len(labels), len(labels), allowed)
    assert_is(masks.from_packed_seq_params(params, within), expected)


@given(LENGTHS, st.sampled_from(["causal", "full"]), st.data())
def test_cu_seqlens_there_and_back(lengths, within, data):
    others = [data.draw(st.integers(1, 9)) for _ in lengths]
    queries, keys = np.cumsum([0, *lengths]), np.cumsum([0, *others])
    mask = masks.from_cu_seqlens(queries, within, keys)
    try:
        again = masks.from_cu_seqlens(*_reordered(masks.to_cu_seqlens(mask)))
    except NotImplementedError:  # a document without queries leaves keys that nobody sees
        blind = ~mask.to_dense().any(axis=1)
        assert 0 in lengths or blind.any()
        return
    np.testing.assert_array_equal(again.to_dense(), mask.to_dense())


def _reordered(triple):
    queries, keys, within = triple
    return queries, within, keys


@pytest.mark.parametrize("name", ["window", "documents", "shared question", "global", "nothing"])
def test_masks_that_are_not_packed_documents_are_refused_as_cu_seqlens(name):
    with pytest.raises(NotImplementedError, match="not a pack of documents"):
        masks.to_cu_seqlens(SHAPES[name])
