"""Emulated kernels as libraries: compiled with g++ into a per-user cache, loaded and called through ctypes.

    engine.cpp  -> engine.<hash>.o                                  once per change of the engine
    entry.cpp + a kernel's source + its definitions + engine.o -> <name>.<hash>.so     once per kernel

What is read once per kernel includes no large header of the standard library: those took longer than the kernel.
A hash covers every source file that takes part, the flags and the compiler's version, so a stale file is never
loaded and nothing is ever overwritten.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ctypes import c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megatron_cp.kernels import build, cache
from megatron_cp.kernels.compilers import run_program

KERNELS = Path(__file__).resolve().parent.parent
EMULATOR = KERNELS / "emulator"
# Without contraction the same source gives the same bits on every CPU.
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra")
ENGINE_FLAGS = ("-O3", "-fvisibility=hidden")
KERNEL_FLAGS = ("-O1", "-Wno-unknown-pragmas")


class EmulatorBuildError(RuntimeError):
    """A kernel's source did not compile for the emulator; the message holds the compiler's words."""


class EmulatorError(RuntimeError):
    """The emulated kernel did what hardware leaves undefined; the message says which thread and what."""


class Range(ctypes.Structure):
    """Memory that a kernel may read, and write where `is_written`."""

    _fields_ = (
        ("name", c_char_p),
        ("begin", c_void_p),
        ("num_bytes", c_uint64),
        ("is_written", c_int32),
    )


class Launch(ctypes.Structure):
    """Mirror of McpEmulatorLaunch in abi.h."""

    _fields_ = (
        ("num_blocks", c_int32),
        ("num_threads", c_int32),
        ("shared_bytes", c_uint32),
        ("registers_per_thread", c_int32),
        ("seed", c_uint64),
        ("host_threads", c_int32),
        ("record_history", c_int32),
        ("ranges", ctypes.POINTER(Range)),
        ("num_ranges", c_int32),
    )


@dataclass(frozen=True)
class Source:
    """One kernel: its file, relative to `root`, its entry, its parameter type, definitions.

    `root` stands in for `kernels/`: its `include` and itself are searched after the emulator's headers, and
    then those of `kernels/`.
    """

    name: str
    path: str
    entry: str
    params: str
    defines: tuple[str, ...] = ()
    root: Path = KERNELS

    @property
    def include_folders(self) -> tuple[Path, ...]:
        """Returns where headers are looked for; the order decides which wrappers a kernel sees."""
        own = (EMULATOR / "include", EMULATOR)
        return (*own, self.root / "include", self.root, KERNELS / "include", KERNELS)

    def digest(self) -> str:
        """Returns a SHA-256 over every file that takes part."""
        files = {EMULATOR / "engine.cpp", EMULATOR / "entry.cpp", self.root / self.path}
        closure = {f for file in files for f in build.included_files(file, self.include_folders)}
        return _digest_of(closure)


@dataclass(frozen=True)
class Machine:
    """How to run: grid, block and shared memory of the launch; `seed` orders what is asynchronous.

    Seed 0 delays nothing, others do. With one host thread the same seed gives the same run;
    with more, CTAs take work from shared counters in the order in which they happen to run.
    `registers_per_thread` 0: all that the number of threads leaves. `ranges`, as `Range`: memory that the kernel may
    touch; none: addresses are not checked.
    """

    num_blocks: int
    num_threads: int
    shared_bytes: int
    seed: int = 0
    host_threads: int = 1
    registers_per_thread: int = 0
    record_history: bool = False
    ranges: tuple[tuple[str, int, int, bool], ...] = ()


@dataclass(frozen=True)
class Run:
    """What happened: instructions by name (threads that executed them), and the barriers' history."""

    counts: dict[str, int]
    history: str


class Kernel:
    """A compiled kernel; holds the library."""

    def __init__(self, path: Path) -> None:
        self._library = library = ctypes.CDLL(str(path))
        library.mcp_emulator_run.restype = c_void_p
        library.mcp_emulator_run.argtypes = (c_void_p, ctypes.POINTER(Launch))
        library.mcp_emulator_free.argtypes = (c_void_p,)
        library.mcp_emulator_free.restype = None
        for name in ("error", "history"):
            function = getattr(library, f"mcp_emulator_{name}")
            function.restype, function.argtypes = c_char_p, (c_void_p,)
        library.mcp_emulator_instruction.restype = c_char_p
        library.mcp_emulator_count.restype = c_uint64
        library.mcp_emulator_count.argtypes = (c_void_p, c_int32)
        library.mcp_emulator_params_bytes.restype = c_uint64
        library.mcp_emulator_encode_tiled.argtypes = (
            *(c_void_p, c_uint32, c_uint32, c_void_p),
            *(c_void_p,) * 6,
            c_uint64,
        )

    @property
    def params_bytes(self) -> int:
        """Returns the size of the kernel's parameter."""
        return int(self._library.mcp_emulator_params_bytes())

    def run(self, params: ctypes.Structure, machine: Machine) -> Run:
        """Runs the kernel. Raises EmulatorError with the first defect found."""
        if ctypes.sizeof(params) != self.params_bytes:
            raise ValueError(
                f"params of {ctypes.sizeof(params)} bytes must have the kernel's {self.params_bytes}; "
                "mirror its struct"
            )
        ranges = (Range * max(1, len(machine.ranges)))(
            *(Range(name.encode(), *place) for name, *place in machine.ranges)
        )
        launch = Launch(
            machine.num_blocks,
            machine.num_threads,
            machine.shared_bytes,
            machine.registers_per_thread,
            machine.seed,
            machine.host_threads,
            machine.record_history,
            ranges,
            len(machine.ranges),
        )
        # Tensor maps inside the parameters must be 64-byte aligned, which ctypes does not promise.
        size = ctypes.sizeof(params)
        memory = ctypes.create_string_buffer(size + 64)
        address = (ctypes.addressof(memory) + 63) // 64 * 64
        ctypes.memmove(address, ctypes.addressof(params), size)
        report = self._library.mcp_emulator_run(address, ctypes.byref(launch))
        try:
            error = self._library.mcp_emulator_error(report).decode()
            if error:
                raise EmulatorError(f"seed {machine.seed}, {error}")
            history = self._library.mcp_emulator_history(report).decode()
            return Run(self._counts(report), history)
        finally:
            self._library.mcp_emulator_free(report)

    def _counts(self, report: int) -> dict[str, int]:
        counts = {}
        for index in range(self._library.mcp_emulator_num_instructions()):
            count = self._library.mcp_emulator_count(report, index)
            if count:
                counts[self._library.mcp_emulator_instruction(index).decode()] = count
        return counts

    def encode_tiled(  # noqa: PLR0913  the driver's argument list
        self,
        dtype: int,
        address: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        *,
        element_strides: Sequence[int] | None = None,
        interleave: int = 0,
        swizzle: int = 3,
        l2_promotion: int = 3,
        fill: int = 0,
    ) -> bytes:
        """Returns the 128 bytes of a tensor map; see cuTensorMapEncodeTiled for the numbers.

        Raises: ValueError for arguments that the driver refuses, or that the emulator does not follow.
        """
        memory = ctypes.create_string_buffer(128 + 64)
        target = (ctypes.addressof(memory) + 63) // 64 * 64
        reason = ctypes.create_string_buffer(512)
        status = self._library.mcp_emulator_encode_tiled(
            target,
            dtype,
            len(dims),
            address,
            (c_uint64 * len(dims))(*dims),
            (c_uint64 * max(1, len(strides)))(*strides),
            (c_uint32 * len(box))(*box),
            (c_uint32 * len(dims))(*(element_strides or (1,) * len(dims))),
            (c_uint32 * 4)(interleave, swizzle, l2_promotion, fill),
            reason,
            len(reason),
        )
        if status:
            raise ValueError(reason.value.decode())
        return ctypes.string_at(target, 128)


@lru_cache(maxsize=256)
def load(source: Source, extra_flags: tuple[str, ...] = ()) -> Kernel:
    """Returns the kernel, compiled if the cache does not have it.

    Raises: EmulatorBuildError without g++ or for source that does not compile; PermissionError for a cache that
    others can write to.
    """
    compiler = _compiler()
    folder = cache_folder()
    key = _key(compiler, source, extra_flags)
    path = folder / f"{source.name}.{key[:32]}.so"

    def make() -> None:
        engine = _engine(compiler, folder, extra_flags)
        _compile_kernel(compiler, source, engine, path, extra_flags)

    return Kernel(cache.make_once(path, make))


def cache_folder() -> Path:
    """Returns the user's folder of emulated kernels. Raises PermissionError if others can write to it."""
    return cache.user_folder("emulator", "emulator")


@lru_cache(maxsize=1)
def _compiler() -> tuple[str, str]:
    """Returns g++ and its version. Raises EmulatorBuildError without it."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise EmulatorBuildError(
            "backend='emulated' compiles the kernels with g++, and no g++ is on PATH (CXX is "
            f"{os.environ.get('CXX', 'unset')}); install a C++17 compiler, or use backend='cpu' or 'reference'"
        )
    run = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, run.stdout.splitlines()[0]


def _digest_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(compiler: tuple[str, str], source: Source, extra_flags: tuple[str, ...]) -> str:
    flags = (FLAGS, ENGINE_FLAGS, KERNEL_FLAGS, extra_flags)
    what = (source.name, source.path, source.entry, source.params, source.defines)
    return hashlib.sha256(repr((compiler, flags, what, source.digest())).encode()).hexdigest()


def _engine(compiler: tuple[str, str], folder: Path, extra_flags: tuple[str, ...]) -> Path:
    sources = _digest_of(build.included_files(EMULATOR / "engine.cpp", (EMULATOR,)))
    key = hashlib.sha256(repr((compiler, FLAGS, ENGINE_FLAGS, extra_flags, sources)).encode())
    path = folder / f"engine.{key.hexdigest()[:32]}.o"
    flags = (*FLAGS, *ENGINE_FLAGS, *extra_flags, f"-I{EMULATOR}", "-c")
    arguments = (*flags, str(EMULATOR / "engine.cpp"))
    return cache.make_once(path, lambda: _compile(compiler, arguments, path))


def _compile_kernel(
    compiler: tuple[str, str],
    source: Source,
    engine: Path,
    path: Path,
    extra_flags: tuple[str, ...],
) -> None:
    macros = (
        f'MCP_EMULATED_SOURCE="{source.root / source.path}"',
        f"MCP_EMULATED_ENTRY={source.entry}",
        f"MCP_EMULATED_PARAMS={source.params}",
        *source.defines,
    )
    flags = [
        *FLAGS,
        *KERNEL_FLAGS,
        *extra_flags,
        *(f"-I{folder}" for folder in source.include_folders),
    ]
    flags += [f"-D{macro}" for macro in macros]
    _compile(
        compiler, (*flags, "-shared", str(EMULATOR / "entry.cpp"), str(engine), "-pthread"), path
    )


def _compile(compiler: tuple[str, str], arguments: Sequence[str], target: Path) -> None:
    """Runs the compiler into a temporary file that then takes the target's name: nobody sees half a file."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(descriptor)
    try:
        command = [compiler[0], *arguments, "-o", name]
        run = run_program(command)
        if run.returncode != 0:
            raise EmulatorBuildError(f"{' '.join(command)}\n{run.stderr}".rstrip())
        Path(name).replace(target)
    finally:
        with suppress(FileNotFoundError):
            Path(name).unlink()
