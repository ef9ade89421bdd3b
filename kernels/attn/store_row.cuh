// One row of an accumulator fragment to global memory, scaled.
#pragma once

#include <mcp/fragment.cuh>

namespace mcp::attn {

// One row in fp32, or added to what is there, in no order: four lanes write the 32 bytes of 8
// columns, a whole sector.
template <int kSize>
MCP_DEVICE void store_or_add_row_f32(
    float* row, const float (&d)[kSize], int half, float factor, bool adds) {
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i++) {
        const float x = d[4 * i + 2 * half] * factor, y = d[4 * i + 2 * half + 1] * factor;
        if (adds) {
            ptx::atomic_add_f32x2(row + 8 * i, x, y);
        } else {
            *reinterpret_cast<f32x2*>(row + 8 * i) = {x, y};
        }
    }
}

// One row in 16 bits. Two lanes exchange halves of two column groups, so that each writes 8
// contiguous bytes and four lanes the 32 bytes of two groups, a whole sector. All lanes of the warp
// call; `valid` lanes store.
template <class T, int kSize>
MCP_DEVICE void store_row_16(
    u16* row, const float (&d)[kSize], int half, float factor, bool valid) {
    const bool odd = lane_index() % 2 != 0;
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i += 2) {
        u32 packed[2];
        MCP_UNROLL
        for (int group = 0; group < 2; group++) {
            const int at = 4 * (i + group) + 2 * half;
            packed[group] = ptx::pack2<T>(d[at] * factor, d[at + 1] * factor);
        }
        const u32 received = ptx::shuffle_xor(odd ? packed[0] : packed[1], 1);
        const u32x2 pair = odd ? u32x2{received, packed[1]} : u32x2{packed[0], received};
        // The even lane keeps group i, the odd lane takes group i + 1, whose columns begin 2 before
        // its own.
        if (valid) *reinterpret_cast<u32x2*>(row + 8 * i + (odd ? 6 : 0)) = pair;
    }
}

}  // namespace mcp::attn
