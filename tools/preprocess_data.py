#!/usr/bin/env python
r"""Documents to Megatron token files: `<prefix>_<key>_document.bin` and `.idx`.

    python tools/preprocess_data.py --input docs/ notes.txt train.jsonl --output-prefix data/train \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer.json --append-eod

Inputs are JSONL files (one document a line), text files and folders (one document a file,
recursively). What cannot be read as text is counted and named in the summary. Beside the token
files: `.manifest.json` (checksums, settings, what was skipped) and `.sources.jsonl` (the inputs
with theirs). `--train-bpe N` first learns a byte-level BPE of N tokens from the same documents and
writes it to --tokenizer-model.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np
from tqdm import tqdm

from megatron_cp.command_line import ToolParser, answering
from megatron_cp.data.indexed import token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.manifest import made_by
from megatron_cp.data.package_tokenizers import TIKTOKEN_PATTERNS
from megatron_cp.data.text_files import JSON_SUFFIXES, TextInputs
from megatron_cp.data.tokenizer import (
    TOKENIZER_TYPES,
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerFiles,
    build_tokenizer,
    train_byte_level_bpe,
)
from megatron_cp.processes import die_with_parent

_BATCH = 32  # documents per message to a worker
_WITH_TEMPLATES = ("HuggingFaceTokenizer", "SFTTokenizer")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Megatron-LM's flags of the same tool, plus folders, patterns, prefixes and BPE training."""
    parser = ToolParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, help="files and folders")
    group.add_argument("--json-keys", nargs="+", default=["text"], help="fields of a JSON line")
    group.add_argument("--prefix-json-key", help="field that stands before the text as its prefix")
    group.add_argument("--patterns", default="*", help='names in folders, "*.py,*.md"')
    group.add_argument("--max-document-mib", type=int, default=64, help="longer ones are skipped")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, required=True)
    group.add_argument("--tokenizer-model", help="tokenizer.json or its directory, or a .model")
    group.add_argument("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, help="of TikTokenizer; default 131072")
    group.add_argument("--tiktoken-pattern", choices=sorted(TIKTOKEN_PATTERNS))
    group.add_argument("--tiktoken-num-special-tokens", type=int, default=1000)
    group.add_argument(
        "--tokenizer-special-tokens", nargs="+", help="of TikTokenizer, or --train-bpe"
    )
    around = group.add_mutually_exclusive_group()
    around.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_const",
        const=True,
        help="put those of the tokenizer's template around documents, as Megatron-LM since 0.19",
    )
    around.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_const",
        const=False,
        dest="tokenizer_hf_include_special_tokens",
        help="put none, and say nothing of it",
    )
    group.add_argument("--append-eod", action="store_true", help="end every document with eod")
    group.add_argument("--train-bpe", type=int, metavar="VOCAB", help="learn a BPE first")
    group.add_argument("--train-bpe-mib", type=int, default=16, help="text to learn it from")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True)
    group.add_argument("--workers", type=int, default=1, help="processes; 1 = this one")
    group.add_argument("--log-interval", type=int, default=1000, help="documents between lines")
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for key in arguments.json_keys:
        if not re.fullmatch(r"[\w-]+", key):  # becomes part of a file name
            parser.error(f"--json-keys {key!r} must consist of letters, digits, _ and -")
        if arguments.json_keys.count(key) > 1:
            parser.error(f"--json-keys names {key!r} twice; name it once")
    if arguments.prefix_json_key and len(arguments.json_keys) > 1:
        parser.error("--prefix-json-key goes with one --json-keys field; run once per field")
    for name in ("workers", "log_interval", "max_document_mib", "train_bpe_mib"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} {getattr(arguments, name)} must be at least 1")
    _check_places(parser, arguments)
    _check_tokenizer(parser, arguments)
    _check_learning(parser, arguments)


def _check_places(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses what names no place, another machine's, or one twice."""
    for flag, places in (
        ("--input", arguments.input),
        ("--output-prefix", [arguments.output_prefix]),
    ):
        for place in places:
            if not place:
                parser.error(f"{flag} is given an empty word; give a place on this machine")
            if "://" in place:
                parser.error(
                    f"{flag} {place} is a URL; only files of this machine are read and written"
                )
    arguments.input = [Path(place) for place in arguments.input]
    real = [path.resolve() for path in arguments.input]
    if twice := [
        path for path, one in zip(arguments.input, real, strict=True) if real.count(one) > 1
    ]:
        parser.error(
            f"--input names {twice[0]} twice, and would write its documents twice; name it once"
        )


def _check_tokenizer(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses what the tokenizer would not read: the user meant another one."""
    kind = arguments.tokenizer_type
    read = {
        "tokenizer_model": kind not in ("GPT2BPETokenizer", "ByteLevel"),
        "vocab_file": kind == "GPT2BPETokenizer",
        "merge_file": kind == "GPT2BPETokenizer",
        "vocab_size": kind == "TikTokenizer",
        "tiktoken_pattern": kind == "TikTokenizer",
    }
    read["tokenizer_hf_include_special_tokens"] = kind in _WITH_TEMPLATES
    for name, is_read in read.items():
        if getattr(arguments, name) is not None and not is_read:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} is not for --tokenizer-type {kind}; drop it, or give its type")


def _check_learning(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    special = arguments.tokenizer_special_tokens or []
    if "" in special or len({*special}) < len(special):
        parser.error(
            f"--tokenizer-special-tokens {special} must be different words, none of them empty"
        )
    if not arguments.train_bpe:
        if arguments.tokenizer_special_tokens and arguments.tokenizer_type != "TikTokenizer":
            parser.error("--tokenizer-special-tokens is for TikTokenizer or --train-bpe; drop it")
        return
    if arguments.tokenizer_type != "HuggingFaceTokenizer":
        parser.error("--train-bpe makes a HuggingFaceTokenizer; set --tokenizer-type")
    if not arguments.tokenizer_model:
        parser.error("--train-bpe needs --tokenizer-model, the file to write")
    if pipes := [path for path in arguments.input if path.is_fifo()]:
        parser.error(f"--train-bpe reads --input {pipes[0]} twice, and it is a pipe; give a file")


def text_inputs(arguments: argparse.Namespace) -> TextInputs:
    """The documents that the arguments name."""
    fields = [*arguments.json_keys, *filter(None, [arguments.prefix_json_key])]
    inputs = TextInputs(
        arguments.input,
        fields=fields,
        patterns=[pattern.strip() for pattern in arguments.patterns.split(",")],
        max_document_bytes=arguments.max_document_mib << 20,
    )
    if arguments.prefix_json_key:
        _refuse_whole_files(arguments.prefix_json_key, inputs)
    return inputs


def _refuse_whole_files(prefix_key: str, inputs: TextInputs) -> None:
    """Raises ValueError for a file without fields: its text would be its own prefix."""
    for file, _ in inputs.files():
        if file.suffix.lower() not in JSON_SUFFIXES:
            raise ValueError(
                f"--prefix-json-key {prefix_key}: {file} has no such field, as only lines of "
                f"{', '.join(JSON_SUFFIXES)} have fields; leave it out of --input, or set --patterns"
            )


def _sample(inputs: TextInputs, max_bytes: int) -> Iterator[str]:
    """Texts of every n-th document, so that the first inputs do not decide the vocabulary alone."""
    total = sum(file.stat().st_size for file, _ in inputs.files())
    step = max(1, -(-total // max_bytes))
    for record in itertools.islice(iter(inputs), 0, None, step):
        yield from record.values()


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    names = (field.name for field in fields(TokenizerFiles))
    files = TokenizerFiles(**{name: getattr(arguments, name) for name in names})
    return build_tokenizer(arguments.tokenizer_type, files)


class Encoder:
    """Records to token arrays; lives in each worker."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tokenizer = _tokenizer(arguments)
        self.keys = arguments.json_keys
        self.prefix_key = arguments.prefix_json_key
        includes = arguments.tokenizer_hf_include_special_tokens
        self.start, self.end = _around(self.tokenizer) if includes else ([], [])
        self.end += [self.tokenizer.eod] if arguments.append_eod else []
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def encode(self, record: dict[str, str]) -> dict[str, tuple[np.ndarray, int]]:
        """Tokens and prefix length of each field."""
        prefix = self.start
        if self.prefix_key:
            prefix = prefix + self.tokenizer.tokenize(record[self.prefix_key])
        return {
            key: (
                np.array(prefix + self.tokenizer.tokenize(record[key]) + self.end, self.dtype),
                len(prefix) if self.prefix_key else 0,
            )
            for key in self.keys
        }


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Special tokens that the tokenizer's template puts before and behind a text."""
    return tokenizer.around_text() if isinstance(tokenizer, HuggingFaceTokenizer) else ([], [])


def _note_template(tokenizer: Tokenizer, includes: bool | None) -> None:
    """Says that texts get no special tokens, where the tokenizer has some and nobody decided."""
    before, behind = _around(tokenizer)
    if includes is None and (before or behind):
        print(
            f"note: this tokenizer's template puts {len(before)} special tokens before a text and {len(behind)} behind "
            "it (Megatron-LM does since 0.19); none is put here: --tokenizer-hf-include-special-tokens puts them, "
            "--tokenizer-hf-no-include-special-tokens is without this note",
            file=sys.stderr,
        )


_encoder: Encoder | None = None


def _start_worker(arguments: argparse.Namespace, parent: int | None = None) -> None:
    global _encoder
    if parent is not None:
        die_with_parent(parent)  # it would wait for work for ever
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per worker process
    _encoder = Encoder(arguments)


def _encode_batch(records: list[dict[str, str]]) -> list[dict[str, tuple[np.ndarray, int]]]:
    assert _encoder is not None
    return [_encoder.encode(record) for record in records]


def _batches(records: Iterable[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    iterator = iter(records)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


def encoded(arguments: argparse.Namespace, records: Iterable[dict[str, str]]) -> Iterator[Any]:
    """Encoded documents in input order, with a bounded number of batches in flight."""
    if arguments.workers == 1:
        _start_worker(arguments)
        for batch in _batches(records):
            yield from _encode_batch(batch)
        return
    # spawn: forking a process that has threads (a caller's, the tokenizer's) may deadlock
    context = multiprocessing.get_context("spawn")
    waiting: collections.deque[Any] = collections.deque()
    start = (arguments, os.getpid())
    others = multiprocessing.active_children()  # of a program that calls this one
    with ProcessPoolExecutor(arguments.workers, context, _start_worker, start) as pool:
        try:
            for batch in _batches(records):
                waiting.append(pool.submit(_encode_batch, batch))
                if len(waiting) > 4 * arguments.workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except (BrokenProcessPool, OSError) as problem:
            if isinstance(problem, OSError) and problem.errno is not None:
                raise  # of a file: a pool that breaks while it is written to has no number
            for worker in set(multiprocessing.active_children()).difference(others):
                worker.kill()  # one that is asked to end may wait for what the dead one held
            raise ChildProcessError(
                "a worker of --workers died, killed for memory perhaps: nothing is written; give fewer --workers"
            ) from None


def write_corpus(arguments: argparse.Namespace, inputs: TextInputs) -> dict[str, Any]:
    """Writes all files; returns the summary that is also in the manifests."""
    tokenizer, includes = _tokenizer(arguments), arguments.tokenizer_hf_include_special_tokens
    _note_template(tokenizer, includes)
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = {k: f"{arguments.output_prefix}_{k}_document" for k in arguments.json_keys}
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(IndexedWriter(prefix, dtype=dtype))
            for key, prefix in prefixes.items()
        }
        prefix_lengths = _write_documents(arguments, inputs, writers)
        if not prefix_lengths:
            raise ValueError(f"--input holds no document; skipped: {dict(inputs.skipped)}")
        facts = {
            **made_by(tokenizer),
            "eod_appended": arguments.append_eod,
            "special_tokens_included": bool(includes),
            "skipped": dict(inputs.skipped),
        }
        kinds = np.array(prefix_lengths, np.int64) if arguments.prefix_json_key else None
        for writer in writers.values():
            writer.finish(facts, prefix_lengths=kinds)
    for prefix in prefixes.values():
        lines = "".join(json.dumps(source) + "\n" for source in inputs.sources)
        Path(f"{prefix}.sources.jsonl").write_text(lines, encoding="utf-8")
    tokens = {key: writer.num_tokens for key, writer in writers.items()}
    return {"documents": len(prefix_lengths), "tokens": tokens, "skipped": dict(inputs.skipped)}


def _write_documents(
    arguments: argparse.Namespace, inputs: TextInputs, writers: dict[str, IndexedWriter]
) -> list[int]:
    """Tokenizes everything under a progress bar; returns the prefix length of each document."""
    total = sum(file.stat().st_size for file, _ in inputs.files())
    inputs.skipped.clear()  # counting sizes walked the folders once already
    interactive = sys.stderr.isatty()
    prefix_lengths: list[int] = []
    start = time.monotonic()
    with tqdm(total=total, unit="B", unit_scale=True, disable=not interactive) as bar:
        for document in encoded(arguments, inputs):
            for key, (tokens, _) in document.items():
                writers[key].add_document(tokens)
            prefix_lengths.append(document[arguments.json_keys[0]][1])
            bar.update(inputs.bytes_read - bar.n)
            if not interactive and len(prefix_lengths) % arguments.log_interval == 0:
                rate = len(prefix_lengths) / (time.monotonic() - start)
                message = f"processed {len(prefix_lengths)} documents ({rate:.1f} docs/s)"
                print(message, file=sys.stderr)
    return prefix_lengths


@answering("preprocess_data.py")
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool and returns its exit code."""
    arguments = parse_arguments(argv)
    if arguments.train_bpe:
        texts = _sample(text_inputs(arguments), arguments.train_bpe_mib << 20)
        train_byte_level_bpe(
            texts,
            vocab_size=arguments.train_bpe,
            path=arguments.tokenizer_model,
            special_tokens=arguments.tokenizer_special_tokens or (),
        )
    summary = write_corpus(arguments, text_inputs(arguments))
    skipped = ", ".join(f"{count} {reason}" for reason, count in sorted(summary["skipped"].items()))
    for key, num_tokens in summary["tokens"].items():
        name = f"{arguments.output_prefix}_{key}_document"
        print(f"{name}: {summary['documents']} documents, {num_tokens} tokens")
    print(f"skipped: {skipped or 'nothing'}")
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the tool as Ctrl-C does, so that what is half written goes."""
    sys.stderr.write(f"preprocess_data.py: {signal.Signals(number).name}: nothing is written\n")
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _leave)
    sys.exit(main())
