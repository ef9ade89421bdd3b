"""The two compilers that make cubins, NVRTC and nvcc, behind one call. Standard library only; no GPU needed.

nvcc is the compiler of a CUDA toolkit and needs a host compiler; NVRTC is the same compiler as a library, needs
none, and comes with every CUDA build of PyTorch. The kernels include no header but their own, so NVRTC is tried
first. Of several versions the oldest major one is taken, in its newest minor version: its cubins load on the most
drivers.
"""

import ctypes
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

if __package__:
    from megatron_cp.kernels import cache
else:  # beside build.py, run as a file by setup.py
    import cache  # type: ignore[no-redef,import-not-found]

FLAGS = ("-std=c++17", "--use_fast_math", "--ptxas-options=-v")
NVCC_FLAGS = ("-cubin", "-O3", "-gencode", "arch=compute_90a,code=sm_90a")
NVRTC_FLAGS = ("--gpu-architecture=sm_90a",)
NVRTC_NAMES = ("libnvrtc.so.12", "libnvrtc.so.13")
# 12.3 has all instructions too, but serialises the matrix products of the backward kernels of the large head dims
# (C7516, seen in its log on 14 variants, 2026-11-22). What a log calls serialised is not used (build.compile_variant);
# another compiler or backend takes its place.
MIN_VERSION = (12, 4)


class CompileError(RuntimeError):
    """A kernel's source did not compile; the message holds the compiler's words."""


class NoCompilerError(RuntimeError):
    """No compiler was found whose cubins can be used here."""


@dataclass(frozen=True)
class Compiled:
    """What one compilation gave: machine code, the PTX it was made from, and what the compiler said."""

    cubin: bytes
    ptx: str
    log: str


@dataclass(frozen=True)
class Compiler:
    """One compiler: `kind` is nvcc or nvrtc, `path` its file, `version` as `13.0.88`."""

    kind: str
    path: str
    version: str

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns `(major, minor)`."""
        return _numbers(self.version)

    @property
    def name(self) -> str:
        """Returns kind and version, as people read them."""
        return f"{'NVRTC' if self.kind == 'nvrtc' else self.kind} {self.version}"

    def compile(
        self, source: Path, defines: Sequence[str], include_folders: Sequence[Path]
    ) -> bytes:
        """Returns the cubin of `source`. Raises CompileError with the compiler's messages."""
        return self.compile_with_log(source, defines, include_folders).cubin

    def compile_with_log(
        self, source: Path, defines: Sequence[str], include_folders: Sequence[Path]
    ) -> Compiled:
        """Returns the cubin of `source`, its PTX and what the compiler said. Raises CompileError."""
        options = [*FLAGS, *(f"-D{define}" for define in defines)]
        make = _compile_with_nvcc if self.kind == "nvcc" else _compile_with_nvrtc
        return make(self.path, source, options, include_folders)


def find_compilers(kind: str | None = None, at_most: int | None = None) -> tuple[Compiler, ...]:
    """Returns the best NVRTC and the best nvcc, in the order in which to try them; at least one.

    `kind`: nvcc or nvrtc alone. `at_most`: the major version of the driver that is to take their cubins.

    Raises: NoCompilerError that says what was looked for, what was found, and how to get what is missing.
    """
    found = [
        *(nvrtcs() if kind in (None, "nvrtc") else ()),
        *(nvccs() if kind in (None, "nvcc") else ()),
    ]
    best: dict[str, Compiler] = {}
    for one in sorted(found, key=lambda c: (c.numbers[0], *(-n for n in c.numbers[1:]))):
        if at_most is None or one.numbers[0] <= at_most:
            best.setdefault(one.kind, one)
    if not best:
        raise NoCompilerError(_nothing_found(kind, at_most, found))
    return tuple(best[kind] for kind in ("nvrtc", "nvcc") if kind in best)


def find_compiler(kind: str | None = None, at_most: int | None = None) -> Compiler:
    """Returns the first of `find_compilers`. Raises NoCompilerError."""
    return find_compilers(kind, at_most)[0]


def _nothing_found(kind: str | None, at_most: int | None, found: Sequence[Compiler]) -> str:
    wanted = f"CUDA {MIN_VERSION[0]}.{MIN_VERSION[1]} or later"
    if at_most is not None:
        wanted += f", and of a major version up to {at_most}, which is the driver's"
    too_new = ", ".join(f"{one.name} ({one.path})" for one in found) or "none"
    return (
        f"no compiler for the Hopper kernels: {kind or 'nvcc and NVRTC'} found: {too_new}; allowed: {wanted} (looked "
        f"for {_searched()}); {install_hint(at_most)}, or put such an nvcc on PATH or set CUDA_HOME"
    )


def install_hint(driver_major: int | None) -> str:
    """Returns the command that installs an NVRTC whose cubins a driver of this major version takes."""
    if driver_major is not None and driver_major < MIN_VERSION[0]:
        return f"update the NVIDIA driver to R525 (CUDA {MIN_VERSION[0]}.0) or later"
    return 'pip install "nvidia-cuda-nvrtc-cu12"'


@lru_cache(maxsize=1)
def nvccs() -> tuple[Compiler, ...]:
    """Returns every nvcc of CUDA_HOME, PATH and /usr/local/cuda* that is new enough."""
    home = os.environ.get("CUDA_HOME")
    paths = [f"{home}/bin/nvcc" if home else None, shutil.which("nvcc")]
    paths += [str(path) for path in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))]
    found: dict[str, Compiler] = {}
    for path in paths:
        if path and os.access(path, os.X_OK) and (version := _nvcc_version(path)):
            found.setdefault(version, Compiler("nvcc", path, version))
    return tuple(found.values())


def _nvcc_version(path: str) -> str:
    """Returns the version of a usable nvcc, "" of one that does not start or is too old."""
    try:
        text = run_program([path, "--version"]).stdout
    except OSError:
        return ""
    version = text.rpartition(" V")[2].split()[0] if " V" in text else ""
    return version if _numbers(version) >= MIN_VERSION else ""


def run_program(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a compiler or reader of machine code and returns what it said.

    A start that fails with EFAULT is tried again: seen once in some hundred starts, on a virtual machine whose
    memory was being reclaimed; the program itself had not begun.
    """
    for tries_left in (2, 1, 0):
        try:
            return subprocess.run(
                list(command),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            if error.errno != errno.EFAULT or not tries_left:
                raise
    raise AssertionError("unreachable")


@lru_cache(maxsize=1)
def nvrtcs() -> tuple[Compiler, ...]:
    """Returns every NVRTC that is new enough: of the linker's path, of packages, of toolkits, of `make toolkits`.

    Raises: PermissionError for a folder of fetched toolkits that others can write to.
    """
    found: dict[str, Compiler] = {}
    for path in _nvrtc_files():
        try:
            library = _load_nvrtc(path)
        except OSError:
            continue
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        version = f"{major.value}.{minor.value}"
        if (major.value, minor.value) >= MIN_VERSION:
            found.setdefault(version, Compiler("nvrtc", path, version))
    return tuple(found.values())


def _nvrtc_files() -> Iterator[str]:
    yield from NVRTC_NAMES
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations if spec else None) or []]
    roots += [path / "nvidia" for path in fetched_toolkits()]
    files = [file for root in roots for file in sorted(root.glob("*/lib/libnvrtc.so.1?"))]
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"),) if home]
    homes += sorted(Path("/usr/local").glob("cuda*"))
    files += [file for home in homes for file in sorted(home.glob("lib64/libnvrtc.so.1?"))]
    yield from (str(file) for file in files if file.name in NVRTC_NAMES)


def fetched_toolkits() -> list[Path]:
    """Returns the folders that `make toolkits` made, one per version. Raises PermissionError, see `cache`."""
    folder = cache.existing_folder("toolkits", "compiler")
    return sorted(path for path in folder.glob("*") if path.is_dir()) if folder else []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _searched() -> str:
    home = os.environ.get("CUDA_HOME", "unset")
    return f"CUDA_HOME={home}, PATH, /usr/local/cuda*; {', '.join(NVRTC_NAMES)} and the nvidia packages"


def _compile_with_nvcc(
    path: str, source: Path, options: Sequence[str], include_folders: Sequence[Path]
) -> Compiled:
    """See `Compiler.compile_with_log`. Nvcc is shown links: it cuts paths at commas, and a shell reads them."""
    with tempfile.TemporaryDirectory(prefix="mcp-nvcc-") as folder:
        real = {
            f"{folder}/{place}": each
            for place, each in enumerate([source.parent, *include_folders])
        }
        for link, each in real.items():
            Path(link).symlink_to(each.absolute())
        own, *others = real
        output = Path(folder, "kernel.cubin")
        command = [path, *NVCC_FLAGS, *options, *(f"-I{link}" for link in others)]
        command += ["--keep", "--keep-dir", folder, "-o", str(output), f"{own}/{source.name}"]
        run = run_program(command)
        if run.returncode != 0:
            said = f"{' '.join(command)}\n{run.stdout}{run.stderr}".rstrip()
            for link, each in real.items():
                said = said.replace(f"{link}/", f"{each}/")
            raise CompileError(said)
        ptx = Path(folder, f"{source.stem}.ptx").read_text(encoding="utf-8")
        return Compiled(output.read_bytes(), ptx, run.stdout + run.stderr)


def _compile_with_nvrtc(
    path: str, source: Path, options: Sequence[str], include_folders: Sequence[Path]
) -> Compiled:
    options = [*options, *(f"-I{folder}" for folder in include_folders)]
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
        with _same_locale():
            status = library.nvrtcCompileProgram(program, len(flags), flag_array)
        log = _nvrtc_text(library, "ProgramLog", program)
        if status != 0:
            raise CompileError(
                f"NVRTC {' '.join((*NVRTC_FLAGS, *options))} {source}\n{log}".rstrip()
            )
        ptx = _nvrtc_text(library, "PTX", program)
        return Compiled(_nvrtc_bytes(library, "CUBIN", program), ptx, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@contextmanager
def _same_locale() -> Iterator[None]:
    """Gives the calling thread its locale back: NVRTC (12.4 to 13.0) leaves it in the C locale.

    Python would then read files and programs' words as ASCII.
    """
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.restype, uselocale.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


def _nvrtc_text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    return _nvrtc_bytes(library, what, program).rstrip(b"\0").decode()


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


@lru_cache(maxsize=16)
def _load_nvrtc(path: str) -> ctypes.CDLL:
    # NVRTC opens its builtins by name; loaded first, from beside it, they are found.
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")) if "/" in path else []:
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(path)


def compile_with_any(compilers: Sequence[Compiler], make: Callable[[Compiler], bytes]) -> bytes:
    """Returns what `make` gives with the first compiler that can; a compiler that cannot is told on stderr.

    Raises: CompileError with the reasons of all of them if none can.
    """
    reasons = []
    for compiler in compilers:
        try:
            result = make(compiler)
        except CompileError as error:
            reasons.append(f"{compiler.name} ({compiler.path}): {error}")
            continue
        for reason in reasons:
            sys.stderr.write(
                f"megatron_cp: {reason}\nmegatron_cp: {compiler.name} is used instead\n"
            )
        return result
    raise CompileError("\n".join(reasons))
