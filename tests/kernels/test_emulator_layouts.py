"""Layouts and values of the emulated instructions against NumPy written from the PTX ISA's tables."""

import ctypes
from enum import IntEnum, auto
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_cp.kernels.emulator import library
from megatron_cp.kernels.params import TensorMap

TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
SWIZZLE_CODES = {16: 0, 32: 1, 64: 2, 128: 3}  # of tensor maps, by bytes; 16: none
MODE_CODES = {16: 0, 128: 1, 64: 2, 32: 3}  # of matrix descriptors
TILE_BYTES = 16384
SOURCE = Path(__file__).with_name("layout_probes.cu")


class Probe(IntEnum):
    COPY = 0
    PRODUCT = auto()
    MATRIX_STORE = auto()
    MATRIX_LOAD = auto()
    WARP = auto()
    REDUCE = auto()
    CONVERT = auto()


class Params(ctypes.Structure):
    _fields_ = (
        ("a_map", TensorMap),
        ("b_map", TensorMap),
        ("out", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("a_modes", ctypes.c_uint64),
        ("b_modes", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("probe", "variant", "x", "y", "z")),
        *((name, ctypes.c_int32) for name in ("a_offset", "b_offset", "a_bytes", "b_bytes")),
        ("padding", ctypes.c_byte * 60),
    )


@pytest.fixture(scope="module")
def kernel():
    return library.load(
        library.Source(
            "probes", SOURCE.name, "layout_probes", "mcp::probes::Params", root=SOURCE.parent
        )
    )


def _map(kernel, tensor, box, swizzle, **options):
    """Returns the tensor map of `tensor` [z, y, x] with boxes (x, y, z)."""
    size = tensor.element_size()
    encoded = kernel.encode_tiled(
        TYPES[tensor.dtype],
        tensor.data_ptr(),
        tensor.shape[::-1],
        (tensor.stride(1) * size, tensor.stride(0) * size),
        box,
        swizzle=SWIZZLE_CODES[swizzle],
        **options,
    )
    return TensorMap.from_buffer_copy(encoded)


def _run(kernel, seed=1, num_blocks=1, out_words=8 * 128 + 1, **fields):
    out = np.zeros(max(out_words, TILE_BYTES // 4), np.uint32)
    params = Params(out=out.ctypes.data, **fields)
    kernel.run(params, library.Machine(num_blocks, 128, 1024 + 2 * TILE_BYTES + 64, seed=seed))
    return out


def _swizzled(byte, width):
    """Returns where a byte of a panel of rows of `width` bytes lies: its 16-byte chunk moves by the row."""
    return byte if width == 16 else byte ^ (byte // 128 % (width // 16)) * 16


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("corner", [(0, 0, 0), (8, 1, -3), (-8, -1, 17), (40, 1, 18)])
def test_a_box_arrives_swizzled_with_what_is_outside_filled(kernel, width, fill, corner):
    tensor = torch.arange(20 * 3 * 48).remainder(251).reshape(20, 3, 48).bfloat16()
    columns, heads, rows = width // 2, 2, 8
    a_map = _map(kernel, tensor, (columns, heads, rows), width, fill=fill)
    num_bytes = 2 * columns * heads * rows
    x, y, z = corner
    shared = _run(kernel, probe=Probe.COPY, a_map=a_map, x=x, y=y, z=z, a_bytes=num_bytes).view(
        np.uint16
    )
    for row, head, column in np.ndindex(rows, heads, columns):
        at = (z + row, y + head, x + column)
        inside = all(0 <= i < n for i, n in zip(at, tensor.shape, strict=True))
        expected = tensor[at].view(torch.uint16).item() if inside else (0xFFFF if fill else 0)
        byte = 2 * ((row * heads + head) * columns + column)
        assert shared[_swizzled(byte, width) // 2] == expected, (row, head, column)


def _operand(seed, dtype):
    return torch.randint(-8, 9, (64, 64), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _matrix(registers):
    """Returns D [64, 64] from registers [thread, i]: PTX ISA, Register Fragments for wgmma.m64nNk16, D."""
    matrix = np.empty((64, 64), np.float32)
    for thread, i in np.ndindex(128, 32):
        warp, lane = divmod(thread, 32)
        matrix[16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2] = (
            registers[thread, i]
        )
    return matrix


def _descriptor(width, leading, stride):
    return MODE_CODES[width] << 62 | stride // 16 << 32 | leading // 16 << 16


def _k_major(kernel, tensor, width):
    """Returns map, modes, bytes of columns [0, width / 2) of a [64 mn, k] tensor as rows of `width` bytes."""
    a_map = _map(kernel, tensor[:, None, :], (width // 2, 1, 64), width)
    return a_map, _descriptor(width, 16, 8 * width), 64 * width


def _mn_major(kernel, tensor, width):
    """The same of a [k, 64 mn] tensor: panels of width / 2 columns side by side, 16 rows each."""
    panels = tensor[:16].unflatten(1, (-1, width // 2)).transpose(0, 1).contiguous()
    a_map = _map(kernel, panels, (width // 2, 16, panels.shape[0]), width)
    # Without swizzle the offsets change roles: stride to the next 8 columns of D, leading along k.
    leading, stride = (16 * width, 8 * width) if width > 16 else (8 * width, 16 * width)
    return a_map, _descriptor(width, leading, stride), 16 * 64 * 2, panels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("in_registers", [False, True])
def test_k_major_operands_of_every_swizzle_and_step(kernel, dtype, width, in_registers):
    a, b = _operand(1, dtype), _operand(2, dtype)
    a_map, a_modes, num_bytes = _k_major(kernel, a, width)
    b_map, b_modes, _ = _k_major(kernel, b, width)
    for step in range(width // 32):
        columns = slice(16 * step, 16 * step + 16)
        out = _run(
            kernel,
            seed=step,
            probe=Probe.PRODUCT,
            variant=(dtype == torch.float16) * 4 + in_registers * 8,
            a_map=a_map,
            b_map=b_map,
            a_modes=a_modes,
            b_modes=b_modes,
            a_bytes=num_bytes,
            b_bytes=num_bytes,
            a_offset=32 * step,
            b_offset=32 * step,
        )
        left = a.double()[:, columns]
        if in_registers:
            left = (torch.arange(64.0)[:, None] + torch.arange(16.0) / 64).to(dtype).double()
        assert_product(out, left @ b.double()[:, columns].T)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("transposed", [1, 2, 3])
def test_mn_major_operands_of_every_swizzle(kernel, width, transposed):
    a, b = _operand(3, torch.bfloat16), _operand(4, torch.bfloat16)
    modes, keep = {}, []
    for bit, name, x in ((1, "a", a), (2, "b", b)):
        if transposed & bit:
            tensor_map, mode, num_bytes, panels = _mn_major(kernel, x, width)
            keep.append(panels)
        else:
            tensor_map, mode, num_bytes = _k_major(kernel, x, 128)
        modes |= {f"{name}_map": tensor_map, f"{name}_modes": mode, f"{name}_bytes": num_bytes}
    out = _run(kernel, probe=Probe.PRODUCT, variant=transposed, **modes)
    left = a.double()[:16].T if transposed & 1 else a.double()[:, :16]
    right = b.double()[:16] if transposed & 2 else b.double()[:, :16].T
    assert_product(out, left @ right)


def test_k_major_operands_without_swizzle_take_their_chunks_from_two_places(kernel):
    a, b = _operand(5, torch.bfloat16), _operand(6, torch.bfloat16)
    # [chunk, mn, 8 columns]: the second chunk of every row lies 64 * 16 bytes further.
    chunks = [x[:, :16].unflatten(1, (2, 8)).transpose(0, 1).contiguous() for x in (a, b)]
    maps = [_map(kernel, x, (8, 64, 2), 16) for x in chunks]
    modes = _descriptor(16, leading=1024, stride=128)
    out = _run(
        kernel,
        probe=Probe.PRODUCT,
        a_map=maps[0],
        b_map=maps[1],
        a_modes=modes,
        b_modes=modes,
        a_bytes=2048,
        b_bytes=2048,
    )
    assert_product(out, a.double()[:, :16] @ b.double()[:, :16].T)


def assert_product(out, expected):
    actual = _matrix(out[: 128 * 32].view(np.float32).reshape(128, 32))
    assert np.array_equal(actual, expected.numpy().astype(np.float32))


@pytest.mark.parametrize("transpose", [0, 1])
def test_stmatrix_stores_rows_or_columns_of_four_matrices(kernel, transpose):
    out = (
        _run(kernel, probe=Probe.MATRIX_STORE, variant=transpose)[:128]
        .view(np.uint16)
        .reshape(4, 8, 8)
    )
    matrix, row, column = np.meshgrid(range(4), range(8), range(8), indexing="ij")
    element = 256 * matrix + 2 * (4 * row + column // 2) + column % 2
    assert np.array_equal(out, element.swapaxes(1, 2) if transpose else element)


def test_ldmatrix_loads_columns_of_four_matrices(kernel):
    out = _run(kernel, probe=Probe.MATRIX_LOAD)[:128].view(np.uint16).reshape(32, 4, 2)
    lane, matrix, half = np.meshgrid(range(32), range(4), range(2), indexing="ij")
    row, column = 2 * (lane % 4) + half, lane // 4
    assert np.array_equal(out, 64 * matrix + 8 * row + column)


@pytest.mark.parametrize("seed", range(4))
def test_lanes_exchange_vote_and_count(kernel, seed):
    out = _run(kernel, seed=seed, num_blocks=3, probe=Probe.WARP)
    lanes = np.arange(128) % 32
    got = out[: 8 * 128].reshape(128, 8)
    assert (got[:, 0] == 25).all() and (got[:, 1] == (lanes ^ 6) ** 2).all()
    assert (got[:, 2] == 1).all() and (got[:, 3] == 0).all()
    assert out[8 * 128] == 3 * 128 and len(set(got[:, 4])) == 128
    assert (got[:, 5] == 3).all()


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize("corner", [(0, 0, 0), (-8, 1, -60), (24, 0, 30)])
def test_stores_and_reductions_skip_what_is_outside(kernel, variant, corner):
    tensor = torch.full((70, 2, 40), 0.5)
    a_map = _map(kernel, tensor, (32, 1, 64), 128)
    x, y, z = corner
    _run(kernel, probe=Probe.REDUCE, variant=variant, a_map=a_map, x=x, y=y, z=z)
    expected = torch.full_like(tensor, 0.5)
    for row, column in np.ndindex(64, 32):
        if 0 <= z + row < 70 and 0 <= x + column < 40:
            value = _swizzled(4 * (32 * row + column), 128) // 4 + 1
            expected[z + row, y, x + column] = value + (0.0 if variant else 0.5)
    assert torch.equal(tensor, expected)


def test_conversions_round_to_nearest_even_and_functions_keep_their_edges(kernel):
    special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        torch.inf,
        -torch.inf,
        65504.0,
        65519.0,
        65520.0,
        2.0**-14,
        2.0**-24,
    ]
    special += [
        2.0**-25,
        1.5 * 2.0**-25,
        6.1e-5,
        1 + 2.0**-8,
        1 + 3 * 2.0**-9,
        1 + 2.0**-11,
        3.39e38,
        -200.0,
    ]
    generator = torch.Generator().manual_seed(0)
    numbers = torch.cat(
        [torch.tensor(special), torch.randn(64 - len(special), generator=generator) * 30]
    )
    out = _run(kernel, probe=Probe.CONVERT, numbers=numbers.data_ptr())[: 8 * 64].reshape(64, 8)
    halves = np.ascontiguousarray(out[:, :2]).view(np.uint16).reshape(64, 2, 2)
    for which, dtype in ((0, torch.bfloat16), (1, torch.float16)):
        for half, sign in ((0, 1), (1, -1)):
            expected = (sign * numbers).to(dtype).view(torch.uint16).numpy()
            assert np.array_equal(halves[:, which, half], expected)
    floats = out.view(np.float32)
    with np.errstate(all="ignore"):
        x = numbers.numpy().astype(np.float64)
        flushed = np.where(np.abs(np.exp2(x)) < 2.0**-126, 0, np.exp2(x)).astype(np.float32)
        np.testing.assert_allclose(floats[:, 2], flushed, rtol=2**-22)
        np.testing.assert_allclose(
            floats[:, 3], np.log2(x).astype(np.float32), rtol=2**-22, atol=2**-22
        )
        reciprocal = np.where(np.abs(1 / x) < 2.0**-126, 0 * x, 1 / x).astype(np.float32)
        np.testing.assert_allclose(floats[:, 4], np.where(np.isinf(x), 0, reciprocal), rtol=2**-22)
    assert np.array_equal(floats[:, 5], numbers.bfloat16().float().numpy())
    assert np.array_equal(floats[:, 6], (-numbers).half().float().numpy())
    assert np.array_equal(floats[:, 7], numbers.numpy())  # max(x, nan) is x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": 8}, "globalAddress=[0-9]+ must be a multiple of 16"),
        ({"dims": (0, 2, 16)}, "globalDim=0 must be in 1"),
        ({"dims": (2**32 + 1, 2, 16)}, "globalDim=4294967297 must be in 1"),
        ({"strides": (136, 272)}, "globalStrides=136 must be a multiple of 16"),
        ({"strides": (128, 2**40)}, "globalStrides=1099511627776 must be .* below 2\\^40"),
        ({"box": (64, 1, 257)}, "boxDim=257 must be in 1 .. 256"),
        ({"box": (0, 1, 16)}, "boxDim=0 must be in 1 .. 256"),
        ({"box": (4, 1, 16)}, r"boxDim\[0\] in bytes=8 must be a multiple of 16"),
        (
            {"box": (128, 1, 16)},
            r"boxDim\[0\] in bytes=256 must not exceed the swizzle's 128 bytes",
        ),
        ({"element_strides": (9, 1, 1)}, "elementStrides=9 must be in 1 .. 8"),
        ({"swizzle": 4}, "swizzle=4 must be NONE"),
        ({"interleave": 1}, "interleave=1 must be NONE"),
        ({"l2_promotion": 4}, "l2Promotion=4"),
        ({"dtype": 13}, "dataType=13"),
        ({"dtype": 1, "fill": 1}, "oobFill=1 must be zero for integer types"),
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (64,) * 6}, "rank=6 must be in 1 .. 5"),
    ],
)
def test_tensor_maps_that_the_driver_refuses_are_refused(kernel, change, message):
    memory = torch.zeros(4096, dtype=torch.bfloat16)
    good = {
        "dtype": 9,
        "address": 0,
        "dims": (64, 2, 16),
        "strides": (128, 256),
        "box": (64, 1, 16),
    }
    arguments = good | change
    arguments["address"] += memory.data_ptr()
    with pytest.raises(ValueError, match=rf"cuTensorMapEncodeTiled: {message}"):
        kernel.encode_tiled(**arguments)
    good["address"] = memory.data_ptr()
    assert len(kernel.encode_tiled(**good)) == 128
