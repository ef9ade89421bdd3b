// Merges rows of a partial attention result into another: a warp per row and head, read and written
// once. Source: Milakov & Gimelshein, arXiv:1805.02867, section 3.1.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/platform.cuh>

#include "params.h"

namespace mcp::rows {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kLogOf2 = 0.693147180559945309f;

// Factors of the two results, and lse of their merge. `part` is not -inf.
struct Weights {
    float held, part, lse;

    MCP_DEVICE Weights(float held_lse, float part_lse) {
        const float top = ptx::max(held_lse, part_lse);
        const float a = ptx::exp2_approx((held_lse - top) * kLog2E);
        const float b = ptx::exp2_approx((part_lse - top) * kLog2E);
        const float scale = ptx::rcp_approx(a + b);
        held = a * scale;
        part = b * scale;
        lse = ptx::fma(ptx::log2_approx(a + b), kLogOf2, top);
    }
};

MCP_DEVICE void merge_row(const MergeRowsParams& params, i64 row, i64 head) {
    const i64 to = params.index == nullptr ? row : params.index[row];
    float* lse = params.lse + to * params.lse_row_stride + head * params.lse_head_stride;
    // One lane reads and writes lse, so that no lane can read what another has written.
    u32 bits[2] = {0, 0};
    if (lane_index() == 0) {
        bits[0] = ptx::as_bits(*lse);
        bits[1] = ptx::as_bits(params.part_lse[row * params.part_lse_row_stride +
                                               head * params.part_lse_head_stride]);
    }
    const float held_lse = ptx::as_float(ptx::shuffle(bits[0], 0));
    const float part_lse = ptx::as_float(ptx::shuffle(bits[1], 0));
    if (part_lse == negative_infinity()) return;
    const Weights weights(held_lse, part_lse);
    float* out = params.out + to * params.out_row_stride + head * params.out_head_stride;
    const float* part = params.part_out + row * params.part_out_row_stride +
                        head * params.part_out_head_stride;
    for (int column = 2 * lane_index(); column < params.width; column += 2 * kWarpSize) {
        const f32x2 held = *reinterpret_cast<const f32x2*>(out + column);
        const f32x2 more = *reinterpret_cast<const f32x2*>(part + column);
        *reinterpret_cast<f32x2*>(out + column) = {
            ptx::fma(more.x, weights.part, held.x * weights.held),
            ptx::fma(more.y, weights.part, held.y * weights.held)};
    }
    if (lane_index() == 0) *lse = weights.lse;
}

MCP_DEVICE void merge_rows(const MergeRowsParams& params) {
    const i64 num_items = static_cast<i64>(params.num_rows) * params.num_heads;
    const i64 step = static_cast<i64>(ptx::num_blocks()) * kWarps;
    i64 item = static_cast<i64>(ptx::block_index()) * kWarps + ptx::thread_index() / kWarpSize;
    for (; item < num_items; item += step) {
        merge_row(params, item / params.num_heads, item % params.num_heads);
    }
}

}  // namespace mcp::rows
