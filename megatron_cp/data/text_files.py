"""Text documents from JSONL files, text files and folders, with a count of everything skipped.

A line of a .jsonl, .ndjson or .json file is a document; so is a text file, and each file of a folder. What
is not text (not UTF-8, NUL bytes, bad JSON, a missing field, one given twice) is counted, never dropped silently.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TOO_LONG = "longer than the limit"
_EMPTY = "empty"
# How gzip, zstd, xz and bzip2 begin.
_COMPRESSED = re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|\xfd7zXZ\0|BZh[1-9]1AY&SY")
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")  # all records of a file in one value


class RepeatedKeyError(ValueError):
    """An object of JSON has a key twice: all but the last value would be lost."""


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of these pairs, for `json.loads`. Raises RepeatedKeyError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise RepeatedKeyError(f"the key {name!r} stands twice in an object")
    return found


def has_lone_surrogate(value: object) -> bool:
    """Whether a value of JSON holds half a character, which JSON may escape and no encoding of Unicode has."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


class TextInputs:
    """An iterable of {field: text} over all documents of `paths`, in a fixed order.

    `skipped` counts by reason, `sources` lists what was read ({path, bytes, sha256}, relative
    names), `bytes_read` grows as files are read. A file inside a folder may not lead out of it by
    a link. Text files stand for every field of `fields`.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file of `paths` is compressed or one array of JSON; or, while reading, is not blank and has no
            document.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        fields: Sequence[str] = ("text",),
        patterns: Sequence[str] = ("*",),
        max_document_bytes: int = 1 << 26,
    ) -> None:
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"--input {path} does not exist; give files or folders")
            if path.is_file():  # now, not when its turn comes
                _refuse_format(path)
        self.paths, self.fields, self.patterns = tuple(paths), tuple(fields), tuple(patterns)
        self.max_document_bytes = max_document_bytes
        self.skipped: Counter[str] = Counter()
        self.sources: list[dict[str, Any]] = []
        self.bytes_read = 0

    def files(self) -> Iterator[tuple[Path, str]]:
        """Returns pairs (file, its name under the input) in sorted order."""
        for path in self.paths:
            if path.is_dir():
                yield from self._files_of_folder(path.resolve())
            else:
                yield path, path.name

    def _files_of_folder(self, root: Path) -> Iterator[tuple[Path, str]]:
        for folder, subfolders, names in os.walk(root):  # does not follow links to folders
            subfolders.sort()
            for name in sorted(names):
                file = Path(folder, name)
                if not any(fnmatch.fnmatch(name, pattern) for pattern in self.patterns):
                    continue
                if file.is_file() and file.resolve().is_relative_to(root):
                    yield file, file.relative_to(root).as_posix()
                else:
                    self.skipped["not a file of the folder"] += 1

    def __iter__(self) -> Iterator[dict[str, str]]:
        for file, name in self.files():
            reads = self._lines if file.suffix.lower() in JSON_SUFFIXES else self._whole
            before, records = self.skipped.copy(), reads(file, name)
            first = next(records, None)
            if first is not None:
                yield first
                yield from records
            elif file in self.paths:
                self._refuse_nothing(file, self.skipped - before)

    def _refuse_nothing(self, file: Path, skipped: Counter[str]) -> None:
        """Raises ValueError for a file that was asked for and is not blank: the corpus would lack all of it."""
        del skipped[_EMPTY]
        if not skipped:
            return
        wanted = f"text in UTF-8 of at most {self.max_document_bytes} bytes"
        if file.suffix.lower() in JSON_SUFFIXES:
            wanted = f"a JSON object with {' and '.join(self.fields)} in each line"
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise ValueError(
            f"--input {file} has no document (skipped: {reasons}); it must hold {wanted}: make it so, or leave it out"
        )

    def _whole(self, file: Path, name: str) -> Iterator[dict[str, str]]:
        if file.stat().st_size > self.max_document_bytes:
            self.skipped[_TOO_LONG] += 1
            return
        raw = file.read_bytes()
        self.bytes_read += len(raw)
        text = self._decode(raw)
        if text is not None:
            self._refuse_json_lines(file, text)
            self._remember(name, len(raw), hashlib.sha256(raw).hexdigest())
            yield dict.fromkeys(self.fields, text)

    def _refuse_json_lines(self, file: Path, text: str) -> None:
        """Raises ValueError for lines of JSON under another name: they would be one document, braces and all."""
        first = text.lstrip().partition("\n")[0]
        if file not in self.paths or not first.startswith("{"):
            return
        try:
            row = json.loads(first)
        except (ValueError, RecursionError):
            return
        if isinstance(row, dict) and all(field in row for field in self.fields):
            raise ValueError(
                f"--input {file}: its first line is a JSON object with {', '.join(self.fields)}, and its name "
                f"ends in none of {', '.join(JSON_SUFFIXES)}; rename it, so that each line is a document"
            )

    def _lines(self, file: Path, name: str) -> Iterator[dict[str, str]]:
        total, num_bytes = hashlib.sha256(), 0
        with file.open("rb") as stream:
            if _ARRAY.match(stream.peek(64)):  # its last record alone may look like a line
                self.skipped["JSON array, not lines"] += 1
                return
            while line := stream.readline(self.max_document_bytes):
                total.update(line)
                num_bytes += len(line)
                self.bytes_read += len(line)
                complete = line.endswith(b"\n") or len(line) < self.max_document_bytes
                while not complete:  # memory stays bounded whatever the file holds
                    rest = stream.readline(1 << 20)
                    total.update(rest)
                    num_bytes += len(rest)
                    self.bytes_read += len(rest)
                    complete = rest.endswith(b"\n") or not rest
                    line = b""
                record = self._record(line)
                if record is not None:
                    yield record
        self._remember(name, num_bytes, total.hexdigest())

    def _record(self, line: bytes) -> dict[str, str] | None:
        if not line:
            self.skipped[_TOO_LONG] += 1
            return None
        text = self._decode(line)
        if text is None:
            return None
        try:
            record = json.loads(text, object_pairs_hook=with_unique_keys)
        except RepeatedKeyError:
            self.skipped["key given twice"] += 1
            return None
        except (ValueError, RecursionError):
            self.skipped["not JSON"] += 1
            return None
        values = {f: record.get(f) for f in self.fields} if isinstance(record, dict) else {}
        texts = {field: value for field, value in values.items() if isinstance(value, str)}
        if len(texts) < len(self.fields):
            self.skipped[f"no text in field {' or '.join(self.fields)}"] += 1
            return None
        return self._checked(texts)

    def _checked(self, record: dict[str, str]) -> dict[str, str] | None:
        """Returns the record; None if its texts are empty or no text (JSON may escape anything)."""
        joined = "".join(record.values())
        if not joined.strip():
            self.skipped[_EMPTY] += 1
        elif "\0" in joined:
            self.skipped["NUL character"] += 1
        elif not joined.isascii() and any("\ud800" <= c <= "\udfff" for c in joined):
            self.skipped["lone surrogate"] += 1
        else:
            return record
        return None

    def _decode(self, raw: bytes) -> str | None:
        if _COMPRESSED.match(raw):
            self.skipped["compressed"] += 1
        elif b"\0" in raw:
            self.skipped["NUL character"] += 1
        else:
            try:
                text = raw.decode("utf-8-sig")  # a byte order mark in front is no text
            except UnicodeDecodeError:
                self.skipped["not UTF-8"] += 1
            else:
                if text.strip():
                    return text
                self.skipped[_EMPTY] += 1
        return None

    def _remember(self, name: str, num_bytes: int, sha256: str) -> None:
        self.sources.append({"path": name, "bytes": num_bytes, "sha256": sha256})


def _refuse_format(path: Path) -> None:
    """Raises ValueError for a file that is no text, or no lines, as its first bytes say."""
    with path.open("rb") as stream:
        head = stream.read(64)
    if _COMPRESSED.match(head):
        raise ValueError(f"--input {path} is compressed; unpack it, and give what is in it")
    if path.suffix.lower() in JSON_SUFFIXES and _ARRAY.match(head):
        raise ValueError(
            f"--input {path} is one JSON array; each line must be a document: write its objects one a line"
        )
