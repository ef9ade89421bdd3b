"""Loading a kernel: which cubin a driver is given, and what happens when it refuses one.

Driver and compilers are fakes.
"""

import pytest

from megatron_cp import doctor
from megatron_cp.kernels import build, compilers, elf, loading
from megatron_cp.kernels import driver as driver_module
from megatron_cp.kernels.driver import CudaError
from tests.kernels.fake_compiler import HEADER

NAME = "bwd_postprocess_bf16_64"


class StrictDriver:
    """Takes cubins of its major version and earlier ones, as NVIDIA's drivers do; `refuses` makes it take less."""

    def __init__(self, *version, status=200, refuses=()):
        self.version, self.status, self.refuses, self.given = version, status, refuses, []

    def load_kernel(self, image, name, shared_bytes, device):
        self.given.append(image)
        major = elf.toolkit_major(image)
        if major is None or major > self.version[0] or image in self.refuses:
            raise CudaError(
                f"cuLibraryLoadData of {name} failed: no (CUresult {self.status})", self.status
            )
        return 1000 + shared_bytes


@pytest.fixture
def place(monkeypatch):
    """Sets what is packaged, what this machine compiles, and its driver; returns the driver."""

    def install(driver, packaged=None, compiled=None):
        def compile_here(name):
            if isinstance(compiled, Exception):
                raise compiled
            return compiled

        monkeypatch.setattr(driver_module, "installed_version", lambda: driver.version)
        monkeypatch.setattr(loading, "installed_version", lambda: driver.version)
        monkeypatch.setattr(build, "packaged_cubin", lambda variant: packaged)
        monkeypatch.setattr(build, "compiled_cubin", compile_here)
        build.cubin.cache_clear()
        return driver

    yield install
    build.cubin.cache_clear()


def test_kernel_is_loaded_with_the_shared_memory_of_its_variant(place):
    driver = place(StrictDriver(12, 8), packaged=HEADER[12])
    assert loading.load_variant(NAME, driver, 0) == 1000
    build.cubin.cache_clear()
    wanted = int(build.variants()["fwd_bf16_128"].value("MCP_SHARED_BYTES"))
    assert loading.load_variant("fwd_bf16_128", driver, 0) == 1000 + wanted


def test_driver_of_cuda_12_is_never_given_a_packaged_cubin_of_cuda_13(place):
    driver = place(StrictDriver(12, 4), packaged=HEADER[13], compiled=HEADER[12])
    loading.load_variant(NAME, driver, 0)
    assert driver.given == [HEADER[12]]


@pytest.mark.parametrize("status", [200, 209, 222])
def test_refused_cubin_is_compiled_anew_and_tried_once_more(place, status):
    stale = HEADER[12] + b"of another device"
    fresh = HEADER[12] + b"compiled here"
    driver = place(StrictDriver(12, 8, status=status, refuses=[stale]), stale, fresh)
    assert loading.load_variant(NAME, driver, 0) == 1000
    assert driver.given == [stale, fresh]


def test_other_failures_are_not_answered_by_compiling(place):
    driver = place(
        StrictDriver(12, 8, status=2, refuses=[HEADER[12]]), HEADER[12], AssertionError("compiled")
    )
    with pytest.raises(CudaError, match=r"\(CUresult 2\)$"):
        loading.load_variant(NAME, driver, 0)


@pytest.mark.parametrize(
    ("compiled", "more"),
    [
        (HEADER[12] + b"stale", "which is what this machine compiles"),
        (HEADER[12] + b"fresh", r"and one of CUDA 12 \(ELF ABI 0x33/7\), compiled here, too"),
        (compilers.NoCompilerError("no compiler"), "and it cannot be compiled anew: no compiler"),
    ],
)
def test_cubin_that_stays_refused_names_driver_toolkit_and_what_to_install(place, compiled, more):
    stale, fresh = HEADER[12] + b"stale", HEADER[12] + b"fresh"
    driver = place(StrictDriver(12, 2, refuses=[stale, fresh]), stale, compiled)
    message = (
        rf"the driver \(CUDA 12\.2\) refuses the cubin of {NAME}, of CUDA 12 \(ELF ABI 0x33/7\), {more}.*; allowed: "
        r'cubins of CUDA up to 12, .*; pip install "nvidia-cuda-nvrtc-cu12"\. cuLibraryLoadData .*CUresult 200'
    )
    with pytest.raises(CudaError, match=message) as refusal:
        loading.load_variant(NAME, driver, 0)
    assert refusal.value.status == 200


@pytest.mark.parametrize(
    ("version", "packaged", "expected"),
    [
        ((12, 4), 12, {"driver": (True, "CUDA 12.4"), "packaged cubins": (True, "68 of CUDA 12")}),
        (
            (12, 4),
            13,
            {
                "packaged cubins": (
                    False,
                    "this driver takes 0 of them, the others are compiled on first use",
                )
            },
        ),
        ((11, 4), 12, {"driver": (False, "CUDA 11.4, too old; update the NVIDIA driver to R525")}),
        ((13, 0), None, {"packaged cubins": (True, "none; compiled on first use")}),
    ],
)
def test_answers_say_what_this_machine_can_use(place, version, packaged, expected):
    place(StrictDriver(*version), HEADER.get(packaged))
    said = {one.part: one for one in loading.answers()}
    for part, (is_fine, words) in expected.items():
        assert said[part].is_fine is is_fine
        assert words.replace("68", str(len(build.variants()))) in said[part].words


def test_doctor_tries_one_kernel_only_where_there_is_a_driver(place, monkeypatch):
    tried = []
    monkeypatch.setattr(
        doctor, "run_probe", lambda code: (tried.append(code), (False, "error 999"))[1]
    )
    place(StrictDriver(12, 4), HEADER[12])
    findings = {finding.name: finding for finding in doctor._kernels(has_hopper=True)}
    assert findings["Hopper kernels"].text == "do not load: error 999"
    assert ["load_variant(" in code for code in tried] == [False, True]
    place(StrictDriver(11, 0), HEADER[12])
    assert "Hopper kernels" not in {one.name for one in doctor._kernels(has_hopper=True)}
    assert len(tried) == 2
