// Tiny kernels, each right when `defect` is kNone and wrong in one way otherwise. The emulator must
// find each.
#include <mcp/panels.cuh>
#include <mcp/ring.cuh>

namespace mcp::planted {

// The numbers are the test's too (test_emulator_detectors.py).
enum Scene : i32 { kProduct, kPhases, kMailbox, kThreads, kRegisters, kBulkStore, kGlobal };

enum Defect : i32 {
    kNone,
    kReadBeforeWait,
    kStoreBeforeWait,
    kWriteBeforeWait,
    kNoFence,
    kWriteAfterFence,
    kOperandChanged,
    kNoCommit,
    kNoWaitForCopy,
    kUnwrittenRows,
    kShiftedDescriptor,
    kBaseOffset,
    kWarpsDisagree,
    kExitInFlight,
    kUninitialised,
    kOverwriteOperand,
    kReleaseTooEarly,
    kStoreWithoutProxyFence,
    kTooManyArrivals,
    kTooFewBytes,
    kTooManyBytes,
    kNoInitFence,
    kNoInitSync,
    kMisalignedPanel,
    kMisalignedBox,
    kOutOfPhase,
    kTooFewArrivals,
    kDataOverBarrier,
    kParityTwo,
    kOneNotCounted,
    kNoWaitForMail,
    kReleasedByOneLane,
    kUnwrittenWord,
    kDivergence,
    kLaneExits,
    kBarrierCountsDiffer,
    kBarrierWarpMissing,
    kArrivesTwice,
    kArrivesForNobody,
    kOutsideBuffer,
    kOutsideShared,
    kNoAlignment,
    kTooManyRegisters,
    kIncreaseDownwards,
    kStoreUnfenced,
    kOverwriteStored,
    kExitWhileStoring,
    kLoadOutside,
    kStoreOutside,
    kAddOutside,
    kStoreIntoInput,
    kStoreOfTwo,
    kStoreMisaligned,
    kCachedLoadOfResult,
};

struct Params {
    TensorMap tile;    // bf16 [64, 1, 64], boxes of all of it, 128-byte swizzle
    TensorMap sums;    // float [32, 1, 64], boxes of all of it, 128-byte swizzle
    float* out;        // [128, 32]
    const i32* words;  // [4]
    i32 scene, defect;
};

constexpr int kTileBytes = 64 * kRowBytes;
constexpr u32 kProducer = 128;  // thread that loads, in a warp of its own

struct Memory {
    u32 base = (ptx::dynamic_shared() + 1023) / 1024 * 1024;
    Panels<64, 64> a{base};
    Panels<64, 64> b{base + kTileBytes};
    u32 spare = base + 2 * kTileBytes;  // as large as a tile
    u32 full = base + 3 * kTileBytes;
    u32 empty = full + 8;
    u32 word = full + 16;

    MCP_DEVICE void init(i32 defect, u32 readers) const {
        if (ptx::thread_index() == 0) {
            ptx::mbarrier_init(full, 1);
            ptx::mbarrier_init(empty, readers);
            if (defect != kNoInitFence) ptx::fence_mbarrier_init();
        }
        if (defect != kNoInitSync) ptx::sync_threads();
    }
};

MCP_DEVICE void load_tiles(const Params& params, const Memory& memory) {
    u32 bytes = 2 * kTileBytes;
    if (params.defect == kTooFewBytes) bytes -= kTileBytes;
    if (params.defect == kTooManyBytes) bytes += 16;
    ptx::mbarrier_arrive_expect_tx(memory.full, bytes);
    if (params.defect == kTooManyArrivals) ptx::mbarrier_arrive(memory.full);
    if (params.defect == kMisalignedBox) {
        ptx::tma_load_3d(memory.a.address, &params.tile, memory.full, 4, 0, 0, ptx::kEvictFirst);
    }
    const u32 shift = params.defect == kMisalignedPanel ? 128 : 0;
    load_panels(Panels<64, 64>{memory.a.address + shift}, &params.tile, memory.full, 0, 0,
                ptx::kEvictFirst);
    load_panels(memory.b, &params.tile, memory.full, 0, 0, ptx::kEvictFirst);
}

MCP_DEVICE void produce(const Params& params, const Memory& memory, u32 round) {
    wait(memory.empty, round ^ 1);
    load_tiles(params, memory);
}

MCP_DEVICE void issue(i32 defect, const Memory& memory, float (&d)[32], const u32* a) {
    u32 a_start = memory.a.address, b_start = memory.b.address;
    if (defect == kUnwrittenRows) b_start += kTileBytes;
    if (defect == kShiftedDescriptor) b_start += kRowBytes;
    if (defect == kWarpsDisagree && ptx::thread_index() >= 96) a_start += 32;
    u64 b_descriptor = k_major_descriptor(b_start);
    if (defect == kBaseOffset) b_descriptor |= 1ull << 49;
    if (defect != kNoFence) ptx::wgmma_fence();
    if (defect == kWriteAfterFence) d[7] += 2.0f;
    ptx::wgmma_ss<bf16, 64, 0, 0>(d, k_major_descriptor(a_start), b_descriptor, true);
    ptx::wgmma_ss<bf16, 64, 0, 0>(d, k_major_descriptor(a_start + 32),
                                  step_descriptor(b_descriptor, 32), true);
    ptx::wgmma_rs<bf16, 64, 0>(d, a, step_descriptor(b_descriptor, 64), true);
    if (defect != kNoCommit) ptx::wgmma_commit();
}

// What may not happen while products are in flight.
MCP_DEVICE void disturb(const Params& params, const Memory& memory, float (&d)[32], u32* a) {
    const i32 defect = params.defect;
    if (defect == kOperandChanged) a[2] = 0;
    if (defect == kReadBeforeWait) params.out[0] = ptx::exp2_approx(d[5] * 0.5f);
    if (defect == kStoreBeforeWait) ptx::store_shared_f32(memory.word, d[5]);
    if (defect == kWriteBeforeWait) d[9] *= 2.0f;
    if (defect == kReleaseTooEarly && ptx::thread_index() == 64) ptx::mbarrier_arrive(memory.empty);
    if (defect == kOverwriteOperand && ptx::thread_index() == 0) {
        load_panels(memory.b, &params.tile, memory.full, 0, 0, ptx::kEvictFirst);
    }
}

MCP_DEVICE void consume(const Params& params, const Memory& memory, u32 round, float (&d)[32]) {
    const i32 defect = params.defect;
    u32 a[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};  // ones
    if (defect != kNoWaitForCopy) wait(memory.full, round);
    if (defect == kStoreWithoutProxyFence) {
        ptx::store_shared_i32x4(memory.a.address + 16 * ptx::thread_index(), {0, 0, 0, 0});
        ptx::named_barrier_sync<128>(1);
    }
    issue(defect, memory, d, a);
    disturb(params, memory, d, a);
    if (defect == kExitInFlight) return;
    ptx::wgmma_wait<0>();
    if (defect != kReleaseTooEarly && ptx::thread_index() == 64) ptx::mbarrier_arrive(memory.empty);
    ptx::as_bits(ptx::exp2_approx(d[0]));
}

// Twice D += A' B with tiles from a producer: 32 columns of the reduction by SS, 16 by RS.
MCP_DEVICE void product(const Params& params) {
    const Memory memory;
    float d[32];
    if (params.defect != kUninitialised) {
        for (float& x : d) x = 0.0f;
    }
    memory.init(params.defect, 1);
    for (u32 round = 0; round < 2; round++) {
        if (ptx::thread_index() == kProducer) produce(params, memory, round);
        if (ptx::thread_index() < kProducer) consume(params, memory, round, d);
        if (params.defect == kExitInFlight) return;
    }
    if (ptx::thread_index() == kProducer) wait(memory.empty, 1);
    if (ptx::thread_index() >= kProducer) return;
    for (int i = 0; i < 32; i++) params.out[32 * ptx::thread_index() + i] = d[i];
}

MCP_DEVICE void phases(const Params& params) {
    const Memory memory;
    memory.init(params.defect, 2);
    const u32 readers = params.defect == kOneNotCounted ? 3 : 2;
    if (ptx::thread_index() < readers) ptx::mbarrier_arrive(memory.empty);
    if (params.defect == kOutOfPhase) {
        ptx::sync_warp();
        if (ptx::thread_index() < 2) ptx::mbarrier_arrive(memory.empty);
        ptx::sync_threads();
    }
    wait(memory.empty, params.defect == kParityTwo ? 2 : 0);
    if (params.defect == kTooFewArrivals) wait(memory.empty, 1);
    if (params.defect == kDataOverBarrier) ptx::store_shared_u32(memory.full, 1);
}

// One lane of every warp answers for a mailbox that all lanes read.
MCP_DEVICE void mailbox(const Params& params) {
    const Memory memory;
    memory.init(params.defect, 5);
    for (u32 round = 0; round < 2; round++) {
        if (ptx::thread_index() == kProducer) {
            wait(memory.empty, round ^ 1);
            ptx::store_shared_u32(memory.word, round);
            ptx::mbarrier_arrive(memory.full);
        }
        if (params.defect != kNoWaitForMail) wait(memory.full, round);
        ptx::load_shared_u32(memory.word);
        if (params.defect != kReleasedByOneLane) ptx::sync_warp();
        if (lane_index() == 0) ptx::mbarrier_arrive(memory.empty);
    }
}

MCP_DEVICE void threads(const Params& params) {
    const i32 defect = params.defect;
    const Memory memory;
    const int lane = lane_index();
    const bool last_warp = ptx::thread_index() >= kProducer;
    if (defect == kUnwrittenWord) ptx::load_shared_u32(memory.word);
    if (defect == kLaneExits && lane == 9) return;
    const bool other = defect == kDivergence && lane >= 16;
    if (other) ptx::any_lane(true);
    if (!other) ptx::shuffle(u32(lane), 3);
    if (defect == kBarrierWarpMissing && last_warp) return;
    if (defect == kArrivesTwice && last_warp) {
        ptx::named_barrier_arrive<160>(3);
        ptx::named_barrier_arrive<160>(3);
    }
    if (defect == kArrivesForNobody && last_warp) ptx::named_barrier_arrive<160>(3);
    if (defect == kBarrierCountsDiffer && last_warp) ptx::named_barrier_sync<64>(2);
    ptx::named_barrier_sync<160>(2);
    ptx::load_constant_i32x4(params.words + (defect == kOutsideBuffer ? 4 : 0));
    if (defect == kOutsideShared) ptx::store_shared_u32(memory.base + (1 << 20), 0);
    if (defect == kNoAlignment) ptx::store_shared_f32x2(memory.word + 4, 0.0f, 0.0f);
}

// Three warpgroups share what 168 registers per thread give.
MCP_DEVICE void registers(const Params& params) {
    if (ptx::thread_index() >= 128) {
        if (params.defect == kIncreaseDownwards) ptx::set_max_registers_up<160>();
        ptx::set_max_registers_up<240>();
    } else if (params.defect == kTooManyRegisters) {
        ptx::set_max_registers_down<32>();
    } else {
        ptx::set_max_registers_down<24>();
    }
}

// Adds 64 x 32 ones from shared memory to global memory.
MCP_DEVICE void bulk_store(const Params& params) {
    const i32 defect = params.defect;
    const Memory memory;
    const u32 at = memory.spare + 64 * ptx::thread_index();
    if (ptx::thread_index() < 128) {
        for (u32 i = 0; i < 16; i++) ptx::store_shared_f32(at + 4 * i, 1.0f);
    }
    if (defect != kStoreUnfenced) ptx::fence_proxy_async();
    ptx::sync_threads();
    if (ptx::thread_index() == kProducer) {
        ptx::tma_reduce_add_3d(&params.sums, memory.spare, 0, 0, 0);
        ptx::tma_commit_group();
        if (defect == kExitWhileStoring) return;
        if (defect != kOverwriteStored) ptx::tma_wait_group_read<0>();
    }
    if (defect == kExitWhileStoring) return;
    ptx::sync_threads();
    if (ptx::thread_index() < 128) ptx::store_shared_f32(at, 2.0f);
    if (ptx::thread_index() == kProducer) ptx::tma_wait_group<0>();
}

// A thread each stores two numbers of its row of `out`.
MCP_DEVICE void global(const Params& params) {
    const i32 defect = params.defect, thread = i32(ptx::thread_index());
    if (thread >= 128) return;
    float* to = params.out + 32 * thread;
    const i32 word =
        ptx::load_global<i32>(params.words + (defect == kLoadOutside ? 4 : thread % 4));
    if (defect == kCachedLoadOfResult) ptx::load_constant_f32(to);
    if (defect == kStoreIntoInput) ptx::store_global<i32>(const_cast<i32*>(params.words), word);
    if (defect == kAddOutside) ptx::atomic_add(params.out - 1, 1.0f);
    if (defect == kStoreOutside && thread == 127) to += 32;
    if (defect == kStoreOfTwo && thread == 5) to += 32;
    if (defect == kStoreMisaligned) to += 1;
    ptx::store_global<f32x2>(to, {float(word), float(thread)});
}

}  // namespace mcp::planted

MCP_KERNEL(384) planted_defects(MCP_PARAMS(mcp::planted::Params, params)) {
    namespace planted = mcp::planted;
    switch (params.scene) {
        case planted::kProduct:
            return planted::product(params);
        case planted::kPhases:
            return planted::phases(params);
        case planted::kMailbox:
            return planted::mailbox(params);
        case planted::kThreads:
            return planted::threads(params);
        case planted::kRegisters:
            return planted::registers(params);
        case planted::kBulkStore:
            return planted::bulk_store(params);
        default:
            return planted::global(params);
    }
}
