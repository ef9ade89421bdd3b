"""What a compiler and nvdisasm made of a variant, kept in the user's cache as cubins in use are.

Each is asked once, as long as the variant's files, the flags and both programs are the same: these by content, since
each checkout's environment has an nvdisasm of its own, and all share the cache.
"""

import functools
import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_cp.kernels import build, cache, compilers
from tools import compile_gate

_disassemble = compile_gate.disassembled
_listings: dict[bytes, str] = {}


def disassembled(cubin: bytes, nvdisasm: str) -> str:
    """Returns what `compile_gate.disassembled` does, kept with the cubins of `Kept` compilers."""
    return _listings.get(cubin) or _disassemble(cubin, nvdisasm)


@functools.cache
def _digest(program: str) -> str:
    return hashlib.sha256(Path(program).read_bytes()).hexdigest()


def _remove_old(paths: Iterable[Path]) -> None:
    """Removes those made more than a day ago: younger ones may be of another checkout that is worked on."""
    for path in paths:
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - 24 * 3600:
                path.unlink()


@dataclass(frozen=True)
class Kept(compilers.Compiler):
    """A compiler of one variant that keeps what it made, and the listing of it."""

    variant: build.Variant
    nvdisasm: str

    @classmethod
    def of(cls, compiler: compilers.Compiler, variant: build.Variant, nvdisasm: str) -> "Kept":
        return cls(compiler.kind, compiler.path, compiler.version, variant, nvdisasm)

    def compile_with_log(
        self, source: Path, defines: Sequence[str], include_folders: Sequence[Path]
    ) -> compilers.Compiled:
        programs = [_digest(path) for path in (self.path, self.nvdisasm)]
        key = (build.source_key(self.variant), programs, compile_gate.NVDISASM_FLAGS)
        folder, stem = cache.user_folder("gate", "gate"), f"{self.variant.name}.{self.version}."
        path = folder / f"{stem}{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json.z"

        def make() -> None:
            made = compilers.Compiler.compile_with_log(self, source, defines, include_folders)
            listing = _disassemble(made.cubin, self.nvdisasm)
            _remove_old(folder.glob(f"{stem}*.json*"))
            told = {"cubin": made.cubin.hex(), "ptx": made.ptx, "log": made.log, "listing": listing}
            cache.write_whole(path, zlib.compress(json.dumps(told).encode(), level=1))

        told = json.loads(zlib.decompress(cache.make_once(path, make).read_bytes()))
        cubin = bytes.fromhex(told["cubin"])
        _listings[cubin] = told["listing"]
        return compilers.Compiled(cubin, told["ptx"], told["log"])
