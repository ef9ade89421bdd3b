"""Bad input: one line that names the value received, what is allowed and what to do."""

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.mask import draw

CAUSAL_4 = masks.causal(4)
NAN = float("nan")

TOO_LARGE = [  # and refused before anything is made of that size
    (lambda: masks.block_table(masks.causal(2**31)), "16777216 strips of slices, at most 4194304"),
    (lambda: masks.block_table(masks.block_causal(2**20, 130)), "neither whole nor empty, at most"),
    (
        lambda: masks.to_flashmask(masks.block_causal(2**20, 16)),
        "34360262656 intervals .* at most 16777216",
    ),
    (lambda: masks.row_intervals(masks.block_causal(2**17, 16).transpose()), "at most 16777216"),
    (lambda: masks.block_table(masks.causal(2**22)).kv_arrays(), "32768 x 32768 blocks"),
    # 2^31 is one more than int32 holds, and would be -2^31 in it
    (
        lambda: masks.to_mask_mod(masks.full(8, 2**31)),
        "mask_mod counts in int32, .* has 2147483648",
    ),
    (lambda: masks.to_packed_seq_params(masks.full(8, 2**31)), "PackedSeqParams counts in int32"),
    (lambda: masks.to_flashmask(masks.full(2**31, 8)), "FlashMask counts in int32"),
]

TABLE = [
    # sizes
    ("negative size", lambda: masks.causal(-1), "num_queries=-1 must be an integer >= 0"),
    ("fractional size", lambda: masks.full(3.5), "num_queries=3.5 must be an integer"),
    ("boolean size", lambda: masks.full(True), "num_queries=True must be an integer"),
    ("no size", lambda: masks.prefix_lm(None, 0), "num_tokens=None must be an integer"),
    ("zero chunk", lambda: masks.chunked_causal(8, 0), "chunk=0 must be an integer >= 1"),
    (
        "many blocks",
        lambda: masks.block_causal_documents([2**31 - 9, 9], 400),
        "block=400 of 2147483648 tokens makes 5368711 slices, at most 4194304",
    ),
    ("zero block", lambda: masks.block_causal_documents([8], 0), "block=0 must be"),
    (
        "window below -1",
        lambda: masks.sliding_window(8, -2),
        "left=-2 must be an integer >= 0, or -1",
    ),
    ("right below -1", lambda: masks.sliding_window(8, 0, -9), "right=-9 must be"),
    ("negative sinks", lambda: masks.sliding_window(8, 0, 0, -1), "num_sink=-1 must be"),
    ("prefix too long", lambda: masks.prefix_lm(4, 5), "prefix=5 must be <= num_tokens=4"),
    ("negative prefix", lambda: masks.prefix_lm(4, -1), "prefix=-1 must be"),
    ("zero dilation", lambda: masks.dilated(4, 2, dilation=0), "dilation=0 must be"),
    ("zero blocks", lambda: masks.star(4, 0), "num_blocks=0 must be"),
    # lengths and kinds
    ("negative length", lambda: masks.documents([3, -1]), r"lengths\[1\]=-1 must be >= 0"),
    ("float lengths", lambda: masks.documents([3.0, 1.0]), "lengths has dtype float64"),
    ("nested lengths", lambda: masks.documents([[3], [1]]), r"lengths has .* shape \(2, 1\)"),
    (
        "types that are lists",
        lambda: masks.from_ranges([(0, 2)], [(0, 2)], [[1]]),
        r"types\[0\]=\[1\] is unknown; allowed are",
    ),
    ("unknown kind", lambda: masks.documents([3], "casual"), "within='casual' is no kind"),
    ("kind of another type", lambda: masks.documents([3], 7), "within=7 is no kind"),
    ("kind in a list", lambda: masks.documents([3], [7]), "within=7 for document 0 is no kind"),
    ("too few kinds", lambda: masks.documents([3, 1], ["full"]), "within has 1 entries for 2"),
    (
        "prefix longer than its document",
        lambda: masks.documents([3, 2], [("prefix", 3), ("prefix", 3)]),
        "prefix=3 of document 1 must be <= its length 2",
    ),
    (
        "mask of another length",
        lambda: masks.documents([3, 2], CAUSAL_4),
        "within for document 0 is 4 x 4; it must be 3 x 3",
    ),
    (
        "builder of another size",
        lambda: masks.documents([3], lambda n: masks.causal(n + 1)),
        "it must be 3 x 3",
    ),
    (
        "builder of another thing",
        lambda: masks.documents([3], lambda n: n),
        "within=3 for document 0 is no kind",
    ),
    (
        "prefixes of another count",
        lambda: masks.prefix_lm_documents([3, 2], [1]),
        "prefix has 1 entries for 2 documents",
    ),
    ("parent after child", lambda: masks.prefix_tree([1, 1], [1, -1]), r"parents\[0\]=1 must be"),
    ("parents of another count", lambda: masks.prefix_tree([1, 1], [-1]), "parents has 1 entries"),
    (
        "overlapping images",
        lambda: masks.image_spans(9, [(0, 4), (3, 6)]),
        r"spans=\[\(0, 4\), \(3, 6\)\] must be disjoint",
    ),
    ("image beyond the end", lambda: masks.image_spans(9, [(7, 10)]), "at or before num_tokens=9"),
    ("reversed image", lambda: masks.image_spans(9, [(4, 2)]), r"spans\[0\]=\(4, 2\) must satisfy"),
    # cu_seqlens
    ("not from 0", lambda: masks.from_cu_seqlens([1, 4]), "cu_seqlens begins with 1; it must"),
    ("empty", lambda: masks.from_cu_seqlens([]), "cu_seqlens begins with nothing"),
    ("falling", lambda: masks.from_cu_seqlens([0, 5, 3]), r"cu_seqlens\[2\]=3 is below"),
    ("NaN", lambda: masks.from_cu_seqlens([0, NAN, 3]), "cu_seqlens has dtype float64"),
    ("two-dimensional", lambda: masks.from_cu_seqlens([[0, 3]]), r"shape \(1, 2\)"),
    (
        "unequal counts",
        lambda: masks.from_cu_seqlens([0, 3], "causal", [0, 3, 4]),
        "cu_seqlens_k has 3 entries and cu_seqlens 2",
    ),
    (
        "kind for two lists",
        lambda: masks.from_cu_seqlens([0, 3], ("window", 2), [0, 3]),
        "must be 'causal' or 'full' when cu_seqlens_k",
    ),
    # slices
    (
        "overlapping slices",
        lambda: masks.from_slices(4, 4, [(0, 2, 0, 2), (2, 4, 0, 4), (1, 4, 1, 2)]),
        r"slices\[\d\]=.* and slices\[2\]=.* share pairs",
    ),
    (
        "reversed range",
        lambda: masks.from_slices(4, 4, [(0, 1, 0, 1), (3, 2, 0, 4)]),
        r"slices\[1\] has q range \[3, 2\)",
    ),
    (
        "outside the grid",
        lambda: masks.from_slices(4, 4, [(0, 4, 0, 5)]),
        r"slices\[0\] has k range \[0, 5\)",
    ),
    ("negative start", lambda: masks.from_slices(4, 4, [(-1, 4, 0, 4)]), r"q range \[-1, 4\)"),
    ("lo above hi", lambda: masks.from_slices(4, 4, [(0, 4, 0, 4, 2, 1)]), "lo=2 > hi=1"),
    (
        "seven numbers",
        lambda: masks.from_slices(4, 4, [(0, 4, 0, 4, 0, 0, 0)]),
        "four to six numbers",
    ),
    ("open range", lambda: masks.from_slices(4, 4, [(0, None, 0, 4)]), "None as a range bound"),
    ("float slice", lambda: masks.from_slices(4, 4, [(0, 4.0, 0, 4)]), "slices have dtype float64"),
    ("huge number", lambda: masks.from_slices(4, 4, [(0, 4, 0, 4, -(10**30), 0)]), "dtype object"),
    # ranges and matrices
    (
        "unknown type",
        lambda: masks.from_ranges([(0, 1)], [(0, 1)], "tri"),
        r"types\[0\]='tri' is unknown",
    ),
    (
        "type number 4",
        lambda: masks.from_ranges([(0, 1)], [(0, 1)], [4]),
        r"types\[0\]=4 is unknown",
    ),
    (
        "a type that is no type",
        lambda: masks.from_ranges([(0, 1)], [(0, 1)], 1.5),
        r"types=1\.5 must be one of",
    ),
    (
        "types of another count",
        lambda: masks.from_ranges([(0, 1)], [(0, 1)], [0, 1]),
        "types has 2 entries",
    ),
    (
        "boxes of another count",
        lambda: masks.from_ranges([(0, 1)], [], 0),
        "q_ranges has 1 entries and k_ranges 0",
    ),
    ("reversed box", lambda: masks.from_ranges([(2, 1)], [(0, 1)], 0), r"q_ranges\[0\]=\(2, 1\)"),
    (
        "flat ranges",
        lambda: masks.from_ranges([0, 1], [(0, 1)], 0),
        r"q_ranges has .* shape \(2,\)",
    ),
    (
        "overlapping boxes",
        lambda: masks.from_ranges([(0, 4), (3, 6)], [(0, 4), (0, 4)], "full"),
        r"ranges\[0\]=.* and ranges\[1\]=.* share pairs",
    ),
    (
        "grid too small",
        lambda: masks.from_ranges([(0, 4)], [(0, 4)], 0, num_queries=3),
        "num_queries=3 must be at least 4",
    ),
    ("float matrix", lambda: masks.from_dense(np.ones((2, 2))), "dense has dtype float64"),
    ("flat matrix", lambda: masks.from_dense(np.ones(4, bool)), r"shape \(4,\)"),
    ("integer table", lambda: masks.block_sparse(np.ones((2, 2), int), 4), "table has dtype int64"),
    (
        "sizes of another count",
        lambda: masks.block_sparse(np.ones((2, 2), bool), [4]),
        "q_blocks has 1 sizes and the table 2 blocks",
    ),
    (
        "end outside the last block",
        lambda: masks.block_sparse(np.ones((2, 2), bool), 4, num_queries=4),
        "num_queries=4 must end inside the last of 2 blocks",
    ),
    (
        "slices of four numbers, three of them: no two of six",
        lambda: masks.from_slices(6, 6, np.array([[0, 2, 0, 2], [2, 4, 2, 4], [4, 6, 4, 6]])),
        r"shape \(3, 4\) must be \[n, 6\]",
    ),
    # algebra
    ("another grid", lambda: CAUSAL_4 & masks.causal(5), r"grid \(5, 5\), this one \(4, 4\)"),
    ("crop outside", lambda: CAUSAL_4.crop(q=(0, 5)), r"q=\(0, 5\) must satisfy"),
    ("shift outside", lambda: CAUSAL_4.shift(q=-1), "leave the grid 3 x 4"),
    (
        "gather twice",
        lambda: CAUSAL_4.gather([(0, 3), (2, 4)], [(0, 4)]),
        "q_ranges=.* must be disjoint",
    ),
    ("gather outside", lambda: CAUSAL_4.gather([(0, 3)], [(2, 5)]), "k_ranges=.* must be disjoint"),
    ("bounds that fall", lambda: CAUSAL_4.area_of_rows([0, 3, 2]), "bounds falls after entry 1"),
    # conversions
    (
        "a mask of no head",
        lambda: masks.from_huggingface_4d(np.zeros((1, 0, 3, 3), bool)),
        r"shape \(1, 0, 3, 3\); it must .* of one head at least",
    ),
    (
        "not a number",
        lambda: masks.from_huggingface_4d(np.full((1, 2, 2, 2), np.nan)),
        "mask holds nan, which is neither 0 nor at most -1e4",
    ),
    (
        "biased mask",
        lambda: masks.from_huggingface_4d(np.full((1, 1, 2, 2), -0.5)),
        "a bias cannot",
    ),
    (
        "integer 4-D mask",
        lambda: masks.from_huggingface_4d(np.ones((1, 1, 2, 2), int)),
        "dtype int64",
    ),
    ("no Hugging Face input", lambda: masks.from_huggingface(), "give one of them, or both"),
    (
        "4-D padding",
        lambda: masks.from_huggingface(np.ones((1, 1, 2, 2), int)),
        "from_huggingface_4d",
    ),
    (
        "five FlashMask columns",
        lambda: masks.from_flashmask(np.zeros((4, 5), int), causal=False),
        r"C in \(2, 4\) for causal=False",
    ),
    (
        "ranks of another size",
        lambda: draw.svg(CAUSAL_4, np.zeros(3)),
        r"rank_of_token has shape \(3,\)",
    ),
]


@pytest.mark.parametrize(("call", "message"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_bad_input_gives_one_clear_line(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.to_flashmask(masks.dilated(9, 6)), "key 0 is hidden from 4 runs"),
        (
            lambda: masks.from_flashmask(np.arange(8).reshape(1, 2, 4, 1), causal=True),
            "differs between batch entries or heads",
        ),
        (
            lambda: masks.from_huggingface_4d(np.arange(8).reshape(1, 2, 2, 2) > 3),
            "differs between heads",
        ),
    ],
)
def test_what_a_form_cannot_express_is_refused_by_name(call, message):
    with pytest.raises(NotImplementedError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), TOO_LARGE)
def test_tables_beyond_memory_are_refused(call, message):
    with pytest.raises(NotImplementedError, match=message):
        call()


def test_a_table_as_large_as_is_allowed_is_right():
    table = masks.block_table(masks.sliding_window(2**22, 127, 0))
    assert table.num_q_blocks == 2**15 and not len(table.full)
    blocks = np.arange(2**15)
    own, before = np.stack([blocks, blocks], 1), np.stack([blocks[1:], blocks[:-1]], 1)
    expected = np.concatenate([own, before])
    expected = expected[np.lexsort((expected[:, 1], expected[:, 0]))]
    np.testing.assert_array_equal(table.partial, expected)
