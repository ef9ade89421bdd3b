"""A stand-in for the CUDA driver: a small library, compiled once per session, that remembers its calls."""

import ctypes
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from tests.processes import HANG_SECONDS

SOURCE = Path(__file__).with_name("fake_cuda.cpp")


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Returns the library; its `fake_*` symbols tell what the last calls were."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "libfake_cuda.so")
        command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        command += ["-isystem", "/usr/local/cuda/include", "-o", str(target), str(SOURCE)]
        subprocess.run(command, check=True, timeout=HANG_SECONDS)
        return ctypes.CDLL(str(target))


def number(name: str) -> int:
    """Returns the value of an integer symbol."""
    return ctypes.c_int.in_dll(load(), name).value


def set_number(name: str, value: int) -> None:
    """Sets an integer symbol."""
    ctypes.c_int.in_dll(load(), name).value = value


def keep_params(num_bytes: int) -> None:
    """Says how many bytes of a launch's parameter to keep."""
    ctypes.c_size_t.in_dll(load(), "fake_params_bytes").value = num_bytes


def last_params(num_bytes: int) -> bytes:
    """Returns what the last launch got as its parameter."""
    return bytes((ctypes.c_ubyte * num_bytes).in_dll(load(), "fake_params"))


def last_launch() -> list[int]:
    """Returns grid x, y, z, block x, y, z, shared bytes and stream of the last launch."""
    return list((ctypes.c_uint * 8).in_dll(load(), "fake_launch"))


def last_map(rank: int) -> dict[str, object]:
    """Returns the arguments of the last `cuTensorMapEncodeTiled`."""
    values = list((ctypes.c_uint64 * 40).in_dll(load(), "fake_map"))
    sizes, strides = values[3 : 3 + rank], values[3 + rank : 2 + 2 * rank]
    box, steps = values[2 + 2 * rank : 2 + 3 * rank], values[2 + 3 * rank : 2 + 4 * rank]
    modes = values[2 + 4 * rank : 6 + 4 * rank]
    named = {"dtype": values[0], "rank": values[1], "address": values[2], "sizes": sizes}
    return named | {"strides": strides, "box": box, "steps": steps, "modes": modes}
