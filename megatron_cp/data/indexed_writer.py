"""Writes Megatron's `.bin` / `.idx` token files, streaming, all or nothing.

    corpus.bin.tmp-node7-4711    locked by its writer, process 4711 on node7, until it is corpus.bin

The kernel drops the lock when that process ends, however it ends. The next writer of the corpus on that machine removes
what nobody holds; where the file system has no locks it stays.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import io
import json
import os
import socket
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.indexed import (
    HEADER,
    MAGIC,
    PREFIX_LENGTHS,
    SUPERVISED,
    TOKEN_DTYPES,
    VERSION,
)

_CODE_OF_DTYPE = {np.dtype(kind): code for code, kind in TOKEN_DTYPES.items()}
_MAX_SEQUENCE = 2**31 - 1
_WRITTEN = ("bin", "idx", "manifest.json", PREFIX_LENGTHS)


class IndexedWriter:
    """Writes a corpus document by document; its files appear only when `finish` succeeds.

    It is a context manager; leaving it through an exception removes the temporary files.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], *, dtype: np.dtype[Any] | type[np.integer[Any]]
    ) -> None:
        self.prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        if self.dtype not in _CODE_OF_DTYPE:
            names = sorted(str(kind) for kind in _CODE_OF_DTYPE)
            raise ValueError(
                f"dtype={self.dtype} must be one of {names}; use token_dtype(vocab_size)"
            )
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.prefix)
        self._temporary = {
            suffix: Path(f"{self.prefix}.{suffix}.tmp-{socket.gethostname()}-{os.getpid()}")
            for suffix in _WRITTEN
        }
        self._bin = _open_held(self._temporary["bin"])
        self._held = ExitStack()
        self._held.callback(_close, self._bin)
        self._bin_sha256 = hashlib.sha256()
        self._lengths = array("q")
        self._documents = array("q", [0])
        self.num_tokens = 0

    def add_document(
        self, tokens: NDArray[Any] | Sequence[int], *, sequence_lengths: Sequence[int] | None = None
    ) -> None:
        """Appends one document of one sequence, or of sequences of the given lengths.

        Raises:
            ValueError: ids outside the dtype, or lengths that do not add up.
        """
        values = np.asarray(tokens, dtype=np.int64)
        lengths = [len(values)] if sequence_lengths is None else list(sequence_lengths)
        if sum(lengths) != len(values) or min(lengths, default=0) < 0:
            raise ValueError(
                f"sequence_lengths={lengths} must add up to the document's {len(values)} tokens; "
                "fix the lengths"
            )
        if max(lengths, default=0) > _MAX_SEQUENCE:
            raise ValueError(
                f"a sequence of {max(lengths)} tokens exceeds the format's {_MAX_SEQUENCE}; split "
                "the document"
            )
        limits = np.iinfo(self.dtype)
        if len(values) and (values.min() < limits.min or values.max() > limits.max):
            raise ValueError(
                f"token ids of document {len(self._documents) - 1} span [{values.min()}, {values.max()}], "
                f"{self.dtype} holds [{limits.min}, {limits.max}]; choose the dtype with token_dtype(vocab_size)"
            )
        block = values.astype(self.dtype).tobytes()
        with _naming(self.prefix):
            self._bin.write(block)
        self._bin_sha256.update(block)
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))
        self.num_tokens += len(values)

    def finish(
        self,
        facts: Mapping[str, Any] | None = None,
        *,
        prefix_lengths: NDArray[np.int64] | None = None,
    ) -> None:
        """Puts the finished corpus in its place, with the kinds of its documents where they are given.

        Its manifest also records `facts` (JSON values). What stood beside an older corpus of that name goes.
        """
        with _naming(self.prefix):
            _sync(self._bin)
        lengths, documents = (
            np.array(self._lengths, dtype=np.int64),
            np.array(self._documents, dtype=np.int64),
        )
        pointers = np.concatenate(([0], np.cumsum(lengths)))[:-1] * self.dtype.itemsize
        header = HEADER.pack(
            MAGIC, VERSION, _CODE_OF_DTYPE[self.dtype], len(lengths), len(documents)
        )
        index = (
            header
            + lengths.astype("<i4").tobytes()
            + pointers.astype("<i8").tobytes()
            + documents.astype("<i8").tobytes()
        )
        manifest = {
            **(facts or {}),
            "documents": len(documents) - 1,
            "tokens": self.num_tokens,
            "dtype": str(self.dtype),
            "bin": {
                "bytes": self.num_tokens * self.dtype.itemsize,
                "sha256": self._bin_sha256.hexdigest(),
            },
            "idx": {"bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()},
        }
        contents = {} if prefix_lengths is None else {PREFIX_LENGTHS: _as_npy(prefix_lengths)}
        contents |= {
            "idx": index,
            "manifest.json": (json.dumps(manifest, indent=1) + "\n").encode(),
        }
        for suffix, content in contents.items():
            stream = _open_held(self._temporary[suffix])
            self._held.callback(_close, stream)
            with _naming(self.prefix):
                stream.write(content)
                _sync(stream)
        # No moment at which a new .bin stands beside an old file that could be believed, or an index without what
        # says how its documents are read.
        for suffix in ("manifest.json", "idx", "sources.jsonl", PREFIX_LENGTHS, SUPERVISED):
            Path(f"{self.prefix}.{suffix}").unlink(missing_ok=True)
        for suffix in ("bin", *contents):
            self._temporary[suffix].replace(f"{self.prefix}.{suffix}")
        self._held.close()

    def discard(self) -> None:
        """Removes the temporary files; the corpus under `prefix`, if any, stays as it was."""
        for path in self._temporary.values():
            path.unlink(missing_ok=True)
        self._held.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()  # after finish() there is nothing left to remove


@contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """Gives an OSError of writing a file name: that of a full disk has none."""
    try:
        yield
    except OSError as problem:
        problem.filename = problem.filename or prefix
        raise


def _open_held(path: Path) -> BinaryIO:
    """Returns a new file with the lock that keeps it."""
    while True:
        stream = path.open("wb")
        with suppress(OSError):  # no locks there
            fcntl.lockf(stream, fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:  # else it was removed before it was locked
            return stream
        stream.close()


def _remove_leftovers(prefix: str) -> None:
    """Removes temporary files of writers that were killed on this machine."""
    folder, name = os.path.split(prefix)
    for suffix in _WRITTEN:
        start = f"{name}.{suffix}.tmp-{socket.gethostname()}-"
        for path in Path(folder).glob(f"{glob.escape(start)}*"):
            writer = path.name.removeprefix(start)
            # A lock does not keep a file from the process that holds it.
            if not writer.isdigit() or int(writer) == os.getpid():
                continue
            with suppress(OSError), path.open("r+b") as stream:
                fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def _close(stream: BinaryIO) -> None:
    with suppress(OSError):  # of what a full disk did not take
        stream.close()


def _as_npy(values: NDArray[np.int64]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values, allow_pickle=False)
    return stream.getvalue()
