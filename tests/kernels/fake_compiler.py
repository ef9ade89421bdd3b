"""A compiler that counts its calls; its cubins say what it was given."""

from megatron_cp.kernels import compilers

# What identifies the ELF file of a cubin, as compilers of these major versions wrote it (read with xxd).
HEADER = {
    12: bytes.fromhex("7f454c46 020101 33 07 00000000000000"),
    13: bytes.fromhex("7f454c46 020101 41 08 00000000000000"),
}

REAL_COMPILERS = (*compilers.nvrtcs(), *compilers.nvccs())
# A kernel that compiles in no time.
TINY = """#include <mcp/a.cuh>
extern "C" __global__ void __launch_bounds__(128, 1) tiny(float* x) { x[threadIdx.x] = D; }
"""


class CountingCompiler:
    """Stands in for a compiler; its 'cubin' says what it was given, after the header of its version."""

    kind, path = "nvcc", "nvcc"

    def __init__(self, version="13.0.1", kind="nvcc", log="", error=None):
        self.calls, self.version, self.kind, self.log, self.error = 0, version, kind, log, error
        self.numbers = tuple(int(part) for part in version.split(".")[:2])
        self.name = f"{kind} {version}"

    def compile_with_log(self, source, defines, include_folders):
        self.calls += 1
        if self.error:
            raise compilers.CompileError(self.error)
        assert all(folder.is_dir() for folder in include_folders)
        text = f"{source.name} {' '.join(defines)} {self.calls}".encode()
        return compilers.Compiled(HEADER[self.numbers[0]] + text, "", self.log)
