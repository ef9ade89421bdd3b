"""The two compilers that make cubins, nvcc and NVRTC, behind one call. Standard library only; no GPU needed.

nvcc is the compiler of a CUDA toolkit; NVRTC is the same compiler as a library, which every CUDA build of
PyTorch installs beside itself.
"""

import ctypes
import errno
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FLAGS = ("-std=c++17", "--use_fast_math")
NVCC_FLAGS = ("-cubin", "-O3", "-gencode", "arch=compute_90a,code=sm_90a")
NVRTC_FLAGS = ("--gpu-architecture=sm_90a",)
NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
MIN_VERSION = (12, 3)  # the first with all instructions of the kernels; 13.0 is the one in use


class CompileError(RuntimeError):
    """A kernel's source did not compile; the message holds the compiler's words."""


class NoCompilerError(RuntimeError):
    """Neither nvcc nor NVRTC was found."""


@dataclass(frozen=True)
class Compiler:
    """One compiler: `kind` is nvcc or nvrtc, `path` its file, `version` as `13.0.88`."""

    kind: str
    path: str
    version: str

    def compile(
        self, source: Path, defines: Sequence[str], include_folders: Sequence[Path]
    ) -> bytes:
        """Returns the cubin of `source`. Raises CompileError with the compiler's messages."""
        options = [*FLAGS, *(f"-D{define}" for define in defines)]
        options += [f"-I{folder}" for folder in include_folders]
        make = _compile_with_nvcc if self.kind == "nvcc" else _compile_with_nvrtc
        return make(self.path, source, options)


def find_compiler(kind: str | None = None) -> Compiler:
    """Returns the compiler of this kind, or nvcc before NVRTC.

    Raises: NoCompilerError that says what was looked for and how to get it.
    """
    compiler = (find_nvcc() if kind in (None, "nvcc") else None) or (
        find_nvrtc() if kind in (None, "nvrtc") else None
    )
    if compiler is None:
        raise NoCompilerError(
            f"no compiler for the Hopper kernels: looked for {kind or 'nvcc and NVRTC'} ({_searched()}); "
            f"put nvcc >= {MIN_VERSION[0]}.{MIN_VERSION[1]} on PATH, set CUDA_HOME, or install a CUDA build of "
            "PyTorch, which brings NVRTC"
        )
    return compiler


@lru_cache(maxsize=1)
def find_nvcc() -> Compiler | None:
    """Returns nvcc of CUDA_HOME, of PATH or of /usr/local/cuda, if one is new enough."""
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc" if home else None, shutil.which("nvcc")]
    for path in [*candidates, "/usr/local/cuda/bin/nvcc"]:
        if not path or not os.access(path, os.X_OK):
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = text.rpartition(" V")[2].split()[0] if " V" in text else ""
        if _is_new_enough(version):
            return Compiler("nvcc", path, version)
    return None


def run_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a compiler or reader of machine code and returns what it said.

    A start that fails with EFAULT is tried again: seen once in some hundred starts, on a virtual machine whose
    memory was being reclaimed; the program itself had not begun.
    """
    for tries_left in (2, 1, 0):
        try:
            return subprocess.run(
                list(command), capture_output=True, text=True, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            if error.errno != errno.EFAULT or not tries_left:
                raise
    raise AssertionError("unreachable")


@lru_cache(maxsize=1)
def find_nvrtc() -> Compiler | None:
    """Returns the NVRTC library of the linker's path or of PyTorch's packages, if one is new enough."""
    for path in _nvrtc_files():
        try:
            library = _load_nvrtc(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        version = f"{major.value}.{minor.value}"
        if _is_new_enough(version):
            return Compiler("nvrtc", path, version)
    return None


def _is_new_enough(version: str) -> bool:
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return tuple(numbers) >= MIN_VERSION


def _searched() -> str:
    home = os.environ.get("CUDA_HOME", "unset")
    return (
        f"CUDA_HOME={home}, PATH, /usr/local/cuda; {', '.join(NVRTC_NAMES)} and the nvidia packages"
    )


def _compile_with_nvcc(path: str, source: Path, options: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="mcp-nvcc-") as folder:
        output = Path(folder, "kernel.cubin")
        command = [path, *NVCC_FLAGS, *options, "-o", str(output), str(source)]
        run = run_program(command)
        if run.returncode != 0:
            raise CompileError(f"{' '.join(command)}\n{run.stdout}{run.stderr}".rstrip())
        return output.read_bytes()


def _compile_with_nvrtc(path: str, source: Path, options: Sequence[str]) -> bytes:
    library = _load_nvrtc(path)
    program = ctypes.c_void_p()
    text, name = source.read_bytes(), str(source).encode()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None),
    )
    try:
        flags = [flag.encode() for flag in (*NVRTC_FLAGS, *options)]
        flag_array = (ctypes.c_char_p * len(flags))(*flags)
        status = library.nvrtcCompileProgram(program, len(flags), flag_array)
        if status != 0:
            log = _nvrtc_bytes(library, "ProgramLog", program).rstrip(b"\0").decode()
            raise CompileError(
                f"NVRTC {' '.join((*NVRTC_FLAGS, *options))} {source}\n{log}".rstrip()
            )
        return _nvrtc_bytes(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_bytes(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise CompileError(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")


def _nvrtc_files() -> Iterator[str]:
    yield from NVRTC_NAMES
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in NVRTC_NAMES:
            yield from (str(file) for file in sorted(Path(root).glob(f"*/lib/{name}")))


@lru_cache(maxsize=4)
def _load_nvrtc(path: str) -> ctypes.CDLL:
    # NVRTC opens its builtins by name; loaded first, from beside it, they are found.
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if "/" in path else []:
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)
