"""Of which CUDA a cubin is, read from its ELF header. Pure functions over bytes.

A driver takes cubins of its own major version of CUDA and of earlier ones. What tells them apart are two bytes
of the header, EI_OSABI and EI_ABIVERSION.
"""

from dataclasses import dataclass

_EI_OSABI, _EI_ABIVERSION, _HEADER_BYTES = 7, 8, 16
# Read from what these compilers made: NVRTC 12.3, 12.4, 12.6, 12.8 and 12.9; nvcc 13.0.88.
_MAJOR_OF_ABI = {(0x33, 7): 12, (0x41, 8): 13}


@dataclass(frozen=True)
class Abi:
    """The two bytes; `str` gives them as `0x33/7`."""

    os_abi: int
    version: int

    def __str__(self) -> str:
        return f"{self.os_abi:#x}/{self.version}"


def abi(cubin: bytes) -> Abi:
    """Returns the OS/ABI and the ABI version of a cubin. Raises ValueError for what is no ELF file."""
    if len(cubin) < _HEADER_BYTES or cubin[:4] != b"\x7fELF":
        raise ValueError(
            f"a cubin of {len(cubin)} bytes begins with {cubin[:4]!r}; it must be an ELF file: make it again with "
            "python -m megatron_cp.kernels.build"
        )
    return Abi(cubin[_EI_OSABI], cubin[_EI_ABIVERSION])


def toolkit_major(cubin: bytes) -> int | None:
    """Returns the major version of CUDA that a cubin is of, None for an ABI that is not known here.

    Raises: ValueError for what is no ELF file.
    """
    found = abi(cubin)
    return _MAJOR_OF_ABI.get((found.os_abi, found.version))


def runs_on(cubin: bytes, driver_major: int | None) -> bool:
    """Returns whether a driver of this major version takes the cubin; None stands for no driver, which asks nothing.

    A cubin of an unknown ABI runs on no known driver. Raises: ValueError for what is no ELF file.
    """
    if driver_major is None:
        return True
    major = toolkit_major(cubin)
    return major is not None and major <= driver_major
