"""What a compiler and nvdisasm made of a variant, kept in the user's cache as cubins in use are.

Each is asked once, as long as the variant's files, the flags and both programs are the same.
"""

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_cp.kernels import build, cache, compilers
from tools import compile_gate

_disassemble = compile_gate.disassembled
_listings: dict[bytes, str] = {}


def disassembled(cubin: bytes, nvdisasm: str) -> str:
    """Returns what `compile_gate.disassembled` does, kept with the cubins of `Kept` compilers."""
    return _listings.get(cubin) or _disassemble(cubin, nvdisasm)


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
        programs = [(path, Path(path).stat().st_mtime_ns) for path in (self.path, self.nvdisasm)]
        key = (build.source_key(self.variant), programs, compile_gate.NVDISASM_FLAGS)
        folder, stem = cache.user_folder("gate", "gate"), f"{self.variant.name}.{self.version}."
        path = folder / f"{stem}{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.json.z"

        def make() -> None:
            made = compilers.Compiler.compile_with_log(self, source, defines, include_folders)
            listing = _disassemble(made.cubin, self.nvdisasm)
            for old in folder.glob(f"{stem}*.json*"):
                old.unlink(missing_ok=True)
            told = {"cubin": made.cubin.hex(), "ptx": made.ptx, "log": made.log, "listing": listing}
            cache.write_whole(path, zlib.compress(json.dumps(told).encode(), level=1))

        told = json.loads(zlib.decompress(cache.make_once(path, make).read_bytes()))
        cubin = bytes.fromhex(told["cubin"])
        _listings[cubin] = told["listing"]
        return compilers.Compiled(cubin, told["ptx"], told["log"])
