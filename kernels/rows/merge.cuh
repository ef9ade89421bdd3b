// Merges rows of partial attention results into others: a warp per row and head, the result read
// and written once. Source: Milakov & Gimelshein, arXiv:1805.02867, section 3.1.
#pragma once

#include <mcp/fragment.cuh>

#include "joins.cuh"

namespace mcp::rows {

constexpr int kPairs = 4;  // of columns, of a lane
constexpr int kMerged = 2 * kPairs * kWarpSize;
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

// One lane reads for all, so that none reads what another has written.
MCP_DEVICE u32 read_by_first(const float* address) {
    return lane_index() == 0 ? ptx::load_global<u32>(address) : 0;
}

MCP_DEVICE float of_first(u32 bits) { return ptx::as_float(ptx::shuffle(bits, 0)); }

// Merges columns `first` to `first + kMerged - 1` of all parts; returns lse of the merge. Columns
// are asked for before the lse beside them is looked at: a warp waits once for a part, not twice.
MCP_DEVICE float merge_columns(const MergeRowsParams& params, const JoinedRow& joined, int head,
                               u32 held_lse, int first) {
    const int column = first + 2 * lane_index();
    const auto is_mine = [&](int pair) { return column + 2 * kWarpSize * pair < params.width; };
    const auto read = [&](const float* from, f32x2(&into)[kPairs]) {
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (is_mine(i)) into[i] = ptx::load_global<f32x2>(from + 2 * kWarpSize * i);
        }
    };
    float* out =
        params.out + joined.row * params.out_row_stride + head * params.out_head_stride + column;
    f32x2 held[kPairs], more[kPairs];
    read(out, held);
    float lse = of_first(held_lse);
    MCP_NO_UNROLL  // for registers: four CTAs fit, and their loads hide one another's latency
    for (i64 place = joined.begin; place < joined.end; ++place) {
        const i64 row = joined.part(place);
        const u32 bits = read_by_first(params.part_lse + row * params.part_lse_row_stride +
                                       head * params.part_lse_head_stride);
        read(params.part_out + row * params.part_out_row_stride +
                 head * params.part_out_head_stride + column,
             more);
        const float part_lse = of_first(bits);
        if (part_lse == negative_infinity()) continue;
        const Weights weights(lse, part_lse);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (!is_mine(i)) continue;
            held[i].x = ptx::fma(more[i].x, weights.part, held[i].x * weights.held);
            held[i].y = ptx::fma(more[i].y, weights.part, held[i].y * weights.held);
        }
        lse = weights.lse;
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        if (is_mine(i)) ptx::store_global<f32x2>(out + 2 * kWarpSize * i, held[i]);
    }
    return lse;
}

MCP_DEVICE void merge_row(const MergeRowsParams& params, i64 index, int head) {
    const JoinedRow joined(params.joins, index);
    float* address =
        params.lse + joined.row * params.lse_row_stride + head * params.lse_head_stride;
    const u32 lse = read_by_first(address);
    float merged = 0.0f;
    for (int first = 0; first < params.width; first += kMerged) {
        merged = merge_columns(params, joined, head, lse, first);
    }
    if (lane_index() == 0) ptx::store_global<float>(address, merged);
}

MCP_DEVICE void merge_rows(const MergeRowsParams& params) {
    for_each_item(params.joins.num_rows, params.num_heads,
                  [&](i64 index, int head) { merge_row(params, index, head); });
}

}  // namespace mcp::rows
