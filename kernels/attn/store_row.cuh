// One row of an accumulator fragment to global memory, scaled, and added to an earlier result if
// wanted.
#pragma once

#include <mcp/fragment.cuh>

namespace mcp::attn {

// out = earlier_weight * earlier + factor * this.
struct RowScale {
    float factor, earlier_weight;
};

// An earlier result of weight 0 may be anything, also nan: it is not read.
MCP_DEVICE void add_earlier(float& x, float& y, f32x2 earlier, float weight) {
    x = ptx::fma(weight, earlier.x, x);
    y = ptx::fma(weight, earlier.y, y);
}

// One row in fp32: four lanes write the 32 bytes of 8 columns, a whole sector.
template <int kSize>
MCP_DEVICE void store_row_f32(float* row, const float (&out)[kSize], int half, RowScale scale) {
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i++) {
        f32x2* to = reinterpret_cast<f32x2*>(row + 8 * i);
        float x = out[4 * i + 2 * half] * scale.factor;
        float y = out[4 * i + 2 * half + 1] * scale.factor;
        if (scale.earlier_weight != 0.0f) add_earlier(x, y, *to, scale.earlier_weight);
        *to = {x, y};
    }
}

// One row in 16 bits. Two lanes exchange halves of two column groups, so that each writes 8
// contiguous bytes and four lanes the 32 bytes of two groups, a whole sector. All lanes of the warp
// call; `valid` lanes store.
template <class T, int kSize>
MCP_DEVICE void store_row_16(
    u16* row, const float (&out)[kSize], int half, RowScale scale, bool valid) {
    const bool odd = lane_index() % 2 != 0;
    MCP_UNROLL
    for (int i = 0; i < kSize / 4; i += 2) {
        u32 packed[2];
        MCP_UNROLL
        for (int group = 0; group < 2; group++) {
            float x = out[4 * (i + group) + 2 * half] * scale.factor;
            float y = out[4 * (i + group) + 2 * half + 1] * scale.factor;
            if (valid && scale.earlier_weight != 0.0f) {
                const u32 earlier = *reinterpret_cast<const u32*>(row + 8 * (i + group));
                add_earlier(x, y, ptx::unpack2<T>(earlier), scale.earlier_weight);
            }
            packed[group] = ptx::pack2<T>(x, y);
        }
        const u32 received = ptx::shuffle_xor(odd ? packed[0] : packed[1], 1);
        const u32x2 pair = odd ? u32x2{received, packed[1]} : u32x2{packed[0], received};
        // The even lane keeps group i, the odd lane takes group i + 1, whose columns begin 2 before
        // its own.
        if (valid) *reinterpret_cast<u32x2*>(row + 8 * i + (odd ? 6 : 0)) = pair;
    }
}

}  // namespace mcp::attn
