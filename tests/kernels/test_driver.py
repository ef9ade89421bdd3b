"""The driver's calls, seen from the other side: a compiled stand-in that remembers its arguments."""

import ctypes
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_cp.kernels import driver as driver_module
from megatron_cp.kernels import params
from megatron_cp.kernels.driver import BFLOAT16, FLOAT32, CudaError, Driver
from tests.kernels import fake_cuda
from tests.processes import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def driver():
    fake_cuda.set_number("fake_failing", 0)
    yield Driver(fake_cuda.load())
    fake_cuda.set_number("fake_failing", 0)


def test_kernel_is_loaded_with_its_shared_memory(driver):
    assert driver.load_kernel(b"12345", "mcp_forward", 100_000, 0) == 1005
    assert fake_cuda.number("fake_shared_bytes") == 100_000
    name = (ctypes.c_char * 128).in_dll(fake_cuda.load(), "fake_kernel_name").value
    assert name == b"mcp_forward"


def test_tensor_map_gets_every_argument_in_its_place(driver):
    encoded = driver.encode_tensor_map(BFLOAT16, 0x7000, (128, 8, 300), (256, 2048), (64, 1, 100))
    assert fake_cuda.last_map(3) == {
        "dtype": 9,
        "rank": 3,
        "address": 0x7000,
        "sizes": [128, 8, 300],
        "strides": [256, 2048],
        "box": [64, 1, 100],
        "steps": [1, 1, 1],
        "modes": [0, 3, 3, 0],  # not interleaved, 128-byte swizzle, 256-byte promotion, zeros
    }
    assert len(encoded) == 128
    assert int.from_bytes(encoded[8:16], "little") == 0x7000


def test_tensor_map_may_lie_plainly(driver):
    driver.encode_tensor_map(FLOAT32, 0x7000, (300, 8), (1216,), (64, 1), swizzled=False)
    assert fake_cuda.last_map(2)["dtype"] == 7
    assert fake_cuda.last_map(2)["modes"] == [0, 0, 3, 0]


def test_launch_copies_the_parameters_at_once(driver):
    struct = params.FwdParams(num_tiles=7, num_heads=3, score_scale=0.5)
    struct.out = 0x1234
    size = ctypes.sizeof(struct)
    fake_cuda.keep_params(size)
    driver.launch(1005, 132, 384, 200_000, 77, struct)
    expected = bytes(struct)
    struct.num_tiles = 0
    assert fake_cuda.last_params(size) == expected
    assert fake_cuda.last_launch() == [132, 1, 1, 384, 1, 1, 200_000, 77]


def test_thread_without_a_context_gets_the_primary_one_and_others_keep_theirs(driver):
    fake_cuda.load().fake_forget_context()
    before = fake_cuda.number("fake_num_retained")
    driver.ensure_context(0)
    driver.ensure_context(0)
    assert fake_cuda.number("fake_num_retained") == before + 1
    thread = threading.Thread(target=driver.ensure_context, args=(0,))
    thread.start()
    thread.join(timeout=HANG_SECONDS)
    assert fake_cuda.number("fake_num_retained") == before + 2


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda d: d.load_kernel(b"x", "mcp_forward", 1, 0), "cuLibraryLoadData of mcp_forward"),
        (
            lambda d: d.encode_tensor_map(BFLOAT16, 8, (64, 2), (128,), (64, 1)),
            "cuTensorMapEncodeTiled of sizes [64, 2], strides [128], box [64, 1]",
        ),
        (
            lambda d: d.launch(1, 5, 384, 0, 0, params.FwdParams()),
            "cuLaunchKernel of 5 x 384 threads",
        ),
    ],
)
def test_failure_is_told_in_the_words_of_the_driver(driver, call, what):
    fake_cuda.set_number("fake_failing", 719)
    with pytest.raises(
        CudaError, match=rf"^{re.escape(what)} failed: out of imagination \(CUresult 719\)$"
    ):
        call(driver)


class _LacksSymbols:
    """A library of an older driver."""

    def __init__(self, library, *missing):
        self._library, self._missing = library, missing

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(f"undefined symbol: {name}")
        return getattr(self._library, name)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (
            ("cuLibraryLoadData", "cuTensorMapEncodeTiled"),
            r"\(CUDA 12\.8\) has no cuLibraryLoadData, cuTensorMapEncodeTiled; allowed: .*12\.0 \(R525\)",
        ),
        (("cuDriverGetVersion",), r"\(no version\) has no cuDriverGetVersion; .*update the driver"),
    ],
)
def test_driver_that_lacks_a_function_is_refused_with_its_version(missing, words):
    with pytest.raises(CudaError, match=words):
        Driver(_LacksSymbols(fake_cuda.load(), *missing))


@pytest.mark.parametrize(
    ("number", "version"), [(12040, (12, 4)), (13000, (13, 0)), (11080, (11, 8))]
)
def test_version_of_the_driver_is_that_of_its_cuda(driver, number, version):
    fake_cuda.set_number("fake_version", number)
    assert driver.version == version
    fake_cuda.set_number("fake_version", 12080)


def test_machine_without_a_driver_has_no_version(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    driver_module.installed_version.cache_clear()
    assert driver_module.installed_version() is None
    driver_module.installed_version.cache_clear()


def test_failure_keeps_the_number_of_the_driver(driver):
    fake_cuda.set_number("fake_failing", 209)
    with pytest.raises(CudaError) as failure:
        driver.load_kernel(b"x", "mcp_forward", 1, 0)
    assert failure.value.status == 209


def test_machine_without_a_driver_is_told_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    driver_module.driver.cache_clear()
    with pytest.raises(CudaError, match=r"libcuda\.so\.1 cannot be loaded .* NVIDIA driver"):
        driver_module.driver()


_OFFSETS = """#include <cstddef>
#include <cstdio>
#include "attn/params.h"
#include "rows/params.h"
using namespace mcp::attn;
using namespace mcp::rows;
int main() {{
    std::printf("{struct} %zu\\n", sizeof({struct}));
    {lines}
}}
"""


STRUCTS = (
    params.FwdParams,
    params.BwdPreprocessParams,
    params.BwdParams,
    params.BwdPostprocessParams,
    params.Joins,
    params.AddRowsParams,
    params.MergeRowsParams,
)
HEADERS = ("attn/params.h", "rows/params.h")


@pytest.mark.parametrize("struct", STRUCTS)
def test_mirror_has_the_offsets_of_the_header(struct, tmp_path):
    name = struct.__name__
    fields = [field[0] for field in struct._fields_ if field[0] != "padding"]
    lines = "\n    ".join(
        f'std::printf("{f} %zu %zu\\n", offsetof({name}, {f}), sizeof({name}::{f}));'
        for f in fields
    )
    source = tmp_path / "offsets.cpp"
    source.write_text(_OFFSETS.format(struct=name, lines=lines))
    include = [f"-I{ROOT / folder}" for folder in ("kernels/include", "kernels")]
    program = str(tmp_path / "offsets")
    subprocess.run(["g++", "-std=c++17", *include, "-o", program, str(source)], check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    mirrored = [f"{name} {ctypes.sizeof(struct)}"]
    mirrored += [f"{f} {getattr(struct, f).offset} {getattr(struct, f).size}" for f in fields]
    assert text.splitlines() == mirrored


@pytest.mark.parametrize("struct", STRUCTS)
def test_mirror_has_every_field_of_the_header(struct):
    header = "".join((ROOT / "kernels" / path).read_text() for path in HEADERS)
    body = header.split(f"struct {struct.__name__} {{")[1].split("\n};")[0]
    declared = [line.split("//")[0].strip().rstrip(";") for line in body.splitlines()]
    names = [
        name.strip(" *")
        for line in declared
        if line
        for name in re.sub(r"^(const )?\w+\*? ", "", line).split(",")
    ]
    assert names == [field[0] for field in struct._fields_ if field[0] != "padding"]


def test_importing_the_kernels_loads_no_driver():
    code = (
        "import megatron_cp.kernels.build, megatron_cp.kernels.driver, megatron_cp.kernels.params;"
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert run.stdout == "False\n", run.stderr
