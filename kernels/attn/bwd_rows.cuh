// The two small kernels around the backward kernel: a warp per row and head, two columns per lane
// and step.
#pragma once

#include <mcp/fragment.cuh>
#include <mcp/platform.cuh>

#include "params.h"

namespace mcp::attn {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / kWarpSize;

MCP_DEVICE i64 first_row_of_warp() {
    return static_cast<i64>(ptx::block_index()) * kRowWarps + ptx::thread_index() / kWarpSize;
}
MCP_DEVICE i64 num_warps_of_grid() {
    return static_cast<i64>(ptx::num_blocks()) * kRowWarps;
}

// Two neighbouring elements of a row that is fp32 or has type T.
template <class T>
MCP_DEVICE f32x2 load_pair(const void* tensor, i64 at, bool is_float) {
    if (is_float) return *reinterpret_cast<const f32x2*>(static_cast<const float*>(tensor) + at);
    return ptx::unpack2<T>(*reinterpret_cast<const u32*>(static_cast<const u16*>(tensor) + at));
}

// A lane per copy. A row for which a copy has no place before its first clears one behind its last.
MCP_DEVICE void store_stats(
    const BwdPreprocessParams& params, i64 row, i64 head, float lse_2, float delta) {
    const i32 copy = lane_index();
    const bool has_place = row >= copy;
    const i64 at = row - copy + (has_place ? 0 : params.num_rows);
    if (at < 0) return;
    const i64 line = (copy * params.num_heads + head) * params.padded_rows;
    params.lse_2[line + at] = has_place ? lse_2 : 0.0f;
    params.delta[line + at] = has_place ? delta : 0.0f;
}

// delta = rowsum(dout * out) - dlse, lse in base 2; see BwdPreprocessParams.
template <class T, int kValueDim>
MCP_DEVICE void preprocess(const BwdPreprocessParams& params) {
    const i64 num_items = static_cast<i64>(params.num_rows) * params.num_heads;
    for (i64 item = first_row_of_warp(); item < num_items; item += num_warps_of_grid()) {
        const i64 row = item / params.num_heads, head = item % params.num_heads;
        const i64 out_at = row * params.out_row_stride + head * params.out_head_stride;
        const i64 dout_at = row * params.dout_row_stride + head * params.dout_head_stride;
        const i64 lse_at = row * params.lse_row_stride + head * params.lse_head_stride;
        float delta = 0.0f;
        for (int column = 2 * lane_index(); column < kValueDim; column += 2 * kWarpSize) {
            const f32x2 out = load_pair<T>(params.out, out_at + column, params.out_is_float != 0);
            const f32x2 dout = load_pair<T>(params.dout, dout_at + column, false);
            delta = ptx::fma(out.x, dout.x, ptx::fma(out.y, dout.y, delta));
        }
        MCP_UNROLL
        for (int mask = 1; mask < kWarpSize; mask *= 2) delta += ptx::shuffle_xor(delta, mask);
        if (lane_index() < kStatCopies) {
            const float lse = params.lse[lse_at];
            const bool empty = lse == negative_infinity();
            const float dlse = params.dlse == nullptr ? 0.0f : params.dlse[lse_at];
            store_stats(params, row, head, empty ? positive_infinity() : lse * kLog2E,
                        empty ? 0.0f : delta - dlse);
        }
    }
}

// dq = softmax_scale * dq_sum.
template <class T, int kHeadDim>
MCP_DEVICE void postprocess(const BwdPostprocessParams& params) {
    const i64 num_items = static_cast<i64>(params.num_rows) * params.num_heads;
    for (i64 item = first_row_of_warp(); item < num_items; item += num_warps_of_grid()) {
        const i64 row = item / params.num_heads, head = item % params.num_heads;
        const i64 sum_at = row * params.sum_row_stride + head * params.sum_head_stride;
        const i64 dq_at = row * params.dq_row_stride + head * params.dq_head_stride;
        for (int column = 2 * lane_index(); column < kHeadDim; column += 2 * kWarpSize) {
            const f32x2 sum = load_pair<T>(params.dq_sum, sum_at + column, true);
            const float x = sum.x * params.softmax_scale, y = sum.y * params.softmax_scale;
            if (params.dq_is_float) {
                *reinterpret_cast<f32x2*>(static_cast<float*>(params.dq) + dq_at + column) = {x, y};
            } else {
                u16* to = static_cast<u16*>(params.dq) + dq_at + column;
                *reinterpret_cast<u32*>(to) = ptx::pack2<T>(x, y);
            }
        }
    }
}

}  // namespace mcp::attn
