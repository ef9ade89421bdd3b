"""Megatron's samples: the same tokens, labels, losses, positions and masks in the same order."""

import itertools
import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.data.batch import BatchConfig
from megatron_cp.data.blend_sources import parse_blend
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.packing import PackingConfig
from megatron_cp.mcore.documents.gpt_dataset import GPTSamples, open_gpt_samples
from tests.child import in_a_child
from tests.data.corpora import write_corpus
from tests.data.megatron_oracle import gpt_samples as asked_gpt_samples

EOD = 7
SEQ_LENGTH = 12
gpt_samples = asked_gpt_samples.__wrapped__  # every test here runs in a process of its own
FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(5)
    for name, count in (("a", 40), ("b", 25), ("c", 30)):
        lengths = generator.integers(0, 40, count)
        lengths[:3] = (1, 0, 2 * SEQ_LENGTH)
        write_corpus(folder / name, lengths.tolist(), eod=EOD)
    return [str(folder / name) for name in "abc"]


def samples_of(words, split, sizes, **change):
    settings = {"seq_length": SEQ_LENGTH, "seed": 99, "eod": EOD, "split": split, **change}
    return GPTSamples(blend=parse_blend(words), num_samples=sizes, **settings)


def loader_of(split, *, flags=(), global_batch_size=1, micro_batch_size=1, **ranks):
    names = dict.fromkeys(flags, True)
    config = LoaderConfig(
        packing=PackingConfig(seq_length=SEQ_LENGTH),
        batch=BatchConfig(
            seq_length=SEQ_LENGTH, labels_cross_documents=True, eod_token=EOD, **names
        ),
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        balance=False,
    )
    return PackedLoader(split.documents, config, packer=split.packer, **ranks)


def megatrons(which, sizes, count, cache, flags=(), **config):
    return gpt_samples(
        which,
        list(sizes),
        count,
        cache,
        eod=EOD,
        random_seed=99,
        sequence_length=SEQ_LENGTH,
        **{flag: flag in flags for flag in FLAGS},
        **config,
    )


def assert_same_samples(split, flags, expected):
    with loader_of(split, flags=flags) as loader:
        for sample in expected:
            batch = next(loader).batch
            assert batch.tokens.tolist() == sample["tokens"]
            assert batch.labels.tolist() == sample["labels"]
            assert batch.loss_mask.tolist() == sample["loss_mask"]
            assert batch.position_ids.tolist() == sample["position_ids"]
            np.testing.assert_array_equal(
                batch.mask.to_dense(), ~np.array(sample["attention_mask"])
            )


@pytest.mark.parametrize("flags", [f for n in range(4) for f in itertools.combinations(FLAGS, n)])
@in_a_child
def test_samples_are_megatron_s_token_for_token_over_epochs(prefixes, tmp_path, flags):
    sizes = (150, 12, 4)  # the training share holds about 55
    for which, name in enumerate(("train", "valid", "test")):
        split = open_gpt_samples(samples_of(prefixes[:1], "80,12,8", sizes))[name]
        length, expected = megatrons(
            which,
            sizes,
            sizes[which],
            tmp_path,
            flags,
            blend=(prefixes[:1], None),
            split="80,12,8",
        )
        assert split.packer.num_samples == length
        assert_same_samples(split, flags, expected)


@pytest.mark.parametrize("seq_length", [2, 5, 64])
@in_a_child
def test_samples_shorter_and_longer_than_documents_are_megatron_s(prefixes, tmp_path, seq_length):
    samples = samples_of(prefixes[:1], "100", (90, 0, 0), seq_length=seq_length)
    split = open_gpt_samples(samples)["train"]
    _, expected = gpt_samples(
        0,
        [90, 0, 0],
        90,
        tmp_path,
        eod=EOD,
        random_seed=99,
        sequence_length=seq_length,
        blend=(prefixes[:1], None),
        split="100",
        **dict.fromkeys(FLAGS, False),
    )
    packs = [next(split.packer) for _ in range(90)]
    for pack, sample in zip(packs, expected, strict=True):
        tokens = [split.documents.read(*piece).tolist() for piece in pack.pieces]
        assert list(itertools.chain(*tokens)) == sample["tokens"]
        document, offset = pack.following
        last = split.documents.read(document, offset, offset + 1)
        assert last.tolist() == sample["labels"][-1:]


@pytest.mark.parametrize("weights", [None, (3, 1, 2), (0.2, 0.7, 0.1)])
@pytest.mark.parametrize("per_split", [False, True])
@in_a_child
def test_blends_are_megatron_s(prefixes, tmp_path, weights, per_split):
    sizes = (120, 9, 0)
    words = list(prefixes)
    if weights is not None:
        words = [str(word) for pair in zip(weights, prefixes, strict=True) for word in pair]
    blend = (prefixes, None if weights is None else list(map(float, weights)))
    if per_split:
        settings = {"blend_per_split": [blend, (prefixes[:1], None), None]}
        sources = {"train": parse_blend(words), "valid": parse_blend(prefixes[:1]), "test": None}
        splits = open_gpt_samples(
            GPTSamples(
                seq_length=SEQ_LENGTH, seed=99, num_samples=sizes, blend_per_split=sources, eod=EOD
            )
        )
    else:
        settings = {"blend": blend, "split": "80,20,0"}
        splits = open_gpt_samples(samples_of(words, "80,20,0", sizes))
    assert splits["test"] is None
    for which, name in enumerate(("train", "valid")):
        length, _ = megatrons(which, sizes, 0, tmp_path, **settings)
        assert splits[name].packer.num_samples == length
        _, expected = megatrons(which, sizes, min(length, sizes[which]), tmp_path, **settings)
        assert_same_samples(splits[name], (), expected)


@in_a_child
def test_one_corpus_with_a_weight_is_a_blend_as_in_megatron(prefixes, tmp_path):
    sizes = (150, 0, 0)
    split = open_gpt_samples(samples_of(["2", prefixes[0]], "100", sizes))["train"]
    settings = {"blend": (prefixes[:1], [2.0]), "split": "100"}
    _, expected = megatrons(0, sizes, 150, tmp_path, **settings)
    assert_same_samples(split, (), expected)


@in_a_child
def test_samples_are_dealt_to_ranks_and_micro_batches_as_megatron_s_sampler_deals(prefixes):
    sizes, ranks, micro, batch = (48, 0, 0), 2, 3, 12
    samples = samples_of(prefixes[:1], "100", sizes)
    with loader_of(open_gpt_samples(samples)["train"]) as alone:
        stream = [next(alone).batch.tokens.tolist() for _ in range(48)]
    for rank in range(ranks):
        with loader_of(
            open_gpt_samples(samples)["train"],
            global_batch_size=batch,
            micro_batch_size=micro,
            dp_rank=rank,
            dp_size=ranks,
        ) as loader:
            drawn = [next(loader).batch.tokens.reshape(micro, -1).tolist() for _ in range(8)]
        # Megatron-LM's sampler: ranks * micro indices in a row, this rank's share of each row
        rows = [range(start, start + ranks * micro) for start in range(0, 48, ranks * micro)]
        shares = [row[rank * micro : (rank + 1) * micro] for row in rows]
        assert drawn == [[stream[i] for i in share] for share in shares]


@pytest.mark.parametrize("num_workers", [0, 2])
@in_a_child
def test_a_run_goes_on_at_the_samples_consumed_and_ends_with_them(prefixes, num_workers):
    samples = samples_of([*prefixes[:2]], "100", (40, 0, 0))
    with loader_of(open_gpt_samples(samples)["train"], global_batch_size=4) as loader:
        stream = [next(loader).batch.tokens.tolist() for _ in range(40)]
        state = json.loads(json.dumps(loader.state_dict()))
        with pytest.raises(ValueError, match="the samples end after 40"):
            next(loader)
    assert state["position"] == 40
    split = open_gpt_samples(samples)["train"]
    config = loader_of(split, global_batch_size=4).config
    with PackedLoader(
        split.documents, replace(config, num_workers=num_workers), packer=split.packer
    ) as loader:
        # A checkpoint of Megatron knows no more than the samples consumed.
        loader.load_state_dict({**loader.state_dict(), "position": 16, "consumed_samples": 16})
        assert [next(loader).batch.tokens.tolist() for _ in range(24)] == stream[16:]
        assert loader.state_dict() == state
        with pytest.raises(ValueError, match="the samples end after 40"):
            next(loader)


@in_a_child
def test_a_state_of_another_shuffle_is_refused(prefixes):
    states = []
    for change in ({}, {"seed": 3}, {"num_samples": 200}):
        sizes = (change.pop("num_samples", 40), 0, 0)
        split = open_gpt_samples(samples_of(prefixes[:1], "100", sizes, **change))["train"]
        with loader_of(split) as loader:
            states.append((loader.state_dict(), loader.load_state_dict))
            for state, _ in states[:-1]:
                with pytest.raises(
                    ValueError, match=r"loader state: (seed=|this run has another index)"
                ):
                    loader.load_state_dict(state)


def files_of(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@in_a_child
def test_indices_are_left_in_the_cache_folder_only_and_used_again(prefixes, tmp_path, monkeypatch):
    corpora = files_of(Path(prefixes[0]).parent)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plain = samples_of(prefixes, "90,10", (60, 5, 0))
    without = open_gpt_samples(plain)["train"]
    assert not any(tmp_path.iterdir())
    cache = tmp_path / "cache"
    cached = samples_of(prefixes, "90,10", (60, 5, 0), cache_path=cache)
    first = open_gpt_samples(cached)["train"]
    files = files_of(cache)
    assert len(files) == 2 * 3 * 4  # splits, corpora, files
    second = open_gpt_samples(cached)["train"]
    assert files_of(cache) == files
    assert {s.packer.identity()["index"] for s in (without, first, second)} == {
        without.packer.identity()["index"]
    }
    packs = [[next(split.packer) for _ in range(60)] for split in (without, first, second)]
    assert packs[0] == packs[1] == packs[2]
    assert files_of(Path(prefixes[0]).parent) == corpora


def put(array, place, value):
    array[place] = value
    return array


DAMAGE = {
    "a document that is not there": ("document", lambda a: put(a, 0, 5000), "holds 5000 at 0"),
    "another dtype": ("sample", lambda a: a.astype(float), "holds float64"),
    "another shape": ("sample", lambda a: a.reshape(-1), "want integers"),
    "places that fall": ("sample", lambda a: a[::-1], "as sample 0"),
    "no permutation": ("shuffle", lambda a: put(a, 0, a[1]), "holds no sample"),
    "a sample that is not there": ("shuffle", lambda a: put(a, 0, 2**31), "holds 2147483648 at 0"),
}


@pytest.mark.parametrize("name", DAMAGE)
@in_a_child
def test_a_damaged_index_of_the_cache_is_built_again_with_one_line(prefixes, tmp_path, name):
    kind, change, says = DAMAGE[name]
    log, lines = logging.getLogger("megatron_cp"), []
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    request = samples_of(prefixes[:1], "100", (150, 0, 0), cache_path=tmp_path)
    packs = list(open_gpt_samples(request)["train"].packer)
    (file,) = tmp_path.glob(f"*-{kind}_index.npy")
    good = file.read_bytes()
    for damage in (change(np.load(file)), None):
        if damage is None:
            file.write_bytes(good[:-1])
            says = "is not an .npy file of numbers"
        else:
            np.save(file, damage)
        assert list(open_gpt_samples(request)["train"].packer) == packs
        (line,) = lines
        assert line.startswith(str(file)) and says in line
        assert line.endswith(": the index of samples is built again")
        assert file.read_bytes() == good
        lines.clear()
        assert list(open_gpt_samples(request)["train"].packer) == packs
        assert lines == []


@in_a_child
def test_an_index_of_megatron_s_own_is_read_from_its_cache(prefixes, tmp_path):
    """What an earlier version left, which let Megatron write the files."""
    from megatron.core.datasets import gpt_dataset

    plain = samples_of(prefixes[:1], "80,20", (60, 5, 0))
    cached = replace(plain, cache_path=tmp_path)
    open_gpt_samples(cached)
    ours = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        built = gpt_dataset.GPTDataset._build_document_sample_shuffle_indices

        def write_in_the_cache(dataset):
            dataset.config.path_to_cache = str(tmp_path)
            return built(dataset)

        patch.setattr(
            gpt_dataset.GPTDataset, "_build_document_sample_shuffle_indices", write_in_the_cache
        )
        open_gpt_samples(plain)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == ours
    files = files_of(tmp_path)
    assert list(open_gpt_samples(cached)["train"].packer) == list(
        open_gpt_samples(plain)["train"].packer
    )
    assert files_of(tmp_path) == files


@in_a_child
def test_what_megatron_cannot_build_is_refused_in_one_line(prefixes, tmp_path):
    write_corpus(tmp_path / "tiny", [3], eod=EOD)
    both = [prefixes[0], str(tmp_path / "tiny")]
    with pytest.raises(ValueError, match="tiny has 3 tokens in the train split, at least 13"):
        open_gpt_samples(samples_of(both, "100", (9, 0, 0)))
    weighted = ["1", both[0], "1", both[1]]
    with pytest.raises(ValueError, match="tiny has 0 tokens in the valid split, at least 1 are"):
        open_gpt_samples(samples_of(weighted, "60,40", (9, 9, 0)))
    with IndexedWriter(tmp_path / "sentences", dtype=np.int32) as writer:
        writer.add_document(np.arange(30), sequence_lengths=[10, 20])
        writer.finish()
    with pytest.raises(ValueError, match="2 sequences in 1 documents"):
        open_gpt_samples(samples_of([str(tmp_path / "sentences")], "100", (9, 0, 0)))
    with pytest.raises(ValueError, match="give blend and split"):
        GPTSamples(seq_length=4, seed=1, num_samples=(1, 0, 0))


def test_a_corpus_made_again_under_its_name_gets_an_index_of_its_own(tmp_path):
    """Ten documents, then forty: an index of the first would never draw the others."""
    words, drawn = [str(tmp_path / "a")], []
    for count in (10, 40, 10):
        write_corpus(tmp_path / "a", [20] * count, eod=EOD)
        request = samples_of(words, "100", (60, 0, 0), cache_path=tmp_path / "cache")
        index = open_gpt_samples(request)["train"].packer
        drawn.append(
            {piece.document for pack in itertools.islice(index, 60) for piece in pack.pieces}
        )
    assert drawn == [set(range(10)), set(range(40)), set(range(10))]
