"""The CUDA driver through ctypes: load a cubin, describe a tensor, launch. Ran with a driver of CUDA 13.

Nothing is loaded before the first call of `driver()`. Everything that can fail raises CudaError with the
driver's own words. Functions that need a context take the device's primary one, which is PyTorch's, when the
calling thread has none (autograd's threads may not).
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import lru_cache

LIBRARY = "libcuda.so.1"
TENSOR_MAP_BYTES = 128
# Values of enumerations in cuda.h.
FLOAT16, FLOAT32, BFLOAT16 = 6, 7, 9  # CUtensorMapDataType
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_INTERLEAVE_NONE, _SWIZZLE_NONE, _SWIZZLE_128B, _L2_PROMOTION_256B, _FILL_ZEROS = 0, 0, 3, 3, 0

_OnePointer = c_void_p * 1
_SIGNATURES: dict[str, tuple[type, ...] | None] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuLibraryLoadData": (
        POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint,
    ),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuTensorMapEncodeTiled": (
        c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32),
        POINTER(c_uint32), c_int, c_int, c_int, c_int,
    ),
    "cuLaunchKernel": None,  # given what it takes: a signature costs .8 us of each call (Xeon, 2026-11-27)
}  # fmt: skip


class CudaError(RuntimeError):
    """A call of the CUDA driver failed; `status` is its CUresult, 0 where no call was made."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Driver:
    """The driver's functions that the kernels need, over a loaded `libcuda.so.1` (or a stand-in)."""

    def __init__(self, library: ctypes.CDLL):
        missing = [name for name in _SIGNATURES if not hasattr(library, name)]
        if missing:
            has = version_text(_version(library))
            raise CudaError(
                f"the NVIDIA driver ({has}) has no {', '.join(missing)}; allowed: drivers of CUDA 12.0 (R525) or "
                "later; update the driver"
            )
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        self._library = library
        self._check("cuInit", library.cuInit(0))

    @property
    def version(self) -> tuple[int, int] | None:
        """Returns `(major, minor)` of the CUDA that the driver is of, as `installed_version` does."""
        return _version(self._library)

    def load_kernel(self, image: bytes, name: str, shared_bytes: int, device: int) -> int:
        """Returns the handle of the kernel `name` of a cubin, allowed `shared_bytes` of shared memory.

        The library stays loaded for the life of the process.
        """
        self.ensure_context(device)
        library, kernel = c_void_p(), c_void_p()
        status = self._library.cuLibraryLoadData(
            byref(library), image, None, None, 0, None, None, 0
        )
        self._check(f"cuLibraryLoadData of {name}", status)
        status = self._library.cuLibraryGetKernel(byref(kernel), library, name.encode())
        self._check(f"cuLibraryGetKernel of {name}", status)
        status = self._library.cuKernelSetAttribute(
            _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, kernel, self._device(device)
        )
        self._check(
            f"cuKernelSetAttribute of {name}, {shared_bytes} bytes of shared memory", status
        )
        assert kernel.value is not None
        return kernel.value

    def encode_tensor_map(
        self,
        dtype: int,
        address: int,
        sizes: Sequence[int],
        stride_bytes: Sequence[int],
        box: Sequence[int],
        swizzled: bool = True,
    ) -> bytes:
        """Returns the 128 bytes that describe a strided tensor to the copy engine.

        `sizes` and `box` begin with the contiguous dimension; `stride_bytes` are those of the others. What
        lies outside the tensor is read as zero. In shared memory a box is swizzled by 128 bytes, or plain.
        """
        storage = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
        aligned = (ctypes.addressof(storage) + 63) // 64 * 64
        rank = len(sizes)
        status = self._library.cuTensorMapEncodeTiled(
            aligned,
            dtype,
            rank,
            address,
            (c_uint64 * rank)(*sizes),
            (c_uint64 * (rank - 1))(*stride_bytes),
            (c_uint32 * rank)(*box),
            (c_uint32 * rank)(*(1,) * rank),
            _INTERLEAVE_NONE,
            _SWIZZLE_128B if swizzled else _SWIZZLE_NONE,
            _L2_PROMOTION_256B,
            _FILL_ZEROS,
        )
        if status:
            what = f"cuTensorMapEncodeTiled of sizes {list(sizes)}, strides {list(stride_bytes)}, box {list(box)}"
            self._check(what, status)
        return ctypes.string_at(aligned, TENSOR_MAP_BYTES)

    def launch(
        self,
        kernel: int,
        num_blocks: int,
        num_threads: int,
        shared_bytes: int,
        stream: int,
        params: ctypes.Structure,
    ) -> None:
        """Launches a kernel whose one parameter is `params`, which may be changed after the return."""
        pointers = _OnePointer(ctypes.addressof(params))
        on, stream_of = c_void_p(kernel), c_void_p(stream)
        status = self._library.cuLaunchKernel(
            on, num_blocks, 1, 1, num_threads, 1, 1, shared_bytes, stream_of, pointers, None
        )
        if status:
            self._check(f"cuLaunchKernel of {num_blocks} x {num_threads} threads", status)

    def ensure_context(self, device: int) -> None:
        """Gives the calling thread the device's primary context unless it has a context."""
        context = c_void_p()
        self._check("cuCtxGetCurrent", self._library.cuCtxGetCurrent(byref(context)))
        if context.value is None:
            retained = self._library.cuDevicePrimaryCtxRetain(byref(context), self._device(device))
            self._check("cuDevicePrimaryCtxRetain", retained)
            self._check("cuCtxSetCurrent", self._library.cuCtxSetCurrent(context))

    def _device(self, ordinal: int) -> c_int:
        device = c_int()
        self._check("cuDeviceGet", self._library.cuDeviceGet(byref(device), ordinal))
        return device

    def _check(self, what: str, status: int) -> None:
        if status == 0:
            return
        text = c_char_p()
        self._library.cuGetErrorString(status, byref(text))
        words = (text.value or b"unknown error").decode(errors="replace")
        raise CudaError(f"{what} failed: {words} (CUresult {status})", status)


@lru_cache(maxsize=1)
def driver() -> Driver:
    """Returns the driver of this machine. Raises CudaError where there is none."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CudaError(
            f"{LIBRARY} cannot be loaded ({error}); the Hopper kernels need a machine with an NVIDIA driver"
        ) from error
    return Driver(library)


@lru_cache(maxsize=1)
def installed_version() -> tuple[int, int] | None:
    """Returns `(major, minor)` of the newest CUDA that this machine's driver serves, None without a driver.

    Nothing is initialised: it can be asked before a fork.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return _version(library)


def version_text(version: tuple[int, int] | None) -> str:
    """Returns a version as people read it."""
    return "no version" if version is None else f"CUDA {version[0]}.{version[1]}"


def _version(library: ctypes.CDLL) -> tuple[int, int] | None:
    number = c_int()
    if not hasattr(library, "cuDriverGetVersion") or library.cuDriverGetVersion(byref(number)):
        return None
    return number.value // 1000, number.value % 1000 // 10  # 12040 is 12.4
