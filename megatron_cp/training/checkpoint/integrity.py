"""SHA-256 of a checkpoint's files: taken while they are written, compared before they are read.

    save    tensors ──> HashedFile ──> disk
                            └──> SHA-256, in a thread meanwhile ──> <file>.sha256 ──> the manifest
    load    every rank reads its share of the files, in threads; all ranks hear of every difference

A difference is damage: of the disk, of a copy, of whoever wrote into the folder. Who can write the manifest too
can hide anything; what keeps a file from being executed is `safe_load`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_cp.errors import ANOTHER_CHECKPOINT, DamagedCheckpointError

SEAL = "manifest_sha256"
"""The manifest's entry that holds the SHA-256 of all its others."""

_ASIDE = ".sha256"
_BLOCK_BYTES = 1 << 20
# Below this a hand-over to the thread costs more than the hash (measured: 1.3 GB/s, 20 us a hand-over).
_WORTH_A_THREAD = 1 << 18
_THREADS = 4


class HashedFile:
    """A file that is written from its beginning to its end, and hashed meanwhile.

    At its end, if all went well, its SHA-256 stands in a small file beside it. What the disk refuses is
    raised as OSError with the file's path at the end of the block, whatever a library made of it before.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "wb") -> None:
        assert mode == "wb", mode
        self._path = Path(path)
        self._hash = hashlib.sha256()
        self._file = self._path.open("wb")
        self._thread = ThreadPoolExecutor(1)
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes bytes; returns how many."""
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            if len(view) < _WORTH_A_THREAD:
                self._hash.update(view)
                return self._file.write(view)
            hashing = self._thread.submit(self._hash.update, view)
            try:
                return self._file.write(view)
            finally:
                hashing.result()  # the caller may change the bytes from here on
        except OSError as failure:
            self._failure = failure
            raise

    def tell(self) -> int:
        """Returns the number of bytes written."""
        return self._file.tell()

    def flush(self) -> None:
        """Hands everything to the operating system."""
        try:
            self._file.flush()
        except OSError as failure:
            self._failure = failure
            raise

    def fileno(self) -> int:
        """Returns the descriptor, with everything handed to it."""
        self.flush()
        return self._file.fileno()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        try:
            self._file.close()
            if error is None:
                aside(self._path).write_text(self._hash.hexdigest())
        except OSError as failure:
            self._failure = self._failure or failure
        if self._failure is not None:
            number, text = self._failure.errno, self._failure.strerror
            raise OSError(number, text, str(self._path)) from None


def aside(path: Path) -> Path:
    """Returns where the SHA-256 of a file waits for the manifest."""
    return path.with_name(path.name + _ASIDE)


def is_aside(path: Path) -> bool:
    """Whether a file holds no part of a checkpoint but a hash that waits for the manifest."""
    return path.name.endswith(_ASIDE)


def take_hashes(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Returns the SHA-256 of every named file, and removes what `HashedFile` left beside them.

    Files that something else wrote (Megatron's index and its entries of every rank) are read once.
    """
    found: dict[str, str] = {}
    for name in names:
        waiting = aside(folder / name)
        if waiting.is_file():
            found[name] = waiting.read_text()
            waiting.unlink()
        else:
            found[name] = sha256_of(folder / name)
    return found


def seal_of(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest's entries without the seal, however the file is laid out."""
    rest = {name: value for name, value in content.items() if name != SEAL}
    read = json.loads(json.dumps(rest))  # as it is when it was written and read
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def share_of(sizes: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """Returns the files that this rank reads: every file is read by one rank, large ones first."""
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    return by_size[rank::world_size]


def check_hashes(folder: Path, hashes: Mapping[str, str], names: Sequence[str]) -> None:
    """Raises DamagedCheckpointError for the first named file that holds something else than was saved."""

    def difference(name: str) -> str | None:
        try:
            return None if sha256_of(folder / name) == hashes[name] else "another SHA-256"
        except OSError as problem:
            return str(problem.strerror)

    with ThreadPoolExecutor(_THREADS) as threads:
        for name, reason in zip(names, threads.map(difference, names), strict=True):
            if reason is not None:
                raise DamagedCheckpointError(
                    f"{folder / name} does not hold what was saved ({reason}); {ANOTHER_CHECKPOINT}"
                )


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        block = bytearray(_BLOCK_BYTES)
        view = memoryview(block)
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()
