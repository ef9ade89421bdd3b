"""One kernel onto one device: the cubin that the driver takes, and a second try where it does not.

    package, else cache, else compiled (`build.cubin`)  ->  driver  -- refused -->  compiled anew  ->  driver

The first way ran on an H100 (docs/gpu.md); no driver has refused a cubin yet, refusals are stand-ins in the tests.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from megatron_cp.kernels import build, compilers, elf
from megatron_cp.kernels.driver import CudaError, installed_version, version_text

# CUresult of an image that this driver or device cannot use: INVALID_IMAGE, NO_BINARY_FOR_GPU,
# UNSUPPORTED_PTX_VERSION. Source: cuda.h.
REFUSALS = (200, 209, 222)


class LoadsKernels(Protocol):
    """What kernels are loaded by: `driver.Driver`, or what stands in for it."""

    @property
    def version(self) -> tuple[int, int] | None:
        """Returns `(major, minor)` of the driver's CUDA."""

    def load_kernel(self, image: bytes, name: str, shared_bytes: int, device: int) -> int:
        """Returns a handle. Raises CudaError."""


def load_variant(name: str, on: LoadsKernels, device: int) -> int:
    """Returns the handle of a variant's kernel on a device, allowed the shared memory that the variant asks for.

    A cubin that the driver refuses is compiled once more, by a compiler of the driver's major version or an earlier
    one, and tried again.

    Raises: CudaError that names the driver's version, the cubin's CUDA and what to install if both are refused, or in
    the driver's words for any other failure; KeyError, NoCompilerError, CompileError and PermissionError like
    `build.cubin`.
    """
    variant = build.variants()[name]
    shared_bytes = dict(define.split("=", 1) for define in variant.defines).get(
        "MCP_SHARED_BYTES", "0"
    )
    image = build.cubin(name)
    try:
        return on.load_kernel(image, variant.entry, int(shared_bytes), device)
    except CudaError as refusal:
        if refusal.status not in REFUSALS:
            raise
        first = refusal
    try:
        again = build.compiled_cubin(name)
    except (compilers.NoCompilerError, compilers.CompileError) as error:
        raise _refused(
            first, name, image, on, f"and it cannot be compiled anew: {error}"
        ) from first
    if again == image:
        raise _refused(first, name, image, on, "which is what this machine compiles") from first
    try:
        return on.load_kernel(again, variant.entry, int(shared_bytes), device)
    except CudaError as second:
        tried = f"and one of {build.cuda_of(again)}, compiled here, too ({second})"
        raise _refused(first, name, image, on, tried) from second


def _refused(first: CudaError, name: str, image: bytes, on: LoadsKernels, more: str) -> CudaError:
    allowed = "up to its own major version" if on.version is None else f"up to {on.version[0]}"
    hint = compilers.install_hint(on.version[0] if on.version else None)
    return CudaError(
        f"the driver ({version_text(on.version)}) refuses the cubin of {name}, of {build.cuda_of(image)}, {more}; "
        f"allowed: cubins of CUDA {allowed}, on devices of compute capability 9.0; {hint}. {first}",
        first.status,
    )


@dataclass(frozen=True)
class Answer:
    """What one part of this machine says to whoever wants to run the kernels."""

    part: str
    is_fine: bool
    words: str


def answers() -> list[Answer]:
    """Returns what the driver, the compilers and the packaged cubins say. Loads no kernel, starts no context."""
    version = installed_version()
    is_new_enough = version is not None and version[0] >= compilers.MIN_VERSION[0]
    words = "none" if version is None else version_text(version)
    if version is not None and not is_new_enough:
        words += f", too old; {compilers.install_hint(version[0])}"
    return [Answer("driver", is_new_enough, words), _compilers(), _packaged()]


def _compilers() -> Answer:
    try:
        found = compilers.find_compilers(at_most=build.driver_major())
    except (compilers.NoCompilerError, PermissionError) as error:
        return Answer("kernel compilers", False, str(error))
    words = ", else ".join(f"{one.name} ({one.path})" for one in found)
    return Answer("kernel compilers", True, words)


def _packaged() -> Answer:
    cubins = [build.packaged_cubin(variant) for variant in build.variants().values()]
    there = [cubin for cubin in cubins if cubin is not None]
    unusable = sum(not elf.runs_on(cubin, build.driver_major()) for cubin in there)
    counts = Counter(build.cuda_of(cubin) for cubin in there)
    words = ", ".join(f"{count} of {cuda}" for cuda, count in counts.items())
    if unusable:
        words += f"; this driver takes {len(there) - unusable} of them, the others are compiled on first use"
    return Answer("packaged cubins", not unusable, words or "none; compiled on first use")
