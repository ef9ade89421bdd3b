"""Fill-in-the-middle, against the definition of Bavarian et al. 2022 written out as text."""

import itertools
import json
import pickle
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.batch import BatchConfig, PlanRequest, build_batch, plan_batch
from megatron_cp.data.blend import open_blend
from megatron_cp.data.blend_sources import parse_blend
from megatron_cp.data.document_set import open_documents, write_prefix_lengths
from megatron_cp.data.fill_in_the_middle import FillInTheMiddle, find_fim_tokens
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.packing import Packer, PackingConfig
from megatron_cp.data.supervision import write_supervision
from megatron_cp.data.tokenizer import ByteLevelTokenizer, train_byte_level_bpe
from tests.data.test_packing import splitmix64

NAMES = {
    "prefix": "<fim_prefix>",
    "middle": "<fim_middle>",
    "suffix": "<fim_suffix>",
    "pad": "<fim_pad>",
    "eod": "<|endoftext|>",
    "split": "<file>",
}
SEED = 7
LEARNED_FROM = ["def attention(q, k, v):\n    return softmax(q @ k.T) @ v\n", "Größe 尺寸"] * 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_byte_level_bpe(
        LEARNED_FROM, vocab_size=310, path=path, special_tokens=list(NAMES.values())
    )


def settings_of(tokenizer, *, split=None, **settings):
    tokens = find_fim_tokens(tokenizer, {**NAMES, "split": split})
    return FillInTheMiddle(tokenizer=tokenizer, tokens=tokens, seed=SEED, **settings)


def write(prefix, documents):
    with IndexedWriter(prefix, dtype=np.int32) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens, dtype=np.int64))
        writer.finish()
    return open_documents(prefix)


def in_paper_order(text, first, second, *, spm):
    """The string of a text cut in three; `|` stands where parts are tokenized apart."""
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if spm:
        return f"<fim_prefix><fim_suffix>{suffix}<fim_middle>{prefix}|{middle}"
    return f"<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>{middle}"


def ids_of(tokenizer, marked):
    return [i for part in marked.split("|") for i in tokenizer.tokenize(part)]


def draws_of(pack):
    start = splitmix64(splitmix64(SEED ^ 0x46494D) ^ pack)
    return (splitmix64(start ^ place) / 2**64 for place in itertools.count())


def rearranged(tokens, fim, draws):
    """A piece, by walking over it: texts end at eod, fragments at the separator."""

    def text_of(run, rate):
        if not next(draws) < rate:
            return run
        text = fim.tokenizer.detokenize(run)
        if fim.no_prefix and text[: len(fim.no_prefix)] == fim.no_prefix:
            return run
        places = [int(next(draws) * (len(text) + 1)) for _ in range(2)]
        marked = in_paper_order(text, min(places), max(places), spm=next(draws) < fim.spm_rate)
        return ids_of(fim.tokenizer, marked)

    def walk(run, mark, change):
        result, waiting = [], []
        for token in run:
            if token != mark:
                waiting.append(token)
                continue
            result += (change(waiting) if waiting else []) + [token]
            waiting = []
        return result + (change(waiting) if waiting else [])

    def document(run):
        if fim.tokens.split in run:
            if not next(draws) < fim.rate:
                return run
            return walk(run, fim.tokens.split, lambda part: text_of(part, fim.fragment_rate))
        return text_of(run, fim.rate)

    return walk(tokens, fim.tokens.eod, document)


def oracle(texts, pack, config):
    """(tokens, labels or None, positions, document of each token), the packing cut or left short."""
    draws, stream = draws_of(pack.number), []
    for number, piece in enumerate(pack.pieces):
        tokens = texts[piece.document][piece.start : piece.stop + 1]
        if piece.stop == len(texts[piece.document]):
            tokens = texts[piece.document][piece.start :]
        changed = rearranged(tokens, config.fim, draws)
        stream += [(token, number, place) for place, token in enumerate(changed)]
    used = min(len(stream), config.seq_length)
    if pack.following is not None:
        document, start = pack.following
        stream.append((texts[document][start], None, 0))
        if pack.pieces[-1].stop < len(texts[pack.pieces[-1].document]):
            stream.pop()
    labels = []
    for (_, number, _), behind in itertools.zip_longest(stream[:used], stream[1 : used + 1]):
        joined = behind and (behind[1] == number or not config.reset_attention_mask)
        labels.append(behind[0] if joined else None)
    tokens, owners, places = zip(*stream[:used], strict=True)
    positions = places if config.reset_position_ids else range(used)
    return list(tokens), labels, list(positions), owners


ALPHABET = "ab ö尺\n"
TEXTS = st.lists(st.text(ALPHABET, max_size=12), min_size=1, max_size=3).map("<file>".join)
CORPORA = st.lists(TEXTS, min_size=1, max_size=5).filter(any)
RATES = st.sampled_from([0.0, 0.5, 1.0])


@given(
    texts=CORPORA,
    with_eod=st.booleans(),
    size=st.integers(1, 40),
    policy=st.sampled_from(["split", "keep"]),
    split=st.sampled_from([None, "<file>"]),
    rates=st.tuples(RATES, RATES, RATES),
    no_prefix=st.sampled_from([None, "a", "ö"]),
    reset=st.booleans(),
)
def test_a_pack_is_what_the_paper_makes_of_its_pieces(
    tokenizer, tmp_path_factory, texts, with_eod, size, policy, split, rates, no_prefix, reset
):
    tokens = [tokenizer.tokenize(text) + [tokenizer.eod] * with_eod for text in texts]
    documents = write(tmp_path_factory.mktemp("corpus") / "c", tokens)
    fim = settings_of(
        tokenizer,
        split=split,
        rate=rates[0],
        spm_rate=rates[1],
        fragment_rate=rates[2],
        no_prefix=no_prefix,
    )
    config = BatchConfig(
        seq_length=size, reset_attention_mask=reset, reset_position_ids=reset, fim=fim
    )
    packer = Packer(documents.lengths, PackingConfig(seq_length=size, policy=policy))
    for number in range(4):
        pack = replace(next(packer), number=number)
        batch = build_batch(documents, [pack], config)
        found, labels, positions, owners = oracle(tokens, pack, config)
        used = len(found)
        assert batch.tokens.tolist() == found + [fim.tokens.pad] * (size - used)
        assert batch.labels[:used].tolist() == [label or 0 for label in labels]
        assert batch.loss_mask.tolist() == [label is not None for label in labels] + [0] * (
            size - used
        )
        assert batch.position_ids[:used].tolist() == positions
        assert list(batch.document_lengths) == list(Counter(owners).values())
        sees = batch.mask.to_dense()
        expected = np.zeros((size, size), dtype=bool)
        for row, column in itertools.product(range(used), repeat=2):
            same = owners[row] == owners[column] or not reset
            expected[row, column] = column <= row and same
        assert (sees == expected).all()


def undone(tokenizer, fim, tokens):
    """The text whose parts these tokens mark."""
    marks = fim.tokens
    first, second, third = (tokens.index(m) for m in (marks.prefix, marks.suffix, marks.middle))
    assert first == 0
    assert second < third
    assert all(tokens.count(mark) == 1 for mark in marks[:3])
    prefix = tokenizer.detokenize(tokens[1:second])
    suffix = tokenizer.detokenize(tokens[second + 1 : third])
    return prefix + tokenizer.detokenize(tokens[third + 1 :]) + suffix


@given(text=st.text(min_size=1, max_size=30).filter(lambda t: "<" not in t), spm=st.booleans())
def test_the_rearrangement_can_be_undone(tokenizer, tmp_path_factory, text, spm):
    tokens = [*tokenizer.tokenize(text), tokenizer.eod]
    documents = write(tmp_path_factory.mktemp("corpus") / "c", [tokens])
    fim = settings_of(tokenizer, rate=1.0, spm_rate=float(spm))
    size = 4 * len(tokens) + 3  # nothing is cut off: at most one token a byte
    pack = next(Packer(documents.lengths, PackingConfig(seq_length=size, policy="keep")))
    for number in range(5):
        config = BatchConfig(seq_length=size, reset_attention_mask=True, fim=fim)
        batch = build_batch(documents, [replace(pack, number=number)], config)
        found = batch.tokens[: batch.document_lengths[0]].tolist()
        assert found.pop() == tokenizer.eod
        assert (found[:2] == [fim.tokens.prefix, fim.tokens.suffix]) >= spm
        assert undone(tokenizer, fim, found) == text


def test_all_cuts_of_a_text_come_equally_often(tokenizer, tmp_path):
    text, num_packs = "abc", 6000
    documents = write(tmp_path / "c", [tokenizer.tokenize(text)])
    pack = next(Packer(documents.lengths, PackingConfig(seq_length=16, policy="keep")))
    fim = settings_of(tokenizer, rate=0.8, spm_rate=0.25)
    config = BatchConfig(seq_length=16, reset_attention_mask=True, fim=fim)
    seen = Counter()
    for number in range(num_packs):
        batch = build_batch(documents, [replace(pack, number=number)], config)
        seen[tuple(batch.tokens[: batch.document_lengths[0]].tolist())] += 1
    expected = Counter({tuple(tokenizer.tokenize(text)): 0.2 * num_packs})
    for first, second, spm in itertools.product(range(4), range(4), (True, False)):
        marked = in_paper_order(text, min(first, second), max(first, second), spm=spm)
        share = 0.8 / 16 * (0.25 if spm else 0.75)
        expected[tuple(ids_of(tokenizer, marked))] += share * num_packs
    assert set(seen) == set(expected)
    for words, count in expected.items():
        assert abs(seen[words] - count) < 5 * count**0.5


def corpus_of_letters(tokenizer, folder, name="c", first=0):
    """Documents of one letter each: a token tells its document."""
    lengths = np.random.default_rng(3).integers(1, 60, 20).tolist()
    letters = "abcdefghijklmnopqrst"[first:]
    return write(
        folder / name,
        [
            [*tokenizer.tokenize(letter * length), tokenizer.eod]
            for letter, length in zip(letters, lengths, strict=False)
        ],
    )


def loader_config(fim, *, policy="split", num_workers=0, seq_length=64):
    return LoaderConfig(
        packing=PackingConfig(seq_length=seq_length, policy=policy, keep_buffer=5),
        batch=BatchConfig(
            seq_length=seq_length, reset_attention_mask=True, reset_position_ids=True, fim=fim
        ),
        global_batch_size=4,
        num_workers=num_workers,
    )


@pytest.mark.parametrize("policy", ["split", "keep"])
def test_no_document_gets_a_token_of_another(tokenizer, tmp_path, policy):
    documents = corpus_of_letters(tokenizer, tmp_path)
    fim = settings_of(tokenizer, rate=1.0)
    with PackedLoader(documents, loader_config(fim, policy=policy)) as loader:
        for _ in range(20):
            batch, start = next(loader).batch, 0
            for length in batch.document_lengths:
                text = tokenizer.detokenize(batch.tokens[start : start + length].tolist())
                assert len(set(text)) <= 1
                start += length
            assert not batch.loss_mask[start:].any()
            assert (batch.tokens[start:] == fim.tokens.pad).all()


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("policy", ["split", "keep"])
def test_at_rate_0_nothing_but_the_padding_token_changes(tokenizer, tmp_path, policy, reset):
    documents = corpus_of_letters(tokenizer, tmp_path)
    packer = Packer(documents.lengths, PackingConfig(seq_length=64, policy=policy, keep_buffer=5))
    config = BatchConfig(seq_length=64, reset_attention_mask=reset, reset_position_ids=reset)
    fim = settings_of(tokenizer, rate=0.0)
    for pack in itertools.islice(packer, 20):
        plain = build_batch(documents, [pack], config)
        batch = build_batch(documents, [pack], replace(config, fim=fim))
        used = pack.num_tokens
        assert batch.tokens[:used].tolist() == plain.tokens[:used].tolist()
        for name in ("labels", "loss_mask", "position_ids"):
            assert getattr(batch, name).tolist() == getattr(plain, name).tolist()
        assert batch.mask.digest() == plain.mask.digest()
        assert batch.document_lengths == plain.document_lengths


def words_of(loader, num_batches):
    return [next(loader).batch.tokens.tolist() for _ in range(num_batches)]


@pytest.fixture
def blend(tokenizer, tmp_path):
    corpus_of_letters(tokenizer, tmp_path, "a")
    corpus_of_letters(tokenizer, tmp_path, "b", first=10)
    return open_blend(parse_blend(["2", str(tmp_path / "a"), "1", str(tmp_path / "b")]))


@pytest.mark.parametrize("policy", ["split", "keep"])
def test_the_draws_are_the_same_in_workers_on_more_ranks_and_after_a_resume(
    tokenizer, blend, policy
):
    fim = settings_of(tokenizer)
    with PackedLoader(blend, loader_config(fim, policy=policy)) as loader:
        stream = words_of(loader, 4)
        state = json.loads(json.dumps(loader.state_dict()))
        stream += words_of(loader, 20)
    with PackedLoader(blend, loader_config(fim, policy=policy, num_workers=2)) as loader:
        assert words_of(loader, 8) == stream[:8]
        loader.load_state_dict(state)
        assert words_of(loader, 8) == stream[4:12]
    halves = []
    for rank in range(2):
        config = loader_config(fim, policy=policy)
        with PackedLoader(blend, config, dp_rank=rank, dp_size=2) as loader:
            loader.load_state_dict(state)
            halves += words_of(loader, 2)
    assert sorted(halves) == sorted(stream[4:8])
    assert len({str(words) for words in stream}) == len(stream)  # epochs differ, too


def test_the_plan_of_every_context_size_is_made_from_the_rearranged_lengths(tokenizer, tmp_path):
    documents = corpus_of_letters(tokenizer, tmp_path)
    fim = settings_of(tokenizer, rate=1.0)
    pack = next(Packer(documents.lengths, PackingConfig(seq_length=64)))
    config = BatchConfig(seq_length=64, reset_attention_mask=True, fim=fim)
    batch = build_batch(documents, [pack], config)
    expected = sum(n * (n + 1) // 2 for n in batch.document_lengths)
    assert list(batch.document_lengths) != [piece.length for piece in pack.pieces]
    for cp_size in (1, 2, 3):
        planned = plan_batch(batch, PlanRequest(cp_size=cp_size))
        assert planned.plans["full"].mask.area() == expected
        assert planned.batch.tokens.tolist() == batch.tokens.tolist()


def test_the_settings_travel_to_another_process(tokenizer):
    fim = pickle.loads(pickle.dumps(settings_of(tokenizer)))
    assert fim.tokenizer.tokenize("def attention") == tokenizer.tokenize("def attention")
    assert fim.tokens == settings_of(tokenizer).tokens


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"middle": "<nothing>"}, r"--fim-middle-token '<nothing>' is not in the vocabulary of"),
        ({"pad": "<p>", "split": "<s>"}, "--fim-pad-token '<p>', --fim-split-sample '<s>' are not"),
        ({"suffix": "<fim_prefix>"}, "--fim-prefix-token and --fim-suffix-token are both"),
        ({"split": "<|endoftext|>"}, "--fim-eod-token and --fim-split-sample are both"),
    ],
)
def test_tokens_that_are_missing_or_the_same_are_refused(tokenizer, changed, message):
    with pytest.raises(ValueError, match=message):
        find_fim_tokens(tokenizer, {**NAMES, **changed})


def test_a_tokenizer_without_names_is_refused():
    with pytest.raises(ValueError, match=r"--fim-prefix-token '<fim_prefix>', .* of ByteLevel"):
        find_fim_tokens(ByteLevelTokenizer(), NAMES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 1.5}, r"rate=1.5 must lie in \[0, 1\]; change --fim-rate"),
        ({"spm_rate": -0.1}, r"spm_rate=-0.1 must lie in \[0, 1\]"),
        ({"split": "<file>"}, "fragment_rate=None with split="),
        ({"fragment_rate": float("nan")}, "fragment_rate=nan must lie"),
    ],
)
def test_rates_that_are_none_are_refused(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        settings_of(tokenizer, **settings)


def test_documents_with_a_prefix_or_learned_tokens_are_refused(tokenizer, tmp_path):
    corpus_of_letters(tokenizer, tmp_path, "prefix")
    write_prefix_lengths(tmp_path / "prefix", np.array([0, 0, -1] + [0] * 17))
    corpus_of_letters(tokenizer, tmp_path, "learned")
    write_supervision(tmp_path / "learned", [(0, 0, 1)])
    config = loader_config(settings_of(tokenizer))
    for name, message in (
        ("prefix", "document 2 .* has prefix or bidir"),
        ("learned", "learned tokens of"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedLoader(open_documents(tmp_path / name), config)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ids_of_another_tokenizer_are_named(tokenizer, tmp_path, num_workers):
    documents = write(tmp_path / "c", [[5, 400, 6] * 30])
    config = loader_config(settings_of(tokenizer), num_workers=num_workers)
    message = r"token id 400 at position \d+ of document 0 of .* must be in \[0, 306\)"
    with PackedLoader(documents, config) as loader, pytest.raises(ValueError, match=message):
        next(loader)
