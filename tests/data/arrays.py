"""Files that run code where they are read as Python's or NumPy's objects."""

import os
import pickle
from pathlib import Path

import numpy as np


class _Command:
    """Unpickled, it runs a command of the shell."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def _write_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(_Command(f"touch {mark}")))


def _write_objects(path: Path, mark: Path) -> None:
    with path.open("wb") as stream:
        np.save(stream, np.array([_Command(f"touch {mark}")], dtype=object), allow_pickle=True)


def _write_zip(path: Path, mark: Path) -> None:
    with path.open("wb") as stream:
        np.savez(stream, a=np.array([_Command(f"touch {mark}")], dtype=object))


# Each takes a path, and a file that appears if what is written there is run.
WRITES_A_FILE = {"a pickle": _write_pickle, "objects": _write_objects, "a zip": _write_zip}
