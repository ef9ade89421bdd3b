"""An .npy file of numbers is what numpy.load makes of it; anything else is refused before memory is taken."""

import io
import pickle
import struct

import numpy as np
import pytest

from megatron_cp.data.plain_array import read_plain_array
from tests.data.arrays import WRITES_A_FILE


def npy(header: str, version: int = 1, body: bytes = b"") -> bytes:
    """A file with a header of one's own."""
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode("latin-1") + body


def of_shape(shape: str, dtype: str = "'<i8'") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}"


def zipped() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(3))
    return stream.getvalue()


NO_ARRAYS = {
    "nothing": b"",
    "text": b"abc",
    "a pickle": pickle.dumps([0]),
    "a zip": zipped(),
    "the first bytes of a zip": b"PK\x03\x04 and no more",
    "no header": b"\x93NUMPY\x01\x00",
    "fewer numbers than it says": npy(of_shape("(9,)"), body=b"12345678"),
    "a negative size": npy(of_shape("(-1,)"), body=b"12345678"),
    "more than there is memory": npy(of_shape(f"({2**45},)")),
    "sizes whose product wraps around": npy(of_shape(f"({2**32}, {2**32})")),
    "a size of a thousand digits": npy(of_shape(f"(0, {'9' * 1000})")),
    "seventy dimensions": npy(of_shape("(" + "1," * 70 + ")"), body=b"12345678"),
    "objects": npy(of_shape("(1,)", "'|O'"), body=pickle.dumps([1])),
    "fields": npy(of_shape("(0,)", "[('a', '<i8')]")),
    "texts": npy(of_shape("(1,)", "'<U4'"), body=b"0123456789abcdef"),
    "brackets without end": npy("[" * 9000),
    "signs without end": npy("-" * 9000 + "1"),
    "a header of another version": npy(of_shape("(1,)"), 3, b"12345678"),
    "keys of another file": npy("{1: 2}"),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", NO_ARRAYS)
def test_what_is_no_array_of_numbers_is_refused_by_its_name(tmp_path, name: str, mapped: bool):
    path = tmp_path / "a.npy"
    path.write_bytes(NO_ARRAYS[name])
    with pytest.raises(
        ValueError, match=r"a\.npy is not an \.npy file of numbers \(.+\); write"
    ) as refused:
        read_plain_array(path, mapped=mapped)
    assert len(str(refused.value).replace(str(path), "")) < 300


@pytest.mark.parametrize("mapped", [False, True])
def test_objects_do_not_run(tmp_path, mapped: bool):
    path = tmp_path / "a.npy"
    for write in WRITES_A_FILE.values():
        write(path, tmp_path / "ran")
        with pytest.raises(ValueError, match="is not an"):
            read_plain_array(path, mapped=mapped)
        assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mapped", [False, True])
def test_numbers_are_what_numpy_reads(tmp_path, mapped: bool):
    arrays = [
        np.zeros((0, 3), np.int64), np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.float32(3), np.array([True, False]), np.arange(3, dtype=">i4"), np.arange(5, dtype=np.uint8),
    ]  # fmt: skip
    for array in arrays:
        np.save(tmp_path / "a.npy", array)
        read = read_plain_array(tmp_path / "a.npy", mapped=mapped)
        expected = np.load(tmp_path / "a.npy")
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(read, expected)
        assert not (mapped and read.size and read.flags.writeable)
