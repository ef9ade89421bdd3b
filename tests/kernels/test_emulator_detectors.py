"""Every detector of the emulator finds the defect planted for it, and lets the right kernel pass.

The kernels are in planted_defects.cu; the numbers of scenes and defects are those of its enumerations.
"""

import ctypes
import re
from enum import IntEnum, auto
from pathlib import Path

import pytest
import torch

from megatron_cp.kernels.emulator import library
from megatron_cp.kernels.params import TensorMap

BFLOAT16, FLOAT32 = 9, 7
SHARED_BYTES = 1024 + 4 * 8192
SEEDS = range(8)


class Scene(IntEnum):
    PRODUCT = 0
    PHASES = auto()
    MAILBOX = auto()
    THREADS = auto()
    REGISTERS = auto()
    BULK_STORE = auto()
    GLOBAL = auto()


class Params(ctypes.Structure):
    _fields_ = (
        ("tile", TensorMap),
        ("sums", TensorMap),
        ("out", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("scene", ctypes.c_int32),
        ("defect", ctypes.c_int32),
        ("padding", ctypes.c_byte * 40),  # the struct is as aligned as a tensor map
    )


SOURCE = Path(__file__).with_name("planted_defects.cu")
DEFECTS = {
    name: number
    for number, name in enumerate(
        re.findall(r"\bk\w+(?=,)", SOURCE.read_text().split("enum Defect : i32 {")[1].split("}")[0])
    )
}

# Defect: what the report must say.
PRODUCT = {
    "kReadBeforeWait": "arithmetic or store: .*accumulator read before wgmma.wait_group",
    "kStoreBeforeWait": "arithmetic or store: .*accumulator read before wgmma.wait_group",
    "kWriteBeforeWait": "accumulator register 9 of lane 0 was written between wgmma.mma_async and",
    "kNoFence": "no wgmma.fence between the last access to the accumulator registers",
    "kWriteAfterFence": "accumulator registers changed after the last wgmma.fence",
    "kOperandChanged": "operand A registers of lane 0 changed between wgmma.mma_async and",
    "kNoCommit": "accumulator read before wgmma.wait_group",
    "kNoWaitForCopy": "is written by a TMA copy that this thread has not waited for|nobody has written",
    "kUnwrittenRows": "reads shared memory 0x[0-9a-f]+, which nobody has written",
    "kShiftedDescriptor": "misaligned swizzled panel: the operand at",
    "kBaseOffset": "has a base offset",
    "kWarpsDisagree": "warps of the warpgroup do not issue the same sequence",
    "kExitInFlight": "exits with wgmma products in flight",
    "kUninitialised": "accumulator register 0 was never written",
    "kOverwriteOperand": "overwrites shared memory .*, which a wgmma of warpgroup 0 may still read|not waited for",
    "kReleaseTooEarly": "overwrites shared memory .*, which a wgmma of warpgroup 0 may still read",
    "kStoreWithoutProxyFence": r"written by thread \d+ through the generic proxy; .*fence.proxy.async",
    "kTooManyArrivals": "has its 1 arrivals already, this one is too many",
    "kTooFewBytes": "fewer bytes were expected than copied|bytes more than expected",
    "kTooManyBytes": "deadlock.*misses 0 of 1 arrivals and 16 bytes",
    "kNoInitFence": "may be invisible to the asynchronous unit",
    "kNoInitSync": "holds no mbarrier|was initialised by thread 0, and nothing has synchronised",
    "kMisalignedBox": "a box starts at column 4 of 2 bytes each: the first byte must be a multiple of 16",
    "kMisalignedPanel": "misaligned swizzled panel: 0x[0-9a-f]+ must be a multiple of 1024",
}
PHASES = {
    "kOutOfPhase": r"out of phase: the thread waits for phase 0 \(parity 0\), and phase 1 has completed too",
    "kTooFewArrivals": "deadlock.*threads 0-159 wait for mbarrier .* parity 1: phase 1 misses 2 of 2",
    "kDataOverBarrier": "overwrites the mbarrier at",
    "kParityTwo": "parity 2 must be 0 or 1",
    "kOneNotCounted": "ended in the middle of phase 1 of mbarrier .* misses 1 of 2 arrivals and 0 bytes",
}
MAILBOX = {
    "kNoWaitForMail": "which nobody has written|was written by thread 128, and nothing orders",
    "kReleasedByOneLane": r"thread 128 .*overwrites .*, which thread \d+ has read, and nothing orders that",
}
THREADS = {
    "kUnwrittenWord": "ld.shared: reads shared memory 0x[0-9a-f]+, which nobody has written",
    "kDivergence": "divergence: lanes 0x[0-9a-f]+ of the warp wait in",
    "kLaneExits": "have exited; all 32 must|exits while lanes|deadlock",
    "kBarrierCountsDiffer": "barrier 2 is in use with",
    "kBarrierWarpMissing": "deadlock.*named barrier 2: 128 of 160 threads",
    "kArrivesTwice": "warp 4 arrives at barrier 3 twice before it completes",
    "kArrivesForNobody": "ended while 32 of 160 threads had arrived at barrier 3",
    "kOutsideBuffer": "lies in no buffer of the launch",
    "kOutsideShared": "lies outside the CTA's",
    "kNoAlignment": "must be a multiple of 8",
}
REGISTERS = {
    "kTooManyRegisters": r"deadlock.*setmaxnreg.inc 240: needs 2304 more registers, the pool of the CTA has \d+",
    "kIncreaseDownwards": "inc to 160 registers, but the warp has 168",
}
BULK_STORE = {
    "kStoreUnfenced": r"written by thread \d+ through the generic proxy; .*fence.proxy.async",
    "kOverwriteStored": "which a bulk store of thread 128 may still read",
    "kExitWhileStoring": "exits while bulk stores may still read shared memory",
}
GLOBAL = {
    "kLoadOutside": r"ld.global: global address 0x[0-9a-f]+ \+ 4 lies in no buffer of the launch",
    "kStoreOutside": r"thread 127 .*st.global: writes global address 0x[0-9a-f]+ \+ 8, which lies in no buffer",
    "kAddOutside": r"atom.add: writes global address 0x[0-9a-f]+ \+ 4, which lies in no buffer",
    "kStoreIntoInput": "writes words at 0x[0-9a-f]+, which the launch only reads",
    "kStoreOfTwo": r"thread [56] .*stores out \+ 768, which thread [56] of block 0 stores, too",
    "kStoreMisaligned": "global address 0x[0-9a-f]+ must be a multiple of 8",
    "kCachedLoadOfResult": "ld.global.nc: out at 0x[0-9a-f]+ is written by the kernel: the read-only cache",
}
EXPECTED = {
    Scene.PRODUCT: PRODUCT,
    Scene.PHASES: PHASES,
    Scene.MAILBOX: MAILBOX,
    Scene.THREADS: THREADS,
    Scene.REGISTERS: REGISTERS,
    Scene.BULK_STORE: BULK_STORE,
    Scene.GLOBAL: GLOBAL,
}


@pytest.fixture(scope="module")
def kernel():
    return library.load(
        library.Source(
            "planted", SOURCE.name, "planted_defects", "mcp::planted::Params", root=SOURCE.parent
        )
    )


def _run(
    kernel, scene: Scene, defect: str, seed: int, **machine
) -> tuple[torch.Tensor, library.Run]:
    tile = torch.arange(64 * 64).remainder(5).sub(2).reshape(64, 64).bfloat16()
    out = torch.full((128, 32), -7.0)
    sums = torch.zeros(64, 32)
    words = torch.arange(4, dtype=torch.int32)
    maps = [
        TensorMap.from_buffer_copy(kernel.encode_tiled(*arguments))
        for arguments in (
            (BFLOAT16, tile.data_ptr(), (64, 1, 64), (128, 128), (64, 1, 64)),
            (FLOAT32, sums.data_ptr(), (32, 1, 64), (128, 128), (32, 1, 64)),
        )
    ]
    params = Params(*maps, out.data_ptr(), words.data_ptr(), scene, DEFECTS[defect])
    ranges = [
        (name, x.data_ptr(), x.nbytes, is_written)
        for name, x, is_written in (
            ("tile", tile, False),
            ("words", words, False),
            ("sums", sums, True),
            ("out", out, True),
        )
    ]
    threads = 384 if scene == Scene.REGISTERS else 160
    settings = library.Machine(1, threads, SHARED_BYTES, seed=seed, ranges=tuple(ranges), **machine)
    run = kernel.run(params, settings)
    return (sums if scene == Scene.BULK_STORE else out), run


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scene", Scene)
def test_a_right_kernel_passes_every_detector(kernel, scene, seed):
    result, _ = _run(kernel, scene, "kNone", seed)
    if scene == Scene.PRODUCT:
        tile = torch.arange(64 * 64).remainder(5).sub(2).reshape(64, 64).double()
        once = tile[:, :32] @ tile[:, :32].T + tile[:, 32:48].sum(dim=1)
        assert torch.equal(_matrix(result), 2 * once)
    if scene == Scene.BULK_STORE:
        assert (result == 1).all()
    if scene == Scene.GLOBAL:
        threads = torch.arange(128)
        assert torch.equal(result[:, :2], torch.stack([threads % 4, threads], dim=1).float())
        assert (result[:, 2:] == -7).all()


def _matrix(registers: torch.Tensor) -> torch.Tensor:
    """Returns D [64, 64] from registers [thread, i], by the fragment layout of the PTX ISA."""
    thread, i = torch.meshgrid(torch.arange(128), torch.arange(32), indexing="ij")
    warp, lane = thread // 32, thread % 32
    matrix = torch.empty(64, 64, dtype=torch.float64)
    matrix[16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2] = (
        registers.double()
    )
    return matrix


@pytest.mark.parametrize(
    ("scene", "defect"), [(scene, defect) for scene, cases in EXPECTED.items() for defect in cases]
)
def test_each_planted_defect_is_found_under_every_seed(kernel, scene, defect):
    for seed in SEEDS:
        with pytest.raises(library.EmulatorError, match=EXPECTED[scene][defect]):
            _run(kernel, scene, defect, seed)


def test_every_planted_defect_is_expected():
    expected = {"kNone"}.union(*EXPECTED.values())
    assert set(DEFECTS) == expected


def test_a_report_names_block_thread_instruction_address_and_section(kernel):
    with pytest.raises(library.EmulatorError) as report:
        _run(kernel, Scene.MAILBOX, "kReleasedByOneLane", 0)
    assert re.search(
        r"^seed 0, block 0, thread 128 \(warp 4, lane 0\), st.shared: overwrites shared memory 0x[0-9a-f]+, .*"
        r"\[PTX ISA, Data Movement and Conversion Instructions: st\]$",
        str(report.value),
    )


def test_a_launch_beyond_the_machine_is_refused(kernel):
    params = Params(scene=Scene.PHASES)
    for machine, message in (
        (library.Machine(1, 160, 227 * 1024 + 1), "227 KB"),
        (library.Machine(1, 100, 1024), "num_threads=100 must be a multiple of 32"),
        (library.Machine(0, 128, 1024), "num_blocks=0 must be >= 1"),
        (library.Machine(1, 512, 1024), "num_threads=512 must not exceed the 384 of the kernel"),
        (library.Machine(1, 384, 1024, registers_per_thread=176), "exceeds 64 K registers"),
    ):
        with pytest.raises(library.EmulatorError, match=message):
            kernel.run(params, machine)


def test_the_history_tells_every_event_of_a_barrier(kernel):
    _, run = _run(kernel, Scene.PRODUCT, "kNone", 3, record_history=True)
    lines = run.history.splitlines()
    assert sum("receives 8192 bytes" in line for line in lines) == 4
    assert sum(re.search(r"phase [01] completes", line) is not None for line in lines) == 4
    assert run.counts["cp.async.bulk.tensor (load)"] == 4
    assert run.counts["wgmma.mma_async"] == 3 * 2 * 128


def test_the_same_seed_gives_the_same_history(kernel):
    histories = {
        seed: [
            _run(kernel, Scene.MAILBOX, "kNone", seed, record_history=True)[1].history
            for _ in range(2)
        ]
        for seed in SEEDS
    }
    assert all(a == b for a, b in histories.values())
    assert len({a for a, _ in histories.values()}) > 1
