"""The token files, against Megatron-Core's own reader and writer, and against liars."""

import os
import signal
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_cp.data.indexed import HEADER, IndexedDataset, token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.manifest import manifest_path
from tests.data import megatron_oracle

documents_of_tokens = st.lists(
    hnp.arrays(np.int64, st.integers(0, 7), elements=st.integers(0, 65535)), max_size=8
)


def write(prefix, documents, dtype=np.uint16, manifest=True):
    with IndexedWriter(prefix, dtype=dtype) as writer:
        for tokens in documents:
            writer.add_document(tokens)
        writer.finish()
    if not manifest:
        manifest_path(prefix).unlink()
    return Path(f"{prefix}.idx"), Path(f"{prefix}.bin")


def read_all(dataset):
    return [dataset.read(i).tolist() for i in range(len(dataset))]


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "corpus"


@given(documents=documents_of_tokens, dtype=st.sampled_from([np.uint16, np.int32, np.int64]))
def test_files_are_byte_equal_to_those_of_megatron(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("both")
    idx, bin_ = write(folder / "ours", documents, dtype)
    megatron_oracle.write_documents(folder / "theirs", documents, dtype)
    assert bin_.read_bytes() == (folder / "theirs.bin").read_bytes()
    assert idx.read_bytes() == (folder / "theirs.idx").read_bytes()
    dataset = IndexedDataset(folder / "theirs")
    assert read_all(dataset) == [tokens.tolist() for tokens in documents]
    assert dataset.digest() == IndexedDataset(folder / "ours").digest()


def test_megatron_reads_our_files(prefix):
    documents = [np.arange(5), np.array([65535, 0]), np.arange(100, 103)]
    write(prefix, documents)
    theirs, indices = megatron_oracle.read_documents(prefix)
    assert theirs == [d.tolist() for d in documents]
    assert indices == [0, 1, 2, 3]


def test_documents_of_several_sequences_are_read_whole(prefix):
    documents = [np.arange(7), np.array([9, 8])]
    megatron_oracle.write_documents(prefix, documents, np.int32, [[3, 0, 4], [1, 1]])
    dataset = IndexedDataset(prefix)
    assert read_all(dataset) == [[0, 1, 2, 3, 4, 5, 6], [9, 8]]
    assert dataset.read(0, 2, 5).tolist() == [2, 3, 4]
    with IndexedWriter(f"{prefix}2", dtype=np.int32) as writer:
        writer.add_document(np.arange(7), sequence_lengths=[3, 0, 4])
        writer.add_document([9, 8], sequence_lengths=[1, 1])
        writer.finish()
    assert Path(f"{prefix}2.idx").read_bytes() == Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1, "uint16"), (65536, "uint16"), (65537, "int32"), (10**6, "int32")]
)
def test_the_narrowest_dtype_holds_the_largest_id(vocab_size, dtype):
    assert token_dtype(vocab_size) == np.dtype(dtype)
    assert np.iinfo(dtype).max >= vocab_size - 1


def test_nothing_appears_until_finish_and_nothing_stays_after_a_failure(prefix):
    with pytest.raises(KeyError), IndexedWriter(prefix, dtype=np.uint16) as writer:
        writer.add_document([1, 2, 3])
        assert not Path(f"{prefix}.bin").exists()
        raise KeyError
    assert list(prefix.parent.iterdir()) == []


def _killed_while_writing(prefix, place: str) -> None:
    """A process that is killed after its first document, or at its first or second file in place."""
    pid = os.fork()
    if pid == 0:
        try:
            writer = IndexedWriter(prefix, dtype="uint16")
            writer.add_document([1, 2, 3])
            calls, replace = [0], Path.replace

            def replace_or_die(path, target):
                calls[0] += 1
                if calls[0] == {"first": 1, "second": 2}[place]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return replace(path, target)

            Path.replace = replace_or_die
            if place != "documents":
                writer.finish(prefix_lengths=np.zeros(1, np.int64))
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("place", ["documents", "first", "second"])
def test_the_next_writer_removes_what_a_killed_one_left(prefix, place: str):
    _killed_while_writing(prefix, place)
    assert any(".tmp-" in path.name for path in prefix.parent.iterdir())
    write(prefix, [[7]])
    assert {path.name for path in prefix.parent.iterdir()} == {
        f"{prefix.name}.{suffix}" for suffix in ("bin", "idx", "manifest.json")
    }
    assert read_all(IndexedDataset(prefix)) == [[7]]


def test_files_of_living_writers_of_other_corpora_and_of_other_machines_stay(prefix):
    """The living one is another process: a lock does not keep a file from the process that holds it."""
    host, dead = socket.gethostname(), 2**22 + 1  # beyond the largest number of a process
    others = [
        f"{prefix.name}.bin.tmp-another{host}-{dead}",
        f"{prefix.name}2.bin.tmp-{host}-{dead}",
        f"{prefix.name}.bin.tmp-{host}-mine",
        f"{prefix.name}.bin.tmp{dead}",
    ]
    for name in others:
        (prefix.parent / name).touch()
    (prefix.parent / f"{prefix.name}.idx.tmp-{host}-{dead}").touch()
    ready, go_on = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with IndexedWriter(prefix, dtype="uint16") as writer:
                writer.add_document([1, 2, 3])
                os.write(ready[1], b".")
                os.read(go_on[0], 1)
                writer.finish()
            code = 0
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    write(prefix, [[7]])
    found = {path.name for path in prefix.parent.iterdir() if ".tmp" in path.name}
    os.write(go_on[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert found == {*others, f"{prefix.name}.bin.tmp-{host}-{pid}"}
    assert read_all(IndexedDataset(prefix)) == [[1, 2, 3]]
    for end in (*ready, *go_on):
        os.close(end)


def test_a_failed_rewrite_leaves_the_old_corpus_readable(prefix):
    write(prefix, [np.arange(4)])
    with (
        pytest.raises(ValueError, match="uint16 holds"),
        IndexedWriter(prefix, dtype=np.uint16) as w,
    ):
        w.add_document([1])
        w.add_document([65536])
    assert read_all(IndexedDataset(prefix)) == [[0, 1, 2, 3]]


def put(path, offset, form, value):
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, offset, value)
    path.write_bytes(raw)


# Three documents of 3, 2 and 4 uint16 tokens: lengths at 34, pointers at 46, documents at 70, end
# at 102.
LIES = [
    ("magic", 0, "<9s", b"MMIDIDY\0\0", "byte 0: magic number: want .* have b'MMIDIDY"),
    ("version", 9, "<Q", 2, "byte 9: format version: want 1, have 2"),
    ("dtype unknown", 17, "<B", 77, "byte 17: dtype code: .* have 77"),
    ("dtype float", 17, "<B", 7, "byte 17: dtype code: .* have 7"),
    ("dtype wider", 17, "<B", 4, "pointer of sequence 1 is unaligned"),
    ("negative count", 18, "<q", -1, "byte 34: lengths section of 18446744073709551615 entries"),
    ("huge count", 18, "<Q", 2**62, "byte 34: lengths section"),
    ("too few sequences", 18, "<Q", 2, "byte 90: end of the index"),
    (
        "no documents",
        26,
        "<Q",
        0,
        "byte 26: number of document boundaries: want at least 1, have 0",
    ),
    ("huge document count", 26, "<Q", 2**61, "byte 70: documents section"),
    ("negative length", 38, "<i", -5, "byte 38: length of sequence 1: want at least 0, have -5"),
    ("longer", 42, "<i", 5, "byte 62: pointer of sequence 2 plus its length lies beyond the .bin"),
    ("shorter", 42, "<i", 3, "byte 16: file size: want 16 bytes, have 18"),
    (
        "shorter inside",
        38,
        "<i",
        1,
        "byte 62: pointer of sequence 2 leaves a gap .* want 8, have 10",
    ),
    ("negative pointer", 54, "<q", -2, "byte 54: pointer of sequence 1 is negative"),
    ("odd pointer", 54, "<q", 7, "byte 54: pointer of sequence 1 is unaligned"),
    ("far pointer", 54, "<q", 2**62, "byte 54: pointer of sequence 1 plus its length lies beyond"),
    ("overlap", 54, "<q", 4, "byte 54: pointer of sequence 1 overlaps .* want 6, have 4"),
    ("first boundary", 70, "<q", 1, "byte 70: first document boundary: want 0, have 1"),
    ("boundary outside", 78, "<q", 9, r"byte 78: document boundary 1: want a value in \[0, 3\]"),
    ("negative boundary", 78, "<q", -1, "byte 78: document boundary 1"),
    ("boundary backwards", 78, "<q", 3, "byte 86: document boundary 2 goes backwards"),
    ("last boundary", 94, "<q", 2, "byte 94: last document boundary: want 3"),
]


@pytest.mark.parametrize(
    ("offset", "form", "value", "message"), [c[1:] for c in LIES], ids=[c[0] for c in LIES]
)
def test_a_lie_of_the_index_is_an_error_naming_file_and_offset(
    prefix, offset, form, value, message
):
    idx, _ = write(prefix, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], manifest=False)
    put(idx, offset, form, value)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(prefix)
    assert str(prefix) in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 9, 17, 33, 34, 45, 46, 69, 70, 101])
def test_an_index_truncated_in_any_section_is_an_error(prefix, size):
    idx, _ = write(prefix, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], manifest=False)
    assert idx.stat().st_size == 102
    idx.write_bytes(idx.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"corpus.idx: byte \d+: .*have {size} bytes"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 5, 17, 19, 40])
def test_a_token_file_of_another_size_is_an_error(prefix, size):
    _, bin_ = write(prefix, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], manifest=False)
    bin_.write_bytes(bin_.read_bytes().ljust(40, b"\0")[:size])
    with pytest.raises(ValueError, match=r"corpus\.(idx|bin): byte"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", ["idx", "bin"])
def test_a_missing_file_is_named(prefix, suffix):
    write(prefix, [[1]])
    Path(f"{prefix}.{suffix}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"corpus\.{suffix} does not exist"):
        IndexedDataset(prefix)


def test_a_file_truncated_after_opening_is_an_error_and_not_a_crash(prefix):
    _, bin_ = write(prefix, [np.arange(5000)])
    dataset = IndexedDataset(prefix)
    with bin_.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(ValueError, match=r"corpus.bin: byte 8000: the file changed"):
        dataset.read(0, 4000)


def test_a_file_touched_after_opening_is_told_by_its_time(prefix):
    _, bin_ = write(prefix, [np.arange(5)])
    dataset = IndexedDataset(prefix)
    os.utime(bin_, ns=(0, 1))
    with pytest.raises(ValueError, match=r"changed .* want its time of modification as at open"):
        dataset.read(0)


def test_a_replaced_file_goes_on_being_read_as_it_was(prefix):
    write(prefix, [np.arange(5)])
    dataset = IndexedDataset(prefix)
    write(prefix, [np.arange(9) + 100])
    assert read_all(dataset) == [[0, 1, 2, 3, 4]]


def test_the_manifest_exposes_a_changed_index_and_changed_tokens(prefix):
    idx, bin_ = write(prefix, [[1, 2], [], [3, 4, 5]])
    IndexedDataset(prefix).verify()
    put(bin_, 2, "<H", 7)
    with pytest.raises(ValueError, match="checksum of the tokens"):
        IndexedDataset(prefix).verify()
    put(idx, 78, "<q", 2)  # a legal index of other documents
    with pytest.raises(ValueError, match="checksum of the index"):
        IndexedDataset(prefix)
    manifest_path(prefix).write_text("[]")
    with pytest.raises(ValueError, match="is not a corpus manifest"):
        IndexedDataset(prefix)


def test_reads_outside_a_document_are_refused(prefix):
    write(prefix, [[1, 2], [3]])
    dataset = IndexedDataset(prefix)
    for call in [(2,), (-1,), (0, 0, 3), (0, -1), (0, 2, 1)]:
        with pytest.raises(IndexError):
            dataset.read(*call)


def test_the_digest_sees_tokens_and_boundaries(prefix):
    digests = set()
    for documents in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2], [4]], [[1, 2, 3]], [[1, 2], [3], []]):
        write(prefix, documents)
        digests.add(IndexedDataset(prefix).digest())
    assert len(digests) == 5


def overwrite(path, content):
    """Like `write_bytes` without emptying the file first, which is ten times slower."""
    with path.open("r+b") as stream:
        stream.write(content)
        stream.truncate()


def _mutations(rng, raw):
    """A changed copy: overwritten, flipped, extreme 32/64-bit values, inserted, removed, cut."""
    raw = bytearray(raw)
    at = int(rng.integers(len(raw)))
    kind = int(rng.integers(6))
    if kind == 0:
        raw[at] = int(rng.integers(256))
    elif kind == 1:
        raw[at] ^= 1 << int(rng.integers(8))
    elif kind == 2:
        extreme = [0, 1, 2, -1, -2, 2**31 - 1, -(2**31), 2**62, -(2**63), 2**63 - 1]
        value = extreme[int(rng.integers(len(extreme)))]
        raw[at : at + 8] = struct.pack("<q", value)[: len(raw) - at]
    elif kind == 3:
        del raw[at:]
    elif kind == 4:
        raw[at:at] = rng.bytes(int(rng.integers(1, 9)))
    else:
        del raw[at : at + int(rng.integers(1, 9))]
    return bytes(raw)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_mutated_index_opens_with_legal_content_or_raises_value_error(prefix, manifest):
    documents = [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10]]
    idx, bin_ = write(prefix, documents, manifest=manifest)
    good, tokens = idx.read_bytes(), bin_.read_bytes()
    rng = np.random.default_rng(7)
    opened = 0
    for _ in range(4000):
        overwrite(idx, _mutations(rng, good))
        try:
            dataset = IndexedDataset(prefix)
        except ValueError:
            continue
        content = read_all(dataset)
        dataset.close()
        opened += 1
        if manifest:
            assert content == documents
        else:  # whatever the documents, together they are the whole token file, once
            assert sum(map(len, content)) * dataset.dtype.itemsize == len(tokens)
            assert b"".join(np.array(c, dataset.dtype).tobytes() for c in content) == tokens
    assert opened < 800
    assert HEADER.size == 34
