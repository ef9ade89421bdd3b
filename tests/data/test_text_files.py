"""Reading documents: what is text comes out unchanged, what is not is counted."""

import bz2
import gzip
import hashlib
import json
import lzma

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.text_files import TextInputs


def texts(paths, **settings):
    inputs = TextInputs(paths, **settings)
    return list(inputs), dict(inputs.skipped), inputs


@given(st.lists(st.text(min_size=1), max_size=6))
def test_every_text_of_a_json_file_comes_out_unchanged(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    records, skipped, _ = texts([path.parent])
    kept = [t for t in documents if t.strip() and "\0" not in t]
    assert [r["text"] for r in records] == kept
    assert sum(skipped.values()) == len(documents) - len(kept)


def test_lines_that_hold_no_document_are_counted(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(
        b'{"text": "good"}\n'
        b"\n   \n"
        b'{"text": ""}\n'
        b'{"other": "x"}\n{"text": 5}\n[1]\n'
        b'{"text": "a\\u0000b"}\n{"text": "a\0b"}\n'
        b'{"text": "\xff"}\n'
        b'{"text": "\\ud800"}\n'
        b'{"text": "one", "text": "two"}\n'
        b"{broken\n" + b"[" * 100_000 + b"\n"
        b'{"text": "' + b"x" * 200_000 + b'"}\n'
        b'{"text": "last, without end of line"}'
    )
    records, skipped, inputs = texts([path], max_document_bytes=150_000)
    assert [r["text"] for r in records] == ["good", "last, without end of line"]
    assert skipped == {
        "empty": 3,
        "no text in field text": 3,
        "NUL character": 2,
        "not UTF-8": 1,
        "lone surrogate": 1,
        "key given twice": 1,
        "not JSON": 2,
        "longer than the limit": 1,
    }
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    size = path.stat().st_size
    assert inputs.sources == [{"path": "bad.jsonl", "bytes": size, "sha256": sha256}]
    assert inputs.bytes_read == size


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_line_as_long_as_the_limit_is_still_read(tmp_path, extra):
    line = b'{"text": "abc"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(line * 3)
    records, skipped, _ = texts([tmp_path], max_document_bytes=len(line) + extra)
    assert len(records) == (0 if extra < 0 else 3)
    assert sum(skipped.values()) == (3 if extra < 0 else 0)


def test_a_folder_gives_one_document_per_file_in_sorted_order(tmp_path):
    for name in ("b/z.md", "a.txt", "b/c/x.txt", "skip.bin"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"text of {name}")
    (tmp_path / "in/b/raw.md").write_bytes(b"\xff\xfe")
    records, skipped, inputs = texts([tmp_path / "in"], patterns=["*.txt", "*.md"])
    names = ["a.txt", "b/z.md", "b/c/x.txt"]
    assert [r["text"] for r in records] == [f"text of {name}" for name in names]
    assert [source["path"] for source in inputs.sources] == names
    assert skipped == {"not UTF-8": 1}


def test_links_do_not_lead_out_of_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/other.txt").write_text("secret too")
    (tmp_path / "in/own.txt").write_text("own")
    (tmp_path / "in/link.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "in/dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in/folder").symlink_to(tmp_path / "folder")
    records, skipped, _ = texts([tmp_path / "in"])
    assert records == [{"text": "own"}]
    assert skipped == {"not a file of the folder": 2}


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--input .*nowhere does not exist"):
        TextInputs([tmp_path / "nowhere"])


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json"])
def test_lines_of_json_are_documents_by_each_of_their_names(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert [row["text"] for row in TextInputs([tmp_path / name])] == ["one", "two"]


@pytest.mark.parametrize("name", ["a", "a.txt", "a.jsonl.txt"])
def test_lines_of_json_under_another_name_are_refused(tmp_path, name):
    (tmp_path / name).write_text('\n{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(
        ValueError, match=r"its first line is a JSON object with text, .* rename it"
    ):
        list(TextInputs([tmp_path / name]))
    assert len(list(TextInputs([tmp_path]))) == 1  # a folder's files are what they are
    (tmp_path / name).write_text('{"other": "one"}\n{')
    assert len(list(TextInputs([tmp_path / name]))) == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    text = "first" if name == "a.txt" else '{"text": "first"}\n{"text": "second"}\n'
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    inputs = TextInputs([tmp_path / name])
    assert [record["text"] for record in inputs] == ["first", "second"][: 1 + (name == "a.jsonl")]
    assert not inputs.skipped


# RFC 8878, 3.1.1: a frame of one raw block.
ZSTD = bytes.fromhex("28b52ffd2005290000") + b"text."


@pytest.mark.parametrize(
    "packed",
    [gzip.compress(b"text", mtime=0), bz2.compress(b"text"), lzma.compress(b"text"), ZSTD],
    ids=["gzip", "bzip2", "xz", "zstd"],
)
def test_a_compressed_input_is_refused_and_one_of_a_folder_counted(tmp_path, packed):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    for name in ("b.jsonl.gz", "c.jsonl"):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(ValueError, match=rf"{name} is compressed; unpack it"):
            TextInputs([tmp_path / "a.jsonl", tmp_path / name])
    records, skipped, _ = texts([tmp_path])
    assert records == [{"text": "one"}]
    assert skipped.pop("compressed") == 2
    assert set(skipped) <= {"not UTF-8", "NUL character", "not JSON"}  # of later "lines"


@pytest.mark.parametrize("start", ["[", "\n [\n", "\ufeff["])
def test_an_array_of_json_is_refused_and_one_of_a_folder_counted(tmp_path, start):
    """Its last record stands alone in its line, as a document would."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    array = start + '{"text": "x"},\n{"text": "y"}\n]\n'
    (tmp_path / "b.json").write_text(array, encoding="utf-8")
    with pytest.raises(ValueError, match=r"b.json is one JSON array; each line must be a document"):
        TextInputs([tmp_path / "a.jsonl", tmp_path / "b.json"])
    records, skipped, _ = texts([tmp_path])
    assert records == [{"text": "one"}]
    assert skipped == {"JSON array, not lines": 1}


@pytest.mark.parametrize(
    ("name", "content", "reasons"),
    [
        ("b.jsonl", b'{"other": "x"}\n\n{\n', "1 no text in field text, 1 not JSON"),
        ("b.txt", "\u00e9".encode("latin-1"), "1 not UTF-8"),
        ("b.txt", b"x" * 50, "1 longer than the limit"),
    ],
)
def test_an_input_without_a_document_is_refused_and_one_of_a_folder_counted(
    tmp_path, name, content, reasons
):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} has no document \(skipped: {reasons}\)"):
        texts([tmp_path / "a.jsonl", tmp_path / name], max_document_bytes=40)
    records, _, _ = texts([tmp_path], max_document_bytes=40)
    assert {"text": "one"} in records


@pytest.mark.parametrize("name", ["b.jsonl", "b.txt"])
@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff", "\ufeff\u2003\n"])
def test_a_blank_input_is_no_error_and_no_document(tmp_path, name, content):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / name).write_text(content, encoding="utf-8")
    records, skipped, _ = texts([tmp_path / name, tmp_path / "a.jsonl"])
    assert records == [{"text": "one"}]
    assert set(skipped) <= {"empty"}
