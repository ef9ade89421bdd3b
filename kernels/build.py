"""Cubins of the kernels: packaged, cached, or compiled here and now. Standard library only, no GPU needed.

    python -m megatron_cp.kernels.build --all        compile what is missing into the user's cache
    python -m megatron_cp.kernels.build --list       say what there is

`cubin(name)` looks into the package (cubins that `setup.py` made where there was a compiler), then into the
user's cache, and compiles otherwise. What may be used is decided by a hash of the sources that the variant
includes, its definitions and the flags (and, in the cache, the compiler's version), so an edited kernel is
never run from an old cubin; and by the driver, which takes cubins of its own major version of CUDA and of earlier
ones (`elf.py`).

Ranks that need the same cubin at once wait for the one that compiles it (`kernels/cache.py`).
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

if __package__:
    from megatron_cp.kernels import cache, compilers, driver, elf
else:  # run as a file by setup.py, before anything is installed
    import cache  # type: ignore[no-redef,import-not-found]
    import compilers  # type: ignore[no-redef,import-not-found]
    import driver  # type: ignore[no-redef,import-not-found]
    import elf  # type: ignore[no-redef,import-not-found]

SOURCES = Path(__file__).resolve().parent
PACKAGED = SOURCES / "cubins"
VARIANTS = SOURCES / "attn" / "variants.json"
INCLUDE_FOLDERS = (SOURCES / "include", SOURCES)
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_OLDEST_DRIVER = compilers.MIN_VERSION[0]
_SERIALISED = re.compile(r"\(C75\d\d\)")  # ptxas' numbers for products that wait for each other


@dataclass(frozen=True)
class Variant:
    """One cubin: a source below `kernels/`, the definitions that make this variant of it, its entry."""

    name: str
    kernel_pass: str
    source: str
    entry: str
    defines: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Returns the source file."""
        return SOURCES / self.source

    def value(self, name: str) -> str:
        """Returns what a definition is set to. Raises KeyError."""
        return dict(define.split("=", 1) for define in self.defines)[name]


@lru_cache(maxsize=1)
def variants() -> dict[str, Variant]:
    """Returns all variants by name, as `attn/variants.json` lists them."""
    entries = json.loads(VARIANTS.read_text(encoding="utf-8"))["variants"]
    listed = [
        Variant(e["name"], e["pass"], e["source"], e["entry"], _defines(e["defines"]))
        for e in entries
    ]
    return {variant.name: variant for variant in listed}


def _defines(values: dict[str, str | int]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in values.items())


@lru_cache(maxsize=256)
def cubin(name: str) -> bytes:
    """Returns a cubin of a variant that this machine's driver takes; without a driver, any.

    It is compiled if neither the package nor the cache has one.

    Raises: KeyError for an unknown name; NoCompilerError, CompileError when it must be compiled and cannot;
    PermissionError for a cache that others can write to.
    """
    variant = variants()[name]
    packaged = packaged_cubin(variant)
    if packaged is not None and elf.runs_on(packaged, driver_major()):
        return packaged
    try:
        return compiled_cubin(name)
    except compilers.NoCompilerError as error:
        if packaged is None:
            raise
        raise compilers.NoCompilerError(
            f"the packaged cubin of {name} is of {cuda_of(packaged)} and the driver of CUDA {driver_major()}; {error}"
        ) from error


def compiled_cubin(name: str) -> bytes:
    """Returns the variant's cubin from the cache, or compiled and put there, whatever is packaged.

    Of a compiler whose cubins this machine's driver takes. Raises like `cubin`.
    """
    variant = variants()[name]
    found = compilers.find_compilers(at_most=driver_major())
    return compilers.compile_with_any(found, lambda compiler: cached_cubin(variant, compiler))


def packaged_cubin(variant: Variant) -> bytes | None:
    """Returns the cubin that came with the package, if it was made from the sources that are here."""
    path = PACKAGED / packaged_name(variant)
    return path.read_bytes() if path.is_file() else None


def packaged_name(variant: Variant) -> str:
    """Returns the file name of a packaged cubin."""
    return f"{variant.name}.{source_key(variant)[:16]}.cubin"


def cuda_of(cubin: bytes) -> str:
    """Returns of which CUDA a cubin is, with what its header says. Raises ValueError for no ELF file."""
    return f"CUDA {elf.toolkit_major(cubin) or 'unknown'} (ELF ABI {elf.abi(cubin)})"


def driver_major() -> int | None:
    """Returns the major version of CUDA that this machine's driver is of, None without a driver."""
    version = driver.installed_version()
    return None if version is None else version[0]


def cached_cubin(variant: Variant, compiler: compilers.Compiler) -> bytes:
    """Returns the cubin of the user's cache, compiled and put there if it is not."""
    key = hashlib.sha256(f"{source_key(variant)} {compiler.kind} {compiler.version}".encode())
    path = cache_folder() / f"{variant.name}.{key.hexdigest()[:32]}.cubin"
    cache.make_once(path, lambda: cache.write_whole(path, compile_variant(variant, compiler)))
    return path.read_bytes()


def compile_variant(variant: Variant, compiler: compilers.Compiler) -> bytes:
    """Returns the cubin, always compiled.

    Raises: CompileError, also for code that the compiler itself calls much slower: serialised matrix products.
    """
    made = compiler.compile_with_log(variant.path, variant.defines, INCLUDE_FOLDERS)
    slow = [line.strip() for line in made.log.splitlines() if _SERIALISED.search(line)]
    if slow:
        raise compilers.CompileError(
            f"{compiler.name} serialises the matrix products of {variant.name}: {slow[0]}; allowed: compilers that "
            "run them in parallel; install another one, as python -m megatron_cp doctor says"
        )
    return made.cubin


def source_key(variant: Variant) -> str:
    """Returns a SHA-256 over every file that the variant includes, its definitions and the flags."""
    flags = (compilers.FLAGS, compilers.NVCC_FLAGS, compilers.NVRTC_FLAGS)
    digest = hashlib.sha256(repr((variant.source, variant.defines, flags)).encode())
    for path in included_files(variant.path):
        digest.update(f"\n{path.relative_to(SOURCES)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def included_files(source: Path, folders: Sequence[Path] | None = None) -> list[Path]:
    """Returns the source and all files of ours that it includes, directly or not, in a fixed order.

    Preprocessor conditions are not looked at: a file too many only costs a compilation. `folders` are where
    headers are looked for, in this order; default: the device's.
    """
    folders = INCLUDE_FOLDERS if folders is None else folders
    found, waiting = {source.resolve()}, [source.resolve()]
    while waiting:
        path = waiting.pop()
        for name in _INCLUDE.findall(path.read_bytes()):
            candidates = [folder / os.fsdecode(name) for folder in (path.parent, *folders)]
            target = next((c.resolve() for c in candidates if c.is_file()), None)
            if target is not None and target not in found:
                found.add(target)
                waiting.append(target)
    return sorted(found)


def cache_folder() -> Path:
    """Returns the user's folder of cubins. Raises PermissionError if others can write to it."""
    return cache.user_folder("cubins", "cubin")


def build_packaged(folder: Path) -> tuple[int, str]:
    """Compiles all variants into `folder` for an installation; returns how many it holds, and by whom.

    Returns 0 and the reason, leaving nothing behind, where there is no compiler: users then compile on first use.

    Raises: CompileError if no compiler that is there can.
    """
    if not VARIANTS.is_file():
        return 0, "the sources of the kernels are not here"
    try:
        found = compilers.find_compilers()
    except compilers.NoCompilerError as error:
        return 0, str(error)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {packaged_name(variant): variant for variant in variants().values()}
    for old in folder.glob("*.cubin"):
        if old.name not in wanted:
            old.unlink()
    missing = [(folder / name, v) for name, v in wanted.items() if not (folder / name).is_file()]

    def make(one: tuple[Path, Variant]) -> None:
        path, variant = one
        cache.write_whole(
            path,
            compilers.compile_with_any(found, lambda c: compile_variant(variant, c)),
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, missing))
    words = f"by {' or '.join(compiler.name for compiler in found)}"
    if not all(elf.runs_on((folder / name).read_bytes(), _OLDEST_DRIVER) for name in wanted):
        words += (
            f"; not for drivers of CUDA {_OLDEST_DRIVER}, which compile on first use: {compilers.install_hint(None)} "
            "or make toolkits before building, for cubins that all drivers take"
        )
    return len(wanted), words


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_cp.kernels.build", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="VARIANT", help="variants to make")
    parser.add_argument("--all", action="store_true", help="make every variant")
    parser.add_argument("--list", action="store_true", help="print the variants and make nothing")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="make a wheel's cubins")
    parser.add_argument("--compiler", choices=("nvcc", "nvrtc"), help="default: NVRTC, else nvcc")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in variants()]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; one of {', '.join(variants())}")
    if not (options.names or options.all or options.list or options.into):
        parser.error("name variants, or give --all, --list or --into")
    chosen = [
        v for v in variants().values() if options.all or options.list or v.name in options.names
    ]
    if options.list:
        _print(*(f"{v.name}  {v.source}  {' '.join(v.defines)}" for v in chosen))
        return 0
    try:
        if options.into:
            count, by = build_packaged(options.into)
            _print(f"{count} cubins in {options.into}: {by}")
            return 0
        _make(chosen, options.compiler)
    except (compilers.NoCompilerError, compilers.CompileError, PermissionError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _make(chosen: Sequence[Variant], kind: str | None) -> None:
    found = compilers.find_compilers(kind, driver_major())
    names = ", else ".join(f"{compiler.name} ({compiler.path})" for compiler in found)
    _print(f"{names} -> {cache_folder()}")
    for variant in chosen:
        started = time.perf_counter()
        made = compilers.compile_with_any(found, lambda c, v=variant: cached_cubin(v, c))  # type: ignore[misc]
        seconds = time.perf_counter() - started
        _print(f"{variant.name}: {len(made)} bytes, {cuda_of(made)}, {seconds:.1f} s")


def _print(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
