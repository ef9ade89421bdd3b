"""Every builder equals its formula, on sizes that include 0, 1 and primes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from tests.mask.test_algebra import assert_is
from tests.oracles import masks as oracle
from tests.strategies import bounds, document_lengths

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 23])
SIDES = st.sampled_from([-1, 0, 1, 2, 3, 7, 50])
LENGTHS = document_lengths(max_documents=5, max_length=9, min_total=0)


@given(SIZES, st.none() | SIZES)
def test_full_and_causal_equal_their_formula(num_queries, num_keys):
    for name in ("full", "causal"):
        built = getattr(masks, name)(num_queries, num_keys)
        assert_is(built, getattr(oracle, name)(num_queries, num_keys))
        assert built.num_slices <= 1


@given(SIZES, SIDES, SIDES, st.integers(0, 4))
def test_sliding_window_equals_its_formula_in_two_slices(size, left, right, num_sink):
    built = masks.sliding_window(size, left, right, num_sink)
    assert_is(built, oracle.sliding_window(size, left, right, num_sink))
    assert built.num_slices <= 2


@given(SIZES, st.integers(1, 9))
def test_chunked_and_block_causal_equal_their_formula(size, block):
    assert_is(masks.chunked_causal(size, block), oracle.chunked_causal(size, block))
    assert_is(masks.block_causal(size, block), oracle.block_causal(size, block))
    if size <= 11:
        assert_is(masks.block_diffusion(size, block), oracle.block_diffusion(size, block))


@given(SIZES, st.data())
def test_prefix_lm_equals_its_formula(size, data):
    prefix = data.draw(st.integers(0, size))
    assert_is(masks.prefix_lm(size, prefix), oracle.prefix_lm(size, prefix))


@given(SIZES, st.integers(0, 6), st.integers(0, 6), st.booleans())
def test_global_sliding_window_equals_its_formula(size, window, num_global, causal):
    built = masks.global_sliding_window(size, window, num_global, causal)
    assert_is(built, oracle.global_sliding_window(size, window, num_global, causal))
    assert built.num_slices <= 3


@given(st.integers(0, 23), SIDES, st.data())
def test_image_spans_equal_their_formula(size, left, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=7)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    built = masks.image_spans(size, spans, left)
    assert_is(built, oracle.image_spans(size, spans, left))
    assert built.num_slices <= 1 + 2 * len(spans)


@given(SIZES, SIDES, SIDES, st.integers(1, 5))
def test_dilated_equals_its_formula(size, left, right, dilation):
    built = masks.dilated(size, left, right, dilation)
    assert_is(built, oracle.dilated(size, left, right, dilation))


@st.composite
def kinds(draw, length):
    prefix = st.integers(0, length).map(lambda p: ("prefix", p))
    window = st.tuples(st.just("window"), SIDES) | st.tuples(st.just("window"), SIDES, SIDES)
    return draw(st.sampled_from(["causal", "full"]) | prefix | window)


@given(LENGTHS, st.data())
def test_documents_of_one_kind_and_of_many_equal_their_formula(lengths, data):
    shortest = min(lengths)
    for within in (data.draw(kinds(shortest)), [data.draw(kinds(n)) for n in lengths]):
        assert_is(masks.documents(lengths, within), oracle.documents(lengths, within))


@given(LENGTHS, SIDES)
def test_documents_take_masks_and_builders_as_kinds(lengths, left):
    named = masks.documents(lengths, ("window", left))
    by_function = masks.documents(lengths, lambda n: masks.sliding_window(n, left))
    by_mask = masks.documents(lengths, [masks.sliding_window(n, left) for n in lengths])
    total = sum(lengths)
    by_algebra = masks.documents(lengths) & masks.sliding_window(total, left)
    for other in (by_function, by_mask, by_algebra):
        np.testing.assert_array_equal(other.to_dense(), named.to_dense())
    mixed = masks.documents([3, 2, 4], ["full", masks.causal, ("prefix", 2)])
    assert_is(mixed, oracle.documents([3, 2, 4], ["full", "causal", ("prefix", 2)]))


@given(LENGTHS, st.data())
def test_prefix_lm_documents_equal_their_formula(lengths, data):
    shared = data.draw(st.integers(0, 10))
    assert_is(
        masks.prefix_lm_documents(lengths, shared), oracle.prefix_lm_documents(lengths, shared)
    )
    own = [data.draw(st.integers(0, n)) for n in lengths]
    assert_is(masks.prefix_lm_documents(lengths, own), oracle.prefix_lm_documents(lengths, own))


@given(LENGTHS, st.data())
def test_prefix_tree_equals_its_formula_at_any_depth(lengths, data):
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(lengths))]
    assert_is(masks.prefix_tree(lengths, parents), oracle.prefix_tree(lengths, parents))


@given(LENGTHS)
def test_shared_question_causal_blockwise_equal_their_formula(lengths):
    assert_is(masks.shared_question(lengths), oracle.shared_question(lengths))
    assert_is(masks.causal_blockwise(lengths), oracle.causal_blockwise(lengths))


def test_a_chain_of_documents_is_one_slice():
    assert masks.prefix_tree([3, 4, 0, 5], [-1, 0, 1, 2]) == masks.causal(12)


@given(LENGTHS, st.integers(1, 5))
def test_block_causal_documents_equal_their_formula(lengths, block):
    built = masks.block_causal_documents(lengths, block)
    assert_is(built, oracle.block_causal_documents(lengths, block))


@given(LENGTHS, st.sampled_from(["causal", "full"]), st.data())
def test_from_cu_seqlens_equals_its_formula(lengths, within, data):
    queries = np.cumsum([0, *lengths])
    assert_is(masks.from_cu_seqlens(queries, within), oracle.from_cu_seqlens(queries, within))
    others = [data.draw(st.integers(0, 9)) for _ in lengths]
    keys = np.cumsum([0, *others]).astype(np.int32)
    built = masks.from_cu_seqlens(queries, within, keys)
    assert_is(built, oracle.from_cu_seqlens(queries, within, keys))


@given(st.integers(0, 40), st.integers(1, 17), st.data())
def test_block_patterns_equal_their_formula(size, num_blocks, data):
    few, some = st.integers(0, 4), st.integers(1, 4)
    calls = {
        "strided": (data.draw(some), data.draw(some), data.draw(st.booleans())),
        "global_local": (data.draw(few), data.draw(few)),
        "star": (),
        "streaming": (data.draw(some), data.draw(few)),
    }
    for name, arguments in calls.items():
        built = getattr(masks, name)(size, num_blocks, *arguments)
        assert_is(built, getattr(oracle, name)(size, num_blocks, *arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "slices", "density"),
    [
        ("strided", (16, 4, 3, True), None, 56 / 256),
        ("strided", (16, 4, 3), None, 56 / 256),
        ("global_local", (16, 1, 1), None, 46 / 256),
        ("star", (4,), 6, 5 / 16),
        ("streaming", (8, 3), 9, 22 / 64),
    ],
)
def test_published_patterns_have_the_published_density(name, arguments, slices, density):
    built = getattr(masks, name)(1 << 16, *arguments)
    assert built.density() == pytest.approx(density, rel=1e-3)
    assert slices is None or built.num_slices <= slices


@given(st.data(), st.booleans())
def test_block_sparse_equals_its_table(data, causal):
    sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)
    q_sizes, k_sizes = data.draw(sizes), data.draw(sizes)
    flags = data.draw(
        st.lists(st.booleans(), min_size=len(q_sizes) * len(k_sizes), max_size=36).map(
            lambda drawn: drawn[: len(q_sizes) * len(k_sizes)]
        )
    )
    table = np.array(flags, dtype=bool).reshape(len(q_sizes), len(k_sizes))
    built = masks.block_sparse(table, q_sizes, k_sizes, causal=causal)
    assert_is(built, oracle.block_sparse(table, q_sizes, k_sizes, causal))


@given(st.integers(1, 5), st.integers(1, 20), st.data())
def test_uniform_block_sparse_may_end_inside_its_last_block(block, size, data):
    count = -(-size // block)
    flags = data.draw(st.lists(st.booleans(), min_size=count * count, max_size=count * count))
    table = np.array(flags, dtype=bool).reshape(count, count)
    sizes = [min(block, size - i * block) for i in range(count)]
    built = masks.block_sparse(table, block, num_queries=size)
    assert_is(built, oracle.block_sparse(table, sizes, sizes))


@given(st.data())
def test_from_ranges_equals_the_triangles_of_its_boxes(data):
    size = data.draw(st.integers(1, 20))
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    q_ranges = list(itertools.pairwise(cuts))
    k_ranges = [data.draw(bounds(size, allow_empty=True)) for _ in q_ranges]
    names = ["full", "causal", "inv_causal", "bi_causal", 0, 1, 2, 3]
    types = [data.draw(st.sampled_from(names)) for _ in q_ranges]
    expected = oracle.ranges(size, size, q_ranges, k_ranges, types)
    built = masks.from_ranges(q_ranges, k_ranges, types, num_queries=size, num_keys=size)
    assert_is(built, expected)


def test_regions_drawn_densely_come_back_as_single_slices():
    for mask in (
        masks.full(9, 5),
        masks.causal(17),
        masks.sliding_window(23, 5, 2),
        masks.causal(5, 9),
        masks.causal(9).transpose(),
    ):
        assert masks.from_dense(mask.to_dense()) == mask
    sink = masks.sliding_window(23, 5, 0, 2)
    assert masks.from_dense(sink.to_dense()).num_slices <= 3


@pytest.mark.parametrize("name", sorted(set(masks.__all__) & set(vars(oracle))))
def test_the_picture_in_the_docstring_is_what_the_example_builds(name):
    arguments = EXAMPLES.get(name)
    if arguments is None:
        assert name in WITHOUT_EXAMPLE
        return
    built = getattr(masks, name)(*arguments)
    rows = ["".join("#" if pair else "." for pair in row) for row in built.to_dense()]
    picture = []
    for line in getattr(masks, name).__doc__.splitlines():
        cells = line.replace(" ", "")[: built.num_keys]
        if len(cells) == built.num_keys and set(cells) <= set("#."):
            picture.append(cells)
    assert picture == rows


EXAMPLES = {
    "full": (3,),
    "causal": (3,),
    "sliding_window": (6, 1, 0, 1),
    "chunked_causal": (5, 2),
    "prefix_lm": (4, 2),
    "global_sliding_window": (5, 1, 1),
    "image_spans": (5, [(1, 3)]),
    "dilated": (5, 2),
    "documents": ([2, 3], ["causal", "full"]),
    "prefix_lm_documents": ([3, 3], [2, 1]),
    "shared_question": ([2, 2, 2],),
    "prefix_tree": ([1, 1, 1, 2], [-1, 0, 1, 0]),
    "causal_blockwise": ([2, 1, 2],),
    "block_causal_documents": ([3, 2], 2),
    "block_causal": (4, 2),
    "strided": (6, 6, 2, 2),
    "global_local": (4, 4, 1, 1),
    "block_diffusion": (3, 1),
}
WITHOUT_EXAMPLE = {"star", "streaming", "block_sparse", "from_cu_seqlens"}  # pictures of blocks
