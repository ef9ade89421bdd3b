"""tools/preprocess_data.py: what goes in as text comes out as the same tokens."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.data.document_set import open_documents
from megatron_cp.data.indexed import IndexedDataset
from megatron_cp.data.supervision import write_supervision
from megatron_cp.data.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer
from tests.processes import HANG_SECONDS, is_running, wait_until
from tools import preprocess_data

BYTES = ["--tokenizer-type", "ByteLevel"]


def run(*arguments):
    return preprocess_data.main([str(a) for a in arguments])


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_come_back_in_order_with_their_end(tmp_path, capsys, workers):
    records = [{"text": f"document {i} ä" * (i % 7 + 1)} for i in range(150)]
    path = write_jsonl(tmp_path / "in.jsonl", [*records, {"text": ""}, {"no": 1}])
    prefix = tmp_path / "out"
    command = ("--input", path, "--output-prefix", prefix, "--append-eod", "--workers", workers)
    assert run(*command, "--log-interval", 50, *BYTES) == 0
    dataset = IndexedDataset(f"{prefix}_text_document")
    dataset.verify()
    tokenizer = ByteLevelTokenizer()
    got = [dataset.read(i) for i in range(len(dataset))]
    assert [tokenizer.detokenize(t[:-1].tolist()) for t in got] == [r["text"] for r in records]
    assert all(t[-1] == tokenizer.eod for t in got)
    output = capsys.readouterr()
    assert "150 documents" in output.out
    assert "skipped: 1 empty, 1 no text in field text" in output.out
    assert "processed 100 documents" in output.err
    manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
    assert manifest["documents"] == 150
    assert manifest["skipped"] == {"empty": 1, "no text in field text": 1}
    assert manifest["tokenizer"]["vocab_size"] == 258


def test_a_file_without_fields_is_not_its_own_prefix(tmp_path, capsys):
    write_jsonl(tmp_path / "in.jsonl", [{"q": "what?", "text": "that"}])
    (tmp_path / "notes.txt").write_text("some notes")
    command = ("--input", tmp_path, "--output-prefix", tmp_path / "o", "--prefix-json-key", "q")
    with pytest.raises(SystemExit, match="2"):
        run(*command, *BYTES)
    (line,) = capsys.readouterr().err.splitlines()
    assert "--prefix-json-key q:" in line and "notes.txt has no such field" in line
    assert run(*command, *BYTES, "--patterns", "*.jsonl") == 0
    assert IndexedDataset(tmp_path / "o_text_document").document_lengths.tolist() == [9]


def test_blanks_between_patterns_leave_no_file_out(tmp_path):
    for name in ("a.py", "b.md", "c.txt"):
        (tmp_path / name).write_text(name)
    command = ("--input", tmp_path, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*command, "--patterns", "*.py, *.md") == 0
    dataset = IndexedDataset(tmp_path / "o_text_document")
    assert [bytes(dataset.read(i).tolist()) for i in range(len(dataset))] == [b"a.py", b"b.md"]


def test_a_bpe_is_written_into_a_folder_too(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "a text to learn from"}] * 3)
    (tmp_path / "folder").mkdir()
    command = ("--input", path, "--tokenizer-type", "HuggingFaceTokenizer", "--train-bpe", "300")
    for place in ("folder", "file.json"):
        prefix = ("--output-prefix", tmp_path / place)
        assert run(*command, "--tokenizer-model", tmp_path / place, *prefix) == 0
    file = tmp_path / "folder" / "tokenizer.json"
    assert file.read_bytes() == (tmp_path / "file.json").read_bytes()
    ids = IndexedDataset(f"{tmp_path}/folder_text_document").read(0).tolist()
    assert HuggingFaceTokenizer(file).detokenize(ids) == "a text to learn from"


def test_each_key_gets_its_own_files(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "ab", "summary": "c"}] * 2)
    keys = ("--json-keys", "text", "summary")
    assert run("--input", path, "--output-prefix", tmp_path / "o", *keys, *BYTES) == 0
    assert IndexedDataset(tmp_path / "o_text_document").document_lengths.tolist() == [2, 2]
    assert IndexedDataset(tmp_path / "o_summary_document").document_lengths.tolist() == [1, 1]


def test_a_prefix_field_makes_prefix_documents(tmp_path):
    records = [{"q": "what?", "text": "that"}, {"q": "é", "text": "so"}]
    path = write_jsonl(tmp_path / "in.jsonl", records)
    command = ("--input", path, "--output-prefix", tmp_path / "o", *BYTES)
    assert run(*command, "--prefix-json-key", "q") == 0
    documents = open_documents(tmp_path / "o_text_document")
    assert documents.prefix_lengths.tolist() == [5, 2]
    assert bytes(documents.read(0, 0, 9).tolist()) == b"what?that"
    assert run(*command) == 0  # again without: no prefix of the older corpus may stay
    assert not open_documents(tmp_path / "o_text_document").prefix_lengths.any()


def test_a_trained_vocabulary_encodes_the_corpus(tmp_path):
    for i in range(20):
        (tmp_path / f"doc{i}.py").write_text(f"def function_{i}(argument):\n    return argument\n")
    model = tmp_path / "tok" / "tokenizer.json"
    tokenizer_flags = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", model)
    paths = ("--input", tmp_path, "--patterns", "*.py", "--output-prefix", tmp_path / "o")
    names = ("--tokenizer-special-tokens", "<fim_prefix>", "<fim_middle>")
    assert run(*paths, *tokenizer_flags, "--train-bpe", 300, *names) == 0
    tokenizer = HuggingFaceTokenizer(model)
    assert [tokenizer.token_id(name) for name in names[1:]] == [2, 3]
    dataset = IndexedDataset(tmp_path / "o_text_document")
    assert dataset.dtype == np.uint16
    names = sorted(f"doc{i}.py" for i in range(20))
    for i, name in enumerate(names):
        text = tokenizer.detokenize(dataset.read(i).tolist())
        assert text == (tmp_path / name).read_text()
    sources = (tmp_path / "o_text_document.sources.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in sources] == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json-keys", "../up"], "must consist of letters"),
        (["--json-keys", "a", "b", "a"], "--json-keys names 'a' twice"),
        (["--json-keys", "a", "b", "--prefix-json-key", "q"], "run once per field"),
        (["--workers", "0"], "--workers 0 must be at least 1"),
        (["--train-bpe", "300"], "set --tokenizer-type"),
        (["--tokenizer-special-tokens", "<a>"], "is for TikTokenizer or --train-bpe; drop it"),
    ],
)
def test_wrong_arguments_are_one_line_and_a_failure(tmp_path, capsys, arguments, message):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(SystemExit) as stop:
        run("--input", path, "--output-prefix", tmp_path / "o", *BYTES, *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_is_written_when_nothing_can_be_read(tmp_path, capsys):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": ""}, {"x": 1}])
    with pytest.raises(SystemExit, match="2"):
        run("--input", path, "--output-prefix", tmp_path / "o", *BYTES)
    error = capsys.readouterr().err
    assert error.startswith(f"preprocess_data.py: error: --input {path} has no document")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]
    path.write_text("\n")
    with pytest.raises(SystemExit, match="2"):
        run("--input", path, "--output-prefix", tmp_path / "o", *BYTES)
    assert "--input holds no document; skipped: {'empty': 1}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SystemExit, match="2"):
        run("--input", tmp_path / "no", "--output-prefix", tmp_path / "o", *BYTES)
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokenizer-type", "ByteLevel", "--log-interval", "0"], "--log-interval 0 must be"),
        (["--tokenizer-type", "ByteLevel", "--max-document-mib", "0"], "--max-document-mib 0 must"),
        (["--tokenizer-type", "ByteLevel", "--workers", "0"], "--workers 0 must be at least 1"),
        (["--tokenizer-type", "BertWordPieceCase"], "choose from"),
        ([*BYTES, "--output-prefix", ""], "--output-prefix is given an empty word"),
        ([*BYTES, "--output-prefix", "s3://b/o"], "--output-prefix s3://b/o is a URL"),
        ([*BYTES, "--input", "https://h/t.jsonl"], "--input https://h/t.jsonl is a URL"),
        ([*BYTES, "--input", ""], "--input is given an empty word"),
        ([*BYTES, "--input", "a/../t.txt", "./t.txt"], "--input names a/../t.txt twice"),
        (
            ["--tokenizer-type", "TikTokenizer", "--tokenizer-special-tokens", "<x>", "<x>"],
            "--tokenizer-special-tokens ['<x>', '<x>'] must be different words",
        ),
        (
            [*BYTES, "--tokenizer-model", "t.json"],
            "--tokenizer-model is not for --tokenizer-type By",
        ),
        ([*BYTES, "--merge-file", "merges.txt"], "--merge-file is not for --tokenizer-type Byte"),
        ([*BYTES, "--vocab-size", "9"], "--vocab-size is not for --tokenizer-type ByteLevel; drop"),
        ([], "--tokenizer-type"),
    ],
)
def test_wrong_flags_are_one_line_without_usage(tmp_path, capsys, arguments, named):
    (tmp_path / "some.txt").write_text("some text")
    with pytest.raises(SystemExit) as stop:
        run("--input", tmp_path / "some.txt", "--output-prefix", tmp_path / "out", *arguments)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert [path.name for path in tmp_path.iterdir()] == ["some.txt"]


def test_what_stood_beside_an_older_corpus_of_that_name_goes(tmp_path):
    first = write_jsonl(
        tmp_path / "in.jsonl", [{"text": "abc", "n": "x"}, {"text": "de", "n": "y"}]
    )
    options = ["--output-prefix", tmp_path / "o", *BYTES]
    run("--input", first, *options, "--prefix-json-key", "n")
    prefix = f"{tmp_path}/o_text_document"
    write_supervision(prefix, [(0, 1, 3)])
    assert open_documents(prefix).is_supervised
    run("--input", first, *options)
    again = open_documents(prefix)
    assert not again.is_supervised
    assert (again.prefix_lengths == 0).all()


def test_a_run_that_fails_at_its_end_leaves_an_older_corpus_whole(tmp_path, monkeypatch):
    first = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc", "n": "x"}])
    options = ["--input", first, "--output-prefix", tmp_path / "o", *BYTES]
    run(*options, "--prefix-json-key", "n")
    prefix = f"{tmp_path}/o_text_document"
    write_supervision(prefix, [(0, 1, 3)])

    def full(writer, facts, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preprocess_data.IndexedWriter, "finish", full)
    with pytest.raises(SystemExit):
        run(*options)
    again = open_documents(prefix)
    assert again.is_supervised and again.prefix_lengths.tolist() == [1]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_full_disk_is_one_line_and_leaves_the_older_corpus_alone(tmp_path, capsys, suffix):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc"}])
    command = ("--input", path, "--output-prefix", tmp_path / "o", *BYTES)
    run(*command)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    # What the tool writes goes to a device that is always full.
    name = f"o_text_document.{suffix}.tmp-{socket.gethostname()}-{os.getpid()}"
    (tmp_path / name).symlink_to("/dev/full")
    write_jsonl(path, [{"text": "de"}])
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run(*command)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("o_text_document: No space left on device")
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after == before | {"in.jsonl": path.read_bytes()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_tool_and_nothing_stays(tmp_path, number):
    os.mkfifo(tmp_path / "in.jsonl")
    command = ["--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "out" / "o", *BYTES]
    tool = subprocess.Popen(
        [sys.executable, preprocess_data.__file__, *map(str, command)],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # tests may run under nohup
    )
    with tool, (tmp_path / "in.jsonl").open("w") as pipe:
        pipe.write('{"text": "abc"}\n')
        pipe.flush()
        try:
            wait_until(lambda: any((tmp_path / "out").glob("*")), "the tool wrote nothing")
            tool.send_signal(number)
            _, said = tool.communicate(timeout=HANG_SECONDS)
        finally:
            tool.kill()
    assert tool.returncode == 128 + number
    assert said.decode() == f"preprocess_data.py: {number.name}: nothing is written\n"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("prefix", ["out/", "out/x"])
def test_a_prefix_is_what_names_begin_with(tmp_path, prefix):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc"}])
    run("--input", path, "--output-prefix", f"{tmp_path}/{prefix}", *BYTES)
    assert len(IndexedDataset(f"{tmp_path}/{prefix}_text_document")) == 1


def test_a_vocabulary_is_not_learned_from_a_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "in.jsonl")
    model = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tmp_path / "t.json")
    command = ("--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "o", *model)
    with pytest.raises(SystemExit, match="2"):
        run(*command, "--train-bpe", 300)
    assert "in.jsonl twice, and it is a pipe; give a file" in capsys.readouterr().err


@pytest.mark.parametrize("key", [(), ("--prefix-json-key", "n")])
def test_no_corpus_is_readable_before_what_says_how_it_is_read(tmp_path, monkeypatch, key):
    """As if the tool were killed after each step of its end: the older corpus, none, or the new one, each whole."""
    first = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc", "n": "x"}])
    second = write_jsonl(tmp_path / "in2.jsonl", [{"text": "bcd", "n": "yz"}])
    options, prefix = ["--output-prefix", tmp_path / "o", *BYTES], f"{tmp_path}/o_text_document"
    run("--input", first, *options, "--prefix-json-key", "n")
    write_supervision(prefix, [(0, 1, 3)])
    seen = []

    def look():
        try:
            found = open_documents(prefix)
        except (ValueError, OSError):
            return
        text = bytes(found.read(0, 0, int(found.lengths[0])).tolist())
        sources = Path(f"{prefix}.sources.jsonl")
        made_of = json.loads(sources.read_text())["path"] if sources.is_file() else None
        seen.append((text, *found.prefix_lengths.tolist(), found.is_supervised, made_of))

    def looking(name):
        change = getattr(Path, name)

        def changed(path, *args, **more):
            result = change(path, *args, **more)
            look()
            return result

        monkeypatch.setattr(Path, name, changed)

    looking("unlink")
    looking("replace")
    run("--input", second, *options, *key)
    older = (b"xabc", 1, True, "in.jsonl")
    newer = (b"yzbcd" if key else b"bcd", 2 if key else 0, False, None)
    assert set(seen) == {older, newer}


def test_a_worker_that_is_killed_ends_the_tool_in_one_line(tmp_path, monkeypatch, capsys):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc"}] * 5000)
    submit, alive = preprocess_data.ProcessPoolExecutor.submit, [True]

    def killed(pool, *task):
        future = submit(pool, *task)
        if alive:
            future.result()  # a worker is at work
            os.kill(next(iter(pool._processes)), signal.SIGKILL)
            alive.clear()
        return future

    monkeypatch.setattr(preprocess_data.ProcessPoolExecutor, "submit", killed)
    bystander = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    bystander.start()
    try:
        with pytest.raises(SystemExit):
            run("--input", path, "--output-prefix", tmp_path / "o", "--workers", 2, *BYTES)
        assert bystander.is_alive()
    finally:
        bystander.kill()
        bystander.join()
    assert "a worker of --workers died" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


def test_workers_end_when_the_tool_is_killed(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "abc"}] * 5000)
    program = (
        "import multiprocessing, os, signal, sys\n"
        "from tools import preprocess_data as tool\n"
        "documents = tool.encoded(tool.parse_arguments(sys.argv[1:]), [{'text': 'abc'}] * 5000)\n"
        "next(documents)\n"
        "print(*[child.pid for child in multiprocessing.active_children()], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = ["--input", path, "--output-prefix", tmp_path / "o", "--workers", "2", *BYTES]
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, options)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=HANG_SECONDS,
    )
    assert result.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in result.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), "a worker outlived the tool")
