"""Cubins of the kernels: packaged, cached, or compiled here and now. Standard library only, no GPU needed.

    python -m megatron_cp.kernels.build --all        compile what is missing into the user's cache
    python -m megatron_cp.kernels.build --list       say what there is

`cubin(name)` looks into the package (cubins that `setup.py` made where nvcc was present), then into the
user's cache, and compiles otherwise. What may be used is decided by a hash of the sources that the variant
includes, its definitions and the flags (and, in the cache, the compiler's version), so an edited kernel is
never run from an old cubin.

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
    from megatron_cp.kernels import cache, compilers
else:  # run as a file by setup.py, before anything is installed
    import cache  # type: ignore[no-redef,import-not-found]
    import compilers  # type: ignore[no-redef,import-not-found]

SOURCES = Path(__file__).resolve().parent
PACKAGED = SOURCES / "cubins"
VARIANTS = SOURCES / "attn" / "variants.json"
INCLUDE_FOLDERS = (SOURCES / "include", SOURCES)
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)


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
    """Returns the cubin of a variant, compiling it if neither the package nor the cache has it.

    Raises: KeyError for an unknown name; NoCompilerError, CompileError when it must be compiled and cannot;
    PermissionError for a cache that others can write to.
    """
    variant = variants()[name]
    packaged = PACKAGED / f"{name}.{source_key(variant)[:16]}.cubin"
    if packaged.is_file():
        return packaged.read_bytes()
    return cached_cubin(variant, compilers.find_compiler())


def cached_cubin(variant: Variant, compiler: compilers.Compiler) -> bytes:
    """Returns the cubin of the user's cache, compiled and put there if it is not."""
    key = hashlib.sha256(f"{source_key(variant)} {compiler.kind} {compiler.version}".encode())
    path = cache_folder() / f"{variant.name}.{key.hexdigest()[:32]}.cubin"
    cache.make_once(path, lambda: cache.write_whole(path, compile_variant(variant, compiler)))
    return path.read_bytes()


def compile_variant(variant: Variant, compiler: compilers.Compiler) -> bytes:
    """Returns the cubin, always compiled. Raises CompileError."""
    return compiler.compile(variant.path, variant.defines, INCLUDE_FOLDERS)


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


def build_packaged(folder: Path) -> int:
    """Compiles all variants into `folder` for an installation; returns how many it holds.

    Returns 0, leaving nothing behind, where nvcc is missing: users then compile on first use.
    """
    compiler = compilers.find_nvcc()
    if compiler is None or not VARIANTS.is_file():
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{v.name}.{source_key(v)[:16]}.cubin": v for v in variants().values()}
    for old in folder.glob("*.cubin"):
        if old.name not in wanted:
            old.unlink()
    missing = [(folder / name, v) for name, v in wanted.items() if not (folder / name).is_file()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, cubin_bytes in pool.map(
            lambda m: (m[0], compile_variant(m[1], compiler)), missing
        ):
            cache.write_whole(path, cubin_bytes)
    return len(wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_cp.kernels.build", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="VARIANT", help="variants to make")
    parser.add_argument("--all", action="store_true", help="make every variant")
    parser.add_argument("--list", action="store_true", help="print the variants and make nothing")
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="make a wheel's cubins with nvcc"
    )
    parser.add_argument("--compiler", choices=("nvcc", "nvrtc"), help="default: nvcc, else NVRTC")
    options = parser.parse_args(arguments)
    if options.into:
        _print(f"{build_packaged(options.into)} cubins in {options.into}")
        return 0
    unknown = [name for name in options.names if name not in variants()]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}; one of {', '.join(variants())}")
    if not (options.names or options.all or options.list):
        parser.error("name variants, or give --all, --list or --into")
    chosen = [
        v for v in variants().values() if options.all or options.list or v.name in options.names
    ]
    if options.list:
        _print(*(f"{v.name}  {v.source}  {' '.join(v.defines)}" for v in chosen))
        return 0
    try:
        compiler = compilers.find_compiler(options.compiler)
        _print(f"{compiler.kind} {compiler.version} ({compiler.path}) -> {cache_folder()}")
        for variant in chosen:
            started = time.perf_counter()
            size = len(cached_cubin(variant, compiler))
            _print(f"{variant.name}: {size} bytes, {time.perf_counter() - started:.1f} s")
    except (compilers.NoCompilerError, compilers.CompileError, PermissionError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _print(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
