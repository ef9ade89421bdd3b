// Rows or columns of an accumulator fragment to global memory, scaled.
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
            ptx::store_global<f32x2>(row + 8 * i, {x, y});
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
        if (valid) ptx::store_global<u32x2>(row + 8 * i + (odd ? 6 : 0), pair);
    }
}

// One of the thread's two rows of fragments whose columns are rows in memory, `stride` apart, and
// of which each continues the one before, 64 rows on; in fp32, or added to what is there. `first`
// is the place of the row in the thread's first column, from which on `num_columns` exist. Eight
// lanes write the 32 bytes of a column, a whole sector.
template <bool kAdds, int kChunks, int kSize>
MCP_DEVICE void store_column_f32(float* first,
                                 i64 stride,
                                 const float (&d)[kChunks][kSize],
                                 int half,
                                 float factor,
                                 i32 num_columns) {
    MCP_UNROLL
    for (int i = 0; i < kChunks * kSize / 2; i++) {
        const int chunk = i / (kSize / 2), at = i % (kSize / 2), column = at / 2 * 8 + at % 2;
        float* const to = first + column * stride + 64 * chunk;
        const float x = d[chunk][at / 2 * 4 + 2 * half + at % 2] * factor;
        if (column >= num_columns) continue;
        if constexpr (kAdds) {
            ptx::atomic_add(to, x);
        } else {
            ptx::store_global<float>(to, x);
        }
    }
}

// The same in 16 bits. Lanes of neighbouring rows exchange halves of two columns, so that each has
// both rows of one. All lanes of the warp call.
template <class T, int kChunks, int kSize>
MCP_DEVICE void store_column_16(u16* first,
                                i64 stride,
                                const float (&d)[kChunks][kSize],
                                int half,
                                float factor,
                                i32 num_columns) {
    const int odd = lane_index() / 4 % 2;
    u16* const own_first = first + odd * (stride - 1);
    MCP_UNROLL
    for (int i = 0; i < kChunks * kSize / 4; i++) {
        const int chunk = i / (kSize / 4), at = i % (kSize / 4) * 4 + 2 * half, column = at / 4 * 8;
        const u32 own = ptx::pack2<T>(d[chunk][at] * factor, d[chunk][at + 1] * factor);
        const u32 received = ptx::shuffle_xor(own, 4);
        const u32 pair =
            odd ? received >> 16 | (own & 0xffff0000u) : (own & 0xffffu) | received << 16;
        u16* const to = own_first + column * stride + 64 * chunk;
        if (column + odd < num_columns) ptx::store_global<u32>(to, pair);
    }
}

}  // namespace mcp::attn
