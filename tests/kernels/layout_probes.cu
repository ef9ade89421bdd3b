// One thing each that the emulator must do as documented; the test computes the same from the
// documents.
#include <mcp/ring.cuh>

namespace mcp::probes {

enum Probe : i32 { kCopy, kProduct, kMatrixStore, kMatrixLoad, kWarp, kReduce, kConvert };

struct Params {
    TensorMap a_map, b_map;
    u32* out;              // what the probe shows
    const float* numbers;  // [64] for kConvert
    u64 a_modes, b_modes;  // descriptors without a start address
    i32 probe, variant;    // variant: kProduct 1 A MN-major, 2 B MN-major, 4 fp16, 8 A in registers
    i32 x, y, z;           // of the box in a_map
    i32 a_offset, b_offset;  // bytes from the start of the tile to the operand
    i32 a_bytes, b_bytes;
};

constexpr u32 kTileBytes = 16384;

struct Memory {
    u32 a = (ptx::dynamic_shared() + 1023) / 1024 * 1024;
    u32 b = a + kTileBytes;
    u32 barrier = b + kTileBytes;

    MCP_DEVICE void load(const Params& params) const {
        if (ptx::thread_index() == 0) {
            ptx::mbarrier_init(barrier, 1);
            ptx::fence_mbarrier_init();
            ptx::mbarrier_arrive_expect_tx(barrier, u32(params.a_bytes + params.b_bytes));
            ptx::tma_load_3d(a, &params.a_map, barrier, params.x, params.y, params.z,
                             ptx::kEvictFirst);
            if (params.b_bytes > 0)
                ptx::tma_load_3d(b, &params.b_map, barrier, 0, 0, 0, ptx::kEvictLast);
        }
        ptx::sync_threads();
        wait(barrier, 0);
    }
};

// Shared memory after a copy, byte for byte.
MCP_DEVICE void copy(const Params& params) {
    const Memory memory;
    memory.load(params);
    for (u32 at = 4 * ptx::thread_index(); at < u32(params.a_bytes); at += 4 * 128) {
        params.out[at / 4] = ptx::load_shared_u32(memory.a + at);
    }
}

template <class T>
MCP_DEVICE void multiply(const Params& params, float (&d)[32], u64 a, u64 b) {
    u32 pairs[4];
    for (u32 i = 0; i < 4; i++) {
        // Element (row, column) of A is row + column / 64.
        const float row =
            float(ptx::thread_index() / 32 * 16 + ptx::thread_index() % 32 / 4 + 8 * (i % 2));
        const float column = float(2 * (ptx::thread_index() % 4) + 8 * (i / 2));
        pairs[i] = ptx::pack2<T>(row + column / 64, row + (column + 1) / 64);
    }
    ptx::wgmma_fence();
    switch (params.variant & ~4) {
        case 0:
            ptx::wgmma_ss<T, 64, 0, 0>(d, a, b, false);
            break;
        case 1:
            ptx::wgmma_ss<T, 64, 1, 0>(d, a, b, false);
            break;
        case 2:
            ptx::wgmma_ss<T, 64, 0, 1>(d, a, b, false);
            break;
        case 3:
            ptx::wgmma_ss<T, 64, 1, 1>(d, a, b, false);
            break;
        case 8:
            ptx::wgmma_rs<T, 64, 0>(d, pairs, b, false);
            break;
        default:
            ptx::wgmma_rs<T, 64, 1>(d, pairs, b, false);
            break;
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
}

MCP_DEVICE void product(const Params& params) {
    const Memory memory;
    memory.load(params);
    float d[32];
    const u64 a = params.a_modes | ((memory.a + u32(params.a_offset)) >> 4);
    const u64 b = params.b_modes | ((memory.b + u32(params.b_offset)) >> 4);
    if (params.variant & 4)
        multiply<fp16>(params, d, a, b);
    else
        multiply<bf16>(params, d, a, b);
    for (int i = 0; i < 32; i++) params.out[32 * ptx::thread_index() + u32(i)] = ptx::as_bits(d[i]);
}

// Register i of lane l holds 256 * i + 2 * l and one more; the 32 rows are stored in order.
MCP_DEVICE void matrix_store(const Params& params) {
    const Memory memory;
    const u32 lane = ptx::thread_index() % 32;
    const u32 row = memory.a + 16 * lane;
    u32 r[4];
    for (u32 i = 0; i < 4; i++) r[i] = (256 * i + 2 * lane) | (256 * i + 2 * lane + 1) << 16;
    if (ptx::thread_index() < 32) {
        if (params.variant == 1)
            ptx::stmatrix_x4_trans(row, r[0], r[1], r[2], r[3]);
        else
            ptx::stmatrix_x4(row, r[0], r[1], r[2], r[3]);
    }
    ptx::sync_threads();
    for (u32 at = ptx::thread_index(); at < 128; at += 128) {
        params.out[at] = ptx::load_shared_u32(memory.a + 4 * at);
    }
}

// The 256 elements of four matrices are counted in the order of their rows.
MCP_DEVICE void matrix_load(const Params& params) {
    const Memory memory;
    const u32 thread = ptx::thread_index();
    ptx::store_shared_u32(memory.a + 4 * thread, 2 * thread | (2 * thread + 1) << 16);
    ptx::sync_threads();
    if (thread >= 32) return;
    u32 r[4];
    ptx::ldmatrix_x4_trans(memory.a + 16 * thread, r[0], r[1], r[2], r[3]);
    for (u32 i = 0; i < 4; i++) params.out[4 * thread + i] = r[i];
}

MCP_DEVICE void warp(const Params& params) {
    const u32 lane = ptx::thread_index() % 32;
    u32* out = params.out + 8 * ptx::thread_index();
    out[0] = ptx::shuffle(lane * lane, 5);
    out[1] = ptx::shuffle_xor(lane * lane, 6);
    out[2] = ptx::any_lane(lane == 31);
    out[3] = ptx::any_lane(lane > 31);
    out[4] = u32(ptx::atomic_add(reinterpret_cast<i32*>(params.out + 8 * 128), 1));
    out[5] = ptx::num_blocks();
}

// Adds 1 .. 2048 as floats, in the order of shared memory, to the box.
MCP_DEVICE void reduce(const Params& params) {
    const Memory memory;
    for (u32 i = ptx::thread_index(); i < 2048; i += 128) {
        ptx::store_shared_f32(memory.a + 4 * i, float(i + 1));
    }
    ptx::fence_proxy_async();
    ptx::sync_threads();
    if (ptx::thread_index() != 0) return;
    if (params.variant == 1)
        ptx::tma_store_3d(&params.a_map, memory.a, params.x, params.y, params.z);
    else
        ptx::tma_reduce_add_3d(&params.a_map, memory.a, params.x, params.y, params.z);
    ptx::tma_commit_group();
    ptx::tma_wait_group<0>();
}

MCP_DEVICE void convert(const Params& params) {
    if (ptx::thread_index() >= 64) return;
    const float x = params.numbers[ptx::thread_index()];
    u32* out = params.out + 8 * ptx::thread_index();
    out[0] = ptx::pack2<bf16>(x, -x);
    out[1] = ptx::pack2<fp16>(x, -x);
    out[2] = ptx::as_bits(ptx::exp2_approx(x));
    out[3] = ptx::as_bits(ptx::log2_approx(x));
    out[4] = ptx::as_bits(ptx::rcp_approx(x));
    out[5] = ptx::as_bits(ptx::unpack2<bf16>(out[0]).x);
    out[6] = ptx::as_bits(ptx::unpack2<fp16>(out[1]).y);
    out[7] = ptx::as_bits(ptx::max(x, ptx::as_float(0x7fc00000u)));
}

}  // namespace mcp::probes

MCP_KERNEL(128) layout_probes(MCP_PARAMS(mcp::probes::Params, params)) {
    namespace probes = mcp::probes;
    switch (params.probe) {
        case probes::kCopy:
            return probes::copy(params);
        case probes::kProduct:
            return probes::product(params);
        case probes::kMatrixStore:
            return probes::matrix_store(params);
        case probes::kMatrixLoad:
            return probes::matrix_load(params);
        case probes::kWarp:
            return probes::warp(params);
        case probes::kReduce:
            return probes::reduce(params);
        default:
            return probes::convert(params);
    }
}
