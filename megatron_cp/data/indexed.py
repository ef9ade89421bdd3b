"""Megatron's `.bin` / `.idx` token files: a reader that believes nothing.

    prefix.bin   token | token | token | ...                 one dtype, documents back to back
    prefix.idx   magic 9 bytes | version u64 | dtype u8 | sequences u64 | documents u64
                 lengths i32[sequences]                      from byte 34 on
                 pointers i64[sequences]                     bytes into the .bin
                 first sequence of each document i64[documents]

The bytes are those of `megatron.core.datasets.indexed_dataset`, in both directions. Megatron's
reader trusts the index; a wrong one feeds it neighbouring or uninitialised memory. Here every
statement of an index is checked once, at open, with whole-array operations, and each read is a
`pread` that must return every byte: a file truncated later is an error, not a SIGBUS.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.manifest import REBUILD, manifest_path, read_manifest

# What may stand beside a corpus and says how its documents are read: document_set.py, supervision.py.
PREFIX_LENGTHS, SUPERVISED = "prefix_lengths.npy", "supervised.npy"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are Megatron's float types: legal in the format, never tokens.
TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the narrowest dtype for ids `0 .. vocab_size - 1`: uint16 up to 65536, else int32."""
    if vocab_size < 1:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least 1; pass the tokenizer's vocab_size"
        )
    return np.dtype(np.uint16 if vocab_size <= 65536 else np.int32)


def _refuse(path: Path, offset: int, statement: str, want: object, have: object) -> NoReturn:
    """Raises the one kind of error this module has."""
    raise ValueError(f"{path}: byte {offset}: {statement}: want {want}, have {have}; {REBUILD}")


@dataclass(frozen=True)
class _Fingerprint:
    """What `stat` says about the two files; a difference means that somebody changed them."""

    idx_bytes: int
    idx_mtime_ns: int
    bin_bytes: int
    bin_mtime_ns: int


class IndexedDataset:
    """Documents of a Megatron `.bin` / `.idx` pair, every claim of the index checked at open.

    `facts` is what its manifest says (`tokenizer` and `eod` where `tools/preprocess_data.py` wrote it), empty
    without one.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the index is wrong (the message names file, byte offset, the value wanted and
            the value found).
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise FileNotFoundError(
                    f"data path {self.prefix!r}: {path} does not exist; give the common prefix of "
                    "a .bin and an .idx file"
                )
        index_bytes = self.idx_path.read_bytes()
        self._descriptor = os.open(self.bin_path, os.O_RDONLY)
        try:
            status = os.fstat(self._descriptor)
            idx_status = self.idx_path.stat()
            self._fingerprint = _Fingerprint(
                len(index_bytes), idx_status.st_mtime_ns, status.st_size, status.st_mtime_ns
            )
            self.facts = read_manifest(
                manifest_path(self.prefix), self.idx_path, index_bytes, status.st_size
            )
            self.dtype, self.document_starts = _parse_index(
                self.idx_path, index_bytes, status.st_size
            )
        except BaseException:
            self.close()
            raise
        self.document_lengths: NDArray[np.int64] = np.diff(self.document_starts)
        self.document_lengths.flags.writeable = False

    @property
    def recorded_sha256(self) -> str | None:
        """Returns the SHA-256 of the `.bin` in the manifest, None without one."""
        return str(self.facts["bin"]["sha256"]) if self.facts else None

    def __len__(self) -> int:
        """Returns the number of documents, empty ones included."""
        return len(self.document_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self.document_starts[-1])

    def read(self, document: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Returns the tokens `[start, stop)` of a document, in the file's dtype.

        Raises:
            IndexError: no such document, or the range leaves it.
            ValueError: the file has changed since it was opened, or the read came back short.
        """
        if not 0 <= document < len(self):
            raise IndexError(f"document={document} must be in [0, {len(self)}) of {self.prefix}")
        length = int(self.document_lengths[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(
                f"tokens [{start}, {stop}) must lie in [0, {length}) of document {document} of "
                f"{self.prefix}"
            )
        offset = (int(self.document_starts[document]) + start) * self.dtype.itemsize
        return np.frombuffer(
            self._read_bytes(offset, (stop - start) * self.dtype.itemsize), dtype=self.dtype
        )

    def _read_bytes(self, offset: int, num_bytes: int) -> bytes:
        if self._descriptor < 0:
            raise ValueError(f"{self.bin_path} is closed; open the dataset again")
        status = os.fstat(self._descriptor)
        expected = self._fingerprint
        if (status.st_size, status.st_mtime_ns) != (expected.bin_bytes, expected.bin_mtime_ns):
            size = f"{expected.bin_bytes} bytes as at open, have {status.st_size}"
            if status.st_size == expected.bin_bytes:
                size = "its time of modification as at open, have another"
            raise ValueError(
                f"{self.bin_path}: byte {offset}: the file changed while it was being read: want {size}; stop whatever "
                "writes or touches it and restart"
            )
        parts: list[bytes] = []
        missing = num_bytes
        while missing:
            part = os.pread(self._descriptor, missing, offset + num_bytes - missing)
            if not part:
                _refuse(
                    self.bin_path,
                    offset,
                    "short read",
                    f"{num_bytes} bytes",
                    f"{num_bytes - missing} bytes",
                )
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def digest(self) -> str:
        """Returns a SHA-256 over dtype, document boundaries and 64 evenly spaced blocks of 4 KiB.

        Corpora below 256 KiB are read whole; `verify` reads every byte of any corpus.
        """
        total = hashlib.sha256(f"{self.dtype.str} {self._fingerprint.bin_bytes}".encode())
        total.update(self.document_starts.tobytes())
        size, block = self._fingerprint.bin_bytes, 4096
        offsets = (
            range(0, size, block)
            if size <= 64 * block
            else [i * (size - block) // 63 for i in range(64)]
        )
        for offset in offsets:
            total.update(self._read_bytes(offset, min(block, size - offset)))
        return total.hexdigest()

    def verify(self) -> None:
        """Compares the whole `.bin` with the manifest's checksum.

        Raises:
            ValueError: they differ, or there is no manifest.
        """
        want = self.recorded_sha256
        if want is None:
            raise ValueError(
                f"{manifest_path(self.prefix)} does not exist, so {self.bin_path} cannot be "
                f"verified; {REBUILD}"
            )
        total = hashlib.sha256()
        for offset in range(0, self._fingerprint.bin_bytes, 1 << 24):
            total.update(
                self._read_bytes(offset, min(1 << 24, self._fingerprint.bin_bytes - offset))
            )
        if total.hexdigest() != want:
            _refuse(self.bin_path, 0, "checksum of the tokens", want, total.hexdigest())

    def close(self) -> None:
        """Closes the token file; reading afterwards is an error."""
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Loader workers open the files themselves, and must see the very bytes that the parent saw.
        return _reopen, (self.prefix, self._fingerprint)


def _reopen(prefix: str, expected: _Fingerprint) -> IndexedDataset:
    dataset = IndexedDataset(prefix)
    if dataset._fingerprint != expected:
        raise ValueError(
            f"{prefix}.bin or .idx was replaced while the run was reading it: want {expected}, "
            f"have {dataset._fingerprint}; restart the run"
        )
    return dataset


def _parse_index(path: Path, raw: bytes, bin_bytes: int) -> tuple[np.dtype[Any], NDArray[np.int64]]:
    """Returns the dtype and the first token of each document, then the total.

    Raises:
        ValueError: the index contradicts itself or the size of the token file.
    """
    dtype, num_sequences, num_documents = _parse_header(path, raw)
    sections = {
        "lengths": (np.int32, num_sequences),
        "pointers": (np.int64, num_sequences),
        "documents": (np.int64, num_documents),
    }
    offset, offsets, arrays = HEADER.size, {}, {}
    for name, (kind, count) in sections.items():
        # Python integers: a huge count cannot wrap around
        end = offset + count * np.dtype(kind).itemsize
        if end > len(raw):
            _refuse(
                path,
                offset,
                f"{name} section of {count} entries",
                f"a file of at least {end} bytes",
                f"{len(raw)} bytes",
            )
        offsets[name] = offset
        arrays[name] = np.frombuffer(
            raw, dtype=np.dtype(kind).newbyteorder("<"), count=count, offset=offset
        ).astype(np.int64)
        offset = end
    if offset != len(raw):
        _refuse(
            path,
            offset,
            "end of the index (multimodal indices are not read)",
            f"{offset} bytes",
            f"{len(raw)} bytes",
        )
    _check_pointers(path, arrays["lengths"], arrays["pointers"], dtype.itemsize, bin_bytes, offsets)
    _check_documents(path, arrays["documents"], num_sequences, offsets["documents"])
    token_starts = np.append(arrays["pointers"], bin_bytes) // dtype.itemsize
    starts: NDArray[np.int64] = token_starts[arrays["documents"]]
    starts.flags.writeable = False
    return dtype, starts


def _parse_header(path: Path, raw: bytes) -> tuple[np.dtype[Any], int, int]:
    if len(raw) < HEADER.size:
        _refuse(path, len(raw), "truncated header", f"{HEADER.size} bytes", f"{len(raw)} bytes")
    magic, version, code, num_sequences, num_documents = HEADER.unpack_from(raw)
    if magic != MAGIC:
        _refuse(path, 0, "magic number", MAGIC, magic)
    if version != VERSION:
        _refuse(path, 9, "format version", VERSION, version)
    if code not in TOKEN_DTYPES:
        _refuse(path, 17, "dtype code", f"an integer type, one of {sorted(TOKEN_DTYPES)}", code)
    if num_documents < 1:
        _refuse(path, 26, "number of document boundaries", "at least 1", num_documents)
    return np.dtype(TOKEN_DTYPES[code]), num_sequences, num_documents


def _first_true(wrong: NDArray[np.bool_]) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None


def _check_pointers(
    path: Path,
    lengths: NDArray[np.int64],
    pointers: NDArray[np.int64],
    itemsize: int,
    bin_bytes: int,
    offsets: Mapping[str, int],
) -> None:
    """Checks that sequences fill the token file back to back, which is what Megatron writes."""
    index = _first_true(lengths < 0)
    if index is not None:
        _refuse(
            path,
            offsets["lengths"] + 4 * index,
            f"length of sequence {index}",
            "at least 0",
            lengths[index],
        )
    sizes = lengths * itemsize
    expected = np.concatenate(([0], np.cumsum(sizes)))
    checks = (
        ("is negative", pointers < 0, "at least 0"),
        ("is unaligned", pointers % itemsize != 0, f"a multiple of {itemsize}"),
        # subtraction on the right: the sum on the left could overflow
        (
            "plus its length lies beyond the .bin",
            pointers > bin_bytes - sizes,
            f"an end of at most {bin_bytes}",
        ),
        ("overlaps the sequence before", pointers < expected[:-1], expected),
        ("leaves a gap after the sequence before", pointers > expected[:-1], expected),
    )
    for statement, wrong, want in checks:
        index = _first_true(wrong)
        if index is not None:
            where = offsets["pointers"] + 8 * index
            _refuse(
                path,
                where,
                f"pointer of sequence {index} {statement}",
                want if isinstance(want, str) else want[index],
                pointers[index],
            )
    if expected[-1] != bin_bytes:
        _refuse(
            path.with_suffix(".bin"),
            min(int(expected[-1]), bin_bytes),
            "file size",
            f"{expected[-1]} bytes",
            f"{bin_bytes} bytes",
        )


def _check_documents(
    path: Path, documents: NDArray[np.int64], num_sequences: int, offset: int
) -> None:
    if documents[0] != 0:
        _refuse(path, offset, "first document boundary", 0, documents[0])
    index = _first_true((documents < 0) | (documents > num_sequences))
    if index is not None:
        _refuse(
            path,
            offset + 8 * index,
            f"document boundary {index}",
            f"a value in [0, {num_sequences}]",
            documents[index],
        )
    index = _first_true(np.diff(documents) < 0)
    if index is not None:
        where = offset + 8 * (index + 1)
        _refuse(
            path,
            where,
            f"document boundary {index + 1} goes backwards",
            f"at least {documents[index]}",
            documents[index + 1],
        )
    if documents[-1] != num_sequences:
        where = offset + 8 * (len(documents) - 1)
        _refuse(
            path,
            where,
            "last document boundary",
            f"{num_sequences}, the number of sequences",
            documents[-1],
        )
