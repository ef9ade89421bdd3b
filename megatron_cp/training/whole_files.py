"""Files of a run that are there whole or not at all: on a full disk, or where the run is killed while it writes."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_numbers = itertools.count()


def write_atomically(path: Path, text: str) -> None:
    """Writes the file so that it holds its old or its new text, whatever happens in between."""
    written_aside(path, text).replace(path)


def written_aside(path: Path, text: str) -> Path:
    """Returns a complete file beside `path` that only needs its name; leaves none if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    return temporary


def append_whole(path: Path, text: str) -> None:
    """Appends the text, or nothing: what comes after is not to stand behind half a line. Raises OSError."""
    data = text.encode()
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            written = file.write(data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(start)
            raise


def check_writable(flag: str, folder: str | None) -> None:
    """Makes the folder, and raises ValueError with flag and folder if no file can be written there.

    None needs no folder.
    """
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise ValueError(
            f"{flag} {folder} cannot be written ({problem.strerror}); give a folder in which files "
            "may be made"
        ) from None


def free_name(folder: Path) -> Path:
    """Returns the first of earlier-1, earlier-2, ... that is not in the folder."""
    paths = (folder / f"earlier-{number}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())
