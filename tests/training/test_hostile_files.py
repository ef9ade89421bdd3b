"""Files made to harm: deep JSON, huge numbers, names that lead elsewhere, ids without end. One plain error each."""

import json
import random
import struct
from pathlib import Path

import pytest

from megatron_cp.data.blend_sources import parse_blend, read_per_split_file
from megatron_cp.data.document_set import open_documents, prefix_lengths_path
from megatron_cp.data.indexed import HEADER, MAGIC, VERSION
from megatron_cp.data.manifest import manifest_path
from megatron_cp.data.supervision import supervision_path
from megatron_cp.data.tokenizer import HuggingFaceTokenizer
from megatron_cp.errors import DamagedCheckpointError
from megatron_cp.mcore.documents.gpt_dataset import GPTSamples, open_gpt_samples
from megatron_cp.models.hugging_face.config_file import read_config
from megatron_cp.models.hugging_face.safetensors_folder import INDEX, _read_index
from megatron_cp.plan.hardware.topology import load_profile
from megatron_cp.report.sources import source_of_path
from megatron_cp.training.checkpoint.files import MANIFEST, read_manifest
from megatron_cp.training.checkpoint.formats import _check_backend
from megatron_cp.training.logging.records import _read_samples
from tests.child import in_a_child
from tests.data.arrays import WRITES_A_FILE
from tests.data.corpora import write_corpus

DEEP = "[" * 200_000
TEXTS = {
    "deep lists": DEEP,
    "deep objects": '{"a":' * 200_000,
    "an endless number": "9" * 100_000,
    "an infinite size": '{"idx": {"sha256": "x"}, "bin": {"bytes": 1e999}, "files": {}, "shape": {}, "data": {}, '
    '"restarts": 1e999}',
    "no text": "\x00\xff",
    "a list": "[]",
    "nothing": "",
}


def tokenizer_file(folder: Path, **changes) -> Path:
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, **changes}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", TEXTS)
def test_hostile_json_is_one_plain_error_of_its_reader(tmp_path, name: str):
    text = TEXTS[name].encode("latin-1")

    def written(file: str) -> Path:
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_bytes(text)
        return tmp_path / file

    write_corpus(tmp_path / "corpus", [3, 4])
    written(manifest_path(tmp_path / "corpus").name)
    tokenizer = tokenizer_file(tmp_path)
    readers = [
        lambda: open_documents(tmp_path / "corpus"),
        lambda: read_manifest(written(f"checkpoint/{MANIFEST}").parent),
        lambda: _check_backend(written("backend/metadata.json").parent),
        lambda: read_config(written("model/config.json").parent),
        lambda: _read_index(written(f"weights/{INDEX}").parent),
        lambda: load_profile(written("profile.json")),
        lambda: read_per_split_file(written("splits.json")),
    ]
    for read in readers[:2] if name == "an infinite size" else readers:
        with pytest.raises((ValueError, DamagedCheckpointError)) as refused:
            read()
        assert len(str(refused.value)) < 1000
    (tmp_path / "run.json").write_text("{}")
    assert _read_samples(written("plan.json").parent, {"iteration": 9}) == []
    if name not in ("a list", "an endless number", "an infinite size"):
        written("tokenizer_config.json")
        with pytest.raises(ValueError, match="is not JSON"):
            HuggingFaceTokenizer(tokenizer)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b"])
def test_a_manifest_does_not_lead_out_of_its_checkpoint(tmp_path, name: str):
    content = {"format": 1, "files": {name: 1}, "sha256": {name: "0"}}
    content |= {"shape": {}, "data": {}, "restarts": 0}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/x.safetensors", "a/b.safetensors"])
def test_an_index_of_weights_names_files_beside_it_alone(tmp_path, name: str):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="must lie beside it"):
        _read_index(tmp_path)


@pytest.mark.parametrize("last", [2**32 - 1, 10_000_000])
def test_one_token_id_does_not_ask_for_an_embedding_of_any_size(tmp_path, last: int):
    with pytest.raises(ValueError, match=f"token id {last} with 4 tokens"):
        HuggingFaceTokenizer(tokenizer_file(tmp_path, c=last))
    assert HuggingFaceTokenizer(tokenizer_file(tmp_path, c=60_000)).vocab_size == 60_001


def test_a_changed_tokenizer_is_read_or_refused_never_worse(tmp_path):
    draw = random.Random(3)
    good = tokenizer_file(tmp_path).read_bytes()
    refused = 0
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(bad))
            if draw.random() < 0.3:
                del bad[place : place + draw.randint(1, 40)]
            else:
                bad[place] = draw.randrange(256)
        path = tmp_path / "tokenizer.json"
        path.write_bytes(bytes(bad))
        try:
            HuggingFaceTokenizer(path)
        except ValueError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("counts", [(2**63, 2), (1, 2**63), (2**64 - 1, 2**64 - 1), (2**40, 1)])
def test_an_index_with_absurd_counts_is_refused_before_anything_is_taken(tmp_path, counts):
    write_corpus(tmp_path / "corpus", [3, 4])
    manifest_path(tmp_path / "corpus").unlink()
    path = tmp_path / "corpus.idx"
    raw = path.read_bytes()
    head = MAGIC + struct.pack("<QBQQ", VERSION, 4, *counts)
    assert len(head) == HEADER.size
    path.write_bytes(head + raw[HEADER.size :])
    with pytest.raises(ValueError, match="entries"):
        open_documents(tmp_path / "corpus")


@pytest.mark.parametrize("name", [*WRITES_A_FILE, "the first bytes of a zip"])
def test_an_array_that_is_none_is_one_plain_error_of_its_reader_and_does_not_run(
    tmp_path, name: str
):
    def written(path: Path) -> Path:
        path.write_bytes(b"PK\x03\x04")
        if name in WRITES_A_FILE:
            WRITES_A_FILE[name](path, tmp_path / "ran")
        return path

    write_corpus(tmp_path / "a", [3, 4])
    write_corpus(tmp_path / "b", [3, 4])
    written(supervision_path(tmp_path / "a"))
    written(prefix_lengths_path(tmp_path / "b"))
    readers = {
        "a.supervised.npy": lambda: open_documents(tmp_path / "a"),
        "b.prefix_lengths.npy": lambda: open_documents(tmp_path / "b"),
        "lengths.npy": lambda: source_of_path(written(tmp_path / "lengths.npy")),
    }
    for file, read in readers.items():
        with pytest.raises(ValueError, match=file) as refused:
            read()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", WRITES_A_FILE)
@in_a_child
def test_nothing_runs_that_stands_in_the_cache_of_indices(tmp_path, name: str):
    write_corpus(tmp_path / "corpus", [30] * 20, eod=7)
    request = GPTSamples(
        seq_length=12, seed=1, num_samples=(40, 0, 0), blend=parse_blend([str(tmp_path / "corpus")]),
        split="100", cache_path=tmp_path / "cache", eod=7,
    )  # fmt: skip
    packs = list(open_gpt_samples(request)["train"].packer)
    files = sorted((tmp_path / "cache").glob("*.npy"))
    assert len(files) == 3
    for file in files:
        WRITES_A_FILE[name](file, tmp_path / "ran")
        assert list(open_gpt_samples(request)["train"].packer) == packs
    assert not (tmp_path / "ran").exists()
