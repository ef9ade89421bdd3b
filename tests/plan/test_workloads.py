"""Workloads have the statistics that their sources publish; named masks are what their definitions say."""

import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan.study.workloads import (
    ALIASES,
    BUILDER_MASKS,
    LONGCA_MASKS,
    MASKS,
    TRAINING_MASKS,
    WORKLOADS,
    document_lengths,
    fitted,
    named_mask,
)

MANY = 1 << 27  # tokens: enough documents for their statistics


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("num_tokens", [1, 2, 4095, 131_072])
def test_lengths_fill_the_pack_and_repeat_for_a_seed(name, num_tokens):
    lengths = document_lengths(name, num_tokens, seed=3)
    assert lengths.sum() == num_tokens and lengths.min() >= 1
    assert np.array_equal(lengths, document_lengths(name, num_tokens, seed=3))


@pytest.mark.parametrize(
    ("name", "share", "length"),
    [
        ("W1", 0.5, (501, 1024)),  # .4675 lie below 501, .7139 up to 1024
        ("W1", 0.9, (2049, 4096)),
        ("W2", 0.5, (1914 * 0.97, 1914 * 1.03)),
        ("W2", 0.9, (6051 * 0.95, 6051 * 1.05)),
        ("W2", 0.99, (16_273 * 0.88, 16_273 * 1.05)),
        ("W4", 0.0, (8192, 8300)),
        ("W4", 1.0, (60_000, 65_536)),
        ("W5", 0.5, (600 * 0.97, 600 * 1.03)),
        ("W8", 0.4, (1, 1024)),
        ("W8", 0.9, (8193, 16_384)),
        ("prolong512k", 0.5, (257, 512)),
        ("pile", 0.99, (7585, 14_208)),
    ],
)
def test_lengths_have_the_published_quantiles(name, share, length):
    lengths = document_lengths(name, MANY)[:-1]
    assert length[0] <= np.quantile(lengths, share) <= length[1]


def test_the_wlb_like_lengths_have_their_published_shares():
    lengths = document_lengths("W3", MANY)[:-1]
    for share, length in ((0.1, 646), (0.5, 3227), (0.9, 5784), (0.99, 26_070), (0.999, 119_836)):
        noise = np.sqrt(share * (1 - share) / len(lengths))
        assert abs((lengths <= length).mean() - share) <= 4 * noise


def test_token_shares_of_the_histograms_are_those_of_their_sources():
    """MagiAttention: 46 % of tokens in documents beyond 8K; the development machine: 66 %."""
    for name, published, off in (("W1", 0.46, 0.03), ("W8", 0.66, 0.06)):
        lengths = document_lengths(name, MANY)
        share = lengths[lengths > 8192].sum() / lengths.sum()
        assert abs(share - published) <= off


def test_every_909th_document_of_the_bimodal_workload_is_long():
    lengths = document_lengths("W5", MANY)[:-1]
    is_long = lengths > 8192
    assert np.array_equal(np.flatnonzero(is_long), np.arange(0, len(lengths), 909))
    assert lengths[~is_long].mean() < 1000 and lengths.max() <= 300_000


def test_no_document_of_the_magi_histogram_is_more_than_a_quarter_of_its_pack():
    for seed, tokens in itertools.product(range(5), (4096, 65_536)):
        assert document_lengths("W1", tokens, seed).max() <= tokens // 4


def test_the_first_lengths_are_those_of_every_machine():
    assert document_lengths("W1", 1 << 20)[:6].tolist() == [642, 51, 1958, 882, 990, 1027]
    assert document_lengths("W4", 1 << 20)[:4].tolist() == [30_805, 8920, 44_447, 28_922]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), num_tokens=st.integers(1, 60))
@settings(max_examples=60)
def test_fitted_repeats_documents_until_the_pack_is_full(lengths, num_tokens):
    if not sum(lengths):
        with pytest.raises(ValueError, match="must hold a token"):
            fitted(np.array(lengths), num_tokens)
        return
    expected, total = [], 0
    for length in itertools.cycle(lengths):
        if total == num_tokens:
            break
        part = min(length, num_tokens - total)
        expected += [part] if part else []
        total += part
    assert fitted(np.array(lengths), num_tokens).tolist() == expected


# ------------------------------------------------------------------ masks


def test_all_published_names_are_there():
    assert len(LONGCA_MASKS) == 14
    published = {*LONGCA_MASKS, *TRAINING_MASKS, "strided", "global_local", "star", "streaming"}
    assert published | set(BUILDER_MASKS) == set(MASKS) and not published & set(ALIASES)


def test_every_builder_of_a_mask_can_be_named():
    builders = {
        name
        for name in masks.__all__
        if not name.startswith(("from_", "to_", "concat"))
        and not inspect.isclass(getattr(masks, name))
        and inspect.signature(getattr(masks, name)).return_annotation is masks.AttentionMask
    }
    assert {"documents", "prefix_tree", "block_diffusion"} <= builders == set(BUILDER_MASKS)


@pytest.mark.parametrize(("builder", "benchmark"), ALIASES.items())
def test_a_builder_and_its_name_in_benchmarks_are_one_mask(builder, benchmark):
    ours, theirs = (named_mask(name, 3000, workload="W4", seed=2) for name in (builder, benchmark))
    assert ours == theirs and MASKS[builder].has_documents == MASKS[benchmark].has_documents


@pytest.mark.parametrize("name", sorted(MASKS))
def test_every_mask_can_be_built_at_any_length(name):
    for num_tokens in (1, 2, 3, 17, 1000, 70_000):
        mask = named_mask(name, num_tokens, workload="W1", seed=1)
        assert (mask.num_queries, mask.num_keys) == (num_tokens, num_tokens)
        assert mask.digest() == named_mask(name, num_tokens, workload="W1", seed=1).digest()
        if num_tokens > 3 and "block_sparse" not in name:
            assert mask.to_dense().any(axis=1).all() if num_tokens <= 1000 else mask.area()


LENGTHS = np.array([5, 3, 8, 4])
Q, K = np.ogrid[:20, :20]
DOC = np.repeat(np.arange(4), LENGTHS)
SAME = DOC[:, None] == DOC
BY_HAND = {
    "full": np.ones((20, 20), dtype=bool),
    "causal": K <= Q,
    "full_document": SAME,
    "causal_document": SAME & (K <= Q),
    "share_question": (K <= Q) & (SAME | (DOC == 0)),
    "documents": SAME & (K <= Q),
    "shared_question": (K <= Q) & (SAME | (DOC == 0)),
    "prefix_tree": (K <= Q) & (SAME | (DOC == 0) | ((DOC[:, None] == 3) & (DOC == 1))),
    "image_spans": (K <= Q) | (SAME & (DOC % 2 == 1)),
    "block_diffusion": Q // 10 == K // 10,  # one block of noisy and one of clean tokens
    "dilated": (K <= Q) & ((Q - K) % 2 == 0),
    "causal_blockwise": (K <= Q) & (SAME | (DOC[:, None] == 3)),
    "star": (K <= Q) & ((Q // 5 == K // 5) | (K < 5)),
    "window_document": SAME & (K <= Q),  # shorter than the window
    "sliding_window_causal": K <= Q,
}


@pytest.mark.parametrize("name", sorted(BY_HAND))
def test_masks_are_what_their_definition_says(name):
    mask = named_mask(name, 20, lengths=LENGTHS)
    assert np.array_equal(mask.to_dense(), BY_HAND[name])


@pytest.mark.parametrize(
    ("name", "density"),
    [("strided", 56 / 256), ("global_local", 46 / 256), ("star", 5 / 16), ("streaming", 0.344)],
)
def test_masks_of_ultraattn_have_their_published_density(name, density):
    assert named_mask(name, 1 << 16).density() == pytest.approx(density, abs=2e-3)


def test_windows_are_1024_keys_wide():
    n, w = 4096, 1024
    assert named_mask("sliding_window_causal", n) == masks.sliding_window(n, w)
    assert named_mask("sliding_window", n).area() == n * (2 * w + 1) - w * (w + 1)
    documents = named_mask("window_document", n, lengths=np.array([3000, 1096]))
    assert documents == (masks.documents([3000, 1096]) & masks.sliding_window(n, w))


def test_mixed_documents_are_causal_full_prefixed_and_windowed_in_turn():
    mask = named_mask("mixed_document", 96, lengths=np.array([16, 16, 16, 48]))
    dense = mask.to_dense()
    blocks = [dense[a:b, a:b] for a, b in ((0, 16), (16, 32), (32, 48), (48, 96))]
    assert dense.sum() == sum(block.sum() for block in blocks)
    assert [block.sum() for block in blocks] == [136, 256, 136 + 1, 48 * 49 // 2]


@pytest.mark.parametrize(
    ("call", "fragments"),
    [
        (lambda: document_lengths("w1", 10), ["workload='w1'", "nearest: W1"]),
        (lambda: named_mask("casual", 10), ["mask='casual'", "nearest: causal"]),
        (lambda: named_mask("full", 10, workload="prolong"), ["workload='prolong'", "prolong64k"]),
        (lambda: document_lengths("W1", 0), ["num_tokens=0", "positive integer"]),
        (lambda: named_mask("full", True), ["num_tokens=True"]),
        (lambda: named_mask("causal_document", 9, lengths=np.array([3, -1])), ["[3, -1]"]),
    ],
)
def test_bad_names_and_sizes_are_refused_in_one_line(call, fragments):
    with pytest.raises(ValueError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)
