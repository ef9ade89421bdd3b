"""From a library, a folder of cubins or our own sources to the listings of single kernels."""

import shutil
import struct
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron_cp.kernels import build, compilers

_SYMBOL_TABLE = 2
_FUNCTION = 2


class ToolError(RuntimeError):
    """A tool is missing, or could not read what it was given; the message has its words."""


def find_tool(name: str) -> str:
    """Returns a program of the CUDA toolkit, on PATH or in the environment's packages. Raises: ToolError."""
    packaged = sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/bin/{name}"))
    found = shutil.which(name) or (str(packaged[-1]) if packaged else None)
    if found is None:
        raise ToolError(
            f"{name} is not on PATH and not in the environment, it must be in one of them: "
            f"pip install nvidia-cuda-{name}"
        )
    return found


def listing_of_variant(name: str, folder: Path) -> str:
    """Returns the machine code of one of our variants, compiled with nvcc into `folder`.

    Raises: NoCompilerError, CompileError, ToolError.
    """
    variant = build.variants()[name]
    cubin = folder / f"{name}.cubin"
    compiler = compilers.find_compiler("nvcc")
    cubin.write_bytes(compiler.compile(variant.path, variant.defines, build.INCLUDE_FOLDERS))
    return _text_of([find_tool("nvdisasm"), "-hex", "-c", str(cubin)])


def cubins_of(library: Path, folder: Path) -> list[Path]:
    """Returns the sm_90a cubins of a library, taken out into `folder`, or those that lie in a folder.

    Raises: ToolError.
    """
    if library.is_dir():
        return sorted(library.glob("*.cubin"))
    command = [find_tool("cuobjdump"), "-xelf", "sm_90a", str(library.resolve())]
    run = compilers.run_program(["env", "-C", str(folder), *command])
    if run.returncode != 0:
        raise ToolError(f"{' '.join(command)}: {run.stdout}{run.stderr}".rstrip())
    return sorted(folder.glob("*.cubin"))


def functions(cubin: bytes) -> Iterator[tuple[int, str]]:
    """Yields (index in the symbol table, name) of the functions of an ELF file of 64 bits."""
    (table_at,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, num_sections = struct.unpack_from("<HH", cubin, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table_at + entry_bytes * n)
        for n in range(num_sections)
    ]
    for section in sections:
        if section[1] != _SYMBOL_TABLE:
            continue
        names_at = sections[section[6]][4]
        for index in range(section[5] // 24):
            name, info = struct.unpack_from("<IB", cubin, section[4] + 24 * index)
            if info & 15 == _FUNCTION:
                end = cubin.index(b"\0", names_at + name)
                yield index, cubin[names_at + name : end].decode()


def listing_of_function(cubins: list[Path], fragment: str) -> str | None:
    """Returns the machine code of the first function, by name, whose name contains `fragment`."""
    found = [
        (name, index, path)
        for path in cubins
        for index, name in functions(path.read_bytes())
        if fragment in name
    ]
    if not found:
        return None
    _, index, path = min(found)
    return _text_of([find_tool("nvdisasm"), "-hex", "-c", "-fun", str(index), str(path)])


def _text_of(command: list[str]) -> str:
    run = compilers.run_program(command)
    if run.returncode != 0:
        raise ToolError(f"{' '.join(command)}: {run.stdout}{run.stderr}".rstrip())
    return run.stdout
